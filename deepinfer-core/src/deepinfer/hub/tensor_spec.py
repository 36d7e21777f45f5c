"""What a checkpoint must hold under one name. The model's manifest makes these, the checkpoint reader checks them."""

from __future__ import annotations

import math
from dataclasses import dataclass

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}
"""Bits of an element, by safetensors dtype name."""

SCALE = "scale"
"""`kind` of the tensor of scales that belongs to a quantized weight."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype (safetensors name) as stored, and how the bytes are to be understood.

    `kind` is the `format` of `hooks.types.Weight` ("bf16", "f32", "fp8_block32", "fp8_row32", "mxfp4_row32"), or
    SCALE for the scales of a quantized weight, which lie under `scale_name`.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return math.prod(self.shape) * BITS[self.dtype] // 8

    @property
    def num_parameters(self) -> int:
        """Parameters of the model in this tensor: packed values count twice, scales not at all."""
        if self.kind == SCALE:
            return 0
        return math.prod(self.shape) * (2 if self.kind == "mxfp4_row32" else 1)


def scale_name(weight_name: str) -> str:
    """Name of the scales of a quantized weight: `X.weight` -> `X.scale`."""
    return weight_name.removesuffix(".weight") + ".scale"


def weight_name(name_of_scale: str) -> str:
    """Name of the weight that scales belong to: `X.scale` -> `X.weight`."""
    return name_of_scale.removesuffix(".scale") + ".weight"
