"""Samples of the gemm ops: weight preparation, dense, block-diagonal and grouped products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from deepinfer.testing.opinfo import rowwise
from deepinfer.testing.opinfo.context import SampleContext, once
from deepinfer.testing.opinfo.record import REPEATABLE, Args, ErrorSample, OpInfo, Sample, by_rows
from deepinfer.testing.opinfo.strategies import rows_and_seeds

# linear


def linear(
    ctx: SampleContext, rows: int, out: int, width: int, kind: str, form: str = "plain",
    out_dtype: torch.dtype | None = None, extreme: bool = False, slow: bool = False,
) -> Sample:  # fmt: skip
    """form: how x arrives: plain, quantized (by the table's own op) or foreign."""
    wide = "" if out_dtype is None else " to float32"
    name = f"{kind} {form}{wide}, {rows} x {width} -> {out}{', extreme' if extreme else ''}"
    ctx = ctx.at(name)
    x = once(lambda: ctx.extreme("x", rows, width) if extreme else ctx.uneven("x", rows, width))
    weight = once(lambda: ctx.dense("weight", out, width, kind))
    make = {"plain": ctx.activation, "quantized": ctx.quantized, "foreign": ctx.foreign}[form]
    if out_dtype is not None and ctx.ideal:
        out_dtype = torch.float64

    def build(index: torch.Tensor) -> Args:
        operands = make(x()[index]), weight()
        return operands if out_dtype is None else (*operands, out_dtype)

    return by_rows(name, rows, build, slow, 2.0 * rows * out * width)


def linear_samples(ctx: SampleContext) -> Iterator[Sample]:
    t = ctx.traits
    hidden, heads = t.hidden_size, t.index_n_heads
    yield linear(ctx, 1, hidden, hidden, "fp8_block32", "quantized")
    yield linear(ctx, 0, hidden, hidden, "fp8_block32", "quantized")
    yield linear(ctx, 37, t.q_lora_rank + t.head_dim, hidden, "fp8_block32", "quantized")
    yield linear(ctx, 3, hidden, hidden, "fp8_block32", "foreign")
    yield linear(ctx, 13, hidden, hidden, "fp8_block32", "quantized", extreme=True)
    yield linear(ctx, 5, heads, hidden, "bf16")
    yield linear(ctx, 17, t.n_routed_experts, hidden, "bf16", out_dtype=torch.float32)
    yield linear(ctx, 13, hidden, hidden, "bf16", out_dtype=torch.float32, extreme=True)
    yield linear(ctx, 2, t.vocab_size + 3, hidden, "f32", out_dtype=torch.float32)
    yield linear(ctx, 4, 45, 96, "fp8_block32", "quantized")
    yield linear(ctx, 129, 2 * t.moe_intermediate_size, hidden, "fp8_block32", "quantized", slow=True)


def linear_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    width = ctx.traits.hidden_size
    weight = once(lambda: ctx.dense("w", width, width, "bf16"))
    yield ErrorSample("channels differ", lambda: (ctx.activation(ctx.normal("x", 3, width // 2)), weight()))
    stored = once(lambda: ctx.dense("w8", width, width, "fp8_block32"))
    yield ErrorSample("channels differ, fp8", lambda: (ctx.quantized(ctx.normal("x", 3, width // 2)), stored()))


def prepare_samples(ctx: SampleContext) -> Iterator[Sample]:
    hidden = ctx.traits.hidden_size
    for kind, out, width in (
        ("fp8_block32", hidden, hidden),
        ("fp8_block32", 45, 96),
        ("bf16", 7, hidden),
        ("f32", 5, 64),
    ):
        inner = ctx.at(kind)
        yield Sample(f"{kind} {out} x {width}", partial(_one_weight, inner, out, width, kind))


def _one_weight(ctx: SampleContext, out: int, width: int, kind: str) -> Args:
    return (ctx.weight("weight", out, width, kind),)


def multiply(ctx: SampleContext, args: Args, prepared: Any) -> torch.Tensor:
    """What a prepared weight is worth: a product with it."""
    x = ctx.at("product").normal("x", 3, args[0].shape[-1])
    quantized = args[0].format == "fp8_block32"
    return ctx.ops.gemm.linear(ctx.quantized(x) if quantized else ctx.activation(x), prepared)


# block diagonal and grouped products


def block_diagonal(ctx: SampleContext, rows: int, groups: int, out: int, width: int, slow: bool = False) -> Sample:
    name = f"{rows} x {groups} x {width} -> {out}"
    ctx = ctx.at(name)
    x = once(lambda: ctx.uneven("x", rows, groups, width))
    weight = once(lambda: ctx.dense("weight", groups * out, width, "fp8_block32"))
    flops = 2.0 * rows * groups * out * width
    return by_rows(name, rows, lambda index: (ctx.quantized(x()[index]), weight()), slow, flops)


def block_diagonal_samples(ctx: SampleContext) -> Iterator[Sample]:
    t = ctx.traits
    width = t.num_attention_heads // t.o_groups * t.head_dim
    for rows in (1, 0, 7):
        yield block_diagonal(ctx, rows, t.o_groups, t.o_lora_rank, width)
    yield block_diagonal(ctx, 65, t.o_groups, t.o_lora_rank, width, slow=True)


def block_diagonal_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    weight = once(lambda: ctx.dense("w", 128, 64, "fp8_block32"))
    yield ErrorSample("channels differ", lambda: (ctx.quantized(ctx.normal("x", 3, 2, 32)), weight()))


def expert_count(ctx: SampleContext) -> int:
    """Experts of a stacked weight; fewer than the model has where they would take gigabytes."""
    return ctx.traits.n_routed_experts if ctx.traits.hidden_size <= 1024 else 8


def grouped(ctx: SampleContext, label: str, counts: list[int], out: int, width: int, kind: str = "mxfp4_row32",
            form: str = "quantized", slow: bool = False) -> Sample:  # fmt: skip
    """counts: rows of every expert."""
    name = f"{kind} {label}, {sum(counts)} x {width} -> {out}"
    ctx = ctx.at(name)
    rows = sum(counts)
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    x = once(lambda: ctx.uneven("x", rows, width))
    weight = once(lambda: ctx.experts("weight", len(counts), out, width, kind))
    make = ctx.quantized if form == "quantized" else ctx.foreign

    def build(index: torch.Tensor) -> Args:
        index = index[torch.sort(expert[index], stable=True).indices]
        ends = torch.bincount(expert[index], minlength=len(counts)).cumsum(0)
        return make(x()[index]), weight(), ctx.put(ends)

    sample = by_rows(name, rows, build, slow, 2.0 * rows * out * width)
    return _sorted_rows(sample, expert)


def _sorted_rows(sample: Sample, expert: torch.Tensor) -> Sample:
    """The sample with parts found where sorting by expert puts them."""
    assert sample.batch is not None

    def rows(order: Any) -> list[slice]:
        places = torch.sort(
            torch.sort(expert[torch.tensor(list(order), dtype=torch.int64)], stable=True).indices
        ).indices
        return [slice(int(p), int(p) + 1) for p in places]

    return replace(sample, batch=replace(sample.batch, rows=rows))


def grouped_samples(ctx: SampleContext) -> Iterator[Sample]:
    t, experts = ctx.traits, expert_count(ctx)
    hidden, inner = t.hidden_size, t.moe_intermediate_size
    ragged = [(3 * i * i) % 5 if i % 3 else 0 for i in range(experts)]
    yield grouped(ctx, "one row", [0] * (experts - 1) + [1], 2 * inner, hidden)
    yield grouped(ctx, "no rows", [0] * experts, 2 * inner, hidden)
    yield grouped(ctx, "ragged", ragged, 2 * inner, hidden)
    yield grouped(ctx, "all to one expert", [0, 0, 19] + [0] * (experts - 3), hidden, inner)
    yield grouped(ctx, "foreign layout", ragged, hidden, inner, form="foreign")
    yield grouped(ctx, "ragged", ragged[:5], 96, 64, "bf16")
    yield grouped(ctx, "every expert", [3] * experts, hidden, inner, slow=True)


def grouped_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    weight = once(lambda: ctx.experts("w", 4, 32, 64))

    def args(width: int, counts: list[int]) -> Args:
        ends = ctx.put(torch.tensor(counts).cumsum(0))
        return ctx.quantized(ctx.normal("x", sum(counts), width)), weight(), ends

    yield ErrorSample("channels differ", lambda: args(32, [1, 2, 0, 1]))
    yield ErrorSample("more experts than the weight has", lambda: args(64, [1, 0, 0, 0, 2]))


def prepare_expert_samples(ctx: SampleContext) -> Iterator[Sample]:
    t, experts = ctx.traits, expert_count(ctx)
    for out, width in ((2 * t.moe_intermediate_size, t.hidden_size), (96, 64)):
        yield Sample(f"{experts} x {out} x {width}", partial(_one_expert_weight, ctx, experts, out, width))


def _one_expert_weight(ctx: SampleContext, experts: int, out: int, width: int) -> Args:
    return (ctx.expert_weight("weight", experts, out, width),)


def multiply_experts(ctx: SampleContext, args: Args, prepared: Any) -> torch.Tensor:
    experts, _, width = args[0].shape
    x = ctx.at("product").normal("x", experts, width)
    return ctx.ops.gemm.grouped_linear(ctx.quantized(x), prepared, ctx.put(torch.arange(1, experts + 1)))


INFOS = (
    OpInfo(
        "gemm.prepare_weight", prepare_samples, observe=multiply, opaque=True, properties=frozenset({REPEATABLE}),
        aliases=frozenset({"out"}),
    ),
    OpInfo("gemm.linear", linear_samples, linear_errors,
           rows_and_seeds(lambda ctx, rows: linear(ctx, rows, 64, ctx.traits.hidden_size, "fp8_block32", "quantized"))),
    OpInfo("gemm.block_diagonal_linear", block_diagonal_samples, block_diagonal_errors,
           rows_and_seeds(lambda ctx, rows: block_diagonal(ctx, rows, 3, 32, 96))),
    OpInfo(
        "gemm.prepare_expert_weight", prepare_expert_samples, observe=multiply_experts, opaque=True,
        properties=frozenset({REPEATABLE}), aliases=frozenset({"out"}),
    ),
    OpInfo("gemm.grouped_linear", grouped_samples, grouped_errors),
    *rowwise.INFOS,
)  # fmt: skip
