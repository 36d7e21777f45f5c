"""Samples of `experts.route`, and how a choice of experts is judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deepinfer.testing.compare import TOLERANCES, Verdict, close, same_selection
from deepinfer.testing.opinfo.context import SampleContext, once
from deepinfer.testing.opinfo.record import Args, ErrorSample, OpInfo, Sample, Tensors, by_rows
from deepinfer.testing.opinfo.strategies import rows_and_seeds

SCALING = 1.5
"""What a row's routing weights sum to, where a sample does not take the model's."""


def route(ctx: SampleContext, rows: int, images: bool = False, scale: float = 1.0, slow: bool = False) -> Sample:
    t = ctx.traits
    name = f"{rows} rows, {'text and images' if images else 'text'}{'' if scale == 1.0 else f', logits x {scale:g}'}"
    ctx = ctx.at(name)
    experts, top_k = t.n_routed_experts, t.num_experts_per_tok
    u = once(lambda: ctx.normal("u", rows, t.hidden_size, scale=scale))
    gate = once(lambda: ctx.dense("gate", experts, t.hidden_size, "bf16"))
    bias, image_bias = (once(lambda label=label: ctx.normal(label, experts, scale=0.3)) for label in ("bias", "vl"))
    image = torch.arange(rows) % 2 == 0

    def build(index: torch.Tensor) -> Args:
        args = (ctx.activation(u()[index]), gate(), ctx.float32(bias()), top_k, t.routed_scaling_factor)
        return (*args, ctx.float32(image_bias()), ctx.put(image[index])) if images else args

    return by_rows(name, rows, build, slow, 2.0 * rows * experts * t.hidden_size)


def route_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows in (1, 0, 37):
        yield route(ctx, rows)
    yield route(ctx, 12, images=True)
    yield route(ctx, 12, scale=30.0)  # logits far beyond where softplus is linear
    yield route(ctx, 12, scale=1e-3)  # nearly equal scores: the bias decides
    yield route(ctx, 1001, slow=True)


def route_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    t = ctx.traits
    gate = once(lambda: ctx.dense("gate", t.n_routed_experts, t.hidden_size, "bf16"))

    def args(experts: int, width: int) -> Args:
        bias = ctx.float32(ctx.normal("b", experts))
        return ctx.activation(ctx.normal("u", 3, width)), gate(), bias, t.num_experts_per_tok, SCALING

    yield ErrorSample("bias of other experts", lambda: args(t.n_routed_experts + 1, t.hidden_size))
    yield ErrorSample("channels differ", lambda: args(t.n_routed_experts, t.hidden_size // 2))


def with_scores(ctx: SampleContext, args: Args, result: Any) -> dict[str, torch.Tensor]:
    """Ids and weights, and in the yardstick the scores that decide them."""
    seen = {"ids": result[0], "weights": result[1]}
    if ctx.ideal:
        u, gate, bias, _, scaling, *images = args
        score = torch.nn.functional.softplus(ctx.ops.gemm.linear(u, gate, torch.float64), threshold=20.0).sqrt()
        chosen_bias = torch.where(images[1].unsqueeze(1), images[0], bias) if images else bias
        seen |= {"score": score, "selecting": score + chosen_bias, "scaling": torch.tensor(scaling)}
    return seen


def judge_routing(found: Tensors, working: Tensors, ideal: Tensors) -> Iterator[tuple[str, Verdict]]:
    """The best experts as a set, in order of score; weights of the experts that were chosen."""
    ids, count, near = found["ids"], working["ids"].shape[1], TOLERANCES[torch.float32]
    yield "ids", same_selection(ids, ideal["selecting"], count, near)
    ordered = ideal["selecting"].gather(1, ids)
    rises = ordered.diff(dim=1)
    late = rises > near.atol + near.rtol * ordered[:, 1:].abs()
    yield (
        "ids",
        Verdict(not bool(late.any()), f"row {int(late.any(1).int().argmax())} is not best first" if late.any() else ""),
    )
    chosen = ideal["score"].gather(1, ids)
    weights = chosen / chosen.sum(1, keepdim=True) * ideal["scaling"]
    same = working["weights"] if torch.equal(ids, working["ids"]) else weights
    yield "weights", close(found["weights"], same, weights)


INFOS = (
    OpInfo("experts.route", route_samples, route_errors, rows_and_seeds(route), ("ids", "weights"),
           with_scores, judge_all=judge_routing),
)  # fmt: skip
