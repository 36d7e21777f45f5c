"""Ops of the group `gemm`: `swiglu` as a C++ kernel; everything else of the group is core's."""

from __future__ import annotations

import torch

from deepinfer.hooks import ModelTraits, OpContext, provides
from deepinfer.hooks.ops import GemmOps
from deepinfer_acme import kernels


class AcmeGemm(GemmOps):
    """Overrides what this backend has. Names, order and defaults of parameters are those of the contract."""

    def __init__(self, context: OpContext) -> None:
        super().__init__(context)
        if not self.refuse("gemm.swiglu", context.traits):
            kernels.load()  # now, not at the first call: a failed build should stop the start, not a running engine

    @provides(version=1, batch_invariant=True, graph_safe=True)
    def swiglu(self, gate_up: torch.Tensor, limit: float, row_weight: torch.Tensor | None = None) -> torch.Tensor:
        """One pass over gate_up [R, 2 I] bfloat16; sizes and dtypes are checked by the kernel."""
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=torch.float32)
        row_weight = None if row_weight is None else row_weight.contiguous()
        torch.ops.deepinfer_acme.swiglu(gate_up.contiguous(), limit, row_weight, out)
        return out

    def refuse(self, op: str, traits: ModelTraits) -> list[str]:
        """Every reason why `op` cannot be served here; core asks before it chooses an implementation."""
        if op != "gemm.swiglu":
            return []
        reasons = kernels.problems()
        if not self.numerics.quantize:
            reasons.append("activations are float32 (smooth numerics), the kernel reads bfloat16 and has no gradient")
        return reasons
