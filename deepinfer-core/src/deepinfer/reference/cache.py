"""Core's cache memory: the published byte layouts (or plain values) behind the cache ops, and the pair compressor.

Layouts, per entry: window key 528 = 512 e4m3 + 16 ue8m0; compressed 288 = 256 packed e2m1 + 32 e4m3 scales, or as a
window key; index key 68, where a block holds the 64 data bytes of all its entries first and then their 4 scale bytes.
Source: DeepSeek-V4.1 cache formats. Called by `hooks.ops.cache` only.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from deepinfer.reference import quant


class _Rows:
    """A table of `rows` vectors in one of the formats fp8, fp4, index.

    packed  holds the published bytes; otherwise float32 values, rounded by the format's quantizer if `quantize`
    """

    def __init__(
        self, rows: int, dim: int, format: str, block_rows: int, packed: bool, quantize: bool, device: torch.device
    ) -> None:
        self.dim, self.format, self.block_rows = dim, format, block_rows
        self.packed, self.quantize = packed, quantize
        if not packed:
            self.values = torch.zeros(rows, dim, dtype=torch.float32, device=device)
            return
        data, scale = {"fp8": (dim, dim // 32), "fp4": (dim // 2, dim // 16), "index": (dim // 2, dim // 32)}[format]
        if format == "index":  # sections per block: all data, then all scales
            self.bytes = torch.zeros(rows // block_rows, block_rows * (data + scale), dtype=torch.uint8, device=device)
            self.codes = self.bytes[:, : block_rows * data].view(-1, block_rows, data)
            self.scales = self.bytes[:, block_rows * data :].view(-1, block_rows, scale)
        else:
            self.bytes = torch.zeros(rows, data + scale, dtype=torch.uint8, device=device)
            self.codes, self.scales = self.bytes[:, :data], self.bytes[:, data:]

    _ENCODE: ClassVar = {"fp8": quant.encode_q8, "fp4": quant.encode_q4e, "index": quant.encode_q4u}
    _DECODE: ClassVar = {"fp8": quant.decode_q8, "fp4": quant.decode_q4e, "index": quant.decode_q4u}
    _ROUND: ClassVar = {"fp8": quant.fake_q8, "fp4": quant.fake_q4e, "index": quant.fake_q4u}

    def encode(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._ENCODE[self.format](vectors)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return self._DECODE[self.format](codes, scales, torch.bfloat16)

    def round(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors as a read would return them, differentiable."""
        return self._ROUND[self.format](vectors, torch.float32) if self.quantize else vectors.float()

    def put(self, physical: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        if self.format == "index":
            block, offset = physical // self.block_rows, physical % self.block_rows
            self.codes[block, offset], self.scales[block, offset] = codes, scales
        else:
            self.codes[physical], self.scales[physical] = codes, scales

    def store(self, physical: torch.Tensor, vectors: torch.Tensor) -> None:
        """Write vectors [M, dim] at rows physical [M]."""
        if self.packed:
            self.put(physical, *self.encode(vectors))
        else:
            self.store_rounded(physical, self.round(vectors))

    def store_rounded(self, physical: torch.Tensor, values: torch.Tensor) -> None:
        """Write plain values; out of place where gradients must flow through the table."""
        copy = self.values.index_copy if values.requires_grad else self.values.index_copy_
        self.values = copy(0, physical, values)

    def load(self, physical: torch.Tensor) -> torch.Tensor:
        """Vectors [..., dim] at rows physical [...]."""
        flat = physical.reshape(-1)
        if not self.packed:
            return self.values.index_select(0, flat).view(*physical.shape, self.dim)
        rows = self.bytes.index_select(0, flat)
        data = self.codes.shape[1]
        return self.decode(rows[:, :data], rows[:, data:]).view(*physical.shape, self.dim)

    def load_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Vectors [c, B * block_rows, dim] of whole blocks [c, B]."""
        count = blocks.shape[0]
        flat = blocks.reshape(-1)
        if not self.packed:
            rows = self.values.view(-1, self.block_rows * self.dim).index_select(0, flat)
        else:
            rows = self.decode(self.codes.index_select(0, flat), self.scales.index_select(0, flat))
        return rows.view(count, -1, self.dim)

    @property
    def memory(self) -> torch.Tensor:
        """The table as rows of memory, for copies and fills."""
        return self.bytes if self.packed else self.values


class Storage:
    """All caches of a worker, see the module. `spec` is a CacheSpec."""

    def __init__(
        self, spec: Any, num_blocks: int, num_slots: int, packed: bool, quantize: bool, device: torch.device
    ) -> None:
        self.spec = spec
        how = (packed, quantize, device)
        ring, size, dim = spec.ring, spec.block_size, spec.head_dim
        self.windows = [_Rows(num_slots * ring, dim, "fp8", ring, *how) for _ in range(spec.window_layers)]
        self.entries = {
            layer: _Rows(num_blocks * (size // r), dim, spec.compressed_format, size // r, *how)
            for layer, r in spec.compressed.items()
        }
        self.index = {
            layer: _Rows(num_blocks * (size // r), spec.index_head_dim, "index", size // r, *how)
            for layer, r in spec.index.items()
        }
        self.state = {
            layer: torch.zeros(num_slots, rows, 2, spec.head_dim, device=device) for layer, rows in spec.state.items()
        }

    def store_window(self, layer: int, keys: torch.Tensor, ring: Any) -> torch.Tensor:
        """Write the rows a ring keeps; returns all keys as a read returns them."""
        table = self.windows[layer]
        if not table.packed:
            keys = table.round(keys)
            table.store_rounded(ring.physical, keys.index_select(0, ring.rows))
            return keys
        codes, scales = table.encode(keys)
        table.put(ring.physical, codes.index_select(0, ring.rows), scales.index_select(0, ring.rows))
        return table.decode(codes, scales)

    def load_window(self, layer: int, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys of `positions` [.., k] in slots [.., 1]; zeros where a position is negative."""
        ring = self.spec.ring
        keys = self.windows[layer].load(slots * ring + positions.clamp(min=0) % ring)
        return keys.masked_fill((positions < 0).unsqueeze(-1), 0)

    def store_entries(self, source: int, entries: torch.Tensor, physical: torch.Tensor) -> None:
        self.entries[source].store(physical, entries)

    def load_entries(self, source: int, physical: torch.Tensor) -> torch.Tensor:
        return self.entries[source].load(physical)

    def store_index(self, source: int, keys: torch.Tensor, physical: torch.Tensor) -> None:
        self.index[source].store(physical, keys)

    def load_index(self, source: int, blocks: torch.Tensor) -> torch.Tensor:
        return self.index[source].load_blocks(blocks)

    def _paged(self) -> list[_Rows]:
        return [*self.entries.values(), *self.index.values()]

    def fill_slots(self, slots: torch.Tensor, value: int) -> None:
        """Set all memory of state slots to a byte (or number) value."""
        for table in self.windows:
            table.memory.view(-1, self.spec.ring, table.memory.shape[-1])[slots] = value
        for state in self.state.values():
            state[slots] = value

    def clone_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for table in self._paged():
            sectioned = table.packed and table.format == "index"  # already one row a block
            per_block = table.memory if sectioned else table.memory.view(-1, table.block_rows, table.memory.shape[-1])
            per_block[target] = per_block[source]

    def clone_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for table in self.windows:
            per_slot = table.memory.view(-1, self.spec.ring, table.memory.shape[-1])
            per_slot[target] = per_slot[source]
        for state in self.state.values():
            state[target] = state[source]


def merge_pairs(
    scores: torch.Tensor, latents: torch.Tensor, state: torch.Tensor, rows: torch.Tensor, step: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Entries of the pairs whose second token is in `rows` [M]; the first token comes from the step or the state.

    scores, latents [Q, d] float32, state [slots, ring, 2, d] float32; returns [M, d] float32.
    """
    sequence, positions = step.sequence[rows], step.positions[rows]
    in_step = (positions > step.q_starts[sequence]).unsqueeze(1)
    before = (rows - 1).clamp(min=0)
    kept = state[step.slots[sequence], (positions - 1) % state.shape[1]]
    left_score = torch.where(in_step, scores[before], kept[:, 0]).to(dtype)
    left_latent = torch.where(in_step, latents[before], kept[:, 1]).to(dtype)
    weight = torch.sigmoid(left_score - scores[rows].to(dtype))  # softmax over the two tokens
    return (weight * left_latent + (1 - weight) * latents[rows].to(dtype)).to(torch.float32)


def keep_state(scores: torch.Tensor, latents: torch.Tensor, state: torch.Tensor, ring: Any) -> None:
    """Write (score, latent) of the rows a state ring keeps. [in-place state]"""
    pairs = torch.stack((scores, latents), 1).index_select(0, ring.rows)
    with torch.no_grad():
        state.view(-1, 2, state.shape[-1]).index_copy_(0, ring.physical, pairs.detach())
