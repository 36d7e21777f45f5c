"""Samples of the gemm ops that work row by row: quantizers, norms, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from deepinfer.testing.opinfo.context import SampleContext, once
from deepinfer.testing.opinfo.record import Args, ErrorSample, OpInfo, Sample, by_rows, exactly
from deepinfer.testing.opinfo.strategies import rows_and_seeds

LIMIT = 10.0
"""Clamp of SwiGLU, where a sample does not take the model's."""


Wrap = Callable[[SampleContext, torch.Tensor], Args]
"""The operands of some rows."""


def elementwise(
    ctx: SampleContext, name: str, rows: int, shape: tuple[int, ...], wrap: Wrap, extreme: bool = False,
    slow: bool = False, scale: float = 1.0,
) -> Sample:  # fmt: skip
    """A sample of rows [rows, *shape]; `wrap` makes the operands of some of them."""
    name = f"{name}, {' x '.join(map(str, (rows, *shape)))}{', extreme' if extreme else ''}"
    ctx = ctx.at(name)
    x = once(lambda: ctx.extreme("x", rows, *shape) if extreme else ctx.uneven("x", rows, *shape) * scale)
    return by_rows(name, rows, lambda index: wrap(ctx, x()[index]), slow)


def _activation(ctx: SampleContext, x: torch.Tensor) -> Args:
    return (ctx.activation(x),)


def _float32(ctx: SampleContext, x: torch.Tensor) -> Args:
    return (ctx.float32(x),)


def quantize_samples(ctx: SampleContext) -> Iterator[Sample]:
    hidden = ctx.traits.hidden_size
    for rows, shape in ((1, (hidden,)), (0, (hidden,)), (37, (32,)), (5, (ctx.traits.o_groups, 96))):
        yield elementwise(ctx, "bf16", rows, shape, _activation)
    yield elementwise(ctx, "float32", 11, (hidden,), _float32)
    yield elementwise(ctx, "bf16", 13, (hidden,), _activation, extreme=True)
    yield elementwise(ctx, "float32", 13, (hidden,), _float32, extreme=True)
    yield elementwise(ctx, "float32", 1001, (5120,), _float32, slow=True)


def quantize_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    if ctx.numerics.quantize:
        for width in (16, 33):
            yield ErrorSample(
                f"{width} channels, no multiple of 32", lambda w=width: (ctx.activation(ctx.normal("x", 3, w)),)
            )


def norm(ctx: SampleContext, x: torch.Tensor) -> Args:
    weight = ctx.normal("weight", x.shape[-1]) + 1
    return ctx.activation(x), ctx.activation(weight), ctx.traits.rms_norm_eps


def norm_samples(ctx: SampleContext) -> Iterator[Sample]:
    t = ctx.traits
    for rows, width in ((1, t.hidden_size), (0, t.hidden_size), (37, t.q_lora_rank), (3, t.head_dim), (2, 160)):
        yield elementwise(ctx, "norm", rows, (width,), norm)
    yield elementwise(ctx, "norm", 13, (t.hidden_size,), norm, extreme=True)
    yield elementwise(ctx, "heads", 3, (5, 64), norm)
    yield elementwise(ctx, "norm", 1001, (5120,), norm, slow=True)


def norm_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    def args() -> Args:
        return ctx.activation(ctx.normal("x", 3, 64)), ctx.activation(ctx.normal("w", 96)), 1e-6

    yield ErrorSample("weight of another width", args)


def _swiglu(limit: float, weighted: bool) -> Callable[[SampleContext, torch.Tensor], Args]:
    def wrap(ctx: SampleContext, packed: torch.Tensor) -> Args:
        gate_up, weight = packed[:, :-1], packed[:, -1].abs()
        return ctx.activation(gate_up), limit, ctx.float32(weight) if weighted else None

    return wrap


def swiglu_samples(ctx: SampleContext) -> Iterator[Sample]:
    width = 2 * ctx.traits.moe_intermediate_size + 1  # the last column becomes the row's weight
    limit = ctx.traits.swiglu_limit
    for rows in (1, 0, 37):
        yield elementwise(ctx, "weighted", rows, (width,), _swiglu(limit, True))
    yield elementwise(ctx, "plain", 5, (width,), _swiglu(limit, False))
    yield elementwise(ctx, "beyond the limit", 7, (width,), _swiglu(limit, True), scale=12.0)
    yield elementwise(ctx, "small limit", 7, (129,), _swiglu(0.5, False), scale=2.0)
    yield elementwise(ctx, "plain", 13, (width,), _swiglu(limit, False), extreme=True)
    yield elementwise(ctx, "weighted", 1001, (2 * 2304 + 1,), _swiglu(limit, True), slow=True)


def swiglu_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    gate_up = once(lambda: ctx.activation(ctx.normal("x", 4, 128)))
    yield ErrorSample("odd number of columns", lambda: (gate_up()[:, :127], LIMIT, None))
    yield ErrorSample("weights of other rows", lambda: (gate_up(), LIMIT, ctx.float32(ctx.uniform("w", 3))))


INFOS = (
    OpInfo("gemm.quantize", quantize_samples, quantize_errors,
           rows_and_seeds(lambda ctx, rows: elementwise(ctx, "bf16", rows, (96,), _activation, extreme=rows % 2 == 1)),
           judges={"out": exactly}),
    OpInfo("gemm.rms_norm", norm_samples, norm_errors,
           rows_and_seeds(lambda ctx, rows: elementwise(ctx, "norm", rows, (96,), norm, extreme=rows % 2 == 1))),
    OpInfo("gemm.rms_norm_quantize", norm_samples, norm_errors, outputs=("normed", "quantized")),
    OpInfo("gemm.swiglu", swiglu_samples, swiglu_errors,
           rows_and_seeds(lambda ctx, rows: elementwise(ctx, "weighted", rows, (65,), _swiglu(1.0, True)))),
    OpInfo("gemm.swiglu_quantize", swiglu_samples, swiglu_errors),
)  # fmt: skip
