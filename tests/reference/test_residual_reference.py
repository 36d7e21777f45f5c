"""Hyper-connections: against tile_kernels bit for bit, and what the mixing matrix promises."""

from __future__ import annotations

import pytest
import torch

from deepinfer.reference import residual

from .tile_kernels_oracle import tile_kernels

M, H, EPS, NORM_EPS, ITERATIONS = 4, 256, 1e-6, 1e-20, 20
ROWS = [1, 3, 32, 70]


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def site(rows, seed=0):
    """streams, fn, base, scale of a site with lively weights."""
    streams = seeded(rows, M, H, seed=seed).bfloat16()
    return streams, seeded(24, M * H, seed=seed + 1), seeded(24, seed=seed + 2), torch.tensor([1.3, 0.7, 2.1])


@pytest.mark.parametrize("rows", ROWS)
def test_mix_equals_tile_kernels(rows):
    streams, fn, base, scale = site(rows)
    tk = tile_kernels()
    logits = tk.mhc_pre_norm_fn_ref(streams[None], fn, None, NORM_EPS)
    pre, post, comb = tk.mhc_pre_split_mixes_ref(logits, scale, base, M, 2.0, EPS)
    comb = tk.sinkhorn_normalize_ref(comb, ITERATIONS, EPS)
    found = residual.mix(streams, fn, base, scale, NORM_EPS, EPS, ITERATIONS)
    assert torch.equal(found[0], pre[0, ..., 0])
    assert torch.equal(found[1], post[0, ..., 0])
    assert torch.equal(found[2], comb[0])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_equals_tile_kernels(iterations, rows):
    logits = seeded(rows, M, M) * 4
    expected = tile_kernels().sinkhorn_normalize_ref(logits[None], iterations, EPS)[0]
    assert torch.equal(residual.sinkhorn(logits, iterations, EPS), expected)


def test_sinkhorn_columns_and_rows_sum_to_one():
    matrix = residual.sinkhorn(seeded(50, M, M).double(), 200, 0.0)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(50, M).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(matrix.sum(-2), torch.ones(50, M).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", ROWS)
def test_write_back_and_collapse_equal_tile_kernels(rows):
    streams, y = seeded(rows, M, H).bfloat16(), seeded(rows, H, seed=1).bfloat16()
    post, comb, pre = seeded(rows, M, seed=2).abs(), seeded(rows, M, M, seed=3).abs(), seeded(rows, M, seed=4).abs()
    tk = tile_kernels()
    expected = tk.mhc_post_ref(y[None], streams[None], post[None, ..., None], comb[None])[0]
    assert torch.equal(residual.write_back(streams, y, post, comb), expected)
    expected = tk.mhc_pre_apply_mix_ref(streams[None], pre[None, ..., None])[0]
    assert torch.equal(residual.collapse(streams, pre), expected)


def test_comb_is_indexed_from_then_to():
    streams, y = seeded(1, M, 8), torch.zeros(1, 8)
    comb = torch.zeros(1, M, M)
    comb[0, 1, 3] = 1
    out = residual.write_back(streams, y, torch.zeros(1, M), comb)
    assert torch.equal(out[0, 3], streams[0, 1])
    assert out[0, :3].abs().sum() == 0


def test_head_weights_equal_tile_kernels():
    streams, fn, base, _ = site(9)
    scale, tk = torch.tensor([0.8]), tile_kernels()
    logits = tk.mhc_pre_norm_fn_ref(streams[None], fn[:M], None, NORM_EPS)
    expected = tk.mhc_head_compute_mix_ref(logits, scale, base[:M], EPS)[0]
    assert torch.equal(residual.head_weights(streams, fn[:M], base[:M], scale, NORM_EPS, EPS), expected)


def test_expand_and_mean():
    embedding = seeded(3, H).bfloat16()
    streams = residual.expand(embedding, M)
    assert torch.equal(streams, tile_kernels().expand_to_mhc_ref(embedding, M))
    assert torch.equal(residual.stream_mean(streams), embedding)
    streams = seeded(3, M, H).bfloat16()
    assert torch.equal(residual.stream_mean(streams), streams.double().mean(1).bfloat16())


def test_float64_sums_agree_with_float32_and_do_not_show_the_number_of_rows():
    streams, fn, base, scale = site(37)
    whole = residual.mix(streams, fn, base, scale, NORM_EPS, EPS, ITERATIONS, torch.float64)
    single = residual.mix(streams, fn, base, scale, NORM_EPS, EPS, ITERATIONS)
    for exact, rounded in zip(whole, single, strict=True):
        assert exact.dtype == torch.float32
        torch.testing.assert_close(exact, rounded, rtol=1e-5, atol=1e-6)
    for size in (1, 2, 7, 16, 36):
        part = residual.mix(streams[:size], fn, base, scale, NORM_EPS, EPS, ITERATIONS, torch.float64)
        assert all(torch.equal(a, b[:size]) for a, b in zip(part, whole, strict=True))


def test_gradients_equal_finite_differences():
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, M, 8), (24, M * 8), (24,), (3,), (2, 8)]
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]

    def through_a_site(streams, fn, base, scale, y):
        flat = torch.nn.functional.linear(streams.flatten(1), fn) * scale.repeat(8) + base
        comb = residual.sinkhorn(flat[:, 8:].unflatten(-1, (M, M)), 3, EPS)
        return residual.write_back(streams, y, flat[:, :4], comb, torch.float64)

    assert torch.autograd.gradcheck(through_a_site, inputs)
