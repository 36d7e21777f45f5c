"""Samples of the experts ops: dispatch, expert products, combination, and the whole sub-layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepinfer.hooks.ops.experts import Dispatched, MoeWeights
from deepinfer.testing.compare import close
from deepinfer.testing.opinfo import routing
from deepinfer.testing.opinfo.context import SampleContext, Trio, once
from deepinfer.testing.opinfo.gemm import expert_count
from deepinfer.testing.opinfo.record import (
    BATCH_INVARIANT,
    PURE,
    Args,
    Check,
    ErrorSample,
    OpInfo,
    Sample,
    by_rows,
    exactly,
)
from deepinfer.testing.opinfo.strategies import rows_and_seeds
from deepinfer.testing.results import Failure


def choice(ctx: SampleContext, label: str, rows: int, experts: int, top_k: int) -> torch.Tensor:
    """Distinct experts of every row, [rows, top_k] int64."""
    return ctx.uniform(label, rows, experts).argsort(1)[:, :top_k]


def assigned(ctx: SampleContext, rows: int, pattern: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights [rows, k]; pattern: spread, or one: every row has the same experts."""
    top_k = ctx.traits.num_experts_per_tok
    ids = choice(ctx, "ids", rows, expert_count(ctx), top_k)
    if pattern == "one":
        ids = ids[:1].expand(rows, top_k).contiguous() if rows else ids
    weights = ctx.uniform("weights", rows, top_k) + 0.1
    return ids, weights / weights.sum(1, keepdim=True) * ctx.traits.routed_scaling_factor


def dispatch(
    ctx: SampleContext, rows: int, pattern: str = "spread", foreign: bool = False, slow: bool = False
) -> Sample:
    name = f"{rows} rows, {pattern}{', foreign layout' if foreign else ''}"
    ctx = ctx.at(name)
    x = once(lambda: ctx.uneven("x", rows, ctx.traits.hidden_size))
    chosen = once(lambda: assigned(ctx, rows, pattern))
    quantize = ctx.foreign if foreign else ctx.quantized

    def fresh() -> Args:
        ids, weights = chosen()
        return quantize(x()), ctx.put(ids), ctx.float32(weights), expert_count(ctx)

    return Sample(name, fresh, slow, flops=0.0)


def dispatch_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows in (1, 0, 37):
        yield dispatch(ctx, rows)
    yield dispatch(ctx, 19, "one")
    yield dispatch(ctx, 7, foreign=True)
    yield dispatch(ctx, 1001, slow=True)


def dispatch_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    def args(weighted: int) -> Args:
        ids = ctx.put(choice(ctx, "ids", 4, 8, 2))
        return ctx.quantized(ctx.normal("x", 4, 64)), ids, ctx.float32(ctx.uniform("w", weighted, 2)), 8

    yield ErrorSample("weights of fewer rows", lambda: args(2))


def dispatched(ctx: SampleContext, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
    """Rows sorted by expert, by the table's own op."""
    return ctx.ops.experts.dispatch(ctx.quantized(x), ctx.put(ids), ctx.float32(weights), expert_count(ctx))


def ffn(ctx: SampleContext, rows: int, pattern: str = "spread", tiny: bool = False, slow: bool = False) -> Sample:
    """tiny: routing weights so small that quantizing the weighted product loses most of its bits."""
    t = ctx.traits
    name = f"{rows} rows, {pattern}{', tiny weights' if tiny else ''}"
    ctx = ctx.at(name)
    hidden, inner, experts = t.hidden_size, t.moe_intermediate_size, expert_count(ctx)
    x = once(lambda: ctx.uneven("x", rows, hidden))
    chosen = once(lambda: assigned(ctx, rows, pattern))
    w13 = once(lambda: ctx.experts("w13", experts, 2 * inner, hidden))
    w2 = once(lambda: ctx.experts("w2", experts, hidden, inner))

    def build(index: torch.Tensor) -> Args:
        ids, weights = (part[index] for part in chosen())
        return dispatched(ctx, x()[index], ids, weights * 3e-10 if tiny else weights), w13(), w2(), t.swiglu_limit

    return by_rows(name, rows, build, slow, 6.0 * rows * t.num_experts_per_tok * hidden * inner)


def ffn_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows in (1, 0, 23):
        yield ffn(ctx, rows)
    yield ffn(ctx, 9, "one")
    yield ffn(ctx, 9, tiny=True)
    yield ffn(ctx, 257, slow=True)


def by_slot(ctx: SampleContext, args: Args, result: torch.Tensor) -> torch.Tensor:
    """Expert rows in the order of tokens and slots, [Q, k, H]."""
    return result[args[0].position]


def shared(ctx: SampleContext, rows: int, slow: bool = False) -> Sample:
    t = ctx.traits
    name = f"{rows} rows"
    ctx = ctx.at(name)
    x = once(lambda: ctx.uneven("x", rows, t.hidden_size))
    w13 = once(lambda: ctx.dense("w13", 2 * t.moe_intermediate_size, t.hidden_size, "fp8_block32"))
    w2 = once(lambda: ctx.dense("w2", t.hidden_size, t.moe_intermediate_size, "fp8_block32"))
    flops = 6.0 * rows * t.hidden_size * t.moe_intermediate_size
    return by_rows(name, rows, lambda i: (ctx.quantized(x()[i]), w13(), w2(), t.swiglu_limit), slow, flops)


def shared_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows in (1, 0, 23):
        yield shared(ctx, rows)
    yield shared(ctx, 257, slow=True)


def combine(ctx: SampleContext, rows: int, pattern: str = "spread", slow: bool = False) -> Sample:
    t = ctx.traits
    name = f"{rows} rows, {pattern}"
    ctx = ctx.at(name)
    outputs = once(lambda: ctx.normal("outputs", rows, t.num_experts_per_tok, t.hidden_size))
    plain = once(lambda: ctx.normal("shared", rows, t.hidden_size))
    chosen = once(lambda: assigned(ctx, rows, pattern))

    def build(index: torch.Tensor) -> Args:
        ids, weights = (part[index] for part in chosen())
        sent = dispatched(ctx, plain()[index], ids, weights)
        expert_rows = torch.empty(ids.numel(), t.hidden_size)
        expert_rows[sent.position.cpu().flatten()] = outputs()[index].flatten(0, 1)
        return ctx.activation(expert_rows), sent, ctx.activation(plain()[index])

    return by_rows(name, rows, build, slow)


def combine_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows in (1, 0, 37):
        yield combine(ctx, rows)
    yield combine(ctx, 9, "one")
    yield combine(ctx, 1001, slow=True)


def combine_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    def args() -> Args:
        ids, weights = assigned(ctx, 4, "spread")
        sent = dispatched(ctx, ctx.normal("x", 4, 64), ids, weights)
        return ctx.activation(ctx.normal("e", ids.numel(), 64)), sent, ctx.activation(ctx.normal("s", 4, 96))

    yield ErrorSample("channels differ", args)


def identity_experts(trio: Trio) -> str | None:
    """Dispatch, experts that return their rows times the routing weight, combine: a weighted sum of the inputs."""
    ctx = trio.found
    x, rows = ctx.normal("x", 17, ctx.traits.hidden_size), 17
    ids, weights = assigned(ctx, rows, "spread")
    sent = dispatched(ctx, x, ids, weights)
    held = ctx.quantized(x).dequantize().cpu().double()
    products = (sent.rows.dequantize().double() * sent.row_weight.double().unsqueeze(1)).to(
        ctx.numerics.activation_dtype
    )
    found = ctx.ops.experts.combine(products, sent, ctx.activation(torch.zeros_like(x))).cpu()
    parts = (held.unsqueeze(1) * weights.double().unsqueeze(-1)).to(ctx.model_dtype).double()
    verdict = close(found, parts.sum(1).to(found.dtype), parts.sum(1))
    if not verdict.ok:
        raise Failure(f"the weighted sum of the inputs comes out wrong: {verdict.detail}", verdict.worst)
    return None


# the whole sub-layer


def moe(ctx: SampleContext, rows: int, images: bool = False, foreign: bool = False, slow: bool = False) -> Sample:
    name = f"{rows} rows{', images' if images else ''}{', foreign layout' if foreign else ''}"
    ctx = ctx.at(name)
    t = ctx.traits
    u = once(lambda: ctx.uneven("u", rows, t.hidden_size))
    weights = once(lambda: moe_weights(ctx))
    image = torch.arange(rows) % 2 == 0
    quantize = ctx.foreign if foreign else ctx.quantized

    def build(index: torch.Tensor) -> Args:
        args = (ctx.activation(u()[index]), quantize(u()[index]), weights())
        return (*args, ctx.put(image[index])) if images else args

    flops = 6.0 * rows * (t.num_experts_per_tok + 1) * t.hidden_size * t.moe_intermediate_size
    return by_rows(name, rows, build, slow, flops)


def moe_weights(ctx: SampleContext) -> MoeWeights:
    """Random weights of one layer."""
    t, experts = ctx.traits, expert_count(ctx)
    hidden, inner = t.hidden_size, t.moe_intermediate_size
    return MoeWeights(
        gate=ctx.dense("gate", experts, hidden, "bf16"),
        bias=ctx.float32(ctx.normal("bias", experts, scale=0.3)),
        bias_vl=ctx.float32(ctx.normal("bias_vl", experts, scale=0.3)),
        w13=ctx.experts("w13", experts, 2 * inner, hidden),
        w2=ctx.experts("w2", experts, hidden, inner),
        shared_w13=ctx.dense("shared_w13", 2 * inner, hidden, "fp8_block32"),
        shared_w2=ctx.dense("shared_w2", hidden, inner, "fp8_block32"),
        top_k=t.num_experts_per_tok,
        scaling=t.routed_scaling_factor,
        limit=t.swiglu_limit,
    )


def moe_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows in (1, 0, 23):
        yield moe(ctx, rows)
    yield moe(ctx, 6, images=True)
    yield moe(ctx, 3, foreign=True)
    yield moe(ctx, 257, slow=True)


INFOS = (
    *routing.INFOS,
    OpInfo("experts.dispatch", dispatch_samples, dispatch_errors, rows_and_seeds(dispatch),
           judges={"out": exactly}, properties=PURE - {BATCH_INVARIANT}),
    OpInfo("experts.ffn", ffn_samples, strategy=rows_and_seeds(ffn), observe=by_slot),
    OpInfo("experts.shared", shared_samples, strategy=rows_and_seeds(shared)),
    OpInfo("experts.combine", combine_samples, combine_errors, rows_and_seeds(combine),
           checks=(Check("identity experts", identity_experts, level=2),)),
    OpInfo("experts.moe", moe_samples, strategy=rows_and_seeds(moe)),
)  # fmt: skip
