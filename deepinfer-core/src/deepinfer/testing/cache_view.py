"""Caches as their readers see them, whatever the layout: taken through a table's own ops, put into core's layout.

Used by `capture.py` for caches in a provider's private layout, so that core's bodies can be run on what they held.
Values are what reads return, so nothing is rounded twice. The compressor's state has no read and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from deepinfer.hooks import CacheSpec, KVCache, OpContext, OpTable
from deepinfer.hooks.ops.step_inputs import Truncation
from deepinfer.reference.cache import Storage


@dataclass(frozen=True)
class CacheView:
    """Contents of a cache: {layer: vectors by physical row}, the rows as in core's layout.

    windows [slots * ring, head_dim], entries [blocks * per block, head_dim], index [blocks * per block, index_head_dim]
    """

    spec: CacheSpec
    num_blocks: int
    num_slots: int
    windows: dict[int, torch.Tensor]
    entries: dict[int, torch.Tensor]
    index: dict[int, torch.Tensor]

    @classmethod
    def read(cls, ops: OpTable, cache: KVCache, device: torch.device) -> CacheView:
        """Everything a cache holds, through the ops of its table."""
        spec, size = cache.spec, cache.spec.block_size
        slots = np.arange(cache.num_slots)
        # a step at position `ring` of every slot: the ring's rows are the positions before it
        bare = replace(spec, compressed={}, index={}, state={})
        starts, ones = np.full(cache.num_slots, spec.ring), np.ones(cache.num_slots, dtype=np.int64)
        table = np.zeros((cache.num_slots, 1), dtype=np.int64)
        step = ops.step_inputs.build(starts, ones, slots, table, starts + 1, bare, Truncation()).encoder
        blocks = torch.arange(cache.num_blocks, device=device)

        def rows(ratio: int) -> torch.Tensor:
            return torch.arange(len(blocks) * (size // ratio), device=device)

        return cls(
            spec, cache.num_blocks, cache.num_slots,
            {n: ops.cache.load_window(cache, n, step, spec.ring).flatten(0, 1) for n in range(spec.window_layers)},
            {source: ops.cache.load_entries(cache, source, rows(ratio)) for source, ratio in spec.compressed.items()},
            {source: ops.cache.load_index(cache, source, blocks.unsqueeze(0)).flatten(0, 1) for source in spec.index},
        )  # fmt: skip

    def restore(self, context: OpContext) -> KVCache:
        """A cache of core's with these contents, held as plain values."""
        quantize = context.numerics.quantize
        storage = Storage(self.spec, self.num_blocks, self.num_slots, False, quantize, context.device)
        for layer, values in self.windows.items():
            storage.windows[layer].values.copy_(values)
        for source, values in self.entries.items():
            storage.entries[source].values.copy_(values)
        for source, values in self.index.items():
            storage.index[source].values.copy_(values)
        return KVCache(self.spec, self.num_blocks, self.num_slots, storage)
