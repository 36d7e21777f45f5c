"""Samples of the attention ops that read values: plan, latent attention in its two forms, drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from deepinfer.hooks import KVCache, Selection
from deepinfer.hooks.ops.attention import LatentWeights
from deepinfer.testing.opinfo import encoder, indexer, rope, split
from deepinfer.testing.opinfo.context import SampleContext, Trio
from deepinfer.testing.opinfo.memory import LAYER, SOURCES, contents
from deepinfer.testing.opinfo.record import (
    CANARY,
    PURE,
    REPEATABLE,
    Args,
    Check,
    ErrorSample,
    OpInfo,
    Sample,
)
from deepinfer.testing.opinfo.rope import table
from deepinfer.testing.opinfo.scenes import (
    DECODE,
    EDGES,
    LONG,
    MIXED,
    MOST_IN_RING,
    ONE,
    SHORT,
    any_scene,
    scene_sample,
)
from deepinfer.testing.opinfo.steps import Scene

# latent attention


def aimed(scene: Scene, strength: float, outside: bool = False) -> torch.Tensor:
    """Queries [rows, heads, head_dim], each aimed at one key, so that a single key gained or lost shows.

    Heads ask in turn for the oldest key of the window, the newest and the second oldest, and with `outside` also for
    the one that has just left it. strength: logit of the key asked for; the others' are about strength / 20.
    """
    t, targets = scene.ctx.traits, []
    window = t.sliding_window
    asked = (window - 1, window if outside else window - 1, 0, window - 2)
    offsets = torch.tensor([asked[h % 4] for h in range(t.num_attention_heads)])
    for i in scene.order:
        start, new = scene.spans[i]
        keys = scene.ctx.normal(f"window {i}", scene.lengths[i], t.head_dim)
        targets.append(keys[(torch.arange(start, start + new).unsqueeze(1) - offsets).clamp(min=0)])
    return torch.cat(targets) * strength * t.head_dim**-0.5


def queries(scene: Scene, kind: str = "plain") -> torch.Tensor:
    """[rows, heads, head_dim] activation dtype.

    kind  plain; sharp: aimed at single keys, some of them out of sight; huge: so strongly that only one key counts
    """
    t = scene.ctx.traits
    if kind == "plain":
        numbers = scene.numbers("q", t.num_attention_heads, t.head_dim, scale=2.0)
    else:
        numbers = aimed(scene, 12.0, outside=True) if kind == "sharp" else aimed(scene, 4000.0)
    return scene.ctx.activation(numbers)


def sink(scene: Scene) -> torch.Tensor:
    """[heads] float32: from hardly counting to winning against everything."""
    heads = scene.ctx.traits.num_attention_heads
    values = scene.ctx.normal("sink", heads, scale=2.0)
    values[1::4], values[2::4] = -40.0, 6.0
    return scene.ctx.float32(values)


def selected(scene: Scene, ratio: int | None, pattern: str) -> Selection | None:
    return None if ratio is None else scene.selection(ratio, pattern)


Source = tuple[int | None, str]
"""(ratio of the selected entries or None, pattern of the selection)"""


def cached_args(source: Source, kind: str = "plain") -> Callable[[Scene], Args]:
    def make(scene: Scene) -> Args:
        ratio, pattern = source
        cache, step = scene.cache("window", "entries"), scene.step()
        scene.ctx.ops.cache.store_window(cache, LAYER, scene.window_keys(), step)
        _complete(scene, cache, step)
        layer = SOURCES[ratio or 1]
        return queries(scene, kind), cache, LAYER, layer, selected(scene, ratio, pattern), sink(scene), step

    return make


def _complete(scene: Scene, cache: KVCache, step: Any) -> None:
    """Store the entries that the step itself completes, as its layers do before they attend."""
    for ratio, layer in SOURCES.items():
        scene.ctx.ops.cache.store_entries(cache, layer, scene.entries(ratio), step)


def chunk_args(source: Source, kind: str = "plain") -> Callable[[Scene], Args]:
    def make(scene: Scene) -> Args:
        ratio, pattern = source
        cache, step = scene.cache("window", "entries"), scene.step()
        before = scene.ctx.ops.cache.load_window(cache, LAYER, step, scene.ctx.traits.sliding_window - 1)
        keys = scene.ctx.ops.cache.store_window(cache, LAYER, scene.window_keys(), step)
        _complete(scene, cache, step)
        layer = SOURCES[ratio or 1]
        return queries(scene, kind), before, keys, cache, layer, selected(scene, ratio, pattern), sink(scene), step

    return make


def latent_args(source: Source, kind: str = "plain") -> Callable[[Scene], Args]:
    def make(scene: Scene) -> Args:
        ratio, pattern = source
        cache, step = scene.cache("window", "entries"), scene.step()
        _complete(scene, cache, step)
        layer = SOURCES[ratio or 1]
        operands = queries(scene, kind), scene.window_keys(), weights(scene)
        return (*operands, cache, LAYER, layer, selected(scene, ratio, pattern), step)

    return make


def weights(scene: Scene) -> LatentWeights:
    ctx = scene.ctx
    norm = ctx.normal("kv_norm", ctx.traits.head_dim, scale=0.3) + 1
    return LatentWeights(ctx.activation(norm), sink(scene), table(ctx))


PREFILL = {"mixed": MIXED, "edges": EDGES, "one run": ((0, 41),), "equal runs": ((0, 17), (30, 17), (129, 17))}


def latent_flops(ctx: SampleContext, spans: Sequence[tuple[int, int]]) -> float:
    """Products of queries with window keys and selected entries, and back."""
    t = ctx.traits
    keys = t.sliding_window + t.index_topk
    return 4.0 * sum(new for _, new in spans) * t.num_attention_heads * t.head_dim * keys


def _scenes(make: Callable[..., Callable[[Scene], Args]], scenes: dict[str, Any], chunked: bool = False) -> Any:
    """Samples over scenes: selections of both ratios, none, empty ones, sharp and huge queries.

    chunked  the op serves steps past the rings only, which a few short sequences of the scene are not
    """

    def sample(
        ctx: SampleContext, label: str, spans: Any, source: Source, kind: str = "plain", slow: bool = False
    ) -> Sample:
        t = ctx.traits
        divisible = not chunked or min(new for _, new in spans) > t.ring - t.sliding_window + 1
        flops = latent_flops(ctx, spans)
        return scene_sample(ctx, label, spans, make(source, kind), slow, flops=flops, divisible=divisible)

    def samples(ctx: SampleContext) -> Iterator[Sample]:
        for number, (label, spans) in enumerate(scenes.items()):
            yield sample(ctx, label, spans, (2 - number % 2, ("some", "all")[number % 2]))
        label, spans = next((label, spans) for label, spans in reversed(scenes.items()) if len(spans) > 1)
        yield sample(ctx, f"{label}, window only", spans, (None, ""))
        yield sample(ctx, f"{label}, nothing selected", spans, (1, "none"))
        yield sample(ctx, f"{label}, sharp", spans, (None, ""), "sharp")
        yield sample(ctx, f"{label}, huge queries", spans, (2, "some"), "huge")
        if PREFILL.items() <= scenes.items():
            yield sample(ctx, "long", LONG, (1, "all"), slow=True)

    return samples


def latent_samples(ctx: SampleContext) -> Iterator[Sample]:
    yield from _scenes(latent_args, SHORT)(ctx.at("in ring"))
    for sample in _scenes(latent_args, PREFILL)(ctx.at("prefill")):
        yield replace(sample, name=f"prefill {sample.name}")


def with_window(place: int) -> Callable[[SampleContext, Args, Any], Any]:
    """The result, and the window rings afterwards; `place`: which operand the cache is."""
    return lambda ctx, args, result: {"result": result, **contents(ctx, args[place], "window")}


def latent_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    def args() -> Args:
        operands = list(latent_args((None, ""))(Scene.of(ctx, DECODE)))
        operands[1] = operands[1][:-1]
        return tuple(operands)

    yield ErrorSample("keys of fewer rows", args)


def run_latent(ratio: int) -> split.Run:
    """`attention.latent` over a scene, entries of the step stored first."""

    def run(scene: Scene, cache: KVCache) -> torch.Tensor:
        step = scene.step()
        _complete(scene, cache, step)
        selection = scene.selection(ratio, "all")
        out = scene.ctx.ops.attention.latent(
            queries(scene), scene.window_keys(), weights(scene), cache, LAYER, SOURCES[ratio], selection, step
        )
        return (out.exact if scene.ctx.ideal else out.dequantize()).cpu()  # type: ignore[attr-defined]

    return run


def split_latent(trio: Trio) -> None:
    cuts = (1, 2, 7, 8, 9, 14, 15, 20)
    split.everywhere_cut(trio, "attention.latent", ("window", "entries"), run_latent(1), _rows, cuts)


def _rows(scene: Scene) -> list[int]:
    return [new for _, new in scene.spans]


def moved_latent(trio: Trio) -> None:
    for spans in (DECODE, MIXED):
        split.other_places(trio, run_latent(2), ("window", "entries"), spans)


# plan


def plan_args(scene: Scene) -> Args:
    return (scene.step(),)


def plan_samples(ctx: SampleContext) -> Iterator[Sample]:
    for label, spans in {"one token": ONE, "decode": DECODE, **PREFILL}.items():
        yield scene_sample(ctx, label, spans, plan_args)


def attend(ctx: SampleContext, args: Args, plan: Any) -> torch.Tensor:
    """What a plan is worth: window attention with it, over keys of the step alone."""
    (step,) = args
    step.plan = plan
    t, rows = ctx.traits, step.num_rows
    ctx = ctx.at("product")
    q = ctx.activation(ctx.normal("q", rows, t.num_attention_heads, t.head_dim))
    keys = ctx.activation(ctx.normal("keys", rows, t.head_dim))
    sinks = ctx.float32(torch.zeros(t.num_attention_heads))
    if step.in_ring:
        cache = Scene.of(ctx, MIXED + DECODE).cache("window")
        return ctx.ops.attention.cached(q, cache, LAYER, SOURCES[1], None, sinks, step)
    before = ctx.activation(ctx.normal("before", step.num_sequences, t.sliding_window - 1, t.head_dim))
    cache = Scene.of(ctx, ONE).cache()
    return ctx.ops.attention.chunk(q, before, keys, cache, SOURCES[1], None, sinks, step)


# drafts


def draft_args(kind: str = "plain") -> Callable[[Scene], Args]:
    def make(scene: Scene) -> Args:
        cache = scene.cache("window")
        return queries(scene, kind), scene.window_keys(), weights(scene), cache, LAYER, scene.step(ratio_free=True)

    return make


def draft_samples(ctx: SampleContext) -> Iterator[Sample]:
    for label, spans in {
        "one sequence": ((9, 5),), "three sequences": ((1, 5), (7, 5), (140, 5)), "single drafts": ((3, 1), (50, 1)),
    }.items():  # fmt: skip
        yield scene_sample(ctx, label, spans, draft_args())
    yield scene_sample(ctx, "sharp", ((9, 3), (20, 3)), draft_args("sharp"))


CACHE = frozenset({"cache"})
INFOS = (
    OpInfo("attention.plan", plan_samples, observe=attend, opaque=True,
           properties=frozenset({REPEATABLE})),
    *rope.INFOS,
    OpInfo("attention.latent", latent_samples, latent_errors, any_scene(latent_args((1, "some"))),
           observe=with_window(3), by_row=("result",), changes=CACHE, properties=PURE | {CANARY},
           checks=(Check("prompt cut anywhere", split_latent, level=2, invariant=True),
                   Check("other blocks and slots", moved_latent, level=2))),
    OpInfo("attention.cached", _scenes(cached_args, SHORT),
           strategy=any_scene(cached_args((2, "all")), MOST_IN_RING), wider=frozenset({"out"})),
    OpInfo("attention.chunk", _scenes(chunk_args, PREFILL, chunked=True), wider=frozenset({"out"})),
    *indexer.INFOS,
    OpInfo("attention.draft", draft_samples),
    *encoder.INFOS,
)  # fmt: skip
