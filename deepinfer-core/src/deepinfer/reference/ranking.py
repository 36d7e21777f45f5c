"""Order among tokens: the k largest of a row, top-p and top-k survivors, ascending probability mass.

One rule for ties everywhere: of two equal values the lower token id comes first. Called by `reference.sampling` and
`hooks.ops.sampling`; rows are independent of each other in all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK_ELEMENTS = 1 << 18
"""Float64 intermediates are formed for about this many values at a time."""

_SUM_BLOCK = 1024
_FIRST_CANDIDATES = 1024
_MORE_CANDIDATES = 16


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices of consecutive rows that cover a [rows, width] array, at most `BLOCK_ELEMENTS` values each if possible."""
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    return (slice(start, start + step) for start in range(0, rows, step))


def row_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum of each row, [R, V] -> [R], added up in an order that depends on V only.

    A plain sum over one long row is split between threads, over several rows it is not, and the two differ in the
    last bit; sums of short blocks are never split.
    """
    whole = values.shape[-1] // _SUM_BLOCK * _SUM_BLOCK
    total = values[:, whole:].sum(-1)
    if whole:
        total = total + values[:, :whole].unflatten(-1, (-1, _SUM_BLOCK)).sum(-1).sum(-1)
    return total


def stable_top(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row, largest first, equal ones by ascending column.

    values   [R, V], no NaN; 1 <= k <= V
    returns  values [R, k], columns [R, k] int64: exactly the first k of a stable descending sort
    """
    if values.device.type != "cpu" or 2 * k >= values.shape[-1]:
        ordered, columns = values.sort(dim=-1, descending=True, stable=True)
        return ordered[:, :k].contiguous(), columns[:, :k].contiguous()
    # On the host a selection beats the sort, and looking at data costs nothing. It leaves open which of several
    # equal values at the edge it takes; only rows with such a tie need a second look.
    edge, columns = values.topk(k + 1, dim=-1)
    columns = columns[:, :k].sort(-1).values
    tied = (edge[:, k - 1] == edge[:, k]).nonzero()[:, 0]
    if len(tied):
        columns[tied] = _tied_columns(values[tied], edge[tied, k - 1 : k], k)
    ordered, order = values.gather(-1, columns).sort(dim=-1, descending=True, stable=True)
    return ordered, columns.gather(-1, order)


def _tied_columns(values: torch.Tensor, kth: torch.Tensor, k: int) -> torch.Tensor:
    """Columns, ascending, of the k largest values when several equal the k-th: the lowest columns of those."""
    above, equal = values > kth, values == kth
    wanted = k - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= wanted))
    return taken.nonzero()[:, 1].view(len(values), k)


def keep_top(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Logits [R, V] with everything but the k largest of a row at -inf (ties: lower ids stay)."""
    if k >= logits.shape[-1]:
        return logits.clone()
    values, columns = stable_top(logits, k)
    return torch.full_like(logits, -torch.inf).scatter_(-1, columns, values)


def survivors(
    logits: torch.Tensor, scaled: torch.Tensor, log_norm: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> torch.Tensor:
    """What top-p, then top-k leave of each row. Both cut a prefix of the row in stable descending order.

    In that order a token is dropped if the probability of all tokens before it exceeds top_p, or if its rank is
    top_k or more: top-p on the full softmax, then top-k on its survivors.

    logits    [R, V] float32   decides the order
    scaled    [R, V] float64   logits / temperature, shifted
    log_norm  [R, 1] float64   log of the sum of exp(scaled)
    top_p     [R] float32      >= 1 = off
    top_k     [R] int64        < 1 = off
    returns   log-probabilities [R, V] float32, renormalised over the survivors, -inf elsewhere
    """
    rows, width = logits.shape
    out = torch.full_like(logits, -torch.inf)
    pending = torch.arange(rows, device=logits.device)
    k = min(width, _FIRST_CANDIDATES) if logits.device.type == "cpu" else width
    while len(pending):
        columns = stable_top(logits[pending], k)[1]
        x = scaled[pending].gather(-1, columns)
        kept, complete = _prefix(x, log_norm[pending], top_p[pending], top_k[pending])
        if k == width:
            return _put_normalised(out, pending, columns, x, kept)
        done = complete.nonzero()[:, 0]
        _put_normalised(out, pending[done], columns[done], x[done], kept[done])
        pending = pending[(~complete).nonzero()[:, 0]]
        k = min(width, k * _MORE_CANDIDATES)
    return out


def _prefix(
    x: torch.Tensor, log_norm: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the k leading tokens stay [R, k], and whether no token after these k can stay [R]."""
    through = (x - log_norm).exp_().cumsum(-1)
    before = torch.zeros_like(through)
    before[:, 1:] = through[:, :-1]
    limit = torch.where(top_p >= 1, torch.inf, top_p.double()).unsqueeze(-1)
    count = torch.where(top_k < 1, torch.iinfo(torch.int64).max, top_k).unsqueeze(-1)
    rank = torch.arange(x.shape[-1], device=x.device)
    kept = (before <= limit) & (rank < count)
    complete = (through[:, -1:] > limit) | (count <= x.shape[-1])
    return kept, complete[:, 0]


def _put_normalised(
    out: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, x: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """Write log_softmax of the kept x [r, k] into out[rows, columns]; returns out. [in-place out]"""
    x = x.masked_fill(~kept, -torch.inf)
    logprobs = x - row_sum(x.exp()).log_().unsqueeze(-1)
    out[rows.unsqueeze(-1), columns] = logprobs.to(out.dtype)
    return out


def smaller_mass(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Inclusive ascending CDF at a token: mass of all tokens less likely than it, equals with a lower id, and itself.

    logprobs [R, V] float32, ids [R] int64; returns [R] float32
    """
    out = torch.empty(len(ids), dtype=torch.float32, device=logprobs.device)
    column = torch.arange(logprobs.shape[-1], device=logprobs.device)
    for block in row_blocks(*logprobs.shape):
        rows, chosen = logprobs[block], ids[block].unsqueeze(-1)
        own = rows.gather(-1, chosen)
        counted = (rows < own) | ((rows == own) & (column <= chosen))
        out[block] = row_sum(rows.to(torch.float64, copy=True).exp_().masked_fill_(~counted, 0)).float()
    return out
