"""The KV compressor of a source layer, one entry per `ratio` tokens, and the index keys made from its latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.hooks import KVCache, OpTable, StepInputs


@dataclass(frozen=True, slots=True)
class IndexKey:
    """Index keys of an index-key source, projected from the latents of the latest compressor.

    wk: prepared weight, norm [index_head_dim], rope [max_positions, 64]
    """

    layer: int
    ratio: int
    wk: Any
    norm: torch.Tensor
    rope: torch.Tensor
    eps: float

    def store(self, ops: OpTable, latents: torch.Tensor, step: StepInputs, cache: KVCache) -> None:
        """Store the keys of the entries that the step completes; latents [M, head_dim]."""
        keys = ops.gemm.rms_norm(ops.gemm.linear(latents, self.wk), self.norm, self.eps)
        positions = step.entries[self.ratio].index * self.ratio
        ops.cache.store_index(cache, self.layer, ops.attention.rope(keys, positions, self.rope), step)


@dataclass(frozen=True, slots=True)
class Compressor:
    """wkv, wgate: prepared weights (wgate only for ratio 2), norm [head_dim], rope [max_positions, 64]."""

    layer: int
    ratio: int
    wkv: Any
    wgate: Any | None
    norm: torch.Tensor
    rope: torch.Tensor
    eps: float

    def store(self, ops: OpTable, u: torch.Tensor, step: StepInputs, cache: KVCache) -> torch.Tensor:
        """Compress the rows u [Q, H] and store the entries they complete; returns their latents [M, head_dim].

        A latent is an entry after the norm, before rope and quantization: what index keys are projected from.
        """
        latents = ops.gemm.rms_norm(self._merge(ops, u, step, cache), self.norm, self.eps)
        positions = step.entries[self.ratio].index * self.ratio  # an entry's position is that of its first token
        ops.cache.store_entries(cache, self.layer, ops.attention.rope(latents, positions, self.rope), step)
        return latents

    def _merge(self, ops: OpTable, u: torch.Tensor, step: StepInputs, cache: KVCache) -> torch.Tensor:
        """Entries [M, head_dim] before the norm."""
        if self.ratio == 1:
            return ops.gemm.linear(u, self.wkv)
        scores = ops.gemm.linear(u, self.wgate, torch.float32)
        latents = ops.gemm.linear(u, self.wkv, torch.float32)
        return ops.cache.compress(cache, self.layer, scores, latents, step)
