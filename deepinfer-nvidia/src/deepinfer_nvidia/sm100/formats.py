"""FP8 and FP4 operands as DeepGEMM and FlashMLA read them, in torch: codes, packed scales, and tensors made of them.

A scale is a ue8m0 byte b, meaning 2^(b - 127), for 32 channels. Four scales along K share an int32, lowest channel in
the lowest byte; words lie MN-major: [..., M, K/128] with stride 1 along M and a multiple of 4 words (16 bytes, what
the copy engine needs) along K. Used by every op group of this package; knows no library.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.hooks import QuantTensor

GROUP = 32
"""Channels of one scale."""
WORD = 4 * GROUP
"""Channels of one int32 of scales."""
ALIGNMENT = 4
"""Words that the distance between two columns of scales is a multiple of."""

_E4M3 = (448.0, 1.75, 8, -22)
_E2M1 = (6.0, 1.5, 2, -126)
"""(largest number, its fraction and exponent, smallest exponent of a scale)"""


def align(count: int, to: int) -> int:
    """`count` rounded up to a multiple of `to`."""
    return -(-count // to) * to


def empty_scales(*shape: int, device: torch.device) -> torch.Tensor:
    """int32 [..., M, words] in the layout above, uninitialised. shape: (..., M, words)."""
    *batch, rows, words = shape
    memory = torch.empty(*batch, words, align(max(rows, 1), ALIGNMENT), dtype=torch.int32, device=device)
    return memory.transpose(-1, -2)[..., :rows, :]


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """uint8 [..., M, K/32] as int32 [..., M, ceil(K/128)] in the layout above; missing scales are 1."""
    padded = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4), value=127)
    words = padded.clone(memory_format=torch.contiguous_format).view(torch.int32)
    return empty_scales(*words.shape, device=words.device).copy_(words)


def unpack_scales(words: torch.Tensor, channels: int) -> torch.Tensor:
    """uint8 [..., M, channels / 32] of `pack_scales`' result."""
    row_major = words.clone(memory_format=torch.contiguous_format)
    return row_major.view(torch.uint8)[..., : channels // GROUP]


def values_of_scales(scales: torch.Tensor) -> torch.Tensor:
    """float32 2^(byte - 127)."""
    return scales.contiguous().view(torch.float8_e8m0fnu).to(torch.float32)


def encode_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] as e4m3 [..., K] and scales uint8 [..., K/32]: the least power of two that keeps a group in range."""
    scaled, scales = _scaled(x, _E4M3)
    return scaled.to(torch.float8_e4m3fn), scales


def decode_fp8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [..., K] of e4m3 [..., K] and uint8 [..., K/32]; exact in bfloat16."""
    groups = codes.to(torch.float32).unflatten(-1, (-1, GROUP)) * values_of_scales(scales).unsqueeze(-1)
    return groups.flatten(-2).to(dtype)


def encode_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] as packed e2m1 int8 [..., K/2] (even channel in the low nibble) and scales uint8 [..., K/32]."""
    scaled, scales = _scaled(x, _E2M1)
    size = scaled.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for boundary, tie_goes_up in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (0, 1, 0, 1, 0, 1, 0), strict=True):
        code += (size >= boundary if tie_goes_up else size > boundary).to(torch.uint8)
    code |= (scaled < 0).to(torch.uint8) << 3
    return (code[..., 0::2] | (code[..., 1::2] << 4)).view(torch.int8), scales


def widen_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Packed e2m1 [..., K/2] as e4m3 [..., K], the same numbers."""
    numbers = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), device=packed.device)
    table = torch.cat((numbers, -numbers)).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = packed.view(torch.uint8)
    return table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()].view(torch.float8_e4m3fn)


def _scaled(x: torch.Tensor, fmt: tuple[float, float, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """x divided by its groups' scales, float32 [..., K] within the format's range, and the scales uint8."""
    largest, fraction, exponent, floor = fmt
    groups = x.to(torch.float32).unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1)
    mantissa, power = torch.frexp(amax)  # amax = mantissa * 2^power, mantissa in [0.5, 1)
    scale = power - 1 - exponent + (mantissa * 2 > fraction).to(power.dtype)
    scale = torch.where(amax > 0, scale, floor).clamp(min=floor)
    scaled = torch.ldexp(groups, -scale.unsqueeze(-1)).clamp(-largest, largest)
    return scaled.flatten(-2), (scale + 127).to(torch.uint8)


@dataclass(frozen=True, slots=True)
class Fp8Tensor(QuantTensor):
    """Activations as products read them.

    values   e4m3 [..., K]
    words    int32 [..., K/128], MN-major: of a matrix [Q, K/128]; of [Q, G, K] one such matrix a group
    chunks   0: channels in order. c: blocks of 32 channels in the fused attention's order, which interleaves the c
             heads of a group: block i of head h is block i * c + h
    """

    words: torch.Tensor = None  # type: ignore[assignment]
    chunks: int = 0

    def dequantize(self) -> torch.Tensor:
        """bfloat16 [..., K], channels in order."""
        channels = self.values.shape[-1]
        values = decode_fp8(self.values, unpack_scales(self.words, channels), torch.bfloat16)
        if not self.chunks:
            return values
        blocks = values.unflatten(-1, (-1, self.chunks, GROUP)).transpose(-2, -3)
        return blocks.flatten(-3)

    def take(self, rows: torch.Tensor) -> Fp8Tensor:
        """Rows [R] int64 of a tensor [Q, ...]."""
        words = self.words[rows]
        batched = words.transpose(0, -2) if words.dim() == 3 else words
        laid = empty_scales(*batched.shape, device=words.device).copy_(batched)
        return Fp8Tensor(
            self.values.view(torch.uint8)[rows].view(torch.float8_e4m3fn),
            laid.transpose(0, -2) if words.dim() == 3 else laid,
            self.chunks,
        )


def quantize_fp8(x: torch.Tensor) -> Fp8Tensor:
    """x [Q, K] or [Q, G, K] bfloat16 or float32 -> Fp8Tensor, in plain torch."""
    codes, scales = encode_fp8(x)
    if x.dim() == 3:
        return Fp8Tensor(codes, pack_scales(scales.transpose(0, 1)).transpose(0, 1))
    return Fp8Tensor(codes, pack_scales(scales))
