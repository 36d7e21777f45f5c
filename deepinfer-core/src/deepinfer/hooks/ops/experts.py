"""Mixture-of-experts ops: the whole sub-layer, and its parts routing, dispatch, expert products and combination.

The model calls `moe`; its default body composes the parts through the bound table, so a backend may replace either
grain. Mathematics: `deepinfer.reference.experts`. Q rows, k slots per row, E experts, R = Q * k expert rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.hooks.api import OpGroup, op
from deepinfer.hooks.types import QuantTensor
from deepinfer.reference import experts as reference


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Weights of one layer.

    gate        prepared dense [E, H]
    bias        [E] float32       selects experts of text rows; never enters a weight
    bias_vl     [E] float32       the same for image rows
    w13, w2     prepared experts [E, 2 I, H] (gate rows first) and [E, H, I]
    shared_w13  prepared dense [2 I, H];  shared_w2 prepared dense [H, I]
    top_k       experts per row
    scaling     what a row's routing weights sum to
    limit       clamp inside SwiGLU
    """

    gate: Any
    bias: torch.Tensor
    bias_vl: torch.Tensor
    w13: Any
    w2: Any
    shared_w13: Any
    shared_w2: Any
    top_k: int
    scaling: float
    limit: float


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows sorted by expert, rows of one expert in their original order.

    rows        QuantTensor [R, H]
    row_weight  [R] float32        routing weight of each expert row
    offsets     [E] int64          expert e owns rows offsets[e-1] .. offsets[e] - 1
    position    [Q, k] int64       expert row of every (row, slot) pair
    """

    rows: QuantTensor
    row_weight: torch.Tensor
    offsets: torch.Tensor
    position: torch.Tensor


class ExpertOps(OpGroup):
    """Routed and shared experts of one layer."""

    group = "experts"

    @op(version=1, level="recommended", status="beta", grain="block", layout="dense_weight")
    def route(
        self,
        u: torch.Tensor,
        gate: Any,
        bias: torch.Tensor,
        top_k: int,
        scaling: float,
        bias_vl: torch.Tensor | None = None,
        image_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores sqrt(softplus(u gate^T)) in float32; the top_k of score + bias, weighted by score alone.

        u           [Q, H] activation dtype
        gate        prepared dense [E, H]
        bias        [E] float32
        bias_vl     [E] float32, used instead of `bias` in rows where image_mask [Q] bool is set
        returns     ids [Q, k] int64, best first, ties to the lower expert; weights [Q, k] float32, sum = scaling
        """
        logits = self.ops.gemm.linear(u, gate, torch.float32)
        return reference.route(logits, bias, top_k, scaling, bias_vl, image_mask, self.numerics.accumulate_dtype)

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def dispatch(self, x: QuantTensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Dispatched:
        """Copy every row once per slot, sorted by expert.

        x [Q, H], ids [Q, k] int64, weights [Q, k] float32
        raises  ValueError if ids and weights differ in shape
        """
        if ids.shape != weights.shape:
            raise ValueError(f"weights are {list(weights.shape)}, expected {list(ids.shape)} as ids are")
        order, offsets, position = reference.sort_by_expert(ids, num_experts)
        rows = x.take(order // ids.shape[1])
        return Dispatched(rows, weights.flatten().index_select(0, order), offsets, position)

    @op(version=1, level="recommended", status="beta", grain="block", layout="expert_weight")
    def ffn(self, dispatched: Dispatched, w13: Any, w2: Any, limit: float) -> torch.Tensor:
        """Every expert on its rows: gate and up product, SwiGLU times the routing weight, quantize, down product.

        w13      prepared experts [E, 2 I, H];  w2 prepared experts [E, H, I]
        returns  [R, H] activation dtype
        """
        gate_up = self.ops.gemm.grouped_linear(dispatched.rows, w13, dispatched.offsets)
        inner = self.ops.gemm.swiglu_quantize(gate_up, limit, dispatched.row_weight)
        return self.ops.gemm.grouped_linear(inner, w2, dispatched.offsets)

    @op(version=1, level="optional", status="beta", grain="block", layout="dense_weight")
    def shared(self, x: QuantTensor, w13: Any, w2: Any, limit: float) -> torch.Tensor:
        """The shared expert on every row, with weight 1.

        x [Q, H], w13 prepared dense [2 I, H], w2 prepared dense [H, I] -> [Q, H] activation dtype
        """
        gate_up = self.ops.gemm.linear(x, w13)
        return self.ops.gemm.linear(self.ops.gemm.swiglu_quantize(gate_up, limit, None), w2)

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def combine(self, expert_rows: torch.Tensor, dispatched: Dispatched, shared: torch.Tensor) -> torch.Tensor:
        """Shared result plus the routed ones in slot order, one addition after the other, rounded once.

        expert_rows [R, H], shared [Q, H] -> [Q, H] activation dtype
        """
        return reference.combine(expert_rows, dispatched.position, shared, self.numerics.accumulate_dtype)

    @op(version=1, level="optional", status="beta", grain="block", layout=("dense_weight", "expert_weight"))
    def moe(
        self, u: torch.Tensor, x: QuantTensor, weights: MoeWeights, image_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The whole sub-layer: route, dispatch, routed and shared experts, combine.

        u           [Q, H] activation dtype, norm output, for the router
        x           [Q, H] the same rows quantized, for the experts
        image_mask  [Q] bool or None
        returns     [Q, H] activation dtype
        """
        experts = self.ops.experts
        ids, row_weights = experts.route(
            u, weights.gate, weights.bias, weights.top_k, weights.scaling, weights.bias_vl, image_mask
        )
        dispatched = experts.dispatch(x, ids, row_weights, weights.bias.shape[0])
        routed = experts.ffn(dispatched, weights.w13, weights.w2, weights.limit)
        shared = experts.shared(x, weights.shared_w13, weights.shared_w2, weights.limit)
        return experts.combine(routed, dispatched, shared)
