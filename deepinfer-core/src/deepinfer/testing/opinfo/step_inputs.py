"""Samples of the `step_inputs` ops: the integer metadata of a step, every number of which is exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from deepinfer.hooks.ops.step_inputs import Truncation
from deepinfer.testing.opinfo.context import SampleContext
from deepinfer.testing.opinfo.memory import cache_spec
from deepinfer.testing.opinfo.record import REPEATABLE, Args, ErrorSample, OpInfo, Sample
from deepinfer.testing.opinfo.scenes import DECODE, EDGES, LONG, MIXED, ONE, SHORT

OFF = Truncation()


def arrays(ctx: SampleContext, spans: Sequence[tuple[int, int]], truncation: Truncation, rest: int) -> Args:
    """Operands of a step of sequences (tokens before, new tokens); rest: prompt tokens after the step."""
    starts, counts = (np.array([span[part] for span in spans], dtype=np.int64) for part in (0, 1))
    width = -(-int((starts + counts).max()) // ctx.traits.block_size) + 1
    order = np.random.default_rng(ctx.seed)
    table = 1 + order.permutation(len(spans) * width).reshape(len(spans), width)
    slots = 1 + order.permutation(len(spans) + 3)[: len(spans)]
    return starts, counts, slots, table, starts + counts + rest, cache_spec(ctx.traits), truncation


def samples(ctx: SampleContext) -> Iterator[Sample]:
    scenes = {"one token": ONE, "decode": DECODE, "mixed": MIXED, "edges": EDGES, "drafts": SHORT["drafts"]}
    for label, spans in scenes.items():
        yield Sample(label, partial(arrays, ctx, spans, OFF, 0))
    for mode in ("mask", "compact"):
        for keep, rest in ((4, 0), (0, 0), (10, 6), (10_000, 0)):
            name = f"mixed, {mode} keeps {keep}, {rest} to come"
            yield Sample(name, partial(arrays, ctx, MIXED, Truncation(mode, keep), rest))
    yield Sample("long", partial(arrays, ctx, LONG, Truncation("compact", 300), 0), slow=True)


def errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    def args(place: int, cut: Any) -> Args:
        operands = list(arrays(ctx, MIXED, OFF, 0))
        operands[place] = operands[place][cut]
        return tuple(operands)

    yield ErrorSample("a block table too narrow", lambda: args(3, np.s_[:, :1]))
    yield ErrorSample("lengths of fewer sequences", lambda: args(1, np.s_[:-1]))
    yield ErrorSample("slots of fewer sequences", lambda: args(2, np.s_[:-1]))


def ahead(ctx: SampleContext, spans: Sequence[tuple[int, int]], refused: int) -> Args:
    """Operands of a step whose host believes that `refused` more tokens are there than the device knows of."""
    starts, counts, slots, table, _, spec, _ = arrays(ctx, [(before + refused, new) for before, new in spans], OFF, 0)
    known = torch.from_numpy(starts - refused).to(ctx.device)
    return known, starts, counts, torch.from_numpy(slots).to(ctx.device), table, spec


def samples_ahead(ctx: SampleContext) -> Iterator[Sample]:
    most = min(cache_spec(ctx.traits).state.values())
    drafts = [(before, min(new, most)) for before, new in SHORT["drafts"]]
    for label, spans in {"one token": ONE, "decode": DECODE, "drafts": drafts}.items():
        for refused in (0, 1, 5):
            yield Sample(f"{label}, {refused} refused", partial(ahead, ctx, spans, refused))


def errors_ahead(ctx: SampleContext) -> Iterator[ErrorSample]:
    def narrow() -> Args:
        operands = list(ahead(ctx, ((150, 1), (20, 1)), 3))
        operands[4] = operands[4][:, :1]
        return tuple(operands)

    yield ErrorSample("a block table too narrow", narrow)
    yield ErrorSample("more rows than a ring has", lambda: ahead(ctx, ((10, ctx.traits.ring + 1),), 0))


INFOS = (
    OpInfo("step_inputs.build", samples, errors, properties=frozenset({REPEATABLE})),
    OpInfo("step_inputs.build_ahead", samples_ahead, errors_ahead, properties=frozenset({REPEATABLE})),
)
