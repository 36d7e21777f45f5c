"""Samples of the attention ops that choose: index queries, scores, candidate blocks, best entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepinfer.testing.opinfo import selection
from deepinfer.testing.opinfo.context import SampleContext, once
from deepinfer.testing.opinfo.memory import SOURCES
from deepinfer.testing.opinfo.record import (
    BATCH_INVARIANT,
    PURE,
    Args,
    ErrorSample,
    OpInfo,
    Sample,
    by_rows,
    exactly,
)
from deepinfer.testing.opinfo.scenes import DECODE, MIXED, ONE, scene_sample
from deepinfer.testing.opinfo.selection import queries, scored
from deepinfer.testing.opinfo.steps import Scene
from deepinfer.testing.opinfo.strategies import rows_and_seeds

# index queries


def quantize_index(ctx: SampleContext, rows: int, extreme: bool = False, slow: bool = False) -> Sample:
    t = ctx.traits
    name = f"{rows} rows{', extreme' if extreme else ''}"
    ctx = ctx.at(name)
    shape = t.index_n_heads, t.index_head_dim
    q = once(lambda: ctx.extreme("q", rows, *shape) if extreme else ctx.normal("q", rows, *shape))
    return by_rows(name, rows, lambda index: (ctx.activation(q()[index]),), slow)


def quantize_index_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows in (1, 0, 13):
        yield quantize_index(ctx, rows)
    yield quantize_index(ctx, 12, extreme=True)
    yield quantize_index(ctx, 257, slow=True)


# scores


def scores_args(ratio: int, span: int) -> Callable[[Scene], Args]:
    def make(scene: Scene) -> Args:
        q, weights = queries(scene)
        cache, step = scored(scene)
        q = scene.ctx.ops.attention.quantize_index(q)
        return q, weights, cache, SOURCES[ratio], step.spans[span], step

    return make


EQUAL_RUNS = ((3, 4), (150, 4), (31, 4))


def scores_samples(ctx: SampleContext) -> Iterator[Sample]:
    for ratio in SOURCES:
        for label, spans, span in (("one token", ((9, 1),), 0), ("decode", DECODE, 0), ("mixed", MIXED, 2),
                                   ("equal runs", EQUAL_RUNS, 0), ("nothing yet", ONE, 0)):  # fmt: skip
            yield scene_sample(ctx, f"{label}, ratio {ratio}", spans, scores_args(ratio, span))
    yield scene_sample(ctx, "long", ((1300, 40),), scores_args(1, 0), slow=True)


def visible_scores(ctx: SampleContext, args: Args, result: torch.Tensor) -> torch.Tensor:
    """Scores [rows, K] of the entries a row sees; what is beyond is unspecified and reads as zero."""
    *_, source, span, step = args
    ratio = args[2].spec.index[source]
    seen = (step.positions[span.rows] + 1) // ratio
    column = torch.arange(result.shape[1], device=result.device)
    return result.masked_fill(column >= seen.unsqueeze(1), 0)


# choices from given scores


def given_scores(ctx: SampleContext, rows: int, width: int, ties: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [rows, width] and how many of them count [rows]; the rest are NaN and infinities.

    ties: few distinct values, among them -inf and both zeros
    """
    scores = ctx.normal("scores", rows, width)
    if ties:
        scores = (scores * 2).round() / 2
        scores[scores == 0.5] = -0.0
        scores[scores < -1.4] = -torch.inf
    lengths = ctx.integers("lengths", 0, width + 1, rows)
    lengths[::3] = width
    beyond = torch.arange(width) >= lengths.unsqueeze(1)
    scores[beyond] = torch.tensor([torch.nan, torch.inf, 9e9])[ctx.integers("junk", 0, 3, rows, width)][beyond]
    return scores, lengths


def choose(ctx: SampleContext, rows: int, width: int, ties: bool = False, slow: bool = False) -> Sample:
    name = f"{rows} rows of {width}{', ties' if ties else ''}"
    ctx = ctx.at(name)
    made = once(lambda: given_scores(ctx, rows, width, ties))

    def build(index: torch.Tensor) -> Args:
        scores, lengths = made()
        return ctx.activation(scores[index]), ctx.put(lengths[index])

    return by_rows(name, rows, build, slow)


def top_samples(ctx: SampleContext) -> Iterator[Sample]:
    top = ctx.traits.index_topk
    for rows, width in (
        (1, 5 * top + 3),
        (0, 4 * top),
        (23, 3 * top + 1),
        (7, top),
        (7, top - 3),
        (5, top + 1),
        (3, 0),
    ):
        yield choose(ctx, rows, width)
    for width in (4 * top, top):
        yield choose(ctx, 17, width, ties=True)
    yield choose(ctx, 33, 65_537, slow=True)


def top_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    scores = once(lambda: ctx.activation(ctx.normal("s", 4, 64)))
    yield ErrorSample("lengths of other rows", lambda: (scores(), ctx.put(torch.full((3,), 64))))


def block_samples(ctx: SampleContext) -> Iterator[Sample]:
    whole = ctx.traits.candidate_topk_blocks * ctx.traits.candidate_block_size
    size = ctx.traits.candidate_block_size
    for rows, width in ((1, 2 * whole), (0, 2 * whole), (19, 3 * whole - 3), (7, whole + 1), (7, whole), (7, size)):
        yield choose(ctx, rows, width)
    yield choose(ctx, 17, 2 * whole + 5, ties=True)
    yield choose(ctx, 9, 40 * whole, slow=True)


def block_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    width = 2 * ctx.traits.candidate_topk_blocks * ctx.traits.candidate_block_size
    scores = once(lambda: ctx.activation(ctx.normal("s", 4, width)))
    yield ErrorSample("lengths of other rows", lambda: (scores(), ctx.put(torch.full((3,), width))))


def listed(ctx: SampleContext, args: Args, result: torch.Tensor | None) -> Any:
    """Candidate blocks, or that there are none."""
    return {"restricted": result is not None, **({} if result is None else {"blocks": result})}


INFOS = (
    *selection.INFOS,
    OpInfo("attention.quantize_index", quantize_index_samples, strategy=rows_and_seeds(quantize_index),
           judges={"out": exactly}),
    OpInfo("attention.index_scores", scores_samples, observe=visible_scores,
           properties=PURE - {BATCH_INVARIANT}),
    OpInfo("attention.candidate_blocks", block_samples, block_errors,
           rows_and_seeds(lambda ctx, rows: choose(ctx, rows, 7 * rows + 5, ties=rows % 2 == 1)),
           observe=listed, by_row=("blocks",)),
    OpInfo("attention.top_entries", top_samples, top_errors,
           rows_and_seeds(lambda ctx, rows: choose(ctx, rows, 3 * rows + 5, ties=rows % 2 == 1))),
)  # fmt: skip
