"""RMSNorm.

Called by the op contracts of `hooks/ops/`. The weight is applied in `accumulate` precision before the single rounding
(model specification 3.2).
"""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    accumulate: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x / rms(x) * weight. x [..., d], weight [d] -> [..., d] in `out_dtype` (None: x's dtype), rounded once."""
    wide = x.to(accumulate)
    return (wide * reciprocal_rms(wide, eps).unsqueeze(-1) * weight.to(accumulate)).to(out_dtype or x.dtype)


def reciprocal_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, in x's dtype. x [..., d] -> [...]."""
    return (x.square().sum(-1) / x.shape[-1] + eps).rsqrt()
