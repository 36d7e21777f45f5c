"""Rows of a group of ranks to the ranks of their experts and back, on DeepEP, in the layout grouped products take.

Rows arrive expanded: one for every expert of this rank that a row chose, sorted by expert, every expert's rows from a
tile on. Room is taken for the worst case, so nothing waits for the host. No op of core spans ranks yet; an expert
parallel sub-layer is `arrive`, the experts' products as in `experts.ffn`, `leave`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_nvidia.libraries import Need
from deepinfer_nvidia.sm100.aligned import Places, product
from deepinfer_nvidia.sm100.formats import Fp8Tensor
from deepinfer_nvidia.sm100.weights import ExpertWeight

EXCHANGE = Need(
    "deep_ep",
    {
        "EPBuffer": ("group", "num_max_tokens_per_rank", "hidden", "num_topk", "use_fp8_dispatch", "deterministic"),
        "EPBuffer.dispatch": ("do_expand", "do_zero_padding", "use_tma_aligned_col_major_sf", "expert_alignment"),
        "EPBuffer.combine": ("handle", "bias"),
    },
)


@dataclass(frozen=True, slots=True)
class Arrived:
    """rows [R, H] and routing weights [R] float32 on their experts' rank; ends [E local] int32: `aligned.Places`."""

    rows: Fp8Tensor
    weights: torch.Tensor
    ends: torch.Tensor
    handle: Any

    def product(self, library: Any, rows: Fp8Tensor, weight: ExpertWeight) -> torch.Tensor:
        """rows [R, K] in the places of the arrived ones times their experts' weights: bfloat16 [R, N]."""
        places = Places(torch.empty(0, dtype=torch.int64), rows.values.shape[0], self.ends)
        return product(library, rows, weight.plain(), places)


class ExpertExchange:
    """One buffer of a group of ranks.

    group     torch's process group;  most: rows any rank brings
    tile      rows that a grouped product's experts begin at multiples of
    in_order  arrivals are sorted, and sums formed in one order, whatever arrives first
    """

    def __init__(
        self, library: Any, group: Any, most: int, hidden: int, top_k: int, tile: int, in_order: bool = False
    ) -> None:
        self._tile = tile
        self._buffer = library.EPBuffer(
            group,
            num_max_tokens_per_rank=most,
            hidden=hidden,
            num_topk=top_k,
            use_fp8_dispatch=True,
            deterministic=in_order,
            allow_multiple_reduction=not in_order,
            explicitly_destroy=True,
        )

    def arrive(self, x: Fp8Tensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Arrived:
        """x [Q, H], ids [Q, k] int64 over the experts of all ranks (-1 = none), weights [Q, k] float32."""
        (codes, words), _, arrived, handle, _ = self._buffer.dispatch(
            (x.values, x.words),
            ids,
            weights,
            num_experts=num_experts,
            expert_alignment=self._tile,
            do_cpu_sync=False,
            do_expand=True,
            do_zero_padding=True,
            use_tma_aligned_col_major_sf=True,
        )
        return Arrived(Fp8Tensor(codes, words), arrived, handle.psum_num_recv_tokens_per_expert, handle)

    def leave(self, rows: torch.Tensor, arrived: Arrived, shared: torch.Tensor) -> torch.Tensor:
        """Experts' results bfloat16 [R, H] back to their rows' ranks, added to `shared` bfloat16 [Q, H]."""
        y, *_ = self._buffer.combine(rows, arrived.handle, bias=shared)
        return y

    def close(self) -> None:
        """Give the buffer back; the communicator goes after it."""
        self._buffer.destroy()
