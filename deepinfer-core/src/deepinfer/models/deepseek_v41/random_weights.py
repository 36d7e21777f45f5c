"""Deterministic random weights in the published formats, for `load_format="dummy"` and for written test checkpoints.

`SyntheticCheckpoint` offers what the weight loader reads from (`hub.safetensors.TensorSource`) without a file;
`testing/checkpoint.py` streams the same values to disk. A value depends on the seed, the tensor's name and its place
alone: not on threads, on the order of reading or on how many rows are read at once.

The values keep a random model numerically alive: matrices N(0, 0.02), norms around 1, sinks N(0, 1), hyper-connections
at their training start (one stream is read, streams stay mostly apart) with a visible part that depends on the input.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.errors import CheckpointError
from deepinfer.hub.safetensors import TORCH_DTYPES
from deepinfer.hub.tensor_spec import SCALE, TensorSpec, weight_name
from deepinfer.reference import quant

BLOCK = 32
CHUNK_VALUES = 1 << 20
"""Values generated at once: bounds the memory for tables of any size."""

MATRIX_STD = 0.02
MIX_STD = 0.3
"""Spread of the input-dependent part of a hyper-connection's logits."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of a tensor. `first_row` counts rows of the values; scales are None for plain formats."""

    first_row: int
    values: torch.Tensor
    scales: torch.Tensor | None


def random_tensor(name: str, spec: TensorSpec, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A whole tensor as stored, and its scales (uint8) for a quantized format."""
    chunks = list(random_chunks(name, spec, seed))
    values = torch.cat([chunk.values for chunk in chunks])
    scales = [chunk.scales for chunk in chunks if chunk.scales is not None]
    return values, torch.cat(scales) if scales else None


def random_chunks(name: str, spec: TensorSpec, seed: int) -> Iterator[Chunk]:
    """The same tensor piece by piece, each of at most about `CHUNK_VALUES` values."""
    step = _chunk_rows(spec)
    return (_chunk(name, spec, seed, index) for index in range(-(-spec.shape[0] // step)))


class SyntheticCheckpoint:
    """Random weights under the names of a manifest; reads like a `Checkpoint`."""

    def __init__(self, manifest: Mapping[str, TensorSpec], seed: int = 0) -> None:
        self._manifest = manifest
        self._seed = seed

    @property
    def names(self) -> KeysView[str]:
        """Names of all tensors."""
        return self._manifest.keys()

    def info(self, name: str) -> TensorSpec:
        """dtype and shape of a tensor."""
        try:
            return self._manifest[name]
        except KeyError:
            raise CheckpointError(f"random weights: have no tensor {name!r}") from None

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """A whole tensor in stored dtype; into `out` where given."""
        tensor = self.read_rows(name, 0, self.info(name).shape[0])
        return tensor if out is None else out.copy_(tensor)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop); generates only the chunks they lie in."""
        spec = self.info(name)
        is_scale = spec.kind == SCALE
        source = weight_name(name) if is_scale else name
        source_spec = self._manifest[source]
        step = _chunk_rows(source_spec) // (_rows_per_scale(source_spec) if is_scale else 1)
        out = torch.empty((stop - start, *spec.shape[1:]), dtype=TORCH_DTYPES[spec.dtype])
        for index in range(start // step, -(-stop // step)):
            chunk = _chunk(source, source_spec, self._seed, index)
            rows = chunk.scales if is_scale else chunk.values
            assert rows is not None, "a scale's weight is quantized"
            first, last = max(start, index * step), min(stop, (index + 1) * step)
            out[first - start : last - start] = rows[first - index * step : last - index * step]
        return out

    def map_rows(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop); generated, because there is no file to map."""
        return self.read_rows(name, start, self.info(name).shape[0] if stop is None else stop)


def _rows_per_scale(spec: TensorSpec) -> int:
    return BLOCK if spec.kind == "fp8_block32" else 1


def _chunk_rows(spec: TensorSpec) -> int:
    """Rows of a chunk, a multiple of the scale blocks."""
    return max(BLOCK, CHUNK_VALUES // math.prod(spec.shape[1:]) // BLOCK * BLOCK)


def _chunk(name: str, spec: TensorSpec, seed: int, index: int) -> Chunk:
    first = index * _chunk_rows(spec)
    columns = spec.shape[1:]
    if spec.kind == "mxfp4_row32":
        columns = (columns[0] * 2,)
    rows = min(_chunk_rows(spec), spec.shape[0] - first)
    noise = _noise(f"{seed}/{name}/{index}", (rows, *columns))
    values, scales = _store(_shaped(name, noise), spec.kind)
    return Chunk(first, values, scales)


def _noise(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """N(0, 1) float32, from a generator keyed by the text."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))


def _shaped(name: str, noise: torch.Tensor) -> torch.Tensor:
    """Turn noise into values that suit the tensor's role."""
    if re.search(r"\.hc_\w+_scale$", name):
        return torch.full_like(noise, 0.01)
    if re.search(r"\.hc_\w+_fn$", name):
        return noise * (100 * MIX_STD / math.sqrt(noise.shape[-1]))
    if re.search(r"\.hc_\w+_base$", name):
        return _mix_base(name) + 0.1 * noise
    if re.search(r"norm\d?\.weight$|\.[qk]_weight$", name):
        return 1 + 0.1 * noise
    if name.endswith(".attn_sink"):
        return noise
    return MATRIX_STD * noise


def _mix_base(name: str) -> torch.Tensor:
    """Training start of a site's mix, float32 [24]: 4 pre (-3, one +3), 4 post (0), 4 x 4 streams (-3, own +3)."""
    site = 2 * int(name.split(".")[1]) + ("hc_ffn" in name)
    pre = torch.full((4,), -3.0)
    pre[site % 4] = 3.0
    kept = 6 * torch.eye(4) - 3
    return torch.cat([pre, torch.zeros(4), kept.flatten()])


def _store(values: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values as the checkpoint stores them, and their scales. Quantized formats start from bfloat16 weights."""
    if kind == "f32":
        return values, None
    weight = values.to(torch.bfloat16)
    if kind == "bf16":
        return weight, None
    quantize = {
        "fp8_block32": quant.quantize_weight_fp8_block32,
        "fp8_row32": quant.quantize_rows_fp8,
        "mxfp4_row32": quant.quantize_weight_mxfp4,
    }[kind]
    return quantize(weight)
