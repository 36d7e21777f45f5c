"""Samples of `attention.select`, and how a choice of entries is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepinfer.hooks import StepInputs
from deepinfer.testing.compare import TOLERANCES, Verdict, same_selection
from deepinfer.testing.opinfo import split
from deepinfer.testing.opinfo.context import SampleContext, Trio
from deepinfer.testing.opinfo.memory import SOURCES
from deepinfer.testing.opinfo.record import Args, Check, OpInfo, Sample, Tensors
from deepinfer.testing.opinfo.scenes import DECODE, MIXED, ONE, any_scene, scene_sample
from deepinfer.testing.opinfo.steps import Scene


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
    return Verdict(
        False, f"row {row} is not ascending with padding at the end: {entries[row].tolist()}", {"index": [row]}
    )


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
    OpInfo("attention.select", select_samples, strategy=any_scene(select_args(1, False, True)),
           outputs=("selection", "candidates"), observe=chosen, judge_all=judge_choice, by_row=("entries",),
           checks=(Check("other blocks", moved, level=2),)),
)  # fmt: skip
