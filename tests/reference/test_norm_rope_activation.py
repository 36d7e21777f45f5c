"""RMSNorm, rope and SwiGLU: against tile_kernels bit for bit, published frequencies, float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepinfer.reference.activation import swiglu
from deepinfer.reference.norm import rms_norm
from deepinfer.reference.rope import apply_rope, inverse_frequencies, rope_table

from .tile_kernels_oracle import tile_kernels

EPS = 1e-20
YARN_REAL = SimpleNamespace(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)
YARN_TINY = SimpleNamespace(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=256)

# model specification, appendix A: inverse frequencies of these pairs
PAIRS = [0, 10, 15, 16, 20, 24, 25, 31]
PUBLISHED = [
    (10000, None, [1.0, 5.623413e-02, 1.333521e-02, 1.0e-02, 3.162278e-03, 1.0e-03, 7.498942e-04, 1.333522e-04]),
    (160000, YARN_REAL, [1.0, 2.364354e-02, 3.635539e-03, 2.265625e-03, 2.969778e-04, 1.953125e-05, 5.372312e-06,
                         5.680529e-07]),
    (160000, YARN_TINY, [1.0, 1.477721e-03, 2.272212e-04, 1.5625e-04, 3.493856e-05, 7.8125e-06, 5.372312e-06,
                         5.680529e-07]),
]  # fmt: skip


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [256, 1280, 96])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_equals_tile_kernels(width, dtype):
    x, weight = seeded(70, width).to(dtype), seeded(width, seed=1).bfloat16()
    assert torch.equal(rms_norm(x, weight, EPS), tile_kernels().norm_forward_ref(x, weight, EPS)[0])


def test_rms_norm_of_a_zero_row_is_zero():
    out = rms_norm(torch.zeros(2, 64).bfloat16(), torch.ones(64), EPS)
    assert torch.equal(out, torch.zeros(2, 64).bfloat16())


def test_rms_norm_rounds_once():
    """The weight is applied before the rounding: the result is within half a bfloat16 step of the float64 value."""
    x, weight = seeded(50, 512).bfloat16(), seeded(512, seed=1).bfloat16()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    error = (rms_norm(x, weight, EPS).double() - exact).abs() / exact.abs()
    assert error.max() <= 2**-8 * (1 + 1e-4)


@pytest.mark.parametrize(("theta", "scaling", "expected"), PUBLISHED, ids=["base", "yarn-real", "yarn-tiny"])
def test_inverse_frequencies_are_the_published_ones(theta, scaling, expected):
    found = inverse_frequencies(theta, 64, scaling)
    assert found.dtype == torch.float32
    assert found.shape == (32,)
    torch.testing.assert_close(found[PAIRS], torch.tensor(expected), rtol=5e-7, atol=0)


def test_yarn_bounds_that_meet_give_a_step():
    """An original length below one turn of the fastest pair: every other pair is slowed by the full factor."""
    scaling = SimpleNamespace(factor=4, beta_fast=32, beta_slow=1, original_max_position_embeddings=6)
    found, base = inverse_frequencies(10000, 64, scaling), inverse_frequencies(10000, 64)
    assert found[0] == 1
    torch.testing.assert_close(found[1:], base[1:] / 4)


def test_rope_table_is_cos_then_sin_with_exact_phases():
    table = rope_table(50_000, 10000, 64)
    assert table.dtype == torch.float32
    angles = 49_999 * 10000.0 ** (-2 * torch.arange(32, dtype=torch.float64) / 64)
    torch.testing.assert_close(table[-1].double(), torch.cat((angles.cos(), angles.sin())), rtol=0, atol=3e-8)
    assert table[0].tolist() == [1.0] * 32 + [0.0] * 32


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rope_equals_tile_kernels(dtype, inverse):
    table, positions = rope_table(300, 160000, 64, YARN_TINY), torch.tensor([0, 1, 7, 299, 7])
    x = seeded(5, 8, 512).to(dtype)
    cos, sin = table.chunk(2, -1)
    rotated = tile_kernels().rotary_embedding_ref(
        x[..., -64:], cos, sin, positions=positions, interleaved=True, conjugate=inverse
    )
    out = apply_rope(x, positions, table, inverse)
    assert out.dtype == dtype
    assert torch.equal(out[..., -64:], rotated)
    assert torch.equal(out[..., :-64], x[..., :-64])


def test_rope_takes_any_middle_dimensions():
    table, positions, x = rope_table(20, 10000, 64), torch.tensor([3, 19]), seeded(2, 2, 3, 128)
    out = apply_rope(x, positions, table)
    assert torch.equal(out[:, 1, 2], apply_rope(x[:, 1, 2], positions, table))
    assert torch.equal(apply_rope(x[:0], positions[:0], table), x[:0])


def test_rope_inverse_restores_and_keeps_relative_phase():
    table = rope_table(200, 10000, 64)
    q, k = seeded(1, 64), seeded(1, 64, seed=1)

    def at(x, position):
        return apply_rope(x, torch.tensor([position]), table, accumulate=torch.float64)

    restored = apply_rope(at(q, 123), torch.tensor([123]), table, inverse=True)
    torch.testing.assert_close(restored, q, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((at(q, 150) * at(k, 130)).sum(), (at(q, 21) * at(k, 1)).sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_swiglu_equals_tile_kernels(dtype, weighted):
    gate_up = (seeded(60, 256) * 8).to(dtype)
    weight = torch.rand(60, generator=torch.Generator().manual_seed(2)) if weighted else None
    expected = tile_kernels().swiglu_forward(gate_up, topk_weights=weight, clamp_value=10.0)
    out = swiglu(gate_up, 10.0, weight)
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)
    assert not torch.equal(out, swiglu(gate_up, 1e9, weight)), "the clamp must act on these inputs"


def test_swiglu_clamps_only_above_on_the_gate():
    out = swiglu(torch.tensor([[20.0, -20.0, 30.0, -30.0]]), 10.0, None, torch.float64)
    silu = [10 / (1 + torch.exp(torch.tensor(-10.0, dtype=torch.float64))).item(), -20 / (1 + 485165195.40979)]
    torch.testing.assert_close(out, torch.tensor([[silu[0] * 10, silu[1] * -10]]))


def test_gradients_equal_finite_differences():
    """gradcheck in float64: every path of norm, rope and SwiGLU is differentiable."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 64, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(64, dtype=torch.float64, generator=generator, requires_grad=True)
    wide = torch.float64
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS, wide), (x, weight))
    table, positions = rope_table(9, 10000, 64), torch.tensor([4, 8])
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, positions, table, accumulate=wide), (x,))
    x32 = x.detach().float().requires_grad_()
    row_weight = torch.rand(2, generator=generator).requires_grad_()
    swiglu(x32, 10.0, row_weight).sum().backward()
    assert x32.grad.abs().min() > 0
    torch.testing.assert_close(row_weight.grad, swiglu(x32.detach(), 10.0).sum(-1))
