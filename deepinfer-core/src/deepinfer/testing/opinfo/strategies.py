"""Hypothesis strategies of samples: sizes, ragged lengths and seeds beyond the fixed ones.

A strategy draws recipes, functions from a `SampleContext` to a `Sample`, so that the subject and both references get
the same sample. Hypothesis is a test requirement, not one of core; it is imported when a strategy is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.testing.opinfo.context import SampleContext
    from deepinfer.testing.opinfo.record import Sample

Spans = tuple[tuple[int, int], ...]
Strategy = Callable[["SampleContext"], Any]
MAX_ROWS = 40


def rows_and_seeds(make: Callable[[SampleContext, int], Sample]) -> Strategy:
    """Samples of 0 .. 40 rows of any seed; `make(ctx, rows)` makes one."""

    def strategy(ctx: SampleContext) -> Any:
        from hypothesis import strategies as st

        rows, seeds = st.integers(0, MAX_ROWS), st.integers(0, 2**31)
        return st.builds(lambda rows, seed: lambda ctx: make(ctx.reseeded(seed), rows), rows, seeds)

    return strategy


def spans_and_seeds(make: Callable[[SampleContext, Spans], Sample], most_rows: int = 25) -> Strategy:
    """Samples of one to four sequences with up to 300 tokens before and 1 .. `most_rows` new ones."""

    def strategy(ctx: SampleContext) -> Any:
        from hypothesis import strategies as st

        span = st.tuples(st.integers(0, 300), st.integers(1, most_rows))
        spans, seeds = st.lists(span, min_size=1, max_size=4), st.integers(0, 2**31)
        return st.builds(lambda spans, seed: lambda ctx: make(ctx.reseeded(seed), tuple(spans)), spans, seeds)

    return strategy
