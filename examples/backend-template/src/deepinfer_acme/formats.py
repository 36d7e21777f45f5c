"""The number formats of cached vectors, encoded to and decoded from bytes. Used by the caches of this package.

    name   codes                scale                              published use
    fp8    e4m3, one byte       power of two (byte b: 2^(b-127))   window keys
    fp4    e2m1, two a byte     e4m3, for 16 channels              compressed entries
    index  e2m1, two a byte     power of two                       index keys

A scale covers 32 channels where nothing else is said. The even channel of a pair is in the low nibble. Groups run
along the last dimension, and every decoded value fits a bfloat16, so nothing is rounded twice.
"""

from __future__ import annotations

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 .. 7; code + 8 is negative."""

_E4M3_LARGEST = (0.875, 9)  # 448 = 0.875 * 2^9, as torch.frexp splits a number
_E2M1_LARGEST = (0.75, 3)  # 6
_SMALLEST_E4M3_SCALE = 2.0**-9


def code_bytes(name: str, dim: int) -> int:
    """Bytes of the codes of one vector of `dim` channels."""
    return dim if name == "fp8" else dim // 2


def group_size(name: str) -> int:
    """Channels that share a scale."""
    return 16 if name == "fp4" else 32


def encode(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., d] -> codes uint8 [..., code_bytes], scales uint8 [..., d / group_size]."""
    groups = x.float().unflatten(-1, (-1, group_size(name)))
    if name == "fp8":
        exponent = _exponent(groups, _E4M3_LARGEST, floor=-22)
        return torch.ldexp(groups, -exponent).flatten(-2).to(torch.float8_e4m3fn).view(torch.uint8), _ue8m0(exponent)
    if name == "index":
        exponent = _exponent(groups, _E2M1_LARGEST, floor=-126)
        return _pack(torch.ldexp(groups, -exponent).flatten(-2)), _ue8m0(exponent)
    amax = groups.abs().amax(-1, keepdim=True)
    scale = (amax / E2M1[-1]).clamp(_SMALLEST_E4M3_SCALE, 448.0).to(torch.float8_e4m3fn)
    # the checkpoint's own tools multiply by the reciprocal, which decides ties differently from a division
    return _pack((groups * scale.float().reciprocal()).flatten(-2)), scale.squeeze(-1).view(torch.uint8)


def decode(name: str, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Vectors [..., d] in `dtype`, bfloat16 or float32, of what `encode` returned."""
    values = codes.view(torch.float8_e4m3fn).float() if name == "fp8" else _unpack(codes)
    factor = scales.view(torch.float8_e4m3fn if name == "fp4" else torch.float8_e8m0fnu).float()
    return (values.unflatten(-1, (-1, group_size(name))) * factor.unsqueeze(-1)).flatten(-2).to(dtype)


def _exponent(groups: torch.Tensor, largest: tuple[float, int], floor: int) -> torch.Tensor:
    """e [..., 1] int32 of the smallest power of two 2^e with max |group| <= largest * 2^e, at least `floor`."""
    fraction, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True))
    return (exponent - largest[1] + (fraction > largest[0])).clamp(min=floor)


def _ue8m0(exponent: torch.Tensor) -> torch.Tensor:
    return (exponent.squeeze(-1) + 127).to(torch.uint8)


def _pack(scaled: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 codes, ties to the even one; larger numbers saturate."""
    x = scaled.abs()
    code = (x > 0.25).to(torch.uint8)
    for boundary, tie_goes_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += x >= boundary if tie_goes_up else x > boundary
    code |= (scaled < 0).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """float32 [..., d] of packed codes [..., d / 2]."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return table[codes.long()]
