"""Steps for ops that read and write caches: sequences with a past, their blocks and slots, caches that hold the past.

A `Scene` is a few sequences, each with tokens before the step and new ones. Every number belongs to (kind, sequence,
position), so that the same sequences in another order, in other blocks, alone, or fed in pieces give the same numbers.
Caches are allocated and filled by the table's own ops, on top of what earlier owners left: reading a row that nobody
wrote shows. Step metadata is core's own, so that a wrong `step_inputs.build` fails there only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from deepinfer.hooks import CacheSpec, KVCache, Selection, StepInputs
from deepinfer.hooks.ops.step_inputs import StepInputOps, Truncation
from deepinfer.testing.opinfo.context import SampleContext
from deepinfer.testing.opinfo.memory import LAYER, SOURCES, cache_spec, leave_rubbish

SPARE_SLOTS = 3
"""Slots without a sequence: neighbours that must not change, and targets of copies."""
SPARE_BLOCKS = 2


@dataclass(frozen=True)
class Scene:
    """Sequences of a step.

    spans      (tokens before the step, new tokens) of every sequence
    order      which sequences take part, in which order; a sequence may not occur twice, since it owns its slot
    placement  decides which blocks and slots they have
    """

    ctx: SampleContext
    spans: tuple[tuple[int, int], ...]
    order: tuple[int, ...] = ()
    placement: int = 0
    compressed_format: str = "fp4"
    lengths: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, ctx: SampleContext, spans: Sequence[tuple[int, int]], **options: Any) -> Scene:
        """A scene of all sequences in order."""
        lengths = tuple(before + new for before, new in spans)
        return cls(ctx, tuple(spans), tuple(range(len(spans))), lengths=lengths, **options)

    def take(self, order: Sequence[int]) -> Scene:
        """Some of the sequences, in this order."""
        return replace(self, order=tuple(order))

    def piece(self, start: Sequence[int], end: Sequence[int]) -> Scene:
        """The same sequences where the step covers positions start[i] .. end[i] - 1 of sequence i."""
        return replace(self, spans=tuple((a, b - a) for a, b in zip(start, end, strict=True)))

    # layout

    @property
    def spec(self) -> CacheSpec:
        return cache_spec(self.ctx.traits, self.compressed_format)

    @property
    def num_blocks(self) -> int:
        return 1 + SPARE_BLOCKS + sum(self._blocks_of(i) for i in range(len(self.spans)))

    @property
    def num_slots(self) -> int:
        return 1 + SPARE_SLOTS + len(self.spans)

    def _blocks_of(self, sequence: int) -> int:
        return -(-self.lengths[sequence] // self.ctx.traits.block_size)

    def blocks(self) -> list[list[int]]:
        """Blocks of every sequence; null and spare ones are nobody's."""
        order = np.random.default_rng(self.placement).permutation(np.arange(1, self.num_blocks)).tolist()
        return [[order.pop() for _ in range(self._blocks_of(i))] for i in range(len(self.spans))]

    def slots(self) -> list[int]:
        """Slot of every sequence, then the spare ones."""
        return np.random.default_rng(self.placement + 1).permutation(np.arange(1, self.num_slots)).tolist()

    def spare_slots(self) -> list[int]:
        return self.slots()[len(self.spans) :]

    # steps

    def step(self, ratio_free: bool = False) -> StepInputs:
        """The step with its plan. ratio_free: a draft pass, which completes no entries."""
        return planned(self.ctx, self._build(self.spans, self.order, ratio_free))

    def past(self) -> StepInputs | None:
        """The step that brings everything before; None if nothing is."""
        before = tuple((0, start) for start, _ in self.spans)
        order = tuple(i for i in self.order if self.spans[i][0])
        return self._build(before, order) if order else None

    def _build(self, spans: Sequence[tuple[int, int]], order: Sequence[int], ratio_free: bool = False) -> StepInputs:
        ctx, owned, slots = self.ctx, self.blocks(), self.slots()
        width = max(map(len, owned)) + 1
        table = np.zeros((len(order), width), dtype=np.int64)
        for row, i in enumerate(order):
            table[row, : len(owned[i])] = owned[i]
        starts, counts = (np.array([spans[i][part] for i in order], dtype=np.int64) for part in (0, 1))
        spec = replace(self.spec, compressed={}, index={}, state={}) if ratio_free else self.spec
        context = replace(ctx.context, device=ctx.device)
        views = StepInputOps(context).build(
            starts, counts, np.array([slots[i] for i in order]), table, starts + counts, spec, Truncation()
        )
        return views.encoder

    # numbers

    def numbers(self, kind: str, *shape: int, scale: float = 1.0, past: bool = False) -> torch.Tensor:
        """Host numbers [rows, *shape] of the step's rows, or of those before it, sequence after sequence."""
        parts = []
        for i in self.order:
            start, new = self.spans[i]
            whole = self.ctx.normal(f"{kind} {i}", self.lengths[i], *shape, scale=scale)
            parts.append(whole[:start] if past else whole[start : start + new])
        return torch.cat(parts)

    def entry_numbers(self, kind: str, ratio: int, width: int, past: bool = False) -> torch.Tensor:
        """Host numbers [M, width] of the entries that the step completes, or that were complete before it."""
        parts = []
        for i in self.order:
            start, new = self.spans[i]
            whole = self.ctx.normal(f"{kind} {i}", self.lengths[i] // ratio, width)
            parts.append(whole[: start // ratio] if past else whole[start // ratio : (start + new) // ratio])
        return torch.cat(parts)

    def selection(self, ratio: int, pattern: str = "some") -> Selection:
        """Entries of every row: some (random, ascending), none (-1 everywhere), all (as many as fit)."""
        top = self.ctx.traits.index_topk
        rows = []
        for i in self.order:
            start, new = self.spans[i]
            score = self.ctx.uniform(f"select {ratio} {i}", self.lengths[i], max(top, self.lengths[i] // ratio))
            visible = (torch.arange(self.lengths[i]) + 1) // ratio
            rows += [_chosen(score[p], int(visible[p]), top, pattern) for p in range(start, start + new)]
        return Selection(self.ctx.put(torch.stack(rows)), ratio)

    # caches

    def cache(self, *kinds: str) -> KVCache:
        """Caches after everything before the step. kinds: of window, entries, index, state, what is needed."""
        ctx = self.ctx
        cache = ctx.ops.cache.allocate(self.spec, self.num_blocks, self.num_slots)
        leave_rubbish(ctx, cache, kinds)
        past = self.past()
        if past is not None:
            for kind in kinds:
                getattr(self, f"_store_{kind}")(cache, past, past=True)
        return cache

    def _store_window(self, cache: KVCache, step: StepInputs, past: bool) -> None:
        self.ctx.ops.cache.store_window(cache, LAYER, self.window_keys(past), step)

    def window_keys(self, past: bool = False) -> torch.Tensor:
        """[rows, head_dim] activation dtype"""
        return self.ctx.activation(self.numbers("window", self.ctx.traits.head_dim, past=past))

    def _store_entries(self, cache: KVCache, step: StepInputs, past: bool) -> None:
        for ratio in SOURCES:
            self.ctx.ops.cache.store_entries(cache, SOURCES[ratio], self.entries(ratio, past), step)

    def entries(self, ratio: int, past: bool = False) -> torch.Tensor:
        """[M, head_dim] activation dtype"""
        return self.ctx.activation(self.entry_numbers(f"entries {ratio}", ratio, self.ctx.traits.head_dim, past))

    def _store_index(self, cache: KVCache, step: StepInputs, past: bool) -> None:
        for ratio in SOURCES:
            self.ctx.ops.cache.store_index(cache, SOURCES[ratio], self.index_keys(ratio, past), step)

    def index_keys(self, ratio: int, past: bool = False) -> torch.Tensor:
        """[M, index_head_dim] activation dtype"""
        return self.ctx.activation(self.entry_numbers(f"index {ratio}", ratio, self.ctx.traits.index_head_dim, past))

    def _store_state(self, cache: KVCache, step: StepInputs, past: bool) -> None:
        self.ctx.ops.cache.compress(cache, SOURCES[2], *self.pairs(past), step)

    def pairs(self, past: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and latents of the compressor, [rows, head_dim] float32 each."""
        width = self.ctx.traits.head_dim
        made = (self.numbers(kind, width, past=past) for kind in ("scores", "latents"))
        scores, latents = (self.ctx.put(x) for x in made)
        return scores, latents


def _chosen(score: torch.Tensor, visible: int, top: int, pattern: str) -> torch.Tensor:
    """Ascending entries of one row, -1 padding, [top] int64."""
    count = {"none": 0, "some": min(top, visible) - (min(top, visible) > 2), "all": min(top, visible)}[pattern]
    entries = score[:visible].topk(count).indices.sort().values
    return torch.cat((entries, torch.full((top - count,), -1, dtype=torch.int64)))


def planned(ctx: SampleContext, step: StepInputs) -> StepInputs:
    """The step with the table's own plan."""
    step.plan = ctx.ops.attention.plan(step)
    return step
