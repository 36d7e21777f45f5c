"""Hypothesis strategies of samples: sizes, ragged lengths and seeds beyond the fixed ones.

Hypothesis is a test requirement, not one of core; it is imported when a strategy is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.testing.opinfo.context import SampleContext
    from deepinfer.testing.opinfo.record import Sample

Strategy = Callable[["SampleContext"], Any]
MAX_ROWS = 40


def rows_and_seeds(make: Callable[[SampleContext, int], Sample]) -> Strategy:
    """Samples of 0 .. 40 rows of any seed; `make(ctx, rows)` makes one."""

    def strategy(ctx: SampleContext) -> Any:
        from hypothesis import strategies as st

        rows, seeds = st.integers(0, MAX_ROWS), st.integers(0, 2**31)
        return st.builds(lambda rows, seed: lambda ctx: make(ctx.reseeded(seed), rows), rows, seeds)

    return strategy
