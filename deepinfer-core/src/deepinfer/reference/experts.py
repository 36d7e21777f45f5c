"""Mixture of experts around the products: routing, ordering rows by expert, and summing the experts' results.

Called by `hooks/ops/experts.py`; model specification 3.12. Q rows, k slots per row, E experts, R = Q * k expert rows.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_SOFTPLUS_LINEAR = 20.0  # softplus(x) = x above this


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    scaling: float,
    bias_vl: torch.Tensor | None = None,
    image_mask: torch.Tensor | None = None,
    accumulate: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k of sqrt(softplus(logits)) + bias; the bias only selects.

    logits      [Q, E] float32
    bias        [E] float32
    bias_vl     [E] float32   takes the place of `bias` where image_mask [Q] bool is set
    returns     ids int64 [Q, k], best first, lower expert index first on ties;
                weights float32 [Q, k], which sum to `scaling`
    """
    scores = functional.softplus(logits.to(accumulate), threshold=_SOFTPLUS_LINEAR).sqrt().float()
    if image_mask is not None and bias_vl is not None:
        bias = torch.where(image_mask.unsqueeze(-1), bias_vl, bias)
    ids = torch.sort(scores.detach() + bias, dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    chosen = scores.gather(1, ids).to(accumulate)
    weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling
    return ids, weights.float()


def sort_by_expert(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order the (row, slot) pairs by expert, pairs of one expert in their original order.

    ids      [Q, k] int64
    returns  order int64 [R]: the flat pair (row * k + slot) at every place; offsets int64 [E]: end of every expert's
             run; position int64 [Q, k]: the place of every pair
    """
    flat = ids.flatten()
    sorted_ids, order = torch.sort(flat, stable=True)
    offsets = torch.searchsorted(sorted_ids, torch.arange(num_experts, device=ids.device), right=True)
    position = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=ids.device))
    return order, offsets, position.view(ids.shape)


def combine(
    expert_rows: torch.Tensor,
    position: torch.Tensor,
    shared: torch.Tensor,
    accumulate: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Shared expert plus routed experts in slot order, added one after the other.

    expert_rows [R, H], position int64 [Q, k], shared [Q, H] -> [Q, H] in shared's dtype, rounded once.
    """
    total = shared.to(accumulate)
    for slot in position.unbind(1):
        total = total + expert_rows.index_select(0, slot).to(accumulate)
    return total.to(shared.dtype)
