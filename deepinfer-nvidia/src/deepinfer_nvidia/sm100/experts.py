"""Routing and experts on DeepGEMM: the whole sub-layer as one kernel, or its parts. Created by `groups.create`."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer.hooks import ModelTraits, OpContext, QuantTensor, Weight, provides
from deepinfer.hooks.ops import ExpertOps
from deepinfer.hooks.ops.experts import Dispatched, MoeWeights
from deepinfer_nvidia.libraries import Need
from deepinfer_nvidia.machine import Machine, OnMachine
from deepinfer_nvidia.sm100 import aligned, limits
from deepinfer_nvidia.sm100.formats import Fp8Tensor, quantize_fp8
from deepinfer_nvidia.sm100.gemm import GROUPED
from deepinfer_nvidia.sm100.mega import MEGA, MegaBuffers
from deepinfer_nvidia.sm100.weights import DENSE, EXPERTS

GATE = Need("deep_gemm", {"bf16_mega_gate": ("x", "weight", "num_topk", "bias", "image_bias", "image_token_mask")})


class Experts(OnMachine, ExpertOps):
    """`moe` where one kernel covers it; `route` and `ffn` for core's composition of it."""

    def __init__(self, context: OpContext, machine: Machine) -> None:
        super().__init__(context, machine)
        self._buffers = MegaBuffers(context.device)

    def refuse(self, op: str, traits: ModelTraits) -> list[str]:
        """Chip, numerics, libraries, and sizes that tiles divide."""
        needs = {"experts.route": (GATE,), "experts.ffn": (GROUPED,), "experts.moe": (MEGA,)}
        reasons = limits.problems(self.machine, self.numerics, *needs.get(op, ()))
        if op == "experts.route":
            reasons += limits.multiple(256, hidden_size=traits.hidden_size)
            reasons += limits.multiple(4, n_routed_experts=traits.n_routed_experts)
            if traits.n_routed_experts > 512:
                reasons.append(f"n_routed_experts={traits.n_routed_experts}, allowed at most 512")
        else:
            width = traits.moe_intermediate_size
            reasons += limits.multiple(128, hidden_size=traits.hidden_size, moe_intermediate_size=width)
        return reasons

    @provides(version=1, layouts={"dense_weight": DENSE})
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
        """Product and top-k in one kernel; not captured, as its first use on a stream allocates."""
        if gate.quantized or gate.values.dtype != torch.bfloat16 or (image_mask is not None and bias_vl is None):
            return super().route(u, gate, bias, top_k, scaling, bias_vl, image_mask)
        images = {} if image_mask is None else {"image_bias": bias_vl, "image_token_mask": image_mask}
        return self.machine.libraries.get("deep_gemm").bf16_mega_gate(
            u.contiguous(), gate.values, top_k, False, 0, scaling, 0, bias=bias, **images
        )

    @provides(version=1, graph_safe=True, layouts={"expert_weight": EXPERTS})
    def ffn(self, dispatched: Dispatched, w13: Any, w2: Any, limit: float) -> torch.Tensor:
        """Rows are spread out once for both products."""
        rows = dispatched.rows
        if isinstance(w13, Weight) or isinstance(w2, Weight) or not len(rows.values):
            return super().ffn(dispatched, w13, w2, limit)
        library = self.machine.libraries.get("deep_gemm")
        tile = library.get_mk_alignment_for_contiguous_layout()
        places = aligned.places(dispatched.offsets, len(rows.values), tile)
        operand = rows if isinstance(rows, Fp8Tensor) else quantize_fp8(rows.dequantize())
        gate_up = aligned.product(library, aligned.spread(operand, places), w13.plain(), places)
        weights = aligned.spread_values(dispatched.row_weight, places)
        inner = self.ops.gemm.swiglu_quantize(gate_up, limit, weights)
        inner = inner if isinstance(inner, Fp8Tensor) else quantize_fp8(inner.dequantize())
        return aligned.product(library, inner, w2.plain(), places)[places.rows]

    @provides(version=1, layouts={"dense_weight": DENSE, "expert_weight": EXPERTS})
    def moe(
        self, u: torch.Tensor, x: QuantTensor, weights: MoeWeights, image_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Routed and shared experts of one rank in one kernel, after the gate."""
        dense = (weights.shared_w13, weights.shared_w2)
        if isinstance(weights.w13, Weight) or not all(w.quantized for w in dense) or not len(u):
            return super().moe(u, x, weights, image_mask)
        ids, row_weights = self.ops.experts.route(
            u, weights.gate, weights.bias, weights.top_k, weights.scaling, weights.bias_vl, image_mask
        )
        operand = x if isinstance(x, Fp8Tensor) else quantize_fp8(x.dequantize())
        library = self.machine.libraries.get("deep_gemm")
        buffer = self._buffers.filled(library, operand, ids, row_weights, weights)
        y = torch.empty_like(u)
        library.fp8_fp4_mega_moe(
            y,
            weights.w13.mega(True),
            weights.w2.mega(False),
            buffer,
            weights.shared_w13.mega(True),
            weights.shared_w2.mega(False),
            activation_clamp=weights.limit,
            fast_math=False,
        )
        return y
