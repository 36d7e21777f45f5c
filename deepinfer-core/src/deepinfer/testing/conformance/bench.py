"""One model with random weights three times over: on the subject's ops, on core's reference, on the float64 yardstick.

Level 3 runs parts of it side by side on equal inputs. Where the model makes a discrete choice (which entries a row
attends to), the working reference chooses for all three; what the subject would have chosen is judged by itself, with
the yardstick's scores as margin.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from deepinfer.hooks import Binding, Contribution, KVCache, OpTable, Provider, Selection, StepInputs
from deepinfer.hooks.bind import bind
from deepinfer.hooks.ops.step_inputs import Truncation
from deepinfer.hub.tensor_spec import TensorSpec
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.indexer import Shared
from deepinfer.models.deepseek_v41.manifest import manifest
from deepinfer.models.deepseek_v41.model import Model
from deepinfer.models.deepseek_v41.random_weights import SyntheticCheckpoint
from deepinfer.models.deepseek_v41.weights import build_model
from deepinfer.testing import yardstick
from deepinfer.testing.conformance.margins import Call, Scores
from deepinfer.testing.opinfo.context import SampleContext, Trio
from deepinfer.testing.subject import BACKTRACKING, BLOCK_SIZE, Subject

SEQUENCES = 8
BLOCKS = 4
"""Paged blocks of a sequence."""

Chunks = Sequence[tuple[int, int]]
"""(first position, rows) of every sequence of a step; sequences without rows are left out."""


class Recorder:
    """A wrapper of bound calls that keeps the operands of some ops, by name of op and operand."""

    def __init__(self, *ops: str) -> None:
        self._ops = ops
        self.calls: dict[str, list[dict[str, Any]]] = {op: [] for op in ops}

    def wrap(self, binding: Binding, function: Callable[..., Any]) -> Callable[..., Any]:
        """Called by the binder for every op."""
        if binding.spec.name not in self._ops:
            return function
        signature, calls = inspect.signature(function), self.calls[binding.spec.name]

        def call(*operands: Any, **named: Any) -> Any:
            calls.append(signature.bind(*operands, **named).arguments)
            return function(*operands, **named)

        return call

    def clear(self) -> None:
        """Forget all calls."""
        for calls in self.calls.values():
            calls.clear()


class _Kept(SyntheticCheckpoint):
    """Random weights that are made once and read three times."""

    def __init__(self, specs: Mapping[str, TensorSpec], seed: int) -> None:
        super().__init__(specs, seed)
        self._tensors: dict[str, torch.Tensor] = {}

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        if name not in self._tensors:
            self._tensors[name] = super().read(name)
        return self._tensors[name].clone() if out is None else out.copy_(self._tensors[name])

    def map_rows(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.read(name)[start:stop]


@dataclass
class Side:
    """One of the three: an op table, the samples' context for it, and the model.

    recorder  sees the calls of its table
    """

    ctx: SampleContext
    config: ModelConfig
    source: SyntheticCheckpoint
    recorder: Recorder = field(default_factory=Recorder)

    @property
    def ops(self) -> OpTable:
        return self.ctx.ops

    @cached_property
    def model(self) -> Model:
        """The model with the seed's random weights."""
        text = self.config.text
        vocab_map = torch.arange(text.vocab_size) % text.engram_compressed_vocab_size
        return build_model(self.config, self.source, self.ops, self.ctx.context, vocab_map)

    def new_cache(self) -> KVCache:
        """Empty caches for `SEQUENCES` sequences."""
        spec = self.config.cache_spec(BLOCK_SIZE, BACKTRACKING)
        return self.ops.cache.allocate(spec, SEQUENCES * BLOCKS + 1, SEQUENCES + 1)

    def step(self, chunks: Chunks, cache: KVCache) -> StepInputs:
        """Integer metadata of a step, its plan made."""
        present = np.array([number for number, (_, rows) in enumerate(chunks) if rows])
        starts = np.array([chunks[number][0] for number in present])
        lengths = np.array([chunks[number][1] for number in present])
        table = 1 + present[:, None] * BLOCKS + np.arange(BLOCKS)
        ends = starts + lengths
        views = self.ops.step_inputs.build(starts, lengths, present + 1, table, ends, cache.spec, Truncation())
        views.encoder.plan = self.ops.attention.plan(views.encoder)
        return views.encoder

    def draft_step(self, starts: Sequence[int], block: int, cache: KVCache) -> StepInputs:
        """A draft pass of `block` slots after each of the sequences 0, 1, ..., which have `starts` tokens so far."""
        first = np.array(starts)
        spec = replace(cache.spec, compressed={}, index={}, state={})
        slots, lengths = np.arange(len(first)) + 1, np.full(len(first), block)
        table = np.zeros((len(first), 1), dtype=np.int64)
        return self.ops.step_inputs.build(first, lengths, slots, table, first, spec, Truncation()).encoder

    def shared(self, chosen: Shared) -> Shared:
        """Another side's choices, on this side's device."""
        put = self.ctx.put
        selections = {source: Selection(put(s.entries), s.ratio) for source, s in chosen.selections.items()}
        return Shared(selections, None if chosen.candidates is None else put(chosen.candidates))


@dataclass(frozen=True)
class Bench:
    """The three sides."""

    found: Side
    working: Side
    ideal: Side

    @classmethod
    def of(cls, subject: Subject) -> Bench:
        """Sides of a subject; weights are made when a case first needs them."""
        trio, source = Trio.of(subject), _Kept(manifest(subject.config), subject.seed)
        watched = ("attention.top_entries", "attention.candidate_blocks", "experts.route")
        records = Recorder(*watched), Recorder(*watched)
        working = replace(trio.working, ops=bind((), trio.working.context, wrappers=(records[0],)))
        ideal = replace(trio.ideal, ops=_recorded_ideal(trio.ideal, records[1]))
        return cls(
            Side(trio.found, subject.config, source),
            Side(working, subject.config, source, records[0]),
            Side(ideal, subject.config, source, records[1]),
        )

    @property
    def all(self) -> tuple[Side, Side, Side]:
        return self.found, self.working, self.ideal

    def clear_records(self) -> None:
        """Forget the calls that the reference sides have made."""
        self.working.recorder.clear()
        self.ideal.recorder.clear()

    def scored(self, op: str, scores: Callable[[Call], torch.Tensor]) -> list[Scores]:
        """(working, ideal) scores of the calls of an op that both reference sides made last, in order."""
        ideal = self.ideal.recorder.calls[op]
        working = self.working.recorder.calls[op][-len(ideal) :]
        return [(scores(w), scores(i)) for w, i in zip(working, ideal, strict=True)]

    def at(self, scope: str) -> Bench:
        """The same sides with random numbers of their own; models are shared."""
        return Bench(*(_scoped(side, scope) for side in self.all))


def _scoped(side: Side, scope: str) -> Side:
    scoped = replace(side, ctx=side.ctx.at(scope))
    scoped.__dict__["model"] = side.model
    return scoped


def _recorded_ideal(ctx: SampleContext, recorder: Recorder) -> OpTable:
    """`yardstick.ideal_table`, with its calls recorded."""
    contribution = Contribution(Provider("yardstick", "deepinfer-core", "0"), {"gemm": yardstick.YardstickGemm})
    return bind((contribution,), ctx.context, wrappers=(recorder,))
