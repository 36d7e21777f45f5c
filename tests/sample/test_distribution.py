"""`process` and its relatives against a slow, obvious numpy version; ties, extremes, independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.reference import ranking, sampling

INF = np.inf


def slow_process(logits, temperature, top_p, top_k):
    """One row in float64, a token at a time: the rule as it is written down."""
    logits = [float(value) for value in logits]
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    if temperature == 0:
        return np.array([0.0 if v == order[0] else -INF for v in range(len(logits))])
    x = [(value - logits[order[0]]) / temperature for value in logits]
    total = sum(np.exp(x))
    kept, before = [], 0.0
    for rank, v in enumerate(order):
        if top_p < 1 and before > top_p:
            break
        if 0 < top_k <= rank:
            break
        kept.append(v)
        before += np.exp(x[v]) / total
    norm = np.log(sum(np.exp(x[v]) for v in kept))
    return np.array([x[v] - norm if v in set(kept) else -INF for v in range(len(logits))])


def f32(*values):
    return torch.tensor(values, dtype=torch.float32)


row = st.lists(st.integers(-40, 40), min_size=3, max_size=40)  # quarters: plenty of exact ties


@given(row, st.sampled_from([0.0, 0.3, 1.0, 2.5]), st.sampled_from([1e-9, 0.3, 0.8, 1.0]), st.integers(-1, 45))
@settings(max_examples=200, deadline=None)
def test_equals_the_written_rule(values, temperature, top_p, top_k):
    logits = torch.tensor([values], dtype=torch.float32) / 4
    top_p = float(np.float32(top_p))
    found = sampling.process(logits, f32(temperature), f32(top_p), torch.tensor([top_k]))[0].numpy()
    expected = slow_process(logits[0], float(np.float32(temperature)), top_p, top_k)
    # a cumulative sum may land on either side of top_p when it equals it up to rounding
    probability = np.exp(slow_process(logits[0], float(np.float32(temperature or 1)), 1.0, -1))
    edge = np.abs(np.cumsum(np.sort(probability)[::-1]) - top_p).min()
    if top_p == 1 or edge > 1e-12:
        assert np.array_equal(np.isfinite(found), np.isfinite(expected))
        alive = np.isfinite(expected)
        np.testing.assert_allclose(found[alive], expected[alive], atol=1e-6, rtol=1e-6)


def test_top_p_drops_only_when_the_mass_before_exceeds_it():
    logits = torch.zeros(1, 4)  # four times 0.25
    for top_p, survivors in ((0.2499, 1), (0.25, 2), (0.5, 3), (0.51, 3), (0.75, 4), (1.0, 4)):
        out = sampling.process(logits, f32(1), f32(top_p), torch.tensor([-1]))
        assert out.isfinite()[0].tolist() == [v < survivors for v in range(4)], top_p  # ties: low ids stay


def test_top_k_comes_after_top_p():
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    both = sampling.process(logits, f32(1), f32(0.45), torch.tensor([3]))
    assert both.isfinite()[0].tolist() == [True, False, False, False]  # top-k first would renormalise and keep two
    only_k = sampling.process(logits, f32(1), f32(1), torch.tensor([2]))
    torch.testing.assert_close(only_k[0, :2].exp(), torch.tensor([0.625, 0.375]))


def test_no_overflow_for_any_temperature_and_logit():
    logits = torch.tensor([[3e38, -3e38, 0.0, 1.0], [1e-30, 2e-30, 0.0, -1.0], [100.0, 100.0, -INF, 99.0]])
    for temperature in (0.0, 1e-45, 1e-30, 1e-6, 1e-4, 1.0, 1e30, 3.4e38):
        for top_p in (1e-9, 1e-4, 1.0):
            t, p, k = torch.full((3,), temperature), torch.full((3,), top_p), torch.full((3,), -1)
            out = sampling.process(logits, t, p, k)
            assert not out.isnan().any()
            assert not (out == INF).any()
            assert torch.allclose(out.double().exp().sum(-1), torch.ones(3, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize("width", [7, 512, 1025, 5000, 40000])
def test_a_row_does_not_depend_on_its_batch(width):
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(9, width, generator=generator) * 4
    temperature = f32(0, 0.5, 1, 2, 40, 1, 0.7, 1, 3)
    top_p = f32(0.9, 0.9, 1, 0.5, 0.97, 0.3, 1, 0.99, 0.8)
    top_k = torch.tensor([-1, 3, 5, -1, -1, 2000, -1, 1500, 1])
    together = sampling.process(logits, temperature, top_p, top_k)
    ids = together.argmax(-1)
    scores = sampling.score(logits, ids, temperature)
    shuffled = torch.randperm(9, generator=generator)
    again = sampling.process(logits[shuffled], temperature[shuffled], top_p[shuffled], top_k[shuffled])
    assert torch.equal(again, together[shuffled])
    for r in range(9):
        one = slice(r, r + 1)
        assert torch.equal(sampling.process(logits[one], temperature[one], top_p[one], top_k[one]), together[one])
        assert torch.equal(sampling.score(logits[one], ids[one], temperature[one]), scores[one])


def test_block_size_changes_nothing(monkeypatch):
    logits = torch.randn(13, 3000, generator=torch.Generator().manual_seed(1))
    args = (torch.ones(13), torch.full((13,), 0.8), torch.full((13,), -1))
    whole = sampling.process(logits, *args)
    monkeypatch.setattr(ranking, "BLOCK_ELEMENTS", 7000)
    assert torch.equal(sampling.process(logits, *args), whole)


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_candidate_lists_equal_the_full_sort(scale, monkeypatch):
    """The host looks at 1024 candidates first, then more; a flat distribution needs all of them."""
    logits = torch.randn(4, 20000, generator=torch.Generator().manual_seed(2)) * scale
    logits[1] = (logits[1] * 4).round() / 4  # thousands of exact ties
    logits[2, 5000:] = -INF
    args = (torch.ones(4), f32(0.9, 0.9, 0.999, 1.0), torch.tensor([-1, 3000, -1, 1024]))
    adaptive = sampling.process(logits, *args)
    monkeypatch.setattr(ranking, "_FIRST_CANDIDATES", 20000)
    assert torch.equal(sampling.process(logits, *args), adaptive)


@given(st.lists(st.integers(-6, 6), min_size=24, max_size=60), st.integers(1, 11))
@settings(max_examples=150, deadline=None)
def test_stable_top_is_the_head_of_a_stable_sort(values, k):
    logits = torch.tensor([values, values[::-1]], dtype=torch.float32)
    logits[logits < -5] = -INF
    found, columns = ranking.stable_top(logits, k)
    for r in range(2):
        expected = sorted(range(len(values)), key=lambda v: (-float(logits[r, v]), v))[:k]
        assert columns[r].tolist() == expected
        assert found[r].tolist() == logits[r, expected].tolist()


def test_row_sum_of_one_long_row_equals_the_same_row_among_others():
    values = torch.rand(3, 200_003, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    threads = torch.get_num_threads()
    try:
        sums = []
        for count in (1, 2):
            torch.set_num_threads(count)
            sums += [ranking.row_sum(values), torch.cat([ranking.row_sum(values[r : r + 1]) for r in range(3)])]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(sums[0], other) for other in sums[1:])
    torch.testing.assert_close(sums[0], values.sum(-1))


def test_greedy_takes_the_lowest_id_of_equal_logits():
    logits = torch.randn(5, 70_000, generator=torch.Generator().manual_seed(4))
    winners = [0, 3, 31_999, 69_998, 40_000]
    for r, first in enumerate(winners):
        logits[r, [first, 69_999]] = 50.0
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert sampling.greedy(logits).tolist() == winners
            assert [int(sampling.greedy(logits[r : r + 1])) for r in range(5)] == winners
        finally:
            torch.set_num_threads(before)


def test_sum_smaller_is_the_ascending_cdf_with_ties_by_column():
    logprobs = torch.tensor([[0.2, 0.3, 0.2, 0.3], [0.1, 0.2, 0.3, 0.4]]).log().repeat_interleave(4, 0)
    found = ranking.smaller_mass(logprobs, torch.arange(4).repeat(2))
    torch.testing.assert_close(found, f32(0.2, 0.7, 0.4, 1.0, 0.1, 0.3, 0.6, 1.0))


def test_keep_top_keeps_low_ids_of_ties():
    logits = f32(1, 3, 2, 2, 2, 0).unsqueeze(0)
    assert ranking.keep_top(logits, 3).tolist() == [[-INF, 3, 2, 2, -INF, -INF]]
    assert torch.equal(ranking.keep_top(logits, 6), logits)


def test_masks_and_status():
    logits = torch.zeros(7, 40)
    logits[0, 5] = torch.nan
    logits[1, 5] = INF
    logits[2] = -INF
    logits[3, :39] = -INF
    allowed = torch.full((7, 2), -1, dtype=torch.int32)
    allowed[4] = 0
    allowed[5] = torch.tensor([1 << 31, 1]).to(torch.int32)  # ids 31 and 32
    banned, pairs = torch.tensor([0, 1]), torch.tensor([[5, 31], [6, 2]])
    masked, status = sampling.prepare(logits, banned, pairs, allowed)
    assert status.tolist() == [1, 2, 3, 0, 4, 0, 0]
    assert (masked[[0, 1, 2, 4]] == 0).all()
    assert masked[5].isfinite().nonzero()[:, 0].tolist() == [32]
    assert (~masked[6].isfinite()).nonzero()[:, 0].tolist() == [0, 1, 2]
    assert logits[6].isfinite().all(), "the caller's logits are untouched"


def test_a_nan_among_banned_ids_is_still_found():
    logits = torch.zeros(1, 4)
    logits[0, 1] = torch.nan
    assert sampling.prepare(logits, torch.tensor([1]), None, None)[1].tolist() == [1]
