"""The mixture-of-experts sub-layer: its weights, and the one coarse op that serves it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.hooks import OpTable, QuantTensor
from deepinfer.hooks.ops.experts import MoeWeights


@dataclass(frozen=True, slots=True)
class Moe:
    """Router, routed experts and the shared expert of one layer."""

    weights: MoeWeights

    def __call__(self, ops: OpTable, u: torch.Tensor, x: QuantTensor, image_mask: torch.Tensor | None) -> torch.Tensor:
        """u, x [Q, H]: the norm's output, plain (router) and quantized (experts). Returns y [Q, H]."""
        return ops.experts.moe(u, x, self.weights, image_mask)
