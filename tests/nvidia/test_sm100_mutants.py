"""A planted mistake in an adapter's layout is found: by a double that refuses the operand, or by the numbers."""

from __future__ import annotations

import pytest
import torch

from deepinfer.testing.conformance import ops as conformance
from deepinfer.testing.opinfo import op_infos
from deepinfer.testing.subject import make_subject
from deepinfer_nvidia.sm100 import aligned, attention, experts, formats, gemm, index, mega, residual, rows, weights


def row_major_scales(*shape, device):
    return torch.empty(*shape, dtype=torch.int32, device=device)


def unaligned_scales(*shape, device):
    *batch, count, words = shape
    return torch.empty(*batch, words, count, dtype=torch.int32, device=device).transpose(-1, -2)


def reversed_bytes(scales):
    return formats.empty_scales(*scales.shape[:-1], scales.shape[-1] // 4, device=scales.device).copy_(
        scales.unflatten(-1, (-1, 4)).flip(-1).flatten(-2).contiguous().view(torch.int32)
    )


def unpadded_lists(lists):
    return lists.to(torch.int32)


def wide_lists(lists):
    return original_padded(lists).long()


original_padded, original_window, original_places = rows.padded, rows.window, aligned.places


def window_of_positions(step, ring, size):
    """Forgets that a ring wraps."""
    positions = step.positions.unsqueeze(1) + torch.arange(1 - size, 1)
    lists = step.slots[step.sequence].unsqueeze(1) * ring + positions
    return original_padded(lists.masked_fill(positions < step.window_lo.unsqueeze(1), -1))


def everything_visible(step, ring, size):
    return original_window(step, ring, size).clamp(min=0)


def dense_places(offsets, count, tile):
    """Forgets that groups begin at a tile."""
    return original_places(offsets, count, 1)


def heads_in_order(q):
    return q.contiguous()


def encode_swapped(q):
    codes, scales = formats.encode_fp4(q)
    swapped = (codes.view(torch.uint8) >> 4) | (codes.view(torch.uint8) << 4)
    return swapped.view(torch.int8), scales.view(torch.int32).squeeze(-1)


def tokens_first(cache, source):
    """Index pages as if every key's scales followed its codes."""
    table = cache.storage.index[source].bytes
    return table.view(len(table), -1, 1, 68).contiguous()[:, :, :, :67]


def not_interleaved(count):
    return torch.arange(count)


def rows_of_shared(count, tile, device):
    return torch.arange(count, device=device)


def near_rows(scores):
    return scores.contiguous()


def unknown_blocks(candidates, lengths, size, most):
    return candidates, candidates >= 0


IMPORTED = (experts, residual)
"""Before anything is patched: modules take names from each other when they are imported."""

MUTANTS = {
    "scales row-major": (formats, "empty_scales", row_major_scales, "experts.ffn"),
    "weight scales row-major": (weights, "pack_scales", lambda s: formats.pack_scales(s).contiguous(), "gemm.linear"),
    "scale columns unaligned": (gemm, "empty_scales", unaligned_scales, "gemm.block_diagonal_linear"),
    "scale bytes reversed": (weights, "pack_scales", reversed_bytes, "gemm.grouped_linear"),
    "recipe of another granularity": (gemm, "RECIPE", (1, 1, 128), "gemm.linear"),
    "rows of the result unaligned": (gemm, "_ROW_BYTES", 4, "gemm.linear"),
    "groups not at tiles": (aligned, "places", dense_places, "gemm.grouped_linear"),
    "index lists not padded": (rows, "padded", unpadded_lists, "attention.cached"),
    "index lists of 64 bits": (rows, "padded", wide_lists, "attention.chunk"),
    "ring does not wrap": (rows, "window", window_of_positions, "attention.cached"),
    "hidden keys listed": (rows, "window", everything_visible, "attention.cached"),
    "queries in the model's order": (attention, "interleave_heads", heads_in_order, "attention.latent"),
    "output order not told": (
        attention,
        "Fp8Tensor",
        lambda codes, words, chunks: formats.Fp8Tensor(codes, words),
        "attention.latent",
    ),
    "nibbles swapped": (index, "encode", encode_swapped, "attention.index_scores"),
    "index pages cut": (index, "pages", tokens_first, "attention.index_scores"),
    "gate and up not interleaved": (weights, "_interleaved", not_interleaved, "experts.moe"),
    "expert scales not in lanes": (weights, "_lanes", not_interleaved, "experts.moe"),
    "shared scales in row order": (mega, "shared_places", rows_of_shared, "experts.moe"),
    "logits' rows not far apart": (index, "_far_rows", near_rows, "attention.top_entries"),
    "candidate lists not completed": (index, "completed", unknown_blocks, "attention.select"),
}
SLOW = ("queries in the model's order", "output order not told")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in MUTANTS])
def test_mutant_is_found(open_doubles, kernel_shaped, monkeypatch, name):
    module, attribute, replacement, op = MUTANTS[name]
    monkeypatch.setattr(module, attribute, replacement)
    subject = make_subject(open_doubles(), kernel_shaped())
    assert subject.ops.binding(op).kind == "native"
    bad = next(r for r in conformance.run(subject, [op_infos()[op]], quick=True) if r.bad)
    assert "ContractError" in bad.detail or "largest error" in bad.detail
