"""Scenes that the samples of ops with caches use, and how a sample is made of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from deepinfer.testing.opinfo.context import SampleContext
from deepinfer.testing.opinfo.record import Args, Sample, by_sequences
from deepinfer.testing.opinfo.steps import Scene
from deepinfer.testing.opinfo.strategies import Strategy, spans_and_seeds

ONE = ((0, 1),)
DECODE = ((0, 1), (5, 1), (23, 1), (150, 1))
MIXED = ((0, 19), (7, 1), (140, 9), (3, 4))
EDGES = ((127, 3), (128, 1), (120, 8), (13, 15))
"""Around the ends of blocks and rings."""
LONG = ((0, 300), (1300, 40), (255, 1))

MOST_IN_RING = 7
"""Rows of a sequence that still lie in the smallest model's ring with their windows."""
SHORT = {"one token": ONE, "decode": DECODE, "drafts": ((0, 3), (6, 5), (13, 7), (200, 2))}
"""Steps whose windows lie in the rings."""

Make = Callable[[Scene], Args]


def scene_sample(
    ctx: SampleContext, label: str, spans: Sequence[tuple[int, int]], make: Make, slow: bool = False,
    counts: Callable[[Scene], list[int]] | None = None, flops: float | None = None, divisible: bool = True,
    **options: Any,
) -> Sample:  # fmt: skip
    """A sample of a scene's sequences.

    counts     rows of each sequence in the result; its new tokens by default
    divisible  some of the sequences are legal operands, too
    """
    scene = Scene.of(ctx.at(label), spans, **options)
    rows = [new for _, new in spans] if counts is None else counts(scene)
    sample = by_sequences(label, rows, lambda order: make(scene.take(order)), slow, flops)
    return sample if divisible else replace(sample, batch=None)


def any_scene(make: Make, most_rows: int = 25) -> Strategy:
    """Strategy of scenes for an op."""
    return spans_and_seeds(lambda ctx, spans: scene_sample(ctx, str(spans), spans, make), most_rows)
