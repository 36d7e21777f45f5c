"""Index scores over 68-byte keys on DeepGEMM, and top-k on DeepSelect: what `attention` composes its indexer from.

A block of index keys holds the codes of all its keys, then the scale words. Queries arrive rounded to MXFP4 already, so
encoding them loses nothing. Logits come back bfloat16 with rows 1,024 bytes apart; columns past a row's context are
undefined.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer.hooks import KVCache, SequenceSpan, StepInputs
from deepinfer_nvidia.sm100.formats import align, encode_fp4

FEW_ROWS = 16
"""Rows a sequence up to which scores are read from the pages one row at a time."""
ROW_BYTES = 1024
"""Distance of logits' rows is a multiple of this."""


def encode(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [R, h, 128] -> packed int8 [R, h, 64], scale words int32 [R, h]."""
    codes, scales = encode_fp4(q)
    return codes.contiguous(), scales.contiguous().view(torch.int32).squeeze(-1)


def pages(cache: KVCache, source: int) -> torch.Tensor:
    """Index keys of a source: uint8 [blocks, keys per block, 1, 68]; the last two dimensions name bytes, not keys."""
    table = cache.storage.index[source].bytes
    per_block = cache.spec.block_size // cache.spec.index[source]
    return table.view(len(table), per_block, 1, table.shape[1] // per_block)


def paged_scores(
    library: Any,
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: KVCache,
    source: int,
    span: SequenceSpan,
    step: StepInputs,
) -> torch.Tensor:
    """[rows, K] bfloat16; q [rows, h, 128], weights [rows, h] of the span."""
    ratio, keys = cache.spec.index[source], pages(cache, source)
    context = ((step.positions[span.rows] + 1) // ratio).clamp(min=1).to(torch.int32).unsqueeze(1)
    request = step.sequence[span.rows].to(torch.int32)
    meta = library.get_paged_mqa_logits_metadata(context, keys.shape[1], library.get_num_sms(), indices=request)
    codes, words = encode(q)
    return library.fp8_fp4_paged_mqa_logits(
        (codes.unsqueeze(1), words.unsqueeze(1)),
        keys,
        weights.contiguous(),
        context,
        step.block_table[step.sequence[span.rows]].to(torch.int32),
        meta,
        span.max_context // ratio,
        indices=request,
    )


def gathered_scores(
    library: Any,
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: KVCache,
    source: int,
    span: SequenceSpan,
    step: StepInputs,
) -> torch.Tensor:
    """Like `paged_scores`; every sequence's keys are copied out of the pages once."""
    ratio, keys = cache.spec.index[source], pages(cache, source)
    per_block, visible = keys.shape[1], span.max_context // cache.spec.index[source]
    blocks = step.block_table[span.sequences, : -(-visible // per_block)].flatten()
    taken = keys.view(len(keys), -1)[blocks]
    width = q.shape[-1] // 2
    codes = taken[:, : per_block * width].reshape(-1, width).view(torch.int8)
    words = taken[:, per_block * width :].contiguous().view(torch.int32).flatten()
    start = torch.arange(span.count, device=q.device).repeat_interleave(span.q_len) * (len(codes) // span.count)
    length = (step.positions[span.rows] + 1) // ratio
    return library.fp8_fp4_mqa_logits(
        encode(q),
        (codes, words),
        weights.contiguous(),
        start.to(torch.int32),
        (start + length).to(torch.int32),
        visible,
    )


def sparse_scores(
    library: Any,
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: KVCache,
    source: int,
    candidates: torch.Tensor,
    size: int,
    lengths: torch.Tensor,
    step: StepInputs,
) -> torch.Tensor:
    """[Q, C * size] bfloat16: scores of the entries of blocks [Q, C] int64 (`completed`), in their order."""
    keys = pages(cache, source)
    context = lengths.clamp(min=1).to(torch.int32)
    request = step.sequence.to(torch.int32)
    chosen = candidates.to(torch.int32).contiguous()
    table = step.block_table[step.sequence].to(torch.int32)
    meta = library.get_paged_sparse_mqa_logits_metadata(
        context, table, request, keys.shape[1], chosen, torch.int8, size
    )
    codes, words = encode(q)
    operands = (codes.unsqueeze(1), words.unsqueeze(1))
    return library.fp8_fp4_paged_sparse_mqa_logits(operands, keys, weights.contiguous(), meta, chosen.shape[1], size)


def completed(
    candidates: torch.Tensor, lengths: torch.Tensor, size: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists as the sparse kernel takes them: as many blocks as a row's context has, at most C, ascending.

    candidates  [Q, C] int64, -1 padding; a row may list fewer than that
    most        blocks that any row can have
    returns     blocks [Q, C] int64 with other visible blocks in the places left, 0 past those; which are candidates
    """
    count, width = candidates.shape[1], max(most, candidates.shape[1])
    block = torch.arange(width, device=candidates.device)
    visible = block < ((lengths + size - 1) // size).unsqueeze(1)
    places = torch.where((candidates >= 0) & (candidates < width), candidates, width)
    wanted = visible.new_zeros(len(visible), width + 1).scatter(1, places, True)[:, :width] & visible
    order = (wanted.long() + visible.long()) * width - block  # candidates, then visible ones, each ascending
    taken = order.topk(count).indices.sort(1).values
    taken = taken.masked_fill(~visible.gather(1, taken), width).sort(1).values
    inside = taken < width
    taken = taken.masked_fill(~inside, 0)
    return taken, wanted.gather(1, taken) & inside


def restrict(scores: torch.Tensor, candidates: torch.Tensor, size: int) -> torch.Tensor:
    """Scores [R, K] with -inf outside of candidate blocks [R, C] (-1 = none)."""
    blocks = -(-scores.shape[1] // size)
    inside = (candidates >= 0) & (candidates < blocks)
    allowed = torch.zeros(len(scores), blocks + 1, dtype=torch.bool, device=scores.device)
    allowed.scatter_(1, torch.where(inside, candidates, blocks), True)
    return scores.masked_fill(~allowed[:, :blocks].repeat_interleave(size, 1)[:, : scores.shape[1]], float("-inf"))


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Lists [R, T] of different widths under each other, padded with -1."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in parts])


def block_maxima(scores: torch.Tensor, lengths: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest visible score of every block [R, B], +inf for a row's last visible one, and visible blocks [R]."""
    hidden = torch.arange(scores.shape[1], device=scores.device) >= lengths.unsqueeze(1)
    visible = scores.masked_fill(hidden, float("-inf"))
    visible = torch.nn.functional.pad(visible, (0, -scores.shape[1] % size), value=float("-inf"))
    best = visible.unflatten(1, (-1, size)).amax(-1).clamp(max=torch.finfo(torch.bfloat16).max)
    blocks = (lengths + size - 1) // size
    return best.scatter(1, (blocks - 1).clamp(min=0).unsqueeze(1), float("inf")), blocks


def top(library: Any, scores: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best of each row's first `lengths` columns: int64 [R, min(count, K)] ascending, -1 padding.

    Columns at -inf are never chosen.
    """
    rows, width = scores.shape
    count = min(count, width)
    if count == 0 or rows == 0:
        return torch.full((rows, count), -1, dtype=torch.int64, device=scores.device)
    chosen = library.topk(
        _far_rows(scores), count, sorted=False, end=lengths.to(torch.int32), indices_type=torch.int64,
        sorted_index=True, idx_oob_fill_value=-1, return_value=False,
    )  # fmt: skip
    lost = (chosen < 0) | (scores.gather(1, chosen.clamp(min=0)) == float("-inf"))
    return _to_front(chosen, lost)


def _to_front(chosen: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """Ascending columns with -1 for the lost ones at the end."""
    last = torch.iinfo(torch.int64).max
    ordered = chosen.masked_fill(lost, last).sort(-1).values
    return ordered.masked_fill(ordered == last, -1)


def _far_rows(scores: torch.Tensor) -> torch.Tensor:
    """Scores with rows a multiple of 1,024 bytes apart, themselves if they are."""
    size = scores.element_size()
    if scores.stride(1) == 1 and scores.stride(0) * size % ROW_BYTES == 0:
        return scores
    out = scores.new_empty(len(scores), align(scores.shape[1], ROW_BYTES // size))[:, : scores.shape[1]]
    return out.copy_(scores)
