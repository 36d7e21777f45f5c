"""Drafts: the Markov step and confidence of the draft head, and which drafts of a step are accepted.

Pure functions behind `SamplingOps.verify` and `SamplingOps.draft_block`. They know neither how drafts were proposed
nor how many a scheduler wants verified.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from deepinfer.reference import rng
from deepinfer.reference.ranking import row_blocks, row_sum
from deepinfer.reference.sampling import WEIGHT_SCALE, draw, draw_weighted, greedy

RESIDUAL_SHRINK = math.exp(-5e-5)
"""Factor on the draft's probability in the residual; keeps the residual from vanishing (engine rule)."""

RULES = ("coupled", "rejection")


class Verification(NamedTuple):
    """Outcome of one verify pass over R rows of n sequences.

    token_ids           [R] int64   the token each row emits if all rows before it were accepted
    accepted            [n] int64   accepted drafts a: the sequence emits its rows 0 .. a
    accept_probability  [R] float32 estimate of a draft's chance of acceptance (rejection rule), None under coupling
    """

    token_ids: torch.Tensor
    accepted: torch.Tensor
    accept_probability: torch.Tensor | None


class DraftBlock(NamedTuple):
    """Drafts of n sequences, B each.

    token_ids    [n, B] int64
    logprobs     [n, B, V] float32  the distribution each draft was drawn from; opaque to everybody but `verify`
    confidences  [n, B] float32     predicted chance of acceptance, 0 .. 1
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    confidences: torch.Tensor


def verify(
    logprobs: torch.Tensor,
    draft_ids: torch.Tensor,
    row_starts: torch.Tensor,
    row_counts: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    golden: torch.Tensor,
    draft_logprobs: torch.Tensor | None,
    rule: str,
) -> Verification:
    """Accept a prefix of every sequence's drafts. See `SamplingOps.verify` for shapes and rules."""
    if rule not in RULES:
        raise ValueError(f"verification rule {rule!r}, expected one of {', '.join(RULES)}")
    rows, sequences = len(draft_ids), len(row_starts)
    sequence = torch.arange(sequences, device=row_starts.device).repeat_interleave(row_counts, output_size=rows)
    offset = torch.arange(rows, device=row_starts.device) - row_starts[sequence]
    row_seeds, row_positions = seeds[sequence], positions[sequence] + offset
    probability = None
    if rule == "coupled":
        token_ids = draw(logprobs, row_seeds, row_positions)
    elif draft_logprobs is None:
        raise ValueError("the rejection rule needs the draft's distributions, found draft_logprobs=None")
    else:
        token_ids, probability = _reject(logprobs, draft_ids, row_seeds, row_positions, draft_logprobs)
    token_ids = torch.where(golden >= 0, golden, token_ids)
    agrees = (token_ids == draft_ids) & (draft_ids >= 0) & (offset < row_counts[sequence] - 1)
    return Verification(token_ids, accepted_prefix(agrees, sequence, row_starts), probability)


def accepted_prefix(agrees: torch.Tensor, sequence: torch.Tensor, row_starts: torch.Tensor) -> torch.Tensor:
    """Drafts of each sequence before the first refused one, [n] int64.

    agrees [R] bool: the row's draft is accepted if those before it are, False in each sequence's last row;
    sequence [R] int64 of each row, ascending; row_starts [n] int64
    """
    rows = len(agrees)
    offset = torch.arange(rows, device=agrees.device) - row_starts[sequence]
    first_refused = torch.where(agrees, rows, offset)
    return torch.full_like(row_starts, rows).scatter_reduce_(0, sequence, first_refused, "amin")


def _reject(
    target: torch.Tensor, drafts: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, proposal: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling row by row: the draft itself if it passes the test, else a residual draw.

    Rows without a draft (-1) draw from the target as if there were no speculation. A rejected draft has a residual of
    0, so it is never drawn again unless the whole residual vanishes.
    """
    proposed = drafts >= 0
    x = drafts.clamp(min=0).unsqueeze(-1)
    log_ratio = (target.gather(-1, x) - proposal.gather(-1, x))[:, 0].double()
    coin = rng.uniform(rng.random_words(seeds, positions, rng.PURPOSE_ACCEPT))
    passes = proposed & (coin < log_ratio.clamp(max=0).exp())  # NaN (both impossible) compares false
    words = rng.random_words(seeds, positions, torch.where(proposed, rng.PURPOSE_RESIDUAL, rng.PURPOSE_TARGET))
    drawn, probability = torch.empty_like(drafts), torch.empty_like(seeds, dtype=torch.float32)
    for block in row_blocks(*target.shape):
        covered = proposal[block].to(torch.float64, copy=True).exp_().mul_(RESIDUAL_SHRINK)
        covered.masked_fill_(~proposed[block].unsqueeze(-1), 0)
        residual = (target[block].double().exp() - covered).clamp_(min=0)
        probability[block] = (1 - row_sum(residual)).clamp_(min=0).float()
        weights = (residual * WEIGHT_SCALE).long()
        empty = weights.sum(-1) == 0
        found = draw_weighted(weights, tuple(word[block] for word in words))
        drawn[block] = torch.where(empty, greedy(target[block]), found)
    impossible = ~(target.amax(-1) > -torch.inf)
    return torch.where(passes, drafts, drawn).masked_fill_(impossible, -1), probability


def markov_logits(
    base: torch.Tensor, previous: torch.Tensor, embed: torch.Tensor, head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One Markov correction: base + head . embed[previous], in the dtype of `head`, rounded once to float32.

    base [n, V] float32, previous [n] int64, embed [V, r], head [V, r] float32 or float64
    returns logits [n, V] float32, embeddings [n, r] in the dtype of `embed`
    """
    embedding = embed[previous]
    return base + (embedding.to(head.dtype) @ head.T).float(), embedding


def confidence(
    hidden: torch.Tensor, embedding: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """sigmoid(clamp((concat(hidden, embedding) . weight) / temperature, -60, 60)).

    hidden [n, H] before the final norm, embedding [n, r], weight [H + r] float32 or float64 (the dtype of the sum),
    temperature [] float32; returns [n] float32
    """
    features = torch.cat([hidden.to(weight.dtype), embedding.to(weight.dtype)], dim=-1)
    logit = ((features @ weight) / temperature).clamp(-60, 60)
    return (1 / (1 + (-logit).exp())).float()  # torch.sigmoid rounds differently at the end of a vector register
