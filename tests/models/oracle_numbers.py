"""Rounding, quantizers, norm and rope of the oracle: numpy float64, written from the formulas, no float8 casts.

Used by `oracle.py`. A `Numbers` object is one of the two numerics modes: in *smooth* mode every rounding and quantizer
is the identity and all values stay float64; in *exact* mode sums are accumulated in float64, rounded once to float32,
and every bf16() and quantizer of the specification applies. Quantizers return the dequantized value.
"""

from __future__ import annotations

import numpy as np

E4M3_MAX = 448.0
ROPE_CHANNELS = 64


def e4m3_table() -> np.ndarray:
    """Values of the 127 finite non-negative e4m3fn codes, [127], ascending: 4 exponent bits (bias 7), 3 of mantissa."""
    codes = np.arange(0x7F)  # 0x7F is NaN
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def e2m1_table() -> np.ndarray:
    """Values of the 8 non-negative e2m1 codes, [8]."""
    return np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """uint8 codes -> float64 values; bit 7 is the sign."""
    table = np.append(e4m3_table(), np.nan)
    return np.where(codes & 0x80, -1.0, 1.0) * table[codes & 0x7F]


def decode_e2m1_pairs(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., K/2] -> float64 [..., K]; the even channel is in the low nibble."""
    nibbles = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return np.where(nibbles & 8, -1.0, 1.0) * e2m1_table()[nibbles & 7]


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """uint8 exponents -> 2^(byte - 127)."""
    return 2.0 ** (codes.astype(np.float64) - 127)


def round_to_table(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Nearest table value of |x| with x's sign; ties go to the even code; beyond the end saturates."""
    middles = (table[:-1] + table[1:]) / 2
    size = np.abs(x)
    code = np.searchsorted(middles, size, side="left")  # a tie yields the lower code
    tie = (code < len(middles)) & (size == middles[np.minimum(code, len(middles) - 1)])
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    return np.copysign(table[code], x)


def power_of_two_above(t: np.ndarray) -> np.ndarray:
    """2^ceil(log2 t) for t > 0."""
    mantissa, exponent = np.frexp(t)  # t = mantissa * 2^exponent, mantissa in [0.5, 1)
    return np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))


def round_f32(x: np.ndarray) -> np.ndarray:
    """Round to nearest float32, kept in a float64 array."""
    return np.asarray(x, dtype=np.float64).astype(np.float32).astype(np.float64)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Round to float32, then to nearest-even bfloat16 on the bits; kept in a float64 array."""
    bits = np.asarray(x, dtype=np.float64).astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def in_groups(x: np.ndarray, size: int) -> np.ndarray:
    """[..., K] -> [..., K/size, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def quantize_q8(x: np.ndarray) -> np.ndarray:
    """Q8: e4m3, a power-of-two scale for 32 channels."""
    groups = in_groups(round_f32(x), 32)
    amax = np.maximum(np.abs(groups).max(-1, keepdims=True), np.float32(1e-4))
    scale = power_of_two_above(round_f32(amax / E4M3_MAX))
    q = round_to_table(np.clip(groups / scale, -E4M3_MAX, E4M3_MAX), e4m3_table())
    return (q * scale).reshape(x.shape)


def quantize_q4u(x: np.ndarray) -> np.ndarray:
    """Q4u: e2m1, a power-of-two scale for 32 channels."""
    groups = in_groups(round_f32(x), 32)
    amax = np.maximum(np.abs(groups).max(-1, keepdims=True), 6 * 2.0**-126)
    scale = power_of_two_above(round_f32(amax / 6))
    return (round_to_table(groups / scale, e2m1_table()) * scale).reshape(x.shape)


def quantize_q4e(x: np.ndarray) -> np.ndarray:
    """Q4e: e2m1, an e4m3 scale for 16 channels; multiplies by the float32 reciprocal of the scale."""
    groups = in_groups(round_f32(x), 16)
    amax = np.maximum(np.abs(groups).max(-1, keepdims=True), 6 * 2.0**-9)
    scale = round_to_table(np.minimum(round_f32(amax / 6), E4M3_MAX), e4m3_table())
    reciprocal = round_f32(1 / scale)
    return (round_to_table(round_f32(groups * reciprocal), e2m1_table()) * scale).reshape(x.shape)


class Numbers:
    """One numerics mode. Arrays are float64 throughout; only the set of representable values differs."""

    def __init__(self, mode: str) -> None:
        if mode not in ("smooth", "exact"):
            raise ValueError(f"mode: found {mode!r}, expected 'smooth' or 'exact'")
        self.exact = mode == "exact"

    def f32(self, x: np.ndarray) -> np.ndarray:
        return round_f32(x) if self.exact else x

    def bf16(self, x: np.ndarray) -> np.ndarray:
        return round_bf16(x) if self.exact else x

    def q8(self, x: np.ndarray) -> np.ndarray:
        return quantize_q8(x) if self.exact else x

    def q4u(self, x: np.ndarray) -> np.ndarray:
        return quantize_q4u(x) if self.exact else x

    def q4e(self, x: np.ndarray) -> np.ndarray:
        return quantize_q4e(x) if self.exact else x

    def lin8(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """x [..., K], w [N, K] dequantized -> bf16 [..., N]."""
        return self.bf16(self.q8(x) @ w.T)

    def lin16(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """x bf16 [..., K], w bf16 [N, K] -> bf16 [..., N]."""
        return self.bf16(x @ w.T)

    def rms_norm(self, x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
        """x [..., d], w [d] -> bf16 [..., d]; the weight multiplies before the only rounding."""
        return self.bf16(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w)

    def rope(self, x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, inverse: bool = False) -> np.ndarray:
        """Rotate adjacent pairs of the last 64 channels. x [n, ..., d], positions [n]; not rounded."""
        angle = positions.astype(np.float64)[:, None] * inv_freq  # [n, 32]
        shape = (len(positions),) + (1,) * (x.ndim - 2) + (ROPE_CHANNELS // 2,)
        cos, sin = self.f32(np.cos(angle)).reshape(shape), self.f32(np.sin(angle)).reshape(shape)
        if inverse:
            sin = -sin
        out = x.copy()
        even, odd = x[..., -ROPE_CHANNELS::2], x[..., -ROPE_CHANNELS + 1 :: 2]
        out[..., -ROPE_CHANNELS::2] = even * cos - odd * sin
        out[..., -ROPE_CHANNELS + 1 :: 2] = even * sin + odd * cos
        return out


def base_inv_freq(theta: float) -> np.ndarray:
    """Frequencies of layers without compression, [32]."""
    return theta ** (-2 * np.arange(ROPE_CHANNELS // 2) / ROPE_CHANNELS)


def yarn_inv_freq(theta: float, factor: float, beta_fast: float, beta_slow: float, original: int) -> np.ndarray:
    """Frequencies of compressed layers, [32]: interpolated where a channel turns less than beta_slow times."""

    def channel(rotations: float) -> float:
        return ROPE_CHANNELS * np.log(original / (rotations * 2 * np.pi)) / (2 * np.log(theta))

    low = max(0, int(np.floor(channel(beta_fast))))
    high = min(ROPE_CHANNELS - 1, int(np.ceil(channel(beta_slow))))
    width = (high - low) or 0.001
    ramp = np.clip((np.arange(ROPE_CHANNELS // 2) - low) / width, 0, 1)
    base = base_inv_freq(theta)
    return base * (1 - ramp) + base / factor * ramp


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) without overflow."""
    return np.exp(-np.logaddexp(0, -x))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x); x itself above 20."""
    return np.where(x > 20, x, np.logaddexp(0, np.minimum(x, 20)))


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)
