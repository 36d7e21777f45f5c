"""The KV compressor of a source layer: one entry per `ratio` tokens, and the index key that belongs to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.hooks import KVCache, OpTable, StepInputs


@dataclass(frozen=True, slots=True)
class IndexKey:
    """Projection of latents to index keys. wk: prepared weight; norm [index_head_dim]."""

    wk: Any
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class Compressor:
    """wkv, wgate: prepared weights (wgate only for ratio 2), norm [head_dim], rope [max_positions, 64]."""

    layer: int
    ratio: int
    wkv: Any
    wgate: Any | None
    norm: torch.Tensor
    index_key: IndexKey | None
    rope: torch.Tensor
    eps: float

    def store(self, ops: OpTable, u: torch.Tensor, step: StepInputs, cache: KVCache) -> None:
        """Compress the rows u [Q, H] and store the entries they complete."""
        entries = step.entries[self.ratio]
        merged = self._merge(ops, u, step, cache)
        if entries.rows.shape[0] == 0:
            return
        latents = ops.gemm.rms_norm(merged, self.norm, self.eps)
        positions = entries.index * self.ratio  # an entry's position is that of its first token
        ops.cache.store_entries(cache, self.layer, ops.attention.rope(latents, positions, self.rope), step)
        if self.index_key is not None:
            keys = ops.gemm.linear(latents, self.index_key.wk)
            keys = ops.gemm.rms_norm(keys, self.index_key.norm, self.eps)
            ops.cache.store_index(cache, self.layer, ops.attention.rope(keys, positions, self.rope), step)

    def _merge(self, ops: OpTable, u: torch.Tensor, step: StepInputs, cache: KVCache) -> torch.Tensor:
        """Entries [M, head_dim] before the norm."""
        if self.ratio == 1:
            return ops.gemm.linear(u, self.wkv)
        scores = ops.gemm.linear(u, self.wgate, torch.float32)
        latents = ops.gemm.linear(u, self.wkv, torch.float32)
        return ops.cache.compress(cache, self.layer, scores, latents, step)
