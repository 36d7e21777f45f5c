"""Rotary position embedding: adjacent channel pairs, on the last channels of a vector, with optional YaRN scaling.

Called by the op contracts of `hooks/ops/` and by the model, which builds its tables here once (model specification
3.4). There is no magnitude factor.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch


class YarnScaling(Protocol):
    """What YaRN needs of `rope_scaling`; names follow the checkpoint's config keys."""

    @property
    def factor(self) -> float:
        """How far the context is stretched."""

    @property
    def original_max_position_embeddings(self) -> int:
        """Context length before stretching."""

    @property
    def beta_fast(self) -> float:
        """Turns within the original length from which a pair keeps its frequency."""

    @property
    def beta_slow(self) -> float:
        """Turns up to which a pair is slowed by the full factor."""


def inverse_frequencies(theta: float, rope_dim: int, scaling: YarnScaling | None = None) -> torch.Tensor:
    """Angle per position of every channel pair, float32 [rope_dim / 2]."""
    return _frequencies(theta, rope_dim, scaling).float()


def rope_table(max_positions: int, theta: float, rope_dim: int, scaling: YarnScaling | None = None) -> torch.Tensor:
    """float32 [max_positions, rope_dim] = [cos | sin]. Angles are formed in float64: far positions keep their phase."""
    positions = torch.arange(max_positions, dtype=torch.float64)
    angles = torch.outer(positions, _frequencies(theta, rope_dim, scaling))
    return torch.cat((angles.cos(), angles.sin()), -1).float()


def apply_rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    inverse: bool = False,
    accumulate: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Rotate the last channels of x by each row's position; the channels before them are copied.

    x          [Q, ..., d]            any dimensions between rows and channels
    positions  [Q] int64              row of the table
    table      [P, rope_dim] float32  `rope_table`
    inverse    rotate backwards
    returns    [Q, ..., d] in x's dtype, rounded once from `accumulate`
    """
    rope_dim = table.shape[-1]
    row_shape = (positions.shape[0], *[1] * (x.dim() - 2), rope_dim)
    cos, sin = table.index_select(0, positions).to(accumulate).view(row_shape).chunk(2, -1)
    kept, rotated = x.split((x.shape[-1] - rope_dim, rope_dim), -1)
    even, odd = rotated.to(accumulate).unflatten(-1, (rope_dim // 2, 2)).unbind(-1)
    if inverse:
        sin = -sin
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return torch.cat((kept, pairs.flatten(-2).to(x.dtype)), -1)


def _frequencies(theta: float, rope_dim: int, scaling: YarnScaling | None) -> torch.Tensor:
    """float64 [rope_dim / 2]: theta^(-2i / rope_dim), slow ones divided by YaRN's factor."""
    pair = torch.arange(rope_dim // 2, dtype=torch.float64)
    base = theta ** (-2.0 * pair / rope_dim)
    if scaling is None:
        return base
    low, high = _yarn_bounds(theta, rope_dim, scaling)
    ramp = ((pair - low) / (high - low)).clamp(0.0, 1.0)
    return base * (1.0 - ramp) + base / scaling.factor * ramp


def _yarn_bounds(theta: float, rope_dim: int, scaling: YarnScaling) -> tuple[float, float]:
    """Pairs below `low` keep their frequency (they turn more than beta_fast times within the original length), pairs
    above `high` are slowed by the full factor (fewer than beta_slow turns)."""

    def pair_of(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return rope_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(0, math.floor(pair_of(scaling.beta_fast)))
    high = min(rope_dim - 1, math.ceil(pair_of(scaling.beta_slow)))
    return low, high + 0.001 if low == high else high
