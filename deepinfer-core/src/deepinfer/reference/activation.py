"""SwiGLU with clamped inputs and an optional weight per row.

Called by the op contracts of `hooks/ops/`; model specification 3.12.
"""

from __future__ import annotations

import torch


def swiglu(
    gate_up: torch.Tensor,
    limit: float,
    row_weight: torch.Tensor | None = None,
    accumulate: torch.dtype = torch.float32,
) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) * row_weight.

    gate_up     [R, 2 I]     gate first, then up
    row_weight  [R] float32  routing weight, applied before the down projection (None: 1)
    returns     [R, I] float32, rounded once from `accumulate`
    """
    gate, up = gate_up.to(accumulate).chunk(2, -1)
    gate = gate.clamp(max=limit)
    # Below -80 the result is under 1e-33 either way; the bound keeps exp, and with it the gradient, finite.
    product = gate / (1.0 + torch.exp(-gate.clamp(min=-80.0))) * up.clamp(-limit, limit)
    if row_weight is not None:
        product = product * row_weight.to(accumulate).unsqueeze(-1)
    return product.float()
