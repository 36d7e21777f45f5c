"""Number formats: quantizers of activations, codecs of cached bytes, and weights in the checkpoint's formats.

Called by the op contracts of `hooks/ops/`, by the checkpoint writer and by tests. Knows nothing of layers or devices.

    format  elements           scale                          used for
    Q8      e4m3, groups of 32 power of two (ue8m0 byte)      FP8 activations, window keys, Engram rows
    Q4u     e2m1, groups of 32 power of two (ue8m0 byte)      index queries and keys, expert weights
    Q4e     e2m1, groups of 16 e4m3                           compressed keys

Groups run along the last dimension. `fake_*` return dequantized values (every value of the three formats fits a
bfloat16) and pass gradients straight through; `encode_*` / `decode_*` produce and read bytes; two e2m1 codes share a
byte, the even channel in the low nibble. A ue8m0 byte b means 2^(b - 127). Formulas: model specification 4.1 and 4.3.

A fake quantizer rounds without leaving float32. Adding 1.5 * 2^23 * step to a number forces its last kept bit to
`step`, to nearest with ties to even, and subtracting it again leaves the rounded number. With power-of-two scales
`step` follows from the number's own exponent, so nothing is divided. Precondition: finite |x| < 2^100; infinities and
NaN stay what they are; a negative number that rounds to zero may lose its sign.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

_BLOCK_VALUES = 1 << 20
"""Values that a quantizer works on at a time on a CPU."""

GROUP = 32
"""Channels that share one power-of-two scale."""
GROUP_E4M3_SCALE = 16
"""Channels that share one e4m3 scale."""
BLOCK = 32
"""Side of the square blocks of an FP8 weight."""

_EXPONENT = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class _Format:
    """An element format: significand bits after the leading one, exponent of its smallest normal number, largest
    number (fraction, exponent) and the exponent of the smallest scale."""

    mantissa: int
    smallest: int
    fraction: float
    exponent: int
    scale_floor: int


_E4M3 = _Format(mantissa=3, smallest=-6, fraction=1.75, exponent=8, scale_floor=-22)  # floor: |x| = 1e-4
_E2M1 = _Format(mantissa=1, smallest=0, fraction=1.5, exponent=2, scale_floor=-126)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        ctx.dtype = source.dtype
        return quantized.view_as(quantized)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.dtype), None


def straight_through(source: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """`quantized`, with the gradient of the identity with respect to `source` (same shape)."""
    if torch.is_grad_enabled() and source.requires_grad:
        return _StraightThrough.apply(source, quantized)
    return quantized


def fake_q8(x: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Q8, dequantized. x [..., K] bfloat16 or float32, K a multiple of 32 -> [..., K] `out_dtype`."""
    return straight_through(x, _fake_power_of_two(x.detach(), _E4M3, out_dtype))


def fake_q4u(x: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Q4u, dequantized. x [..., K] bfloat16 or float32, K a multiple of 32 -> [..., K] `out_dtype`."""
    return straight_through(x, _fake_power_of_two(x.detach(), _E2M1, out_dtype))


def fake_q4e(x: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Q4e, dequantized. x [..., K] bfloat16 or float32, K a multiple of 16 -> [..., K] `out_dtype`."""
    groups = _groups(x.detach(), GROUP_E4M3_SCALE)
    scale = _e4m3_scale(groups).float()
    quantized = _round_e2m1(groups * scale.reciprocal()).mul_(scale).flatten(-2).to(out_dtype)
    return straight_through(x, quantized)


def encode_q8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q8 as bytes. x [..., K] -> codes uint8 [..., K] (e4m3), scales uint8 [..., K / 32] (ue8m0)."""
    scaled, scales = _scaled_by_power_of_two(_groups(x.detach(), GROUP), _E4M3)
    return scaled.flatten(-2).to(torch.float8_e4m3fn).view(torch.uint8), scales


def decode_q8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values [..., K] `dtype` of codes uint8 or e4m3 [..., K] and scales uint8 [..., K / 32]."""
    return _scaled_values(_decode_e4m3(codes), scale_values(scales), dtype)


def encode_q4u(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4u as bytes. x [..., K] -> packed uint8 [..., K / 2], scales uint8 [..., K / 32] (ue8m0)."""
    scaled, scales = _scaled_by_power_of_two(_groups(x.detach(), GROUP), _E2M1)
    return _pack_e2m1(scaled.flatten(-2)), scales


def decode_q4u(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values [..., K] `dtype` of packed uint8 [..., K / 2] and scales uint8 [..., K / 32] (ue8m0)."""
    return _scaled_values(_decode_e2m1(packed), scale_values(scales), dtype)


def encode_q4e(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4e as bytes. x [..., K] -> packed uint8 [..., K / 2], scales uint8 [..., K / 16] (e4m3)."""
    groups = _groups(x.detach(), GROUP_E4M3_SCALE)
    scale = _e4m3_scale(groups)
    scaled = groups * scale.float().reciprocal()
    return _pack_e2m1(scaled.flatten(-2)), scale.squeeze(-1).view(torch.uint8)


def decode_q4e(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values [..., K] `dtype` of packed uint8 [..., K / 2] and scales uint8 [..., K / 16] (e4m3)."""
    return _scaled_values(_decode_e2m1(packed), _decode_e4m3(scales), dtype)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) as bfloat16, exact for every byte; byte 255 is NaN. scales uint8, any shape."""
    return scales.view(torch.float8_e8m0fnu).to(torch.bfloat16)


def dequantize_weight(
    values: torch.Tensor, scales: torch.Tensor | None, format: str, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """A stored weight as dense numbers [..., out, in] of `dtype`; exact in bfloat16 and wider.

    `values`, `scales` and `format` are those of `deepinfer.hooks.types.Weight`. A dense weight keeps its gradient.
    Raises `ValueError` for an unknown format.
    """
    if format in ("bf16", "f32"):
        return values.to(dtype)
    if scales is None:
        raise ValueError(f"weight format {format!r} needs scales, found none")
    if format == "fp8_block32":
        return _decode_blocks(values, scales, dtype)
    if format == "fp8_row32":
        return decode_q8(values, scales, dtype)
    if format == "mxfp4_row32":
        return decode_q4u(values, scales, dtype)
    raise ValueError(f"weight format {format!r}, expected bf16, f32, fp8_block32, fp8_row32 or mxfp4_row32")


def quantize_weight_fp8_block32(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense FP8. weight [out, in] -> e4m3 [out, in], scales uint8 [ceil(out/32), ceil(in/32)], one per 32x32 block."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.detach().float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2)  # [out/32, in/32, 32, 32]
    scaled, scales = _scaled_by_power_of_two(blocks.flatten(-2), _E4M3)
    dense = scaled.unflatten(-1, (BLOCK, BLOCK)).transpose(1, 2).reshape(padded.shape)[:rows, :columns]
    return dense.to(torch.float8_e4m3fn), scales


def quantize_weight_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts. weight [..., out, in] -> packed uint8 [..., out, in / 2], scales uint8 [..., out, in / 32]."""
    return encode_q4u(weight)


def quantize_rows_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Engram rows. weight [rows, in] -> e4m3 [rows, in], scales uint8 [rows, in / 32]."""
    codes, scales = encode_q8(weight)
    return codes.view(torch.float8_e4m3fn), scales


def _groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """x [..., K] as float32 [..., K / size, size]."""
    return x.float().unflatten(-1, (x.shape[-1] // size, size))


def _fake_power_of_two(x: torch.Tensor, fmt: _Format, out_dtype: torch.dtype) -> torch.Tensor:
    """x [..., K] rounded; large inputs in row blocks, so that the passes over a block stay in a cache."""
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    step = max(1, _BLOCK_VALUES // x.shape[-1])
    if x.device.type != "cpu" or rows.shape[0] <= step:
        return _fake_block(x, fmt, out_dtype)
    out = torch.empty(rows.shape, dtype=out_dtype)
    for first in range(0, rows.shape[0], step):
        out[first : first + step] = _fake_block(rows[first : first + step], fmt, out_dtype)
    return out.view(x.shape)


def _fake_block(x: torch.Tensor, fmt: _Format, out_dtype: torch.dtype) -> torch.Tensor:
    groups = _groups(x, GROUP)
    magnitude = groups.view(torch.int32) & _MAGNITUDE
    floor = _scale_bits(magnitude.amax(-1, keepdim=True), fmt).add_(fmt.smallest << 23)
    # exponent of each number, not below that of the smallest normal code: the kept bits end at a fixed distance
    exponent = torch.maximum(magnitude.bitwise_and_(_EXPONENT), floor, out=magnitude)
    return _round_at(groups, exponent, fmt.mantissa).flatten(-2).to(out_dtype)


def _round_at(x: torch.Tensor, exponent: torch.Tensor, mantissa: int) -> torch.Tensor:
    """x float32 to multiples of 2^(exponent - mantissa). exponent: int32 bits of a power of two, overwritten."""
    shift = exponent.add_(((23 - mantissa) << 23) | (1 << 22)).view(torch.float32)
    return (x + shift).sub_(shift)


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """x float32 rounded to the nearest e2m1 number, saturating."""
    x = x.clamp(-_E2M1_MAX, _E2M1_MAX)
    exponent = (x.view(torch.int32) & _EXPONENT).clamp_min_((127 + _E2M1.smallest) << 23)
    return _round_at(x, exponent, _E2M1.mantissa)


def _scale_bits(amax: torch.Tensor, fmt: _Format) -> torch.Tensor:
    """int32 bits of 2^ceil(log2(amax / largest)), at least the format's floor. amax: int32 bits, overwritten.

    amax / largest exceeds a power of two exactly when amax's fraction exceeds the largest number's, so one integer
    addition carries into the exponent where a division would be rounded up.
    """
    carry = round((2.0 - fmt.fraction) * (1 << 23)) - 1
    bits = amax.add_(carry).bitwise_and_(_EXPONENT).sub_(fmt.exponent << 23)
    return bits.clamp_min_((127 + fmt.scale_floor) << 23)


def _amax_bits(groups: torch.Tensor) -> torch.Tensor:
    """int32 bits [..., 1] of max |x| over groups [..., g] float32; NaN counts as largest."""
    return (groups.view(torch.int32) & _MAGNITUDE).amax(-1, keepdim=True)


def _scaled_by_power_of_two(groups: torch.Tensor, fmt: _Format) -> tuple[torch.Tensor, torch.Tensor]:
    """groups [..., g] float32 -> (groups / scale, ue8m0 bytes [...])."""
    bits = _scale_bits(_amax_bits(groups), fmt)
    return groups * bits.view(torch.float32).reciprocal(), (bits >> 23).squeeze(-1).to(torch.uint8)


def _e4m3_scale(groups: torch.Tensor) -> torch.Tensor:
    """e4m3 scales [..., 1] of groups [..., g] float32: amax / 6 rounded to nearest."""
    amax = _amax_bits(groups).view(torch.float32).clamp_min_(_E2M1_MAX * 2.0**-9)
    # a tensor as divisor: dividing by a Python number multiplies by its rounded reciprocal on some devices
    return (amax / torch.full_like(amax, _E2M1_MAX)).clamp_max_(_E4M3_MAX).to(torch.float8_e4m3fn)


def _pack_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """scaled float32 [..., K] -> packed codes uint8 [..., K / 2]."""
    value = _round_e2m1(scaled.abs())
    # codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6: the lower envelope of three lines
    code = torch.minimum(torch.minimum(value * 2, value + 2), value * 0.5 + 4).to(torch.int32)
    code |= (scaled.view(torch.int32) >> 28).bitwise_and_(8)
    pair = code.to(torch.uint8).view(torch.int16)  # even channel in the low byte, odd in the high byte
    return (pair | (pair >> 4)).to(torch.uint8)


def _decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """codes uint8 or e4m3 [..., K] -> bfloat16 [..., K], two channels a look-up where K is even."""
    codes = codes.contiguous().view(torch.uint8)
    if codes.shape[-1] % 2 or codes.storage_offset() % 2:
        return codes.view(torch.float8_e4m3fn).to(torch.bfloat16)
    return _look_up(_e4m3_pairs(codes.device), codes.view(torch.uint16).to(torch.int32))


def _decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """packed uint8 [..., K / 2] -> bfloat16 [..., K], two channels a look-up."""
    return _look_up(_e2m1_pairs(packed.device), packed.view(torch.uint8).to(torch.int32))


def _look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table int32 [n], each entry two bfloat16; index int32 [..., k] -> bfloat16 [..., 2 k]."""
    return table.index_select(0, index.flatten()).view(index.shape).view(torch.bfloat16)


def _scaled_values(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values bfloat16 [..., K] (overwritten) times one scale per group [..., K / g]; the product is exact."""
    groups = values.unflatten(-1, (scales.shape[-1], -1))
    return groups.mul_(scales.unsqueeze(-1)).flatten(-2).to(dtype)


def _decode_blocks(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values e4m3 [..., out, in], scales uint8 [..., ceil(out/32), ceil(in/32)] -> [..., out, in]."""
    rows, columns = values.shape[-2:]
    decoded = _decode_e4m3(values)
    wide = scale_values(scales).repeat_interleave(BLOCK, -1)[..., :columns]  # one scale per channel and row block
    if rows % BLOCK:
        return decoded.mul_(wide.repeat_interleave(BLOCK, -2)[..., :rows, :]).to(dtype)
    blocks = decoded.unflatten(-2, (rows // BLOCK, BLOCK))
    return blocks.mul_(wide.unsqueeze(-2)).flatten(-3, -2).to(dtype)


@functools.lru_cache(maxsize=8)
def _e4m3_pairs(device: torch.device) -> torch.Tensor:
    """int32 [65536]: entry i is the two bfloat16 of the e4m3 codes in i's low and high byte."""
    with torch.inference_mode(False):
        codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float8_e4m3fn)
        return codes.to(torch.bfloat16).view(torch.int32).to(device)


@functools.lru_cache(maxsize=8)
def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """int32 [256]: entry i is the two bfloat16 of the e2m1 codes in i's low and high nibble."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    codes = [*magnitudes, *(math.copysign(m, -1.0) for m in magnitudes)]
    with torch.inference_mode(False):
        pairs = torch.tensor([[codes[i & 15], codes[i >> 4]] for i in range(256)], dtype=torch.bfloat16)
        return pairs.view(torch.int32).flatten().to(device)
