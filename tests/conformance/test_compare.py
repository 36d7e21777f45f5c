"""The tolerance rule: what it lets pass, what it refuses, and what it says about it."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.testing.compare import TOLERANCES, close, equal, equal_but_ties, same_selection


def product(dtype=torch.float32):
    """(working, ideal) of a 64 x 256 matrix product of inputs rounded to dtype."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((64, 128), (128, 256)))
    ideal = a.double() @ b.double()
    return (a.float() @ b.float()).to(dtype), ideal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_another_order_of_summation_passes(dtype):
    working, ideal = product(dtype)
    other = ideal.to(dtype)
    assert close(working, working, ideal).ok
    assert close(other, working, ideal).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_element_is_found_where_a_cosine_does_not_see_it(dtype):
    working, ideal = product(dtype)
    found = working.clone()
    found[3, 5] += 8
    x, y = found.double().flatten(), ideal.flatten()
    assert 1 - 2 * (x @ y) / (x @ x + y @ y) < 1e-4
    verdict = close(found, working, ideal)
    assert not verdict.ok
    assert verdict.worst["index"] == [3, 5]
    assert verdict.worst["error"] == pytest.approx(8, rel=0.02)
    assert verdict.worst["expected"] == pytest.approx(float(ideal[3, 5]))


def test_a_small_row_among_large_ones_is_judged_by_itself():
    """Its error disappears in the norm of everything and is below the largest error of the yardstick."""
    generator = torch.Generator().manual_seed(1)
    ideal = torch.randn(8, 64, generator=generator, dtype=torch.float64) * 1000
    ideal[5] *= 1e-4
    working = ideal.to(torch.bfloat16)
    found = working.clone()
    found[5] = found[5] * 1.1
    verdict = close(found, working, ideal)
    assert not verdict.ok
    assert "row [5]" in verdict.detail
    ideal[5] *= 1e-6  # of no weight at all: rounding noise of what cancelled
    assert close(found.index_fill(0, torch.tensor([5]), 0.0), ideal.to(torch.bfloat16), ideal).ok


def test_a_small_error_everywhere_is_found_by_the_norm():
    working, ideal = product()
    verdict = close(working * (1 + 1e-5), working, ideal)
    assert not verdict.ok


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_values_have_to_be_the_same_ones(value):
    ideal = torch.randn(4, 4, dtype=torch.float64)
    assert not close(ideal.float().index_fill(0, torch.tensor([2]), value), ideal.float(), ideal).ok
    ideal[1, 2] = value
    assert close(ideal.float(), ideal.float(), ideal).ok
    other = ideal.float()
    other[1, 2] = 0.0
    verdict = close(other, ideal.float(), ideal)
    assert not verdict.ok
    assert verdict.worst["index"] == [1, 2]


def test_the_sign_of_an_infinity_counts():
    ideal = torch.tensor([1.0, math.inf], dtype=torch.float64)
    assert not close(torch.tensor([1.0, -math.inf]), ideal.float(), ideal).ok


def test_a_narrower_result_is_judged_by_a_yardstick_of_its_own_dtype():
    working, ideal = product()
    assert close(ideal.to(torch.bfloat16), working, ideal).ok
    assert not close(ideal.to(torch.bfloat16).float(), working, ideal).ok, "as float32 the same numbers are too coarse"


def test_floors_serve_results_that_the_yardstick_hits_exactly():
    ideal = torch.tensor([[0.0078125, 0.015625]], dtype=torch.float64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        small, large = TOLERANCES[dtype].rtol / 4, TOLERANCES[dtype].rtol * 40
        assert close((ideal * (1 + small)).to(dtype), ideal.to(dtype), ideal).ok
        assert not close((ideal * (1 + large)).to(dtype), ideal.to(dtype), ideal).ok


def test_shapes_have_to_be_equal_and_nothing_is_fine():
    assert not close(torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(3, 2).double()).ok
    assert close(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3).double()).ok
    assert close(torch.zeros(()), torch.zeros(()), torch.zeros(()).double()).ok
    assert close(torch.zeros(4), torch.zeros(4), torch.zeros(4).double()).ok
    assert not close(torch.ones(4), torch.zeros(4), torch.zeros(4).double()).ok


def test_equal_is_by_value():
    assert equal(torch.tensor([0.0, math.nan]), torch.tensor([-0.0, math.nan])).ok
    verdict = equal(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [5, 4]]))
    assert (verdict.ok, verdict.worst["index"], verdict.worst["found"]) == (False, [1, 0], 3)
    assert "1 of 4 elements differ, first 3 at [1, 0], expected 5" in verdict.detail
    assert not equal(torch.tensor([True]), torch.tensor([False])).ok
    assert not equal(torch.zeros(2), torch.zeros(3)).ok
    assert equal(torch.zeros(0), torch.zeros(0)).ok


def test_ties_of_a_code_may_fall_either_way_but_only_a_few():
    working = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 4] * 4)
    found = working.clone()
    found[0, 5] = 4.0
    assert equal_but_ties(found, working).ok
    found[:, 4:8] = 6.0
    assert not equal_but_ties(found, working).ok, "too many, and more than one code away"
    found = working.clone()
    found[:, 5] = 4.0
    assert "differ, allowed 2%" in equal_but_ties(found, working).detail
    found = working.clone()
    found[2, 0] = 6.0
    assert "more than one code" in equal_but_ties(found, working).detail
    found[2, 0] = math.nan
    assert not equal_but_ties(found, working).ok


class TestSelection:
    scores = torch.tensor([[5.0, 1.0, 4.0, 3.0, 2.0], [1.0, 2.0, -math.inf, -math.inf, -math.inf]], dtype=torch.float64)

    def verdict(self, *rows):
        return same_selection(torch.tensor(rows), self.scores, 3)

    def test_sets_in_any_order_pass(self):
        assert self.verdict([0, 2, 3], [0, 1, -1]).ok
        assert self.verdict([3, 0, 2], [-1, 1, 0]).ok

    def test_a_worse_column_does_not(self):
        verdict = self.verdict([0, 2, 4], [0, 1, -1])
        assert not verdict.ok
        assert verdict.worst == {
            "error": 1.0,
            "bound": pytest.approx(0.049),
            "index": [0],
            "found": 2.0,
            "expected": 3.0,
        }

    def test_a_swap_within_the_tolerance_passes(self):
        scores = self.scores.clone()
        scores[0, 4] = 2.97
        assert same_selection(torch.tensor([[0, 2, 4], [0, 1, -1]]), scores, 3).ok

    @pytest.mark.parametrize(
        ("row", "what"),
        [
            ([0, 0, 2], "twice"),
            ([0, 2, -1], "too few"),
            ([0, 2, 5], "selects column 5 of 5"),
        ],
    )
    def test_no_column_twice_missing_or_outside(self, row, what):
        verdict = self.verdict(row, [0, 1, -1])
        assert not verdict.ok
        assert what in verdict.detail

    def test_invisible_columns_are_never_chosen(self):
        assert "invisible" in self.verdict([0, 2, 3], [0, 1, 2]).detail

    def test_nothing_to_choose_from(self):
        assert same_selection(torch.full((2, 3), -1), torch.zeros(2, 0, dtype=torch.float64), 3).ok
        assert same_selection(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 5, dtype=torch.float64), 3).ok
