"""Samples of the attention ops that choose: index queries, scores, candidate blocks, the best entries, the whole choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepinfer.hooks import StepInputs
from deepinfer.testing.compare import TOLERANCES, Verdict, same_selection
from deepinfer.testing.opinfo import split
from deepinfer.testing.opinfo.cache import DECODE, MIXED, ONE, any_scene, scene_sample
from deepinfer.testing.opinfo.context import SampleContext, Trio, once
from deepinfer.testing.opinfo.gemm import exactly
from deepinfer.testing.opinfo.record import (
    BATCH_INVARIANT, PURE, Args, Check, ErrorSample, OpInfo, Sample, Tensors, by_rows,
)  # fmt: skip
from deepinfer.testing.opinfo.steps import SOURCES, Scene
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


def queries(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries [rows, heads, dim] and head weights [rows, heads], activation dtype."""
    t = scene.ctx.traits
    q = scene.numbers("index q", t.index_n_heads, t.index_head_dim)
    return scene.ctx.activation(q), scene.ctx.activation(scene.numbers("index weights", t.index_n_heads))


def scored(scene: Scene) -> tuple[Any, StepInputs]:
    """Caches with the index keys of everything up to the step's end, and the step."""
    cache, step = scene.cache("index"), scene.step()
    for ratio, layer in SOURCES.items():
        scene.ctx.ops.cache.store_index(cache, layer, scene.index_keys(ratio), step)
    return cache, step


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
    for rows, width in ((1, 5 * top + 3), (0, 4 * top), (23, 3 * top + 1), (7, top), (7, top - 3), (5, top + 1), (3, 0)):
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


# the whole choice


def select_args(ratio: int, candidates: bool, make_candidates: bool) -> Callable[[Scene], Args]:
    def make(scene: Scene) -> Args:
        q, weights = queries(scene)
        cache, step = scored(scene)
        blocks = candidate_lists(scene, ratio) if candidates else None
        return q, weights, cache, SOURCES[ratio], blocks, make_candidates, step

    return make


def candidate_lists(scene: Scene, ratio: int) -> torch.Tensor:
    """Candidate blocks [rows, C] as a candidate source leaves them: random ones and the last visible, -1 padding."""
    t, rows = scene.ctx.traits, []
    for i in scene.order:
        start, new = scene.spans[i]
        blocks = -(-scene.lengths[i] // ratio // t.candidate_block_size) + 1
        score = scene.ctx.uniform(f"candidates {i}", scene.lengths[i], max(blocks, t.candidate_topk_blocks))
        for position in range(start, start + new):
            visible = -(-((position + 1) // ratio) // t.candidate_block_size)
            count = min(max(1, visible // 2), visible, t.candidate_topk_blocks)
            chosen = score[position, :visible].topk(count).indices
            if count:
                chosen[0] = visible - 1
            chosen = torch.unique(chosen)
            rows.append(torch.cat((chosen, torch.full((t.candidate_topk_blocks - len(chosen),), -1))))
    return scene.ctx.put(torch.stack(rows))


WIDE = ((0, 2), (190, 1), (330, 1), (75, 3))
"""Past enough entries that a small model's candidate blocks are a choice."""


def select_samples(ctx: SampleContext) -> Iterator[Sample]:
    for ratio, label, spans in ((1, "one token", ((9, 1),)), (2, "decode", DECODE), (1, "mixed", MIXED),
                                (2, "nothing yet", ONE), (1, "wide", WIDE)):  # fmt: skip
        yield scene_sample(ctx, f"{label}, ratio {ratio}", spans, select_args(ratio, False, False))
    yield scene_sample(ctx, "wide, makes candidates", WIDE, select_args(1, False, True))
    yield scene_sample(ctx, "few, makes candidates", DECODE, select_args(2, False, True))
    yield scene_sample(ctx, "wide, among candidates", WIDE, select_args(1, True, False))
    yield scene_sample(ctx, "long", ((1300, 40),), select_args(1, False, True), slow=True)


def chosen(ctx: SampleContext, args: Args, result: Any) -> dict[str, Any]:
    """The choice at its full width, and in the yardstick the scores behind it."""
    selection, blocks = result
    top = ctx.traits.index_topk
    entries = torch.nn.functional.pad(selection.entries, (0, top - selection.entries.shape[1]), value=-1)
    seen = {"entries": entries, "ratio": selection.ratio, "restricted": blocks is not None}
    if blocks is not None:
        seen["blocks"] = blocks
    if ctx.ideal:
        seen |= _yardstick(ctx, args)
    return seen


def _yardstick(ctx: SampleContext, args: Args) -> dict[str, torch.Tensor]:
    """Float64 scores of entries and of candidate blocks, -inf where nothing may be chosen."""
    q, weights, cache, source, candidates, _, step = args
    q = ctx.ops.attention.quantize_index(q)
    size, ratio = ctx.traits.candidate_block_size, cache.spec.index[source]
    width = -(-max(span.max_context for span in step.spans) // ratio // size) * size
    parts = []
    for span in step.spans:
        scores = ctx.ops.attention.index_scores(q, weights, cache, source, span, step)
        seen = (step.positions[span.rows] + 1) // ratio
        scores = scores.masked_fill(torch.arange(scores.shape[1]) >= seen.unsqueeze(1), -torch.inf)
        parts.append(torch.nn.functional.pad(scores, (0, width - scores.shape[1]), value=-torch.inf))
    scores = torch.cat(parts)
    blocks = scores.unflatten(1, (-1, size)).amax(2) if width else scores
    if width:  # the last visible block always counts
        last = ((step.positions + 1) // ratio - 1).clamp(min=0) // size
        seen = (blocks > -torch.inf).any(1, keepdim=True)
        blocks = blocks.scatter(1, last.unsqueeze(1), blocks.new_full((), torch.inf).where(seen, -torch.inf))
    if candidates is not None:
        allowed = torch.zeros(scores.shape[0], width // size + 1, dtype=torch.bool)
        allowed.scatter_(1, torch.where(candidates >= 0, candidates, width // size), True)
        scores = scores.masked_fill(~allowed[:, :-1].repeat_interleave(size, 1), -torch.inf)
    return {"scores": scores, "block_scores": blocks}


def judge_choice(found: Tensors, working: Tensors, ideal: Tensors) -> Iterator[tuple[str, Verdict]]:
    """Ascending lists of the best entries; candidate blocks likewise, unless every block is one."""
    entries = found["entries"]
    yield "ratio", Verdict(found["ratio"] == working["ratio"], f"{found['ratio']}, expected {working['ratio']}")
    yield "entries", ascending(entries)
    yield "entries", same_selection(entries, ideal["scores"], entries.shape[1], TOLERANCES[torch.bfloat16])
    same = found["restricted"] == working["restricted"]
    yield "candidates", Verdict(same, f"candidates given: {found['restricted']}, expected {working['restricted']}")
    if working["restricted"]:
        blocks = found["blocks"]
        if blocks.shape == working["blocks"].shape:
            blocks = blocks.masked_fill(blocks >= -(-_visible(ideal["scores"]) // _block(ideal)).unsqueeze(1), -1)
        yield "candidates", same_selection(blocks, ideal["block_scores"], working["blocks"].shape[1])


def _visible(scores: torch.Tensor) -> torch.Tensor:
    return (scores > -torch.inf).sum(1)


def _block(ideal: Tensors) -> int:
    return ideal["scores"].shape[1] // max(1, ideal["block_scores"].shape[1])


def ascending(entries: torch.Tensor) -> Verdict:
    """Each row rises strictly and ends in -1 padding."""
    places = torch.where(entries < 0, torch.iinfo(torch.int64).max, entries)
    wrong = (places.diff(dim=1) <= 0) & (entries[:, 1:] >= 0) | (entries[:, :-1] < 0) & (entries[:, 1:] >= 0)
    if not bool(wrong.any()):
        return Verdict(True)
    row = int(wrong.any(1).int().argmax())
    return Verdict(False, f"row {row} is not ascending with padding at the end: {entries[row].tolist()}", {"index": [row]})


def moved(trio: Trio) -> None:
    """The same choice whatever blocks the index keys lie in."""

    def run(scene: Scene, cache: Any) -> torch.Tensor:
        q, weights = queries(scene)
        step = scene.step()
        scene.ctx.ops.cache.store_index(cache, SOURCES[1], scene.index_keys(1), step)
        picked, _ = scene.ctx.ops.attention.select(q, weights, cache, SOURCES[1], None, True, step)
        return picked.entries.cpu()

    for spans in (WIDE, MIXED):
        split.other_places(trio, run, ("index",), spans)


INFOS = (
    OpInfo("attention.select", select_samples, strategy=any_scene(select_args(1, False, True)), outputs=("selection", "candidates"), observe=chosen,
           judge_all=judge_choice, by_row=("entries",),
           checks=(Check("other blocks", moved, level=2),)),
    OpInfo("attention.quantize_index", quantize_index_samples, strategy=rows_and_seeds(quantize_index),
           judges={"out": exactly}),
    OpInfo("attention.index_scores", scores_samples, observe=visible_scores,
           properties=PURE - {BATCH_INVARIANT}),
    OpInfo("attention.candidate_blocks", block_samples, block_errors,
           rows_and_seeds(lambda ctx, rows: choose(ctx, rows, 7 * rows + 5, ties=rows % 2 == 1)), observe=listed, by_row=("blocks",)),
    OpInfo("attention.top_entries", top_samples, top_errors,
           rows_and_seeds(lambda ctx, rows: choose(ctx, rows, 3 * rows + 5, ties=rows % 2 == 1))),
)  # fmt: skip
