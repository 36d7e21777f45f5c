"""Samples of the cache ops: allocation, stores, loads, compressor, zeroing and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from deepinfer.hooks import CacheSpec, KVCache
from deepinfer.testing.compare import Verdict, equal_but_ties
from deepinfer.testing.opinfo import split
from deepinfer.testing.opinfo.context import SampleContext
from deepinfer.testing.opinfo.memory import LAYER, SOURCES, cache_spec, contents
from deepinfer.testing.opinfo.record import (
    CANARY,
    PURE,
    REPEATABLE,
    STREAM,
    Args,
    Check,
    ErrorSample,
    OpInfo,
    Sample,
    exactly,
)
from deepinfer.testing.opinfo.scenes import (
    DECODE,
    EDGES,
    LONG,
    MIXED,
    MOST_IN_RING,
    ONE,
    SHORT,
    Make,
    any_scene,
    scene_sample,
)
from deepinfer.testing.opinfo.steps import Scene

IN_PLACE = frozenset({REPEATABLE, STREAM, CANARY})
KINDS = ("window", "entries", "index", "state")


def _samples(
    make: Make, counts: Callable[[Scene], list[int]] | None = None, scenes: dict[str, Any] | None = None
) -> Any:
    """Samples of one op over the usual scenes."""
    every = scenes or {"one token": ONE, "decode": DECODE, "mixed": MIXED, "edges": EDGES}

    def samples(ctx: SampleContext) -> Iterator[Sample]:
        for label, spans in every.items():
            yield scene_sample(ctx, label, spans, make, counts=counts)
        yield scene_sample(ctx, "long", LONG, make, slow=True, counts=counts)

    return samples


# stores


def window_args(scene: Scene) -> Args:
    return scene.cache("window"), LAYER, scene.window_keys(), scene.step()


def float32_args(scene: Scene) -> Args:
    keys = scene.ctx.put(scene.numbers("window", scene.ctx.traits.head_dim))
    return scene.cache("window"), LAYER, keys, scene.step()


def window_samples(ctx: SampleContext) -> Iterator[Sample]:
    yield from _samples(window_args)(ctx)
    yield scene_sample(ctx, "float32 keys", MIXED, float32_args)


def entries_args(ratio: int) -> Make:
    return lambda scene: (scene.cache("entries"), SOURCES[ratio], scene.entries(ratio), scene.step())


def index_args(ratio: int) -> Make:
    return lambda scene: (scene.cache("index"), SOURCES[ratio], scene.index_keys(ratio), scene.step())


def _ratios(make: Callable[[int], Make]) -> Any:
    """The usual scenes for both ratios."""

    def samples(ctx: SampleContext) -> Iterator[Sample]:
        for label, spans in {"one token": ONE, "decode": DECODE, "mixed": MIXED, "edges": EDGES}.items():
            for ratio in SOURCES:
                yield scene_sample(ctx, f"{label}, ratio {ratio}", spans, make(ratio))
        yield scene_sample(ctx, "long, ratio 2", LONG, make(2), slow=True)

    return samples


def entries_samples(ctx: SampleContext) -> Iterator[Sample]:
    yield from _ratios(entries_args)(ctx)
    yield scene_sample(ctx, "mixed, fp8", MIXED, entries_args(1), compressed_format="fp8")
    yield huge(ctx)


HUGE_BLOCKS = (1 << 31) // (288 * 64) + 3
"""Blocks of ratio-2 entries that take more than 2^31 bytes."""


def huge(ctx: SampleContext) -> Sample:
    """Entries in the last blocks of a cache of more than 2^31 bytes."""
    ctx = ctx.at("huge")

    def fresh() -> Args:
        spec = CacheSpec(ctx.traits.block_size, ctx.traits.ring, 0, ctx.traits.head_dim, ctx.traits.index_head_dim,
                         {SOURCES[2]: 2}, {}, {})  # fmt: skip
        scene = Scene.of(ctx, ((0, 2 * 9),))
        step = scene.step()
        step.entries[2].physical.add_((HUGE_BLOCKS - 3) * (spec.block_size // 2))
        return ctx.ops.cache.allocate(spec, HUGE_BLOCKS, 1), SOURCES[2], scene.entries(2), step

    return Sample("more than 2^31 bytes", fresh, slow=True)


def stored(kind: str) -> Callable[[SampleContext, Args, Any], Any]:
    """What a store leaves in the caches, and what it returns."""

    def observe(ctx: SampleContext, args: Args, result: Any) -> Any:
        cache: KVCache = args[0]
        if cache.num_blocks > 10_000:  # too much to read whole
            rows = args[3].entries[2].physical
            return {"stored": ctx.ops.cache.load_entries(cache, args[1], rows), "none": result}
        return {"result": result, **contents(ctx, cache, kind)}

    return observe


def entry_errors(make: Make, place: int) -> Any:
    """Numbers of fewer rows than the step has."""

    def errors(ctx: SampleContext) -> Iterator[ErrorSample]:
        def args() -> Args:
            operands = list(make(Scene.of(ctx, MIXED)))
            operands[place] = operands[place][:-2]
            return tuple(operands)

        yield ErrorSample("fewer rows than the step has", args)

    return errors


# loads


def load_window_args(scene: Scene) -> Args:
    return scene.cache("window"), LAYER, scene.step(), scene.ctx.traits.sliding_window - 1


def load_window_samples(ctx: SampleContext) -> Iterator[Sample]:
    one = lambda scene: [1] * len(scene.spans)  # noqa: E731  rows of the result belong to sequences
    for label, spans in {"one token": ONE, "decode": DECODE, "mixed": MIXED, "edges": EDGES}.items():
        yield scene_sample(ctx, label, spans, load_window_args, counts=one)
    whole = lambda scene: (scene.cache("window"), LAYER, scene.step(), scene.ctx.traits.sliding_window)  # noqa: E731
    yield scene_sample(ctx, "whole window", DECODE, whole, counts=one)


def row_windows_args(scene: Scene) -> Args:
    cache, step = scene.cache("window"), scene.step()
    scene.ctx.ops.cache.store_window(cache, LAYER, scene.window_keys(), step)
    return cache, LAYER, step, scene.ctx.traits.sliding_window


def load_entries_args(ratio: int, label: str) -> Callable[[SampleContext], Args]:
    """label: all (every row, shuffled, some twice), none."""

    def fresh(ctx: SampleContext) -> Args:
        scene = Scene.of(ctx, MIXED)
        cache = scene.cache("entries")
        rows = scene.num_blocks * (ctx.traits.block_size // ratio)
        physical = ctx.integers("physical", 0, rows, 0 if label == "none" else 301)
        return cache, SOURCES[ratio], ctx.put(physical)

    return fresh


def load_entries_samples(ctx: SampleContext) -> Iterator[Sample]:
    for ratio in SOURCES:
        for label in ("some", "none"):
            name = f"{label}, ratio {ratio}"
            yield Sample(name, partial(load_entries_args(ratio, label), ctx.at(name)))


def load_index_samples(ctx: SampleContext) -> Iterator[Sample]:
    for ratio in SOURCES:
        for rows, columns in ((1, 1), (3, 2), (2, 0)):
            name = f"{rows} x {columns} blocks, ratio {ratio}"
            yield Sample(name, partial(_load_index_args, ctx.at(name), ratio, rows, columns))


def _load_index_args(ctx: SampleContext, ratio: int, rows: int, columns: int) -> Args:
    scene = Scene.of(ctx, MIXED)
    return scene.cache("index"), SOURCES[ratio], ctx.put(ctx.integers("blocks", 0, scene.num_blocks, rows, columns))


# compressor


def compress_args(scene: Scene) -> Args:
    scores, latents = scene.pairs()
    return scene.cache("state"), SOURCES[2], scores, latents, scene.step()


def entries_of(scene: Scene) -> list[int]:
    return [(start + new) // 2 - start // 2 for start, new in scene.spans]


PAIRS = {
    "one token": ONE,
    "second token": ((1, 1), (9, 1), (150, 1)),
    "decode": DECODE,
    "mixed": MIXED,
    "edges": EDGES,
    "single pairs": ((0, 2), (1, 2), (2, 1), (3, 3)),
}


# slots, blocks


def zero_args(ctx: SampleContext, every: bool) -> Args:
    scene = Scene.of(ctx, DECODE)
    slots = scene.slots() if every else scene.slots()[1:4:2]
    return scene.cache("window", "state"), ctx.put(torch.tensor(slots, dtype=torch.int64))


def zero_samples(ctx: SampleContext) -> Iterator[Sample]:
    yield Sample("two slots", partial(zero_args, ctx.at("two"), False))
    yield Sample("all slots", partial(zero_args, ctx.at("all"), True))


def clone_args(ctx: SampleContext, what: str, count: int) -> Args:
    scene = Scene.of(ctx, DECODE)
    kinds = ("window", "state") if what == "slots" else ("entries", "index")
    limit = scene.num_slots if what == "slots" else scene.num_blocks
    order = torch.randperm(limit - 1, generator=ctx.generator("order")) + 1
    source, target = order[:count], order[count : 2 * count]
    if count > 1:
        source[1] = source[0]  # two copies of one
    return scene.cache(*kinds), ctx.put(source), ctx.put(target)


def clone_samples(what: str) -> Any:
    def samples(ctx: SampleContext) -> Iterator[Sample]:
        for count in (1, 2, 0):
            yield Sample(f"{count} {what}", partial(clone_args, ctx.at(f"{count}"), what, count))

    return samples


def left(*kinds: str) -> Callable[[SampleContext, Args, Any], Any]:
    """What is in the caches afterwards."""
    return lambda ctx, args, result: {"result": result, **contents(ctx, args[0], *kinds)}


# allocation


def allocate_samples(ctx: SampleContext) -> Iterator[Sample]:
    for form in ("fp4", "fp8"):
        for blocks, slots in ((3, 2), (1, 1)):
            args = cache_spec(ctx.traits, form), blocks, slots
            yield Sample(f"{form}, {blocks} blocks, {slots} slots", lambda args=args: args)


def zeros(ctx: SampleContext, args: Args, cache: KVCache) -> Any:
    """A new cache: its sizes, and everything in it."""
    return {
        "spec": cache.spec, "blocks": cache.num_blocks, "slots": cache.num_slots, **contents(ctx, cache, *KINDS)
    }  # fmt: skip


def _fp4(found: torch.Tensor, working: torch.Tensor, ideal: torch.Tensor) -> Verdict:
    """Compressed entries: their scales are no powers of two."""
    return equal_but_ties(found, working)


EXACT = {"out": exactly, "result": exactly, "window 0": exactly, "window 1": exactly, **{
    f"index {layer}": exactly for layer in SOURCES.values()}}  # fmt: skip
FP4 = {"stored": _fp4, "out": _fp4, **{f"entries {layer}": _fp4 for layer in SOURCES.values()}}
CACHE = frozenset({"cache"})

INFOS = (
    OpInfo("cache.allocate", allocate_samples, observe=zeros, opaque=True, properties=frozenset({REPEATABLE})),
    OpInfo("cache.store_window", window_samples, entry_errors(window_args, 2), any_scene(window_args),
           observe=stored("window"), judges=EXACT,
           changes=CACHE, properties=IN_PLACE),
    OpInfo("cache.load_window", load_window_samples, strategy=any_scene(load_window_args), judges=EXACT),
    OpInfo("cache.load_row_windows", _samples(row_windows_args, scenes=SHORT),
           strategy=any_scene(row_windows_args, MOST_IN_RING), judges=EXACT),
    OpInfo("cache.store_entries", entries_samples, entry_errors(entries_args(2), 2),
           any_scene(entries_args(2)), observe=stored("entries"), judges=FP4, changes=CACHE, properties=IN_PLACE),
    OpInfo("cache.load_entries", load_entries_samples, judges=FP4, properties=PURE),
    OpInfo("cache.store_index", _ratios(index_args), entry_errors(index_args(1), 2),
           any_scene(index_args(2)), observe=stored("index"), judges=EXACT, changes=CACHE, properties=IN_PLACE),
    OpInfo("cache.load_index", load_index_samples, judges=EXACT),
    OpInfo("cache.compress", _samples(compress_args, entries_of, PAIRS), entry_errors(compress_args, 2),
           any_scene(compress_args), observe=left("state"), by_row=("result",), changes=CACHE,
           properties=IN_PLACE | PURE,
           checks=(Check("prompt cut anywhere", split.compress, level=2, invariant=True),)),
    OpInfo("cache.zero_slots", zero_samples, observe=left("window", "state"), judges=EXACT, changes=CACHE,
           properties=IN_PLACE),
    OpInfo("cache.clone_blocks", clone_samples("blocks"), observe=left("entries", "index"), judges=EXACT | FP4,
           changes=CACHE, properties=IN_PLACE),
    OpInfo("cache.clone_slots", clone_samples("slots"), observe=left("window", "state"), judges=EXACT, changes=CACHE,
           properties=IN_PLACE),
)  # fmt: skip
