"""The lightning indexer: scores of compressed entries, candidate blocks, and which entries a row attends to.

    score[p, j] = sum_h relu(q[p, h] . key[j]) * weight[p, h]         rounded to bf16 in exact mode
Selections are ascending lists padded with -1; equal scores prefer the lower entry. Called by `hooks.ops.attention`.
"""

from __future__ import annotations

import torch

# Rectified products are formed for about this many (row, head, entry) triples at a time.
_PRODUCT_VALUES = 2**19


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    visible: torch.Tensor,
    accumulate: torch.dtype,
    round_to: torch.dtype,
) -> torch.Tensor:
    """Scores of every entry for every row of c runs.

    q [c, L, h, d], weights [c, L, h], keys [c, K, d]; visible [L] host tensor: most entries that any run's row sees,
    ascending. Returns [c, L, K] in `round_to`; columns from `visible` of a row's block on are -inf.
    """
    count, length, heads, dim = q.shape
    keys = keys.to(accumulate).transpose(1, 2)
    step = max(1, _PRODUCT_VALUES // max(1, count * heads * keys.shape[2]))
    parts = []
    for first in range(0, length, step):
        rows = slice(first, first + step)
        seen = int(visible[rows][-1])
        part = q[:, rows].to(accumulate)
        products = torch.matmul(part.reshape(count, -1, dim), keys[:, :, :seen]).relu_()
        products = products.view(count, part.shape[1], heads, seen)
        scores = torch.matmul(weights[:, rows].to(accumulate).unsqueeze(2), products).squeeze(2).to(round_to)
        parts.append(torch.nn.functional.pad(scores, (0, keys.shape[2] - seen), value=float("-inf")))
    return torch.cat(parts, 1)


def top_entries(scores: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best of the first `lengths` entries of each row, ascending, padded with -1.

    scores [R, K] float, lengths [R] int64; returns [R, min(count, K)] int64. Ties prefer the lower index; an entry
    whose score is -inf is never chosen.
    """
    width = scores.shape[1]
    index = torch.arange(width, device=scores.device)
    visible = (index < lengths.unsqueeze(1)) & (scores > float("-inf"))
    if width > count:
        order = _ordered_key(scores, index)
        order = order.masked_fill_(~visible, torch.iinfo(order.dtype).min)
        index = torch.topk(order, count, sorted=False).indices
        visible = visible.gather(1, index)
    chosen = torch.where(visible, index, width).sort(-1).values
    return torch.where(chosen < width, chosen, -1)


def _ordered_key(scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Distinct integers that sort like (score ascending, index descending), so that top-k has no ties. [R, K]."""
    scores = scores + 0.0  # turns -0 into 0
    if scores.dtype == torch.bfloat16 and scores.shape[1] <= 2**16:
        bits = scores.view(torch.int16).to(torch.int32)
        return (torch.where(bits < 0, -(bits & 0x7FFF) - 1, bits) << 16) + (0xFFFF - index).to(torch.int32)
    bits = scores.to(torch.float32).view(torch.int32).to(torch.int64)
    return (torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits) << 31) - index


def candidate_blocks(scores: torch.Tensor, lengths: torch.Tensor, block: int, count: int) -> torch.Tensor | None:
    """The `count` blocks with the largest score of each row; the last visible block always counts.

    scores [R, K] float, lengths [R] int64; returns [R, count] int64 ascending, -1 padding, or None when no row has
    more than `count` blocks (every block is a candidate).
    """
    rows, width = scores.shape
    blocks = -(-width // block)
    if blocks <= count:
        return None
    index = torch.arange(width, device=scores.device)
    masked = scores.masked_fill(index >= lengths.unsqueeze(1), float("-inf"))
    masked = torch.nn.functional.pad(masked, (0, blocks * block - width), value=float("-inf"))
    best = masked.view(rows, blocks, block).amax(-1).clamp(max=torch.finfo(torch.bfloat16).max)
    visible_blocks = (lengths + block - 1) // block
    last = (visible_blocks - 1).clamp(min=0).unsqueeze(1)
    best = best.scatter(1, last, float("inf"))
    return top_entries(best, visible_blocks, count)


def restrict(scores: torch.Tensor, candidates: torch.Tensor, block: int) -> torch.Tensor:
    """Scores [R, K] with -inf outside the candidate blocks [R, C] (-1 = none)."""
    width = scores.shape[1]
    blocks = -(-width // block)
    allowed = torch.zeros(scores.shape[0], blocks + 1, dtype=torch.bool, device=scores.device)
    inside = (candidates >= 0) & (candidates < blocks)
    allowed.scatter_(1, torch.where(inside, candidates, blocks), True)
    allowed = allowed[:, :blocks].repeat_interleave(block, 1)[:, :width]
    return scores.masked_fill(~allowed, float("-inf"))
