"""Variables that restrict a process to some devices: what is accepted, and what is said of the rest."""

from __future__ import annotations

import pytest

from deepinfer.hooks import read_visibility


def read(present=3, **environ):
    return read_visibility("ACME_DEVICES", present, ("OLD_DEVICES",), identifiers="ID-[0-9a-f]+", environ=environ)


def test_nothing_set_means_all():
    seen = read()
    assert (seen.variable, seen.devices, seen.problems) == (None, ("0", "1", "2"), ())


@pytest.mark.parametrize("mask", ["0,1", " 2 , 0", "ID-7f3,1", "1"])
def test_good_masks(mask):
    seen = read(ACME_DEVICES=mask)
    assert seen.devices == tuple(part.strip() for part in mask.split(","))
    assert (seen.variable, seen.mask, seen.problems) == ("ACME_DEVICES", mask, ())


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        ("0,1,3,4", "asks for 4 devices, this machine has 3: no device 3, 4, numbers are 0 to 2"),
        ("a,b", "holds 'a', 'b', expected device numbers separated by commas, such as 0,1"),
        ("0,,1", "holds '', expected device numbers separated by commas, such as 0,1"),
        ("-1", "holds '-1', expected device numbers separated by commas, such as 0,1"),
        ("", "hides every device of 3; unset it or list devices such as 0,1"),
        ("0,0", "names 0 more than once"),
    ],
)
def test_bad_masks(mask, problem):
    assert read(ACME_DEVICES=mask).problems == (f"ACME_DEVICES={mask} {problem}",)


def test_all_problems_of_a_mask_are_listed():
    assert len(read(ACME_DEVICES="x,9,9").problems) == 3


def test_an_alias_alone_is_used():
    seen = read(OLD_DEVICES="2")
    assert (seen.variable, seen.devices, seen.problems) == ("OLD_DEVICES", ("2",), ())


def test_two_variables_must_agree():
    assert read(ACME_DEVICES="0,1", OLD_DEVICES="0, 1").problems == ()
    assert read(ACME_DEVICES="0,1", OLD_DEVICES="1,2").problems == (
        "ACME_DEVICES=0,1 and OLD_DEVICES=1,2 disagree; set one of them, or both to the same devices",
    )


def test_numbers_are_not_compared_with_an_unknown_count():
    assert read(present=0, ACME_DEVICES="7").problems == ()
