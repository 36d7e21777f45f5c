"""Latent attention: every head of a query reads one shared key-value vector per position, plus a sink.

    logit[h, k] = scale * q[h] . key[k]                              over the visible keys
    out[h]      = sum_k e^logit[h,k] key[k] / (sum_k e^logit[h,k] + e^sink[h])       no visible key: 0

Two forms of the same sum. `attend_rows` takes an explicit list of keys per row (decode). `attend_chunk` takes the keys
of a run of rows once and reads the sliding window as a band (prefill). Called by `hooks.ops.attention`; plain tensors
in and out, no caches, no steps. Formula: DeepSeek-V4.1 core attention with sink.
"""

from __future__ import annotations

import torch

# Gathered keys are processed in row blocks of about this many values, so that a block stays in a core's cache.
_GATHER_VALUES = 2**21
_BAND_ROWS = 64


def sink_softmax(logits: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension with one extra logit in the denominator.

    logits [..., h, K] with -inf where a key is invisible; sink [h]; returns [..., h, K], all 0 where nothing is visible.
    """
    sink = sink.to(logits.dtype).unsqueeze(-1)
    peak = torch.maximum(logits.amax(-1, keepdim=True), sink) if logits.shape[-1] else sink.expand(*logits.shape[:-1], 1)
    weights = torch.exp(logits - peak)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - peak))


def attend_rows(
    q: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, sink: torch.Tensor, scale: float, accumulate: torch.dtype
) -> torch.Tensor:
    """Every row attends to its own keys.

    q [Q, h, d], keys [Q, K, d], visible [Q, K] bool, sink [h] float32; returns [Q, h, d] in `accumulate`.
    """
    keys = keys.to(accumulate)
    logits = torch.matmul(q.to(accumulate), keys.transpose(1, 2)) * scale
    logits = logits.masked_fill(~visible.unsqueeze(1), float("-inf"))
    return torch.matmul(sink_softmax(logits, sink), keys)


def band_rows(q_len: int) -> int:
    """Rows of one band block for a run of `q_len` rows."""
    return min(_BAND_ROWS, q_len)


def band_mask(positions: torch.Tensor, lowest: torch.Tensor, window: int) -> torch.Tensor:
    """Which keys of its band block a row sees.

    positions, lowest [c, L] int64: position of each row and the first position it may see. Key column m of band block
    b holds the position `positions[:, 0] - (window - 1) + b * rows + m`. Returns [c, blocks, rows, rows + window - 1].
    """
    count, length = positions.shape
    rows = band_rows(length)
    blocks = -(-length // rows)
    pad = blocks * rows - length
    lowest = torch.maximum(lowest, positions - (window - 1))
    first = torch.nn.functional.pad(lowest, (0, pad), value=2**62).view(count, blocks, rows, 1)
    last = torch.nn.functional.pad(positions, (0, pad), value=-1).view(count, blocks, rows, 1)
    columns = torch.arange(rows + window - 1, device=positions.device)
    starts = torch.arange(blocks, device=positions.device) * rows
    key = positions[:, :1, None] - (window - 1) + starts.view(1, -1, 1) + columns
    key = key.unsqueeze(2)
    return (key >= first) & (key <= last)


def attend_chunk(
    q: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor,
    entries: torch.Tensor | None,
    selected: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
    accumulate: torch.dtype,
) -> torch.Tensor:
    """Rows of c runs of equal length L attend to a sliding window and to selected compressed entries.

    q         [c, L, h, d]
    keys      [c, window - 1 + L, d]   window keys: those before the run, then the run's own
    mask      from `band_mask`
    entries   [U, d] or None           compressed entries that any row uses
    selected  [c, L, T] int64 or None  rows of `entries`, -1 = skip
    sink      [h] float32              returns [c, L, h, d] in `accumulate`
    """
    count, length, heads, dim = q.shape
    blocks, rows, width = mask.shape[1:]
    padded = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, blocks * rows - length)).to(accumulate)
    banded = torch.nn.functional.pad(keys, (0, 0, 0, blocks * rows - length)).to(accumulate)
    banded = banded.unfold(1, width, rows)  # [c, blocks, d, width], a view
    logits = torch.matmul(padded.view(count, blocks, rows * heads, dim), banded) * scale
    logits = logits.view(count, blocks, rows, heads, width)
    logits = logits.masked_fill(~mask.unsqueeze(3), float("-inf"))
    logits = logits.view(count, blocks * rows, heads, width)[:, :length].reshape(-1, heads, width)
    if selected is None:
        weights, far = sink_softmax(logits, sink), None
    else:
        weights, far = _selected_part(q.reshape(-1, heads, dim), logits, entries, selected.flatten(0, 1), sink, scale)
    weights = weights.view(count, length, heads, width)
    weights = torch.nn.functional.pad(weights, (0, 0, 0, 0, 0, blocks * rows - length))
    near = torch.matmul(weights.view(count, blocks, rows * heads, width), banded.transpose(2, 3))
    near = near.view(count, blocks * rows, heads, dim)[:, :length]
    return near if far is None else near + far.view(count, length, heads, dim)


def _selected_part(
    q: torch.Tensor, near: torch.Tensor, entries: torch.Tensor, selected: torch.Tensor, sink: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joint softmax of window logits `near` [R, h, K] and of selected entries; row blocks bound the gathered keys.

    Returns the window's weights [R, h, K] and the entries' share of the output [R, h, d].
    """
    accumulate = near.dtype
    step = max(16, _GATHER_VALUES // max(1, selected.shape[1] * entries.shape[1]))
    q, entries = q.to(accumulate), entries.to(accumulate)
    weights, outputs = [], []
    for first in range(0, q.shape[0], step):
        rows = slice(first, first + step)
        index = selected[rows]
        gathered = torch.nn.functional.embedding(index.clamp(min=0), entries)
        far = torch.matmul(q[rows], gathered.transpose(1, 2)) * scale
        far = far.masked_fill((index < 0).unsqueeze(1), float("-inf"))
        joint = sink_softmax(torch.cat((near[rows], far), -1), sink)
        window, chosen = joint.split((near.shape[-1], far.shape[-1]), -1)
        weights.append(window)
        outputs.append(torch.matmul(chosen, gathered))
    return torch.cat(weights), torch.cat(outputs)


def attend_segment(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, accumulate: torch.dtype) -> torch.Tensor:
    """Full attention of one segment; q, k, v [N, heads, d]; returns [N, heads, d] in `accumulate`."""
    q, k, v = (x.to(accumulate).transpose(0, 1) for x in (q, k, v))
    weights = torch.softmax(torch.matmul(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5, -1)
    return torch.matmul(weights, v).transpose(0, 1)
