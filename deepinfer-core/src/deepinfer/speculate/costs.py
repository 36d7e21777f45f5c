"""What a step costs: milliseconds by rows, and of the draft pass by sequences. Measured, then kept up to date.

The schedule weighs accepted tokens against these. `CostModel` is the interface; `MeasuredCosts` interpolates between
points that the worker measured when the engine started and follows what steps really took, for contexts grow and
machines are shared. It does not know how a step is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

FOLLOW = 0.2
"""Weight of a new observation."""


class CostModel(Protocol):
    """Milliseconds on the device. Only ratios matter."""

    def step(self, rows: np.ndarray) -> np.ndarray:
        """A step of so many rows without its draft pass, float64 of the same shape."""
        ...

    def drafting(self, sequences: int) -> float:
        """A draft pass for so many sequences."""
        ...

    def observe(self, rows: int, sequences: int, drafted: bool, milliseconds: float) -> None:
        """A decode step took this long."""
        ...


class MeasuredCosts:
    """Piecewise linear between measured points; beyond the last one with the average slope.

    rows, step_ms            points of the main step, rows ascending from 1
    sequences, drafting_ms   points of the draft pass
    """

    def __init__(self, rows: np.ndarray, step_ms: np.ndarray, sequences: np.ndarray, drafting_ms: np.ndarray) -> None:
        self.rows, self.step_ms = np.asarray(rows, np.float64), _rising(step_ms)
        self.sequences, self.drafting_ms = np.asarray(sequences, np.float64), _rising(drafting_ms)

    @classmethod
    def of(cls, step_ms: Mapping[int, float], drafting_ms: Mapping[int, float]) -> MeasuredCosts:
        """From {rows: milliseconds} and {sequences: milliseconds}."""
        points = (
            np.array(column) for curve in (step_ms, drafting_ms) for column in zip(*sorted(curve.items()), strict=True)
        )
        return cls(*points)

    def step(self, rows: np.ndarray) -> np.ndarray:
        """See `CostModel`."""
        return _interpolate(np.asarray(rows, np.float64), self.rows, self.step_ms)

    def drafting(self, sequences: int) -> float:
        """See `CostModel`."""
        return float(_interpolate(np.array(float(sequences)), self.sequences, self.drafting_ms))

    def observe(self, rows: int, sequences: int, drafted: bool, milliseconds: float) -> None:
        """Follow the curves where they were wrong, near the observed sizes."""
        expected = float(self.step(np.array(rows))) + (self.drafting(sequences) if drafted else 0.0)
        error = np.clip(milliseconds - expected, -expected / 2, expected / 2)  # a hiccup must not count for much
        if drafted:  # nobody knows which of the two was wrong
            error /= 2
            self.drafting_ms = _followed(self.sequences, self.drafting_ms, sequences, error)
        self.step_ms = _followed(self.rows, self.step_ms, rows, error)


def _followed(points: np.ndarray, values: np.ndarray, size: int, error: float) -> np.ndarray:
    """A curve moved by a share of `error` at `size`, less and less up to half and double that size."""
    distance = np.abs(np.log2(points) - np.log2(size))
    nearness = np.clip(1 - distance, 0.0, 1.0) if distance.min() < 1 else (distance == distance.min()).astype(float)
    return _rising(np.maximum(values + FOLLOW * nearness * error, 0.1 * values))


def _rising(values: np.ndarray) -> np.ndarray:
    """Costs never fall with the size; a measurement that says so was disturbed."""
    return np.maximum.accumulate(np.asarray(values, np.float64))


def _interpolate(x: np.ndarray, points: np.ndarray, values: np.ndarray) -> np.ndarray:
    inside = np.interp(x, points, values)
    if len(points) < 2:
        return inside
    slope = (values[-1] - values[0]) / (points[-1] - points[0])
    return inside + slope * np.maximum(x - points[-1], 0.0)


def grid(largest: int) -> list[int]:
    """Sizes worth measuring: all up to 8, then steps of about a quarter, `largest` at the end."""
    sizes = list(range(1, min(8, largest) + 1))
    while sizes[-1] < largest:
        sizes.append(min(largest, sizes[-1] + max(1, sizes[-1] // 3)))
    return sizes


def sizes_by_importance(largest: int, width: int) -> list[int]:
    """The sizes of `grid`, those first that draw the curve: 1, `width` (a sequence with all drafts) and its doubles."""
    doubles = [1]
    while (size := width << (len(doubles) - 1)) <= largest:
        doubles.append(size)
    small = range(2, min(width, largest + 1))
    return list(dict.fromkeys([*doubles, *small, *grid(largest)]))
