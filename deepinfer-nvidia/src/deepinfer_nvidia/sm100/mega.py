"""Memory that the fused expert kernel takes its operands from. Used by `experts`.

The library's buffer belongs to a process group. One rank has none here, so `SoloGroup` stands for it; the buffer is
then plain device memory. Its capacity grows with the largest step, which happens before graphs are captured because
the largest step is warmed up first.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer.hooks.ops.experts import MoeWeights
from deepinfer_nvidia.libraries import Need
from deepinfer_nvidia.sm100.formats import Fp8Tensor, align

MEGA = Need(
    "deep_gemm",
    {
        "fp8_fp4_mega_moe": ("y", "l1_weights", "l2_weights", "sym_buffer", "shared_l1_weights", "activation_clamp"),
        "SymmBuffer": ("num_experts", "num_max_tokens_per_rank", "num_topk", "num_shared_experts"),
        "get_block_m_for_mega_moe": (),
    },
)

KIND = "fp8xfp4"
"""Activations and weights of the product, in the library's words."""


class SoloGroup:
    """A process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def barrier(self) -> None:
        """Everybody is here."""


class MegaBuffers:
    """One buffer for every set of sizes (backbone and draft layers differ), filled anew for every call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[int, ...], Any] = {}
        self._group = SoloGroup()

    def filled(
        self, library: Any, x: Fp8Tensor, ids: torch.Tensor, row_weights: torch.Tensor, weights: MoeWeights
    ) -> Any:
        """The library's buffer with this step's operands: x [Q, H], ids [Q, k] int64, row_weights [Q, k] float32."""
        rows, width = x.values.shape
        experts, top_k = weights.w13.shape[0], ids.shape[1]
        inner, shared = weights.w2.shape[2], weights.shared_w2.shape[1]
        buffer = self._of(library, rows, (experts, top_k, width, inner, shared // inner))
        buffer.x[:rows].view(torch.uint8).copy_(x.values.view(torch.uint8))
        buffer.x_sf[:rows].copy_(x.words)
        tile = library.get_block_m_for_mega_moe(1, experts, buffer.num_max_tokens_per_rank, rows, top_k, KIND)
        buffer.shared_l1_acts_sf[shared_places(rows, tile, self._device)] = x.words
        buffer.topk_idx[:rows].copy_(ids)
        buffer.topk_weights[:rows].copy_(row_weights)
        return buffer

    def _of(self, library: Any, rows: int, sizes: tuple[int, ...]) -> Any:
        buffer = self._buffers.get(sizes)
        if buffer is None or buffer.num_max_tokens_per_rank < rows:
            experts, top_k, width, inner, shared = sizes
            buffer = library.SymmBuffer(self._group, experts, rows, top_k, width, inner, shared, KIND)
            self._buffers[sizes] = buffer
        return buffer


def shared_places(rows: int, tile: int, device: torch.device) -> torch.Tensor:
    """Where the kernel looks for the scale words of each row of the shared expert: int64 [rows].

    Tiles of rows begin at multiples of 128; within 128, row 32 * quarter + lane is at 4 * lane + quarter.
    """
    row = torch.arange(rows, device=device)
    within = row % tile
    return row // tile * align(tile, 128) + within // 128 * 128 + within % 32 * 4 + within % 128 // 32
