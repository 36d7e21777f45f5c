"""Samples of the attention ops that read values: rope, plan, latent attention in its two forms, drafts, images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from deepinfer.hooks import KVCache, Selection
from deepinfer.hooks.ops.attention import LatentWeights
from deepinfer.reference.rope import rope_table
from deepinfer.testing.opinfo import indexer, split
from deepinfer.testing.opinfo.cache import (
    DECODE, EDGES, LONG, MIXED, MOST_IN_RING, ONE, SHORT, any_scene, scene_sample,
)  # fmt: skip
from deepinfer.testing.opinfo.context import SampleContext, Trio, once
from deepinfer.testing.opinfo.record import (
    CANARY, PURE, REPEATABLE, Args, Check, ErrorSample, OpInfo, Sample, by_rows, by_sequences,
)  # fmt: skip
from deepinfer.testing.opinfo.steps import LAYER, SOURCES, Scene, contents
from deepinfer.testing.opinfo.strategies import rows_and_seeds

TABLE_ROWS = 2048
"""Positions of the rope tables, more than any sample reaches."""
THETA = 10000.0

# rope


def table(ctx: SampleContext) -> torch.Tensor:
    """[TABLE_ROWS, rope_dim] float32"""
    return ctx.float32(rope_table(TABLE_ROWS, THETA, ctx.traits.qk_rope_head_dim))


def rope(ctx: SampleContext, rows: int, shape: tuple[int, ...], inverse: bool = False, wide: bool = False,
         slow: bool = False) -> Sample:  # fmt: skip
    """wide: float32 channels."""
    kind = f"{'float32' if wide else 'activations'}{', inverse' if inverse else ''}"
    name = f"{kind}, {' x '.join(map(str, (rows, *shape)))}"
    ctx = ctx.at(name)
    x, places = once(lambda: ctx.normal("x", rows, *shape)), once(lambda: ctx.integers("p", 0, TABLE_ROWS, rows))
    angles = once(lambda: table(ctx))
    make = ctx.float32 if wide else ctx.activation
    return by_rows(name, rows, lambda i: (make(x()[i]), ctx.put(places()[i]), angles(), inverse), slow)


def rope_samples(ctx: SampleContext) -> Iterator[Sample]:
    t = ctx.traits
    heads = (t.num_attention_heads, t.head_dim)
    for rows in (1, 0, 7):
        yield rope(ctx, rows, heads)
    yield rope(ctx, 7, heads, inverse=True, wide=True)
    yield rope(ctx, 37, (t.head_dim,))
    yield rope(ctx, 5, (t.index_n_heads, t.index_head_dim))
    yield rope(ctx, 3, (t.qk_rope_head_dim,), inverse=True)
    yield rope(ctx, 257, heads, slow=True)


def rope_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    def args(rows: int) -> Args:
        return ctx.activation(ctx.normal("x", 4, ctx.traits.head_dim)), ctx.put(torch.arange(rows)), table(ctx), False

    yield ErrorSample("positions of other rows", lambda: args(3))


# latent attention


def sharp(scene: Scene) -> torch.Tensor:
    """Queries [rows, heads, head_dim], each aimed at one key, so that a single key gained or lost shows.

    Head h of row p asks for the window key at position p - h, or for the one just outside the window.
    """
    t, targets = scene.ctx.traits, []
    heads, window = t.num_attention_heads, t.sliding_window
    for i in scene.order:
        start, new = scene.spans[i]
        keys = scene.ctx.normal(f"window {i}", scene.lengths[i], t.head_dim)
        offsets = torch.tensor([(window - 1, window, 0, window - 2)[h % 4] if h < 4 else h for h in range(heads)])
        places = (torch.arange(start, start + new).unsqueeze(1) - offsets).clamp(min=0)
        targets.append(keys[places])
    return torch.cat(targets) * 12 * t.head_dim**-0.5


def queries(scene: Scene, kind: str = "plain") -> torch.Tensor:
    """[rows, heads, head_dim] activation dtype. kind: plain, sharp, huge."""
    t = scene.ctx.traits
    if kind == "sharp":
        return scene.ctx.activation(sharp(scene))
    scale = {"plain": 2.0, "huge": 300.0}[kind]
    return scene.ctx.activation(scene.numbers("q", t.num_attention_heads, t.head_dim, scale=scale))


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

    def sample(ctx: SampleContext, label: str, spans: Any, source: Source, kind: str = "plain", slow: bool = False) -> Sample:
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


# images


def encoder(ctx: SampleContext, segments: Sequence[int], scale: float = 1.0, slow: bool = False) -> Sample:
    """segments: patches of every image."""
    heads = ctx.vision.num_attention_heads
    width = ctx.vision.hidden_size // heads
    name = f"segments of {', '.join(map(str, segments))}{'' if scale == 1 else ', huge'}"
    ctx = ctx.at(name)
    scales = {"q": scale, "k": 1.0, "v": 1.0}

    def take(order: Sequence[int]) -> Args:
        parts = [[ctx.normal(f"{kind} {i}", segments[i], heads, width, scale=s) for i in order] for kind, s in scales.items()]
        q, k, v = (ctx.activation(torch.cat(part)) for part in parts)
        return q, k, v, torch.tensor([0, *(segments[i] for i in order)]).cumsum(0)

    return by_sequences(name, segments, take, slow, 4.0 * sum(n * n for n in segments) * heads * width)


def encoder_samples(ctx: SampleContext) -> Iterator[Sample]:
    for segments in ((1,), (16, 1, 9), (37,), (5, 0, 3)):
        yield encoder(ctx, segments)
    yield encoder(ctx, (12, 5), scale=200.0)
    yield encoder(ctx, (1024, 300), slow=True)


def encoder_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    heads, width = ctx.vision.num_attention_heads, 32

    def args(rows: int, keys: int, last: int) -> Args:
        q, k = (ctx.activation(ctx.normal("x", n, heads, width)) for n in (rows, keys))
        return q, k, k, torch.tensor([0, 3, last])

    yield ErrorSample("segments end before the rows do", lambda: args(9, 9, 7))
    yield ErrorSample("channels of other heads", lambda: (*args(9, 9, 9)[:2], ctx.activation(ctx.normal("v", 9, heads + 1, width)),
                                                          torch.tensor([0, 3, 9])))  # fmt: skip


CACHE = frozenset({"cache"})
INFOS = (
    OpInfo("attention.plan", plan_samples, observe=attend, opaque=True,
           properties=frozenset({REPEATABLE})),
    OpInfo("attention.rope", rope_samples, rope_errors,
           rows_and_seeds(lambda ctx, rows: rope(ctx, rows, (3, 128), rows % 2 == 1, rows % 3 == 1))),
    OpInfo("attention.latent", latent_samples, latent_errors, any_scene(latent_args((1, "some"))), observe=with_window(3), by_row=("result",), changes=CACHE,
           properties=PURE | {CANARY},
           checks=(Check("prompt cut anywhere", split_latent, level=2, invariant=True),
                   Check("other blocks and slots", moved_latent, level=2))),
    OpInfo("attention.cached", _scenes(cached_args, SHORT),
           strategy=any_scene(cached_args((2, "all")), MOST_IN_RING), wider=frozenset({"out"})),
    OpInfo("attention.chunk", _scenes(chunk_args, PREFILL, chunked=True), wider=frozenset({"out"})),
    *indexer.INFOS,
    OpInfo("attention.draft", draft_samples),
    OpInfo("attention.encoder", encoder_samples, encoder_errors),
)  # fmt: skip
