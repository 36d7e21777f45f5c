"""The attention sub-layer: low-rank query, window key, compressed entries, grouped low-rank output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.hooks import KVCache, OpTable, QuantTensor, StepInputs
from deepinfer.hooks.ops.attention import LatentWeights
from deepinfer.models.deepseek_v41.compressor import Compressor, IndexKey
from deepinfer.models.deepseek_v41.indexer import Indexer, Shared


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention. Prepared weights: wqa_wkv (rows of wq_a, then wkv), wq_b, wo_a, wo_b.

    q_norm        [q_lora_rank]
    entry_source  layer whose compressed entries are read; selection_source: layer whose selection is used;
                  both None for window-only layers
    compressor, index_key, indexer  where the layer is a source of entries, index keys, selections
    """

    layer: int
    wqa_wkv: Any
    q_norm: torch.Tensor
    wq_b: Any
    latent: LatentWeights
    wo_a: Any
    wo_b: Any
    entry_source: int | None
    selection_source: int | None
    compressor: Compressor | None
    index_key: IndexKey | None
    indexer: Indexer | None
    heads: int
    eps: float

    def store_entries(self, ops: OpTable, u: torch.Tensor, step: StepInputs, cache: KVCache, shared: Shared) -> None:
        """Write this layer's compressed entries and index keys for all rows u [Q, H], where it is a source."""
        if self.compressor is not None:
            shared.latents = self.compressor.store(ops, u, step, cache)
        if self.index_key is not None:
            assert shared.latents is not None, "an index-key source follows a compressor"
            self.index_key.store(ops, shared.latents, step, cache)

    def __call__(
        self, ops: OpTable, u: torch.Tensor, x: QuantTensor, step: StepInputs, cache: KVCache, shared: Shared
    ) -> torch.Tensor:
        """u, x [Q, H]: the norm's output, plain and quantized; entries are stored already. Returns y [Q, H]."""
        q, kv, qr = self._project(ops, x)
        if self.indexer is not None:
            self.indexer.select(ops, u, qr, step, cache, shared)
        selection = None if self.selection_source is None else shared.selections[self.selection_source]
        source = self.layer if self.entry_source is None else self.entry_source
        out = ops.attention.latent(q, kv, self.latent, cache, self.layer, source, selection, step)
        return self._output(ops, out)

    def draft(self, ops: OpTable, x: QuantTensor, ring: int, step: StepInputs, cache: KVCache) -> torch.Tensor:
        """Attention of a draft block; `ring` is the draft layer's window ring. Returns y [n * B, H]."""
        q, kv, _ = self._project(ops, x)
        return self._output(ops, ops.attention.draft(q, kv, self.latent, cache, ring, step))

    def _project(self, ops: OpTable, x: QuantTensor) -> tuple[torch.Tensor, torch.Tensor, QuantTensor]:
        """Query [Q, heads, head_dim], window key [Q, head_dim], normed low-rank query."""
        low = ops.gemm.linear(x, self.wqa_wkv)
        rank = self.q_norm.shape[0]
        _, qr = ops.gemm.rms_norm_quantize(low[:, :rank], self.q_norm, self.eps)
        q = ops.gemm.linear(qr, self.wq_b).view(low.shape[0], self.heads, -1)
        return q, low[:, rank:], qr

    def _output(self, ops: OpTable, out: QuantTensor) -> torch.Tensor:
        return ops.gemm.linear(ops.gemm.block_diagonal_linear(out, self.wo_a), self.wo_b)
