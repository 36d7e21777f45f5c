"""Ops of the group `cache` in a private layout: codes and scales lie in separate planes.

Core keeps the codes and scales of a vector together (528 bytes for a window key); here every row of the code plane
starts at a multiple of its size, which is what wide loads want. Ops that share the layout tag `kv_cache` come from one
provider: core binds all of these, or, if one of them refuses, none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepinfer.hooks import CacheSpec, KVCache, ModelTraits, StepInputs, provides
from deepinfer.hooks.ops import CacheOps
from deepinfer_acme import formats

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYOUT = "acme_planar_v1"
"""Name of the layout. A change of what the bytes mean is a new name."""


@dataclass(frozen=True)
class Plane:
    """Vectors of one format.

    codes   uint8 [owners, rows, code bytes];  scales  uint8 [owners, rows, groups]
    An owner is a state slot or a block: what is zeroed or copied at a time.
    """

    format: str
    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def zeros(cls, format: str, owners: int, rows: int, dim: int, device: torch.device) -> Plane:
        """Room for owners * rows vectors of `dim` channels."""
        widths = (formats.code_bytes(format, dim), dim // formats.group_size(format))
        return cls(format, *(torch.zeros(owners, rows, width, dtype=torch.uint8, device=device) for width in widths))

    def put(self, physical: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write rows at physical = owner * rows + row [M]. [in-place]"""
        self.codes.flatten(0, 1)[physical] = codes
        self.scales.flatten(0, 1)[physical] = scales

    def load(self, physical: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Vectors [..., dim] at physical [...]."""
        codes, scales = self.codes.flatten(0, 1)[physical], self.scales.flatten(0, 1)[physical]
        return formats.decode(self.format, codes, scales, dtype)


@dataclass(frozen=True)
class Storage:
    """All caches of a worker: what `KVCache.storage` is in this layout.

    windows  one plane a ring;  entries, index  {source layer: plane}
    state    {source layer: float32 [slots, ring rows, 2, head_dim]}, scores and latents of unfinished pairs
    """

    windows: tuple[Plane, ...]
    entries: dict[int, Plane]
    index: dict[int, Plane]
    state: dict[int, torch.Tensor]

    @classmethod
    def zeros(cls, spec: CacheSpec, blocks: int, slots: int, device: torch.device) -> Storage:
        """Zeroed memory for `spec`."""

        def paged(format: str, ratios: dict[int, int], dim: int) -> dict[int, Plane]:
            return {s: Plane.zeros(format, blocks, spec.block_size // r, dim, device) for s, r in ratios.items()}

        return cls(
            tuple(Plane.zeros("fp8", slots, spec.ring, spec.head_dim, device) for _ in range(spec.window_layers)),
            paged(spec.compressed_format, spec.compressed, spec.head_dim),
            paged("index", spec.index, spec.index_head_dim),
            {source: torch.zeros(slots, rows, 2, spec.head_dim, device=device) for source, rows in spec.state.items()},
        )

    def by_slot(self) -> Iterator[torch.Tensor]:
        """Memory whose first dimension is the state slot."""
        for plane in self.windows:
            yield from (plane.codes, plane.scales)
        yield from self.state.values()

    def by_block(self) -> Iterator[torch.Tensor]:
        """Memory whose first dimension is the block."""
        for plane in (*self.entries.values(), *self.index.values()):
            yield from (plane.codes, plane.scales)


def window_rows(slots: torch.Tensor, positions: torch.Tensor, ring: int) -> torch.Tensor:
    """Physical rows of `positions` [n, k] in the rings of slots [n, 1]; negative positions give some valid row."""
    return slots * ring + positions.clamp(min=0) % ring


_native = provides(version=1, batch_invariant=True, layouts={"kv_cache": LAYOUT})
"""All ops here move and round single vectors, so a row's result does not depend on the rows beside it."""


class AcmeCache(CacheOps):
    """Every op of the contract, see there for shapes."""

    def refuse(self, op: str, traits: ModelTraits) -> list[str]:
        """This layout holds the published bytes and nothing else."""
        if not self.numerics.packed_cache:
            return [f"numerics.packed_cache={self.numerics.packed_cache}, allowed True: {LAYOUT} holds published bytes"]
        return []

    @_native
    def allocate(self, spec: CacheSpec, num_blocks: int, num_slots: int) -> KVCache:
        storage = Storage.zeros(spec, num_blocks, num_slots, self.context.device)
        return KVCache(spec, num_blocks, num_slots, storage)

    @_native
    def store_window(self, cache: KVCache, layer: int, keys: torch.Tensor, step: StepInputs) -> torch.Tensor:
        plane, ring = cache.storage.windows[layer], step.rings[cache.spec.ring]
        codes, scales = formats.encode(plane.format, keys)
        plane.put(ring.physical, codes[ring.rows], scales[ring.rows])
        return formats.decode(plane.format, codes, scales)

    @_native
    def load_window(self, cache: KVCache, layer: int, step: StepInputs, count: int) -> torch.Tensor:
        positions = step.q_starts.unsqueeze(1) + torch.arange(-count, 0, device=step.q_starts.device)
        return self._windows(cache, layer, step.slots, positions)

    @_native
    def load_row_windows(self, cache: KVCache, layer: int, step: StepInputs, window: int) -> torch.Tensor:
        positions = step.positions.unsqueeze(1) + torch.arange(1 - window, 1, device=step.positions.device)
        return self._windows(cache, layer, step.slots[step.sequence], positions)

    def _windows(self, cache: KVCache, layer: int, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys [n, k, head_dim] of positions [n, k] in slots [n]; zeros before a sequence's first token."""
        keys = cache.storage.windows[layer].load(window_rows(slots.unsqueeze(1), positions, cache.spec.ring))
        return keys.masked_fill((positions < 0).unsqueeze(-1), 0)

    @_native
    def store_entries(self, cache: KVCache, source: int, entries: torch.Tensor, step: StepInputs) -> None:
        plane = cache.storage.entries[source]
        plane.put(step.entries[cache.spec.compressed[source]].physical, *formats.encode(plane.format, entries))

    @_native
    def load_entries(self, cache: KVCache, source: int, physical: torch.Tensor) -> torch.Tensor:
        return cache.storage.entries[source].load(physical)

    @_native
    def store_index(self, cache: KVCache, source: int, keys: torch.Tensor, step: StepInputs) -> None:
        plane = cache.storage.index[source]
        plane.put(step.entries[cache.spec.index[source]].physical, *formats.encode(plane.format, keys))

    @_native
    def load_index(self, cache: KVCache, source: int, blocks: torch.Tensor) -> torch.Tensor:
        plane = cache.storage.index[source]
        return formats.decode(plane.format, plane.codes[blocks], plane.scales[blocks]).flatten(1, 2)

    @_native
    def compress(
        self, cache: KVCache, source: int, scores: torch.Tensor, latents: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        state, pairs = cache.storage.state[source], torch.stack((scores, latents), 1)
        rows, ring = step.entries[2].rows, step.rings[state.shape[1]]
        sequence, positions = step.sequence[rows], step.positions[rows]
        # the first token of a pair is the row before, or was kept by an earlier step
        earlier = state[step.slots[sequence], (positions - 1) % state.shape[1]]
        in_step = (positions > step.q_starts[sequence]).view(-1, 1, 1)
        first = torch.where(in_step, pairs[(rows - 1).clamp(min=0)], earlier)
        (score, first), (other, second) = (
            pair.to(self.numerics.accumulate_dtype).unbind(1) for pair in (first, pairs[rows])
        )
        weight = torch.sigmoid(score - other)  # softmax over the two scores
        merged = weight * first + (1 - weight) * second
        state.flatten(0, 1)[ring.physical] = pairs[ring.rows]
        return merged.to(torch.float32).to(self.numerics.activation_dtype)

    @_native
    def zero_slots(self, cache: KVCache, slots: torch.Tensor) -> None:
        for memory in cache.storage.by_slot():
            memory[slots] = 0

    @_native
    def clone_blocks(self, cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
        for memory in cache.storage.by_block():
            memory[target] = memory[source]

    @_native
    def clone_slots(self, cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
        for memory in cache.storage.by_slot():
            memory[target] = memory[source]
