"""Core attention and the indexer against straightforward float64 sums over explicit lists of keys."""

from __future__ import annotations

import pytest
import torch

from deepinfer.reference import attention, indexer


def naive(q, keys, sink, scale):
    """One row: q [h, d], keys list of [d]; the formula, head by head."""
    out = torch.zeros_like(q)
    for head in range(q.shape[0]):
        weights = [torch.exp(scale * (q[head] @ key)) for key in keys]
        total = sum(weights, torch.exp(sink[head]))
        for weight, key in zip(weights, keys, strict=True):
            out[head] += weight / total * key
    return out


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 2, 7, 63, 64, 65, 130])
@pytest.mark.parametrize("window", [1, 4, 32])
def test_chunk_equals_explicit_keys(length, window):
    torch.manual_seed(length * 100 + window)
    heads, dim, start, entries = 2, 8, 5, 11
    q, own, before = random(1, length, heads, dim), random(1, length, dim), random(1, window - 1, dim)
    sink, compressed = random(heads), random(entries, dim)
    selected = torch.randint(-1, entries, (1, length, 3))
    positions = torch.arange(start, start + length).unsqueeze(0)
    lowest = (positions - window + 1).clamp(min=0)
    mask = attention.band_mask(positions, lowest, window)
    keys = torch.cat((before, own), 1)
    out = attention.attend_chunk(q, keys, mask, compressed, selected, sink.float(), 0.3, torch.float64)
    for row in range(length):
        seen = [keys[0, row + m] for m in range(window) if start + row - window + 1 + m >= 0]
        seen += [compressed[j] for j in selected[0, row].tolist() if j >= 0]
        expected = naive(q[0, row], seen, sink.float().double(), 0.3)
        torch.testing.assert_close(out[0, row], expected, rtol=1e-12, atol=1e-12)


def test_rows_form_equals_chunk_form():
    torch.manual_seed(0)
    count, length, window, heads, dim = 2, 70, 16, 3, 8
    q, keys = random(count, length, heads, dim), random(count, window - 1 + length, dim)
    sink = random(heads).float()
    positions = torch.stack((torch.arange(3, 73), torch.arange(100, 170)))
    mask = attention.band_mask(positions, (positions - window + 1).clamp(min=0), window)
    chunk = attention.attend_chunk(q, keys, mask, None, None, sink, 0.2, torch.float64)
    windows = keys.unfold(1, window, 1).transpose(2, 3).flatten(0, 1)
    visible = (positions.unsqueeze(2) + torch.arange(1 - window, 1) >= 0).flatten(0, 1)
    rows = attention.attend_rows(q.flatten(0, 1), windows, visible, sink, 0.2, torch.float64)
    torch.testing.assert_close(chunk.flatten(0, 1), rows, rtol=1e-12, atol=1e-12)


def test_no_visible_key_gives_zero():
    q, keys = random(2, 3, 4), random(2, 5, 4)
    visible = torch.tensor([[False] * 5, [True] * 5])
    out = attention.attend_rows(q, keys, visible, torch.zeros(3), 1.0, torch.float64)
    assert out[0].abs().max() == 0
    assert out[1].abs().min() > 0


def test_narrowed_window_hides_keys_below_lowest():
    length, window = 6, 4
    positions = torch.arange(10, 16).unsqueeze(0)
    lowest = torch.tensor([[11, 11, 12, 13, 20, 12]])
    mask = attention.band_mask(positions, lowest, window)[0, 0]
    columns = torch.arange(length + window - 1) + 10 - (window - 1)
    for row in range(length):
        p, low = positions[0, row], max(int(lowest[0, row]), int(positions[0, row]) - window + 1)
        assert mask[row].tolist() == [(low <= c <= p) for c in columns.tolist()]


def test_index_scores_equal_the_formula_with_negative_products():
    torch.manual_seed(1)
    q, weights, keys = random(2, 5, 3, 8), random(2, 5, 3), random(2, 9, 8)
    visible = torch.tensor([2, 4, 6, 8, 9])
    scores = indexer.index_scores(q, weights, keys, visible, torch.float64, torch.float64)
    for c in range(2):
        for row in range(5):
            for j in range(int(visible[row])):
                expected = sum(weights[c, row, h] * max(q[c, row, h] @ keys[c, j], 0) for h in range(3))
                torch.testing.assert_close(scores[c, row, j], torch.as_tensor(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_entries_prefers_the_lower_of_equal_scores_and_sorts(dtype):
    scores = torch.tensor([[1.0, 3, 3, 2, 3], [0, -0.0, 0, 0, 0], [5, 4, 3, 2, 1]], dtype=dtype)
    lengths = torch.tensor([5, 5, 2])
    assert indexer.top_entries(scores, lengths, 2).tolist() == [[1, 2], [0, 1], [0, 1]]
    assert indexer.top_entries(scores, torch.tensor([5, 1, 0]), 3).tolist() == [[1, 2, 4], [0, -1, -1], [-1] * 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_entries_equals_a_stable_sort_on_coarse_scores(dtype):
    torch.manual_seed(2)
    scores = torch.randn(40, 300).mul(2).round().to(dtype)
    lengths = torch.randint(0, 301, (40,))
    chosen = indexer.top_entries(scores, lengths, 32)
    for row in range(40):
        order = sorted(range(int(lengths[row])), key=lambda j: (-scores[row, j].item(), j))[:32]
        assert [j for j in chosen[row].tolist() if j >= 0] == sorted(order)


def test_candidate_blocks_keep_the_last_block_and_restrict_selection():
    torch.manual_seed(3)
    scores, lengths = torch.randn(12, 70), torch.randint(1, 71, (12,))
    blocks = indexer.candidate_blocks(scores, lengths, 8, 3)
    for row in range(12):
        n = int(lengths[row])
        best = {b: scores[row, 8 * b : min(8 * b + 8, n)].max().item() for b in range((n + 7) // 8)}
        best[(n - 1) // 8] = float("inf")
        expected = sorted(sorted(best, key=lambda b: (-best[b], b))[:3])
        assert [b for b in blocks[row].tolist() if b >= 0] == expected
    chosen = indexer.top_entries(indexer.restrict(scores, blocks, 8), lengths, 40)
    for row in range(12):
        allowed = {j for b in blocks[row].tolist() if b >= 0 for j in range(8 * b, 8 * b + 8) if j < lengths[row]}
        assert {j for j in chosen[row].tolist() if j >= 0} == allowed
    assert indexer.candidate_blocks(scores, lengths, 8, 9) is None
