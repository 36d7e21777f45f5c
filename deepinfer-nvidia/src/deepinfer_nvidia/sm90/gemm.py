"""Row-wise ops and products with this package's own kernels. Created by `groups.create`."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer.hooks import CANONICAL, ModelTraits, QuantTensor, provides
from deepinfer.hooks.ops import GemmOps
from deepinfer_nvidia import kernels
from deepinfer_nvidia.machine import OnMachine
from deepinfer_nvidia.sm90.limits import multiple, numerics_problems

DENSE = {"dense_weight": CANONICAL}
EXPERT = {"expert_weight": CANONICAL}


class Gemm(OnMachine, GemmOps):
    """Norms, rounding and SwiGLU in one pass over their rows."""

    def refuse(self, op: str, traits: ModelTraits) -> list[str]:
        """Device, numerics, and widths of whole groups of 32."""
        reasons = [*kernels.problems(self.context.device, self.machine.libraries), *numerics_problems(self.numerics)]
        if op in ("gemm.rms_norm_quantize", "gemm.swiglu_quantize"):
            reasons += multiple("hidden_size", traits.hidden_size, 32)
            reasons += multiple("moe_intermediate_size", traits.moe_intermediate_size, 32)
        return reasons

    @provides(version=1, batch_invariant=True, graph_safe=True, layouts=DENSE)
    def linear(self, x: torch.Tensor | QuantTensor, weight: Any, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """FP8 weights are decoded in the product, bfloat16 ones read as they are. Float32 products take core's body."""
        values = x.dequantize() if isinstance(x, QuantTensor) else x
        if weight.format not in ("fp8_block32", "bf16") or values.dtype != torch.bfloat16:
            return super().linear(x, weight, out_dtype)
        dtype = out_dtype or self.numerics.activation_dtype
        return kernels.load("products").linear(values, weight.values, weight.scales, dtype)

    @provides(version=1, batch_invariant=True, graph_safe=True, layouts=EXPERT)
    def grouped_linear(self, x: QuantTensor, weight: Any, offsets: torch.Tensor) -> torch.Tensor:
        """MXFP4 weights are decoded in the product; other formats take core's body."""
        if weight.format != "mxfp4_row32":
            return super().grouped_linear(x, weight, offsets)
        return kernels.load("products").grouped_linear(x.dequantize(), weight.values, weight.scales, offsets)

    @provides(version=1, batch_invariant=True, graph_safe=True)
    def quantize(self, x: torch.Tensor) -> QuantTensor:
        """One pass."""
        return QuantTensor(kernels.load("rowwise").quantize(x))

    @provides(version=1, batch_invariant=True, graph_safe=True)
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """One pass."""
        return kernels.load("rowwise").rms_norm(x, weight, eps)

    @provides(version=1, batch_invariant=True, graph_safe=True)
    def rms_norm_quantize(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, QuantTensor]:
        """Both results from one pass."""
        normed, rounded = kernels.load("rowwise").rms_norm_quantize(x, weight, eps)
        return normed, QuantTensor(rounded)

    @provides(version=1, batch_invariant=True, graph_safe=True)
    def swiglu(self, gate_up: torch.Tensor, limit: float, row_weight: torch.Tensor | None = None) -> torch.Tensor:
        """One pass."""
        return kernels.load("rowwise").swiglu(gate_up, limit, row_weight, rounded=False)

    @provides(version=1, batch_invariant=True, graph_safe=True)
    def swiglu_quantize(
        self, gate_up: torch.Tensor, limit: float, row_weight: torch.Tensor | None = None
    ) -> QuantTensor:
        """SwiGLU and rounding in one pass, nothing in between reaches memory."""
        return QuantTensor(kernels.load("rowwise").swiglu(gate_up, limit, row_weight, rounded=True))
