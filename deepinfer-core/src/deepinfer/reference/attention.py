"""Latent attention: every head of a query reads one shared key-value vector per position, plus a sink.

    logit[h, k] = scale * q[h] . key[k]                              over the visible keys
    out[h]      = sum_k e^logit[h,k] key[k] / (sum_k e^logit[h,k] + e^sink[h])       no visible key: 0

Two forms of the same sum. `attend_rows` takes an explicit list of keys per row (decode). `attend_chunk` takes the keys
of a run of rows once and reads the sliding window as a band (prefill). Called by `hooks.ops.attention`; plain tensors
in and out, no caches, no steps. Formula: DeepSeek-V4.1 core attention with sink.
"""

from __future__ import annotations

import torch

# Band blocks are processed in groups that gather about this many key values, so that a group stays in a core's cache.
_GATHER_VALUES = 2**21


def sink_softmax(logits: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension with one extra logit in the denominator.

    logits [..., h, K] with -inf where a key is invisible; sink [h]; returns [..., h, K], 0 where nothing is visible.
    """
    sink = sink.to(logits.dtype).unsqueeze(-1)
    no_key = not logits.shape[-1]
    peak = sink.expand(*logits.shape[:-1], 1) if no_key else torch.maximum(logits.amax(-1, keepdim=True), sink)
    weights = torch.exp(logits - peak)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - peak))


def attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    visible: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    accumulate: torch.dtype,
) -> torch.Tensor:
    """Every row attends to its own keys.

    q [Q, h, d], keys [Q, K, d], visible [Q, K] bool, sink [h] float32; returns [Q, h, d] in `accumulate`.
    """
    keys = keys.to(accumulate)
    logits = torch.matmul(q.to(accumulate), keys.transpose(1, 2)) * scale
    logits = logits.masked_fill(~visible.unsqueeze(1), float("-inf"))
    return torch.matmul(sink_softmax(logits, sink), keys)


def band_rows(q_len: int, window: int) -> int:
    """Rows of one band block: a block reads rows + window - 1 keys, so rows near half the window waste little."""
    return min(max(16, min(64, window // 2)), q_len)


def band_mask(positions: torch.Tensor, lowest: torch.Tensor, window: int) -> torch.Tensor:
    """Which keys of its band block a row sees.

    positions, lowest [c, L] int64: position of each row and the first position it may see. Key column m of band block
    b holds the position `positions[:, 0] - (window - 1) + b * rows + m`. Returns [c, blocks, rows, rows + window - 1].
    """
    count, length = positions.shape
    rows = band_rows(length, window)
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

    Works through the band blocks a few at a time, so that what a block needs stays in a core's cache.
    """
    count, length, heads, dim = q.shape
    blocks, rows, width = mask.shape[1:]
    pad = blocks * rows - length
    bands = torch.nn.functional.pad(keys, (0, 0, 0, pad)).to(accumulate).unfold(1, width, rows)
    bands = bands.reshape(count * blocks, dim, width)  # a view for one run
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, pad)).view(count * blocks, rows, heads, dim)
    mask = mask.flatten(0, 1)
    chosen = width
    if selected is not None:
        entries = entries.to(accumulate)
        selected = torch.nn.functional.pad(selected, (0, 0, 0, pad), value=-1).view(count * blocks, rows, -1)
        chosen = selected.shape[2]
    step = max(1, _GATHER_VALUES // max(1, rows * chosen * dim))
    parts = []
    for first in range(0, count * blocks, step):
        part = slice(first, first + step)
        ids = None if selected is None else selected[part]
        parts.append(_attend_bands(q[part].to(accumulate), bands[part], mask[part], entries, ids, sink, scale))
    return torch.cat(parts).view(count, blocks * rows, heads, dim)[:, :length]


def _attend_bands(
    q: torch.Tensor,
    bands: torch.Tensor,
    mask: torch.Tensor,
    entries: torch.Tensor | None,
    selected: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Band blocks: q [B, R, h, d], bands [B, d, w], mask [B, R, w], selected [B, R, T] or None; [B, R, h, d]."""
    blocks, rows, heads, dim = q.shape
    stacked = (blocks, rows * heads)
    near = torch.matmul(q.view(*stacked, dim), bands).view(blocks, rows, heads, -1) * scale
    near = near.masked_fill_(~mask.unsqueeze(2), float("-inf"))
    if selected is None:
        weights = sink_softmax(near, sink)
        return torch.matmul(weights.view(*stacked, -1), bands.transpose(1, 2)).view(q.shape)
    gathered = torch.nn.functional.embedding(selected.clamp(min=0), entries).flatten(0, 1)  # [B R, T, d]
    far = torch.matmul(q.view(blocks * rows, heads, dim), gathered.transpose(1, 2)) * scale
    far = far.view(blocks, rows, heads, -1).masked_fill_((selected < 0).unsqueeze(2), float("-inf"))
    joint = sink_softmax(torch.cat((near, far), -1), sink)
    near, far = joint.split((near.shape[-1], far.shape[-1]), -1)
    out = torch.matmul(near.reshape(*stacked, -1), bands.transpose(1, 2)).view(blocks * rows, heads, dim)
    return torch.baddbmm(out, far.reshape(blocks * rows, heads, -1), gathered).view(q.shape)


def attend_segment(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, accumulate: torch.dtype) -> torch.Tensor:
    """Full attention of one segment; q, k, v [N, heads, d]; returns [N, heads, d] in `accumulate`."""
    q, k, v = (x.to(accumulate).transpose(0, 1) for x in (q, k, v))
    weights = torch.softmax(torch.matmul(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5, -1)
    return torch.matmul(weights, v).transpose(0, 1)
