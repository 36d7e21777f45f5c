"""The caches that samples use: their sizes, what earlier owners left in them, and everything they hold.

Reads and writes go through the ops of the table, so any layout serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from deepinfer.hooks import CacheSpec, EntryRows, KVCache, ModelTraits, RingRows, StepInputs
from deepinfer.testing.opinfo.context import SampleContext

LAYER = 1
"""Window ring that samples use; ring 0 belongs to another layer."""
SOURCES = {1: 4, 2: 3}
"""{ratio: layer whose compressed entries and index keys samples use}"""


def cache_spec(traits: ModelTraits, compressed_format: str = "fp4") -> CacheSpec:
    """A small model's caches: two window rings, one source of each ratio."""
    sources = {layer: ratio for ratio, layer in SOURCES.items()}
    state = 2 + max(0, traits.ring - traits.sliding_window - 1)
    return CacheSpec(
        block_size=traits.block_size,
        ring=traits.ring,
        window_layers=LAYER + 1,
        head_dim=traits.head_dim,
        index_head_dim=traits.index_head_dim,
        compressed=sources,
        index=dict(sources),
        state={SOURCES[2]: state},
        compressed_format=compressed_format,
    )


def everywhere(ctx: SampleContext, cache: KVCache) -> StepInputs:
    """Metadata that addresses every row of every cache once, for writing and reading all of them."""
    spec, slots = cache.spec, cache.num_slots
    rows = torch.arange(slots * spec.ring)
    entries = {}
    for ratio in sorted({*spec.compressed.values(), *spec.index.values()}):
        physical = torch.arange(cache.num_blocks * (spec.block_size // ratio))
        entries[ratio] = EntryRows(*(ctx.put(physical) for _ in range(3)))
    rings = {spec.ring: RingRows(ctx.put(rows), ctx.put(rows))}
    starts = torch.full((slots,), spec.ring)
    return StepInputs(
        positions=ctx.put(rows % spec.ring), sequence=ctx.put(rows // spec.ring), q_starts=ctx.put(starts),
        row_starts=ctx.put(torch.arange(slots) * spec.ring), slots=ctx.put(torch.arange(slots)),
        block_table=ctx.put(torch.zeros(slots, 1, dtype=torch.int64)), window_lo=ctx.put(rows % spec.ring),
        entries=entries, rings=rings, spans=(), in_ring=False,
    )  # fmt: skip


def leave_rubbish(ctx: SampleContext, cache: KVCache, kinds: Sequence[str]) -> None:
    """Fill caches with the numbers of earlier owners."""
    ctx, spec, step = ctx.at("rubbish"), cache.spec, everywhere(ctx, cache)
    if "window" in kinds:
        for layer in range(spec.window_layers):
            keys = ctx.normal(f"window {layer}", cache.num_slots * spec.ring, spec.head_dim, scale=3.0)
            ctx.ops.cache.store_window(cache, layer, ctx.activation(keys), step)
    for ratio, layer in SOURCES.items():
        rows = cache.num_blocks * (spec.block_size // ratio)
        if "entries" in kinds:
            numbers = ctx.normal(f"entries {ratio}", rows, spec.head_dim, scale=3.0)
            ctx.ops.cache.store_entries(cache, layer, ctx.activation(numbers), step)
        if "index" in kinds:
            numbers = ctx.normal(f"index {ratio}", rows, spec.index_head_dim, scale=3.0)
            ctx.ops.cache.store_index(cache, layer, ctx.activation(numbers), step)
    if "state" in kinds:
        fill_state(ctx, cache)


def fill_state(ctx: SampleContext, cache: KVCache) -> None:
    """Compressor state of every slot from an earlier owner."""
    ring, slots = cache.spec.state[SOURCES[2]], cache.num_slots
    rows = torch.arange(slots * ring)
    step = replace(
        everywhere(ctx, cache), positions=ctx.put(rows % ring), sequence=ctx.put(rows // ring),
        entries={2: EntryRows(*(ctx.put(rows[:0]) for _ in range(3)))},
        rings={ring: RingRows(ctx.put(rows), ctx.put(rows))},
    )  # fmt: skip
    numbers = (
        ctx.put(ctx.normal(kind, slots * ring, cache.spec.head_dim, scale=3.0)) for kind in ("scores", "latents")
    )
    ctx.ops.cache.compress(cache, SOURCES[2], *numbers, step)


def contents(ctx: SampleContext, cache: KVCache, *kinds: str) -> dict[str, torch.Tensor]:
    """Everything that caches hold, as reads return it: {name: [rows, width]}."""
    spec, step, seen = cache.spec, everywhere(ctx, cache), {}
    if "window" in kinds:
        for layer in range(spec.window_layers):
            seen[f"window {layer}"] = ctx.ops.cache.load_window(cache, layer, step, spec.ring).flatten(0, 1)
    for ratio, layer in SOURCES.items():
        if "entries" in kinds:
            seen[f"entries {layer}"] = ctx.ops.cache.load_entries(cache, layer, step.entries[ratio].physical)
        if "index" in kinds:
            blocks = ctx.put(torch.arange(cache.num_blocks)).unsqueeze(0)
            seen[f"index {layer}"] = ctx.ops.cache.load_index(cache, layer, blocks).flatten(0, 1)
    if "state" in kinds:
        seen["state"] = state(ctx, cache)
    return seen


def state(ctx: SampleContext, cache: KVCache) -> torch.Tensor:
    """Compressor state of every slot, as merges with probing second tokens show it: [slots * ring, head_dim].

    The probing steps keep no rows themselves (`RingRows` is empty), so looking changes nothing.
    """
    ring, slots, width = cache.spec.state[SOURCES[2]], cache.num_slots, cache.spec.head_dim
    probe = [ctx.put(ctx.at("probe").normal(kind, slots, width)) for kind in ("scores", "latents")]
    every, found = ctx.put(torch.arange(slots)), []
    for row in range(ring):
        first = row if row % 2 == 0 else row + ring  # second tokens stand at odd positions
        step = replace(
            everywhere(ctx, cache),
            positions=torch.full_like(every, first + 1), sequence=every, q_starts=torch.full_like(every, first + 1),
            row_starts=every, entries={2: EntryRows(every, torch.full_like(every, first // 2), every)},
            rings={ring: RingRows(every[:0], every[:0])},
        )  # fmt: skip
        found.append(ctx.ops.cache.compress(cache, SOURCES[2], *probe, step))
    return torch.stack(found, 1).flatten(0, 1)
