"""Quantizers, codecs and weight formats: against tile_kernels bit for bit, and against the nearest code in float64."""

from __future__ import annotations

import pytest
import torch

from deepinfer.reference import quant

from .tile_kernels_oracle import tile_kernels

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
FORMATS = ["q8", "q4u", "q4e"]
CASTS = {
    "q8": {"fmt": "e4m3", "block_size": (1, 32), "round_sf": True},
    "q4u": {"fmt": "e2m1", "block_size": (1, 32), "round_sf": True},
    "q4e": {"fmt": "e2m1", "block_size": (1, 16), "use_e4m3_sf": True},
}


def fake(name):
    return getattr(quant, f"fake_{name}")


def encode(name):
    return getattr(quant, f"encode_{name}")


def decode(name):
    return getattr(quant, f"decode_{name}")


def samples(dtype):
    """Rows of many magnitudes, with zeros, tiny values, ties and the largest codes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 512, generator=generator) * torch.exp(torch.randn(200, 512, generator=generator) * 4)
    x[0] = 0
    x[1] *= 1e-6
    x[2] = torch.tensor([448.0, -448, 464, 0.0009765625] * 128)
    x[3] = torch.tensor([6.0, -6, 5, 2.5, 0.25, 0.75, 1.25, 1.75] * 64)
    x[4] *= 1e20
    x[5, 1:] = 0
    x[6] = 1e-4
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_scales_equal_tile_kernels(name, dtype):
    x = samples(dtype)
    data, scale = tile_kernels().cast(x, **CASTS[name])
    codes, scales = encode(name)(x)
    assert torch.equal(codes, data.view(torch.uint8))
    expected = scale.view(torch.uint8) if name == "q4e" else (scale.view(torch.int32) >> 23).to(torch.uint8)
    assert torch.equal(scales, expected)
    values = tile_kernels().cast_back((data, scale), "bf16", CASTS[name]["block_size"])
    assert torch.equal(decode(name)(codes, scales), values)
    assert torch.equal(fake(name)(x), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_every_value_goes_to_the_nearest_code(name, dtype):
    """With the stored scale given, no other code is closer (float64), and the largest never overflows."""
    x = samples(dtype)
    group = 16 if name == "q4e" else 32
    _, scales = encode(name)(x)
    scale = scales.view(torch.float8_e4m3fn).double() if name == "q4e" else torch.exp2(scales.double() - 127)
    grid = E4M3 if name == "q8" else E2M1
    wanted = x.double().unflatten(1, (-1, group)) / scale.unsqueeze(-1)
    found = fake(name)(x).double().unflatten(1, (-1, group)) / scale.unsqueeze(-1)
    distance = (wanted.abs().unsqueeze(-1) - grid).abs().amin(-1)
    assert (found.abs() <= grid[-1]).all()
    torch.testing.assert_close((found - wanted).abs(), distance, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_quantizing_twice_changes_nothing(name):
    once = fake(name)(samples(torch.bfloat16))
    if name == "q4e":  # its scale is rounded, so only the bytes of a power-of-two format survive in general
        once = torch.tensor([6.0, 3, 1.5, 0.5] * 8).repeat(4, 1).bfloat16()
    assert torch.equal(fake(name)(once), once)


@pytest.mark.parametrize("name", FORMATS)
def test_leading_dimensions_and_result_dtypes(name):
    x = samples(torch.bfloat16)
    shaped = x.view(10, 20, 512)
    assert torch.equal(fake(name)(shaped), fake(name)(x).view_as(shaped))
    assert fake(name)(x, torch.float32).dtype == torch.float32
    assert torch.equal(fake(name)(x, torch.float32), fake(name)(x).float())
    codes, scales = encode(name)(shaped)
    assert torch.equal(decode(name)(codes, scales, torch.float32), fake(name)(shaped, torch.float32))
    assert fake(name)(x[:0]).shape == (0, 512)


def test_non_finite_values_stay_non_finite():
    x = torch.ones(3, 64)
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    for name in FORMATS[:2]:
        out = fake(name)(x)
        assert torch.isnan(out[0, 3])
        assert not torch.isfinite(out[1, 5])
        assert torch.equal(out[2], x[2].bfloat16())
        assert torch.equal(out[0, 32:], x[0, 32:].bfloat16())
    assert torch.isnan(fake("q4e")(x)[0, 3])


def test_fp4_packing_puts_the_even_channel_low():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 2] = 6.0, -1.5, 0.5
    packed, scales = quant.encode_q4u(x)
    assert packed[0, :2].tolist() == [7 | (8 + 3) << 4, 1]
    assert scales.tolist() == [[127]]


@pytest.mark.parametrize("shape", [(64, 96), (100, 96), (33, 160), (1, 32)])
def test_fp8_block_weight_equals_tile_kernels(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.02
    values, scales = quant.quantize_weight_fp8_block32(weight)
    data, scale = tile_kernels().cast(weight, "e4m3", (32, 32), round_sf=True)
    assert torch.equal(values.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(scales, (scale.view(torch.int32) >> 23).to(torch.uint8))
    back = quant.dequantize_weight(values, scales, "fp8_block32")
    assert torch.equal(back, tile_kernels().cast_back((data, scale), "bf16", (32, 32)))


def test_fp4_expert_and_fp8_row_weights_equal_tile_kernels():
    weight = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(4)) * 0.02
    packed, scales = quant.quantize_weight_mxfp4(weight)
    data, scale = tile_kernels().cast(weight.flatten(0, 1), "e2m1", (1, 32), round_sf=True)
    assert torch.equal(packed.flatten(0, 1), data.view(torch.uint8))
    assert torch.equal(scales.flatten(0, 1), (scale.view(torch.int32) >> 23).to(torch.uint8))
    back = quant.dequantize_weight(packed, scales, "mxfp4_row32", torch.float32)
    assert torch.equal(back.flatten(0, 1), tile_kernels().cast_back((data, scale), "fp32", (1, 32)))
    rows, row_scales = quant.quantize_rows_fp8(weight[0])
    data, scale = tile_kernels().cast(weight[0], "e4m3", (1, 32), round_sf=True)
    assert rows.dtype == torch.float8_e4m3fn
    assert torch.equal(rows.view(torch.uint8), data.view(torch.uint8))
    back = quant.dequantize_weight(rows, row_scales, "fp8_row32")
    assert torch.equal(back, tile_kernels().cast_back((data, scale), "bf16", (1, 32)))


def test_every_byte_of_every_format_decodes_to_its_value():
    codes = torch.arange(256, dtype=torch.uint8)
    scales = torch.full((8,), 127 + 3, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).double() * 8
    torch.testing.assert_close(quant.decode_q8(codes, scales).double(), expected, rtol=0, atol=0, equal_nan=True)
    signed = torch.cat((E2M1, -E2M1))
    pairs = torch.stack((signed[codes.long() & 15], signed[codes.long() >> 4]), -1).flatten()
    scales = torch.full((16,), 127 - 2, dtype=torch.uint8)
    assert torch.equal(quant.decode_q4u(codes, scales).double(), pairs / 4)
    assert torch.equal(quant.scale_values(codes)[:255].double(), torch.exp2(torch.arange(255).double() - 127))
    assert torch.isnan(quant.scale_values(codes)[255])


def test_weights_cut_from_odd_addresses_decode():
    values, scales = quant.quantize_rows_fp8(torch.randn(5, 32))
    storage = torch.cat((torch.zeros(1, dtype=torch.uint8), values.view(torch.uint8).flatten()))
    moved = storage[1:].view(5, 32).view(torch.float8_e4m3fn)
    assert moved.storage_offset() == 1
    assert torch.equal(quant.dequantize_weight(moved, scales, "fp8_row32"), quant.decode_q8(values, scales))


def test_dense_formats_keep_values_and_gradients():
    weight = torch.randn(4, 4, requires_grad=True)
    quant.dequantize_weight(weight, None, "f32", torch.float32).sum().backward()
    assert torch.equal(weight.grad, torch.ones(4, 4))
    half = torch.randn(4, 4).bfloat16()
    assert torch.equal(quant.dequantize_weight(half, None, "bf16", torch.float32), half.float())


def test_wrong_formats_are_named():
    with pytest.raises(ValueError, match="int3"):
        quant.dequantize_weight(torch.zeros(1, 1), torch.zeros(1, 1), "int3")
    with pytest.raises(ValueError, match="needs scales"):
        quant.dequantize_weight(torch.zeros(1, 1), None, "fp8_row32")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_passes_straight_through(name, dtype):
    x = torch.randn(4, 64, dtype=dtype).requires_grad_()
    upstream = torch.randn(4, 64).bfloat16()
    out = fake(name)(x)
    assert torch.equal(out.detach(), fake(name)(x.detach()))
    out.backward(upstream)
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad, upstream.to(dtype))


def test_constants_made_in_inference_mode_serve_training():
    quant._e4m3_pairs.cache_clear()
    values, scales = quant.quantize_weight_fp8_block32(torch.randn(32, 32))
    with torch.inference_mode():
        quant.dequantize_weight(values, scales, "fp8_block32")
    x = torch.randn(2, 32, requires_grad=True)
    (x @ quant.dequantize_weight(values, scales, "fp8_block32", torch.float32)).sum().backward()
    assert x.grad.abs().sum() > 0
