"""The blacklist's syntax."""

from __future__ import annotations

import pytest

from deepinfer.errors import ConfigError
from deepinfer.sample.banned import check_ids, parse_blacklist


@pytest.mark.parametrize(
    ("text", "ids"),
    [("", ()), ("  ", ()), ("0", (0,)), ("0..3,7,10..12", (0, 1, 2, 3, 7, 10, 11, 12)), (" 5..5 , 99", (5, 99))],
)
def test_ranges_are_inclusive(text, ids):
    assert parse_blacklist(text, 100) == ids


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1,,2", "''"), ("a", "'a'"), ("-1", "'-1'"), ("1..", "'1..'"), ("1-3", "'1-3'"), ("3..1", "'3..1'"),
        ("4,4", "'4' after 4"), ("2..6,5", "'5' after 6"), ("100", "'100' is out of range"),
        ("98..100", "ids are 0 .. 99"),
    ],
)  # fmt: skip
def test_errors_name_variable_and_item(text, found):
    with pytest.raises(ConfigError, match="DEEPINFER_DECODE_TOKEN_BLACKLIST") as caught:
        parse_blacklist(text, 100)
    assert found in str(caught.value)


def test_check_ids_sorts_and_bounds():
    assert check_ids("eos_ids", [5, 1, 5], 6) == (1, 5)
    with pytest.raises(ConfigError, match="eos_ids: token id -1"):
        check_ids("eos_ids", [3, -1], 6)
