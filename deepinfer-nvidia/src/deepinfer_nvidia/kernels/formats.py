"""Number formats inside kernels: decode e4m3, e2m1 and power-of-two scales, round to e4m3 and e2m1, bit for bit as
`deepinfer.reference.quant` does.

A group of values is a tile [..., g]; a ue8m0 byte b means 2^(b - 127). Knows no layout of rows or caches.
"""

# No `annotations` import: Triton reads the annotations of its functions.

import triton
import triton.language as tl

from deepinfer_nvidia.kernels import interpreted

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 rounded to `dtype`, to nearest with ties to even. The interpreter drops the bits instead, so there they
    are rounded by hand first."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def product(a, b, total):
    """total + a times b on the matrix units: bfloat16 operands, float32 sums. The interpreter multiplies bfloat16 as
    integers, so there the operands are widened."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total)


@triton.jit
def e4m3_value(code):
    """float32 of e4m3 codes (uint8 or wider, low 8 bits)."""
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_value(code):
    """float32 of e2m1 codes (low 4 bits): exponent and fraction move to float32's place, 2^126 corrects the bias."""
    code = code.to(tl.int32)
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def ue8m0_value(byte):
    """float32 2^(byte - 127); byte 0 is the subnormal 2^-127."""
    return tl.maximum(byte.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def scale_bits_e4m3(amax):
    """int32 bits of 2^ceil(log2(amax / 448)), at least 2^-22. amax float32 >= 0."""
    bits = ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    return tl.maximum(bits, (127 - 22) << 23)


@triton.jit
def scale_bits_e2m1(amax):
    """int32 bits of 2^ceil(log2(amax / 6)), at least 2^-126."""
    bits = ((amax.to(tl.int32, bitcast=True) + 0x3FFFFF) & 0x7F800000) - (2 << 23)
    return tl.maximum(bits, 1 << 23)


@triton.jit
def inverse_power(bits):
    """float32 reciprocal of a power of two given by its bits."""
    return ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3(x):
    """x float32, |x| <= 448, to the nearest e4m3 number, ties to even."""
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
    shift = (exponent + ((20 << 23) | (1 << 22))).to(tl.float32, bitcast=True)
    return (x + shift) - shift


@triton.jit
def round_e2m1(x):
    """x float32 to the nearest e2m1 number, ties to even, saturating at 6."""
    x = tl.minimum(tl.maximum(x, -6.0), 6.0)
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 127 << 23)
    shift = (exponent + ((22 << 23) | (1 << 22))).to(tl.float32, bitcast=True)
    return (x + shift) - shift


@triton.jit
def e4m3_code(rounded, source):
    """uint8 codes of numbers `round_e4m3` returned; the sign is `source`'s, so that a negative zero keeps it."""
    small = tl.abs(rounded) * 7.52316384526264e-37  # 2^-120: e4m3's exponent bias becomes float32's
    sign = (source.to(tl.int32, bitcast=True) >> 24) & 0x80
    return ((small.to(tl.int32, bitcast=True) >> 20) | sign).to(tl.uint8)


@triton.jit
def e2m1_code(rounded, source):
    """int32 codes 0 .. 15 of numbers `round_e2m1` returned."""
    small = tl.abs(rounded) * 1.1754943508222875e-38  # 2^-126
    sign = (source.to(tl.int32, bitcast=True) >> 28) & 8
    return (small.to(tl.int32, bitcast=True) >> 22) | sign


@triton.jit
def fake_e4m3(groups):
    """Tile [R, G, 32] float32 rounded to e4m3 with one power-of-two scale per group; values, not codes."""
    bits = scale_bits_e4m3(tl.max(tl.abs(groups), 2))
    scaled = groups * inverse_power(bits)[:, :, None]
    return round_e4m3(scaled) * bits.to(tl.float32, bitcast=True)[:, :, None]


@triton.jit
def low_half(word):
    """bfloat16 in the low half of an int32."""
    return (word << 16).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def high_half(word):
    """bfloat16 in the high half of an int32."""
    return (word & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16)
