"""Ops of the group `attention`: `cached`, the decode step's attention, reads this backend's cache layout directly.

The other ops of the group are core's. Those that read caches go through the cache ops, so they work on any layout.
"""

from __future__ import annotations

import torch

from deepinfer.hooks import KVCache, ModelTraits, Selection, StepInputs, provides
from deepinfer.hooks.ops import AttentionOps
from deepinfer_acme.cache import LAYOUT, window_rows

HEAD_TILE = 8
"""Heads that one matrix unit takes at a time."""
ROW_TILE = 32
"""Rows whose keys are decoded at a time; bounds the memory for them."""


class AcmeAttention(AttentionOps):
    """Keys are decoded from the planes straight to float32; the softmax is divided out once, at the end."""

    def refuse(self, op: str, traits: ModelTraits) -> list[str]:
        """Every reason, each with the value found and those allowed."""
        if op != "attention.cached":
            return []
        heads = traits.num_attention_heads
        return [] if heads % HEAD_TILE == 0 else [f"num_attention_heads={heads}, allowed multiples of {HEAD_TILE}"]

    @provides(version=1, layouts={"kv_cache": LAYOUT})
    def cached(
        self,
        q: torch.Tensor,
        cache: KVCache,
        layer: int,
        source: int,
        selection: Selection | None,
        sink: torch.Tensor,
        step: StepInputs,
    ) -> torch.Tensor:
        every = torch.arange(step.num_rows, device=q.device)
        parts = []
        for rows in every.split(ROW_TILE):
            keys, visible = self._window(cache, layer, step, rows)
            if selection is not None:
                entries, chosen = self._selected(cache, source, selection, step, rows)
                keys, visible = torch.cat((keys, entries), 1), torch.cat((visible, chosen), 1)
            parts.append(self._attend(q[rows], keys, visible, sink))
        return torch.cat(parts)

    def _window(
        self, cache: KVCache, layer: int, step: StepInputs, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Window keys [r, W, d] float32 of some rows, and which of them each row sees [r, W] bool."""
        offsets = torch.arange(1 - self.traits.sliding_window, 1, device=rows.device)
        positions = step.positions[rows].unsqueeze(1) + offsets
        slots = step.slots[step.sequence[rows]].unsqueeze(1)
        keys = cache.storage.windows[layer].load(window_rows(slots, positions, cache.spec.ring), torch.float32)
        return keys, positions >= step.window_lo[rows].unsqueeze(1)

    def _selected(
        self, cache: KVCache, source: int, selection: Selection, step: StepInputs, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compressed entries [r, T, d] float32 that the selection names for some rows, and which exist [r, T] bool."""
        per_block = cache.spec.block_size // selection.ratio
        chosen = selection.entries[rows]
        entry = chosen.clamp(min=0)
        blocks = step.block_table[step.sequence[rows].unsqueeze(1), entry // per_block]
        keys = cache.storage.entries[source].load(blocks * per_block + entry % per_block, torch.float32)
        return keys, chosen >= 0

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        """q [r, h, d], keys [r, K, d] float32, visible [r, K] bool, sink [h] float32 -> [r, h, d] float32."""
        keys = keys.unsqueeze(1)
        tiles = q.float().unflatten(1, (-1, HEAD_TILE))  # [r, h / 8, 8, d]
        logits = tiles @ keys.transpose(2, 3) * self.traits.head_dim**-0.5
        logits = logits.masked_fill(~visible[:, None, None], float("-inf"))
        sink = sink.view(-1, HEAD_TILE, 1)
        peak = torch.maximum(logits.amax(-1, keepdim=True), sink)  # finite even where a row sees no key
        weights = torch.exp(logits - peak)
        total = weights.sum(-1, keepdim=True) + torch.exp(sink - peak)
        return (weights @ keys / total).flatten(1, 2)
