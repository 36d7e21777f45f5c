"""Cache ops: what a sequence leaves behind, and how it is read again.

Four kinds of memory, described by `CacheSpec`: window rings and compressor state per state slot, compressed entries
and index keys in paged blocks. Their physical layout belongs to the provider of these ops; core's own holds the
published bytes (528 per window key, 288 or 528 per compressed entry, 68 per index key), or plain values when
`numerics.packed_cache` is off. Called by attention, compressor and indexer of the model, and by the worker.
"""

from __future__ import annotations

import torch

from deepinfer.hooks.api import OpGroup, op
from deepinfer.hooks.types import CacheSpec, KVCache, StepInputs
from deepinfer.reference import cache as reference


class CacheOps(OpGroup):
    """Allocation, stores and loads of every cache. All ops share the layout `kv_cache`."""

    group = "cache"

    @op(version=1, level="required", status="beta", grain="kernel", layout="kv_cache")
    def allocate(self, spec: CacheSpec, num_blocks: int, num_slots: int) -> KVCache:
        """Zeroed caches on the context's device.

        num_blocks paged blocks and num_slots state slots, numbers 0 included (block 0 and slot 0 belong to nobody)
        returns    KVCache
        """
        numerics = self.numerics
        storage = reference.Storage(
            spec, num_blocks, num_slots, numerics.packed_cache, numerics.quantize, self.context.device
        )
        return KVCache(spec, num_blocks, num_slots, storage)

    @op(version=1, level="required", status="beta", grain="kernel", layout="kv_cache")
    def store_window(self, cache: KVCache, layer: int, keys: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Quantize window keys and write the rows a ring keeps (`step.rings[ring]`). [in-place cache]

        keys     [Q, head_dim] bfloat16 or float32, after norm and rope
        returns  [Q, head_dim] the keys as a later read returns them (quantized and dequantized, e4m3 per 32 channels)
        raises   ValueError for other rows than the step's
        """
        _require_rows("keys", keys, step)
        return cache.storage.store_window(layer, keys, step.rings[cache.spec.ring])

    @op(version=1, level="required", status="beta", grain="kernel", layout="kv_cache")
    def load_window(self, cache: KVCache, layer: int, step: StepInputs, count: int) -> torch.Tensor:
        """The `count` window keys before each sequence's first row.

        returns  [n, count, head_dim] activation dtype, oldest first; positions before the sequence are zeros
        """
        offsets = torch.arange(-count, 0, device=step.q_starts.device)
        positions = step.q_starts.unsqueeze(1) + offsets
        return cache.storage.load_window(layer, step.slots.unsqueeze(1), positions)

    @op(version=1, level="required", status="beta", grain="kernel", layout="kv_cache")
    def load_row_windows(self, cache: KVCache, layer: int, step: StepInputs, window: int) -> torch.Tensor:
        """The `window` keys up to and including each row's own position; only for steps with `in_ring`.

        returns  [Q, window, head_dim] activation dtype, oldest first; positions before the sequence are zeros
        """
        offsets = torch.arange(1 - window, 1, device=step.positions.device)
        positions = step.positions.unsqueeze(1) + offsets
        return cache.storage.load_window(layer, step.slots[step.sequence].unsqueeze(1), positions)

    @op(version=1, level="required", status="beta", grain="kernel", layout="kv_cache")
    def store_entries(self, cache: KVCache, source: int, entries: torch.Tensor, step: StepInputs) -> None:
        """Quantize and store compressed entries at `step.entries[ratio].physical`. [in-place cache]

        entries  [M, head_dim] after norm and rope: e2m1 with e4m3 scales per 16 channels ("fp4") or as window keys
        """
        physical = step.entries[cache.spec.compressed[source]].physical
        cache.storage.store_entries(source, entries, physical)

    @op(version=1, level="required", status="beta", grain="kernel", layout="kv_cache")
    def load_entries(self, cache: KVCache, source: int, physical: torch.Tensor) -> torch.Tensor:
        """Compressed entries by physical row.

        physical [U] int64 (block * entries per block + offset); returns [U, head_dim] activation dtype
        """
        return cache.storage.load_entries(source, physical)

    @op(version=1, level="required", status="beta", grain="kernel", layout="kv_cache")
    def store_index(self, cache: KVCache, source: int, keys: torch.Tensor, step: StepInputs) -> None:
        """Quantize and store index keys at `step.entries[ratio].physical`. [in-place cache]

        keys     [M, index_head_dim] after norm and rope: e2m1 with power-of-two scales per 32 channels
        """
        cache.storage.store_index(source, keys, step.entries[cache.spec.index[source]].physical)

    @op(version=1, level="required", status="beta", grain="kernel", layout="kv_cache")
    def load_index(self, cache: KVCache, source: int, blocks: torch.Tensor) -> torch.Tensor:
        """Index keys of whole blocks.

        blocks   [c, B] int64 block numbers; returns [c, B * entries per block, index_head_dim] activation dtype
        """
        return cache.storage.load_index(source, blocks)

    @op(version=1, level="recommended", status="beta", grain="block", layout="kv_cache")
    def compress(
        self, cache: KVCache, source: int, scores: torch.Tensor, latents: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """Merge pairs of tokens into entries (ratio 2) and keep unfinished pairs in the state ring. [in-place cache]

        scores, latents  [Q, head_dim] float32
        returns          [M, head_dim] activation dtype, row i belonging to `step.entries[2].rows[i]`:
                         sum over the pair of softmax(score) * latent, per channel, in float32
        raises           ValueError for other rows than the step's
        """
        _require_rows("scores", scores, step)
        _require_rows("latents", latents, step)
        state = cache.storage.state[source]
        rows, ring = step.entries[2].rows, step.rings[state.shape[1]]
        entries = reference.merge_pairs(scores, latents, state, rows, step, self.numerics.accumulate_dtype)
        reference.keep_state(scores, latents, state, ring)
        return entries.to(self.numerics.activation_dtype)

    @op(version=1, level="required", status="beta", grain="kernel", layout="kv_cache")
    def zero_slots(self, cache: KVCache, slots: torch.Tensor) -> None:
        """Zero rings and compressor state of state slots before a new owner. slots [S] int64. [in-place cache]"""
        cache.storage.fill_slots(slots, 0)

    @op(version=1, level="recommended", status="beta", grain="kernel", layout="kv_cache")
    def clone_blocks(self, cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy paged blocks; source, target [S] int64, targets distinct and no source. [in-place cache]"""
        cache.storage.clone_blocks(source, target)

    @op(version=1, level="recommended", status="beta", grain="kernel", layout="kv_cache")
    def clone_slots(self, cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy state slots; source, target [S] int64, targets distinct and no source. [in-place cache]"""
        cache.storage.clone_slots(source, target)


def _require_rows(name: str, x: torch.Tensor, step: StepInputs) -> None:
    """Checked on the host: on a device, rows out of range would end the process's use of it."""
    if x.shape[0] != step.num_rows:
        raise ValueError(f"{name} has {x.shape[0]} rows, expected the step's {step.num_rows}")
