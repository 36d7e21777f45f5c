"""Samples of `attention.rope`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepinfer.reference.rope import rope_table
from deepinfer.testing.opinfo.context import SampleContext, once
from deepinfer.testing.opinfo.record import Args, ErrorSample, OpInfo, Sample, by_rows
from deepinfer.testing.opinfo.strategies import rows_and_seeds

TABLE_ROWS = 2048
"""Positions of the rope tables, more than any sample reaches."""
THETA = 10000.0


def table(ctx: SampleContext) -> torch.Tensor:
    """[TABLE_ROWS, rope_dim] float32"""
    return ctx.float32(rope_table(TABLE_ROWS, THETA, ctx.traits.qk_rope_head_dim))


def rope(ctx: SampleContext, rows: int, shape: tuple[int, ...], inverse: bool = False, wide: bool = False,
         slow: bool = False) -> Sample:  # fmt: skip
    """wide: float32 channels."""
    kind = f"{'float32' if wide else 'activations'}{', inverse' if inverse else ''}"
    name = f"{kind}, {' x '.join(map(str, (rows, *shape)))}"
    ctx = ctx.at(name)
    x, places = once(lambda: ctx.normal("x", rows, *shape)), once(lambda: ctx.integers("p", 0, TABLE_ROWS, rows))
    angles = once(lambda: table(ctx))
    make = ctx.float32 if wide else ctx.activation
    return by_rows(name, rows, lambda i: (make(x()[i]), ctx.put(places()[i]), angles(), inverse), slow)


def rope_samples(ctx: SampleContext) -> Iterator[Sample]:
    t = ctx.traits
    heads = (t.num_attention_heads, t.head_dim)
    for rows in (1, 0, 7):
        yield rope(ctx, rows, heads)
    yield rope(ctx, 7, heads, inverse=True, wide=True)
    yield rope(ctx, 37, (t.head_dim,))
    yield rope(ctx, 5, (t.index_n_heads, t.index_head_dim))
    yield rope(ctx, 3, (t.qk_rope_head_dim,), inverse=True)
    yield rope(ctx, 257, heads, slow=True)


def rope_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    def args(rows: int) -> Args:
        return ctx.activation(ctx.normal("x", 4, ctx.traits.head_dim)), ctx.put(torch.arange(rows)), table(ctx), False

    yield ErrorSample("positions of other rows", lambda: args(3))


INFOS = (
    OpInfo("attention.rope", rope_samples, rope_errors,
           rows_and_seeds(lambda ctx, rows: rope(ctx, rows, (3, 128), rows % 2 == 1, rows % 3 == 1))),
)  # fmt: skip
