"""From logits to tokens: masks, the processed distribution, the draw, and the numbers reported with a token.

Pure functions, the reference bodies of `hooks.ops.sampling`. Every row is computed independently of the others and in
float64, rounded once to float32, so a row's token and logprob do not depend on the batch it is in. Order of operations
(masks, temperature, top-p, top-k, renormalise, draw) is the engine's; formulas are in the docstrings.
"""

from __future__ import annotations

import torch

from deepinfer.reference import rng
from deepinfer.reference.ranking import row_blocks, row_sum, stable_top, survivors

LOGPROB_FLOOR = -9999.0
"""What a reported logprob of an impossible token reads."""

WEIGHT_SCALE = 2.0**31
"""A probability p weighs floor(p * 2^31) in a draw."""

STATUS_OK, STATUS_NAN, STATUS_INF, STATUS_EMPTY, STATUS_MASKED = range(5)
"""Row status: fine; a NaN; a +inf; no finite logit at all; every token forbidden by the masks."""


def prepare(
    logits: torch.Tensor, banned: torch.Tensor | None, pairs: torch.Tensor | None, allowed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply masks and find rows nothing can be drawn from. See `SamplingOps.prepare` for shapes."""
    peak = logits.amax(-1)  # NaN if the row has one
    status = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    status.masked_fill_(peak == -torch.inf, STATUS_EMPTY)
    masked = _mask(logits, banned, pairs, allowed)
    if masked is not logits:
        status.masked_fill_((masked.amax(-1) == -torch.inf) & (peak > -torch.inf), STATUS_MASKED)
    status.masked_fill_(peak == torch.inf, STATUS_INF).masked_fill_(peak.isnan(), STATUS_NAN)
    bad = status != STATUS_OK
    if logits.device.type != "cpu" or bad.any():
        masked = masked.masked_fill(bad.unsqueeze(-1), 0.0)
    return masked, status


def _mask(
    logits: torch.Tensor, banned: torch.Tensor | None, pairs: torch.Tensor | None, allowed: torch.Tensor | None
) -> torch.Tensor:
    """Logits with forbidden tokens at -inf; the very same tensor if there is nothing to forbid."""
    if banned is None and pairs is None and allowed is None:
        return logits
    if allowed is None:
        masked = logits.clone()
    else:
        masked = logits.masked_fill(~unpack_bits(allowed, logits.shape[-1]), -torch.inf)
    if banned is not None:
        masked.index_fill_(-1, banned, -torch.inf)
    if pairs is not None:
        masked[pairs[:, 0], pairs[:, 1]] = -torch.inf
    return masked


def unpack_bits(words: torch.Tensor, width: int) -> torch.Tensor:
    """Bit masks to booleans, bit `i % 32` of word `i // 32`; words [R, ceil(width/32)] int32, returns [R, width]."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> bits) & 1).bool().flatten(1)[:, :width]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Id of the largest logit of each row, the lowest id on ties. logits [R, V] without NaN; returns [R] int64."""
    return logits.argmax(-1)  # documented to return the first of several maxima


def process(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor | None, top_k: torch.Tensor | None
) -> torch.Tensor:
    """The processed distribution as log-probabilities. See `SamplingOps.process` for shapes and formulas."""
    if (top_p is None) != (top_k is None):
        raise ValueError("found one of top_p and top_k; give both, or neither where no row filters")
    out = torch.empty_like(logits)
    filtered = _filtered_rows(logits, temperature, top_p, top_k)
    for block in row_blocks(*logits.shape):
        scaled = _scaled(logits[block], temperature[block])
        out[block] = scaled.sub_(_log_norm(scaled))
    if filtered is not None and top_p is not None and top_k is not None:
        for block in row_blocks(len(filtered), logits.shape[-1]):
            rows = filtered[block]
            scaled = _scaled(logits[rows], temperature[rows])
            out[rows] = survivors(logits[rows], scaled, _log_norm(scaled), top_p[rows], top_k[rows])
    _make_one_hot(out, logits, temperature)
    return out


def _scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - row maximum) / temperature in float64, [R, V]; cannot overflow. Temperature 0 counts as 1."""
    divisor = torch.where(temperature > 0, temperature, 1.0).double().unsqueeze(-1)
    return (logits.double() - logits.amax(-1, keepdim=True).double()).div_(divisor)


def _log_norm(scaled: torch.Tensor) -> torch.Tensor:
    """log of the sum of exp(scaled), [R, 1] float64."""
    return row_sum(scaled.exp()).log_().unsqueeze(-1)


def _filtered_rows(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor | None, top_k: torch.Tensor | None
) -> torch.Tensor | None:
    """Rows that top-p or top-k can change, None without any. Off the host: all rows, so as not to wait for data."""
    if top_p is None or top_k is None:
        return None
    if logits.device.type != "cpu":
        return torch.arange(len(logits), device=logits.device)
    active = (temperature > 0) & ((top_p < 1) | ((top_k > 0) & (top_k < logits.shape[-1])))
    rows = active.nonzero()[:, 0]
    return rows if len(rows) else None


def _make_one_hot(logprobs: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor) -> None:
    """Rows of temperature 0: all probability on the greedy token. [in-place logprobs]"""
    rows = temperature <= 0
    if logits.device.type == "cpu" and not rows.any():
        return
    logprobs.masked_fill_(rows.unsqueeze(-1), -torch.inf)
    winner = greedy(logits).unsqueeze(-1)
    logprobs.scatter_(-1, winner, torch.where(rows.unsqueeze(-1), 0.0, logprobs.gather(-1, winner)))


def score(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """log_softmax(logits / temperature) at one token a row, the same number `process` gives without top-p and top-k.

    logits [R, V] float32, ids [R] int64 in 0 .. V-1, temperature [R] float32, 0 counts as 1; returns [R] float32
    """
    out = torch.empty(len(ids), dtype=torch.float32, device=logits.device)
    for block in row_blocks(*logits.shape):
        scaled = _scaled(logits[block], temperature[block])
        own = scaled.gather(-1, ids[block].unsqueeze(-1))
        out[block] = (own - _log_norm(scaled))[:, 0].float()
    return out.clamp_(min=LOGPROB_FLOOR)


def draw(
    logprobs: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: torch.Tensor | int = rng.PURPOSE_TARGET,
    draft_index: torch.Tensor | int = 0,
) -> torch.Tensor:
    """One token a row from log-probabilities. See `SamplingOps.draw` for shapes and the exact procedure."""
    words = rng.random_words(seeds, positions, purpose, draft_index)
    ids = torch.empty_like(positions)
    for block in row_blocks(*logprobs.shape):
        weights = logprobs[block].to(torch.float64, copy=True).exp_().mul_(WEIGHT_SCALE).long()
        ids[block] = draw_weighted(weights, tuple(word[block] for word in words))
    # NaN compares false as well, so a row without a distribution gives -1 whatever its weights came out as
    return ids.masked_fill_(~(logprobs.amax(-1) > -torch.inf), -1)


def draw_weighted(weights: torch.Tensor, words: rng.Words) -> torch.Tensor:
    """The token whose slice of the running sum, in vocabulary order, holds a uniform integer below the total.

    weights [R, V] int64 >= 0, row sums < 2^32, overwritten; words 4 x [R]; returns [R] int64, some id if all are 0
    """
    through = weights.cumsum_(-1)
    target = rng.uniform_below(through[:, -1], words)
    found = torch.searchsorted(through, target.unsqueeze(-1), right=True)[:, 0]
    return found.clamp_(max=weights.shape[-1] - 1)


def token_logprobs(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logprob of one token a row, floor -9999. logprobs [R, V] float32, ids [R] int64; returns [R] float32."""
    return logprobs.gather(-1, ids.unsqueeze(-1))[:, 0].clamp_(min=LOGPROB_FLOOR)


def top_logprobs(logprobs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely tokens of a row, best first, ties to the lower id; logprobs have the floor -9999.

    logprobs [R, V] float32, 1 <= k <= V; returns ids [R, k] int64, logprobs [R, k] float32
    """
    values, ids = stable_top(logprobs, k)
    return ids, values.clamp(min=LOGPROB_FLOOR)
