"""Matrix products: one rounding of an accurate sum, exact grouping, rows that do not depend on their neighbours."""

from __future__ import annotations

import pytest
import torch

from deepinfer.reference import gemm

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rounded_once(found, exact, magnitude):
    """found is the rounding of a sum whose float32 error is bounded by that of its absolute terms `magnitude`."""
    step = 2.0**-8 if found.dtype == BF16 else 0.0
    bound = step * exact.abs() * (1 + 1e-3) + 2.0**-21 * magnitude
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("out_dtype", [BF16, F32])
@pytest.mark.parametrize("rows", [1, 2, 33, 300])
def test_linear_accumulates_in_float32(rows, out_dtype):
    """Long sums of bfloat16 products: accumulating in bfloat16 would miss this bound a hundredfold."""
    x, weight = seeded(rows, 2048).bfloat16(), seeded(48, 2048, seed=1).bfloat16()
    exact, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    assert_rounded_once(gemm.linear(x, weight, F32, out_dtype), exact, magnitude)


def test_linear_keeps_leading_dimensions_and_dtype():
    x, weight = seeded(3, 5, 32), seeded(7, 32, seed=1)
    out = gemm.linear(x, weight)
    assert out.shape == (3, 5, 7)
    assert out.dtype == F32
    assert gemm.linear(x.bfloat16(), weight.bfloat16()).dtype == BF16
    assert gemm.linear(x[:0], weight).shape == (0, 5, 7)


def test_linear_without_vector_bfloat16_means_the_same(monkeypatch):
    x, weight = seeded(40, 256).bfloat16(), seeded(64, 256, seed=1).bfloat16()
    with_vectors = gemm.linear(x, weight)
    monkeypatch.setattr(gemm, "_fast_bfloat16", lambda device: False)
    without = gemm.linear(x, weight)
    assert without.dtype == BF16
    torch.testing.assert_close(without, with_vectors, rtol=2**-7, atol=1e-4)


def test_block_diagonal_gives_every_group_its_own_rows():
    x, weight = seeded(6, 3, 64).bfloat16(), seeded(3 * 5, 64, seed=1).bfloat16()
    out = gemm.block_diagonal_linear(x, weight)
    exact = torch.cat([x[:, g].double() @ weight[5 * g : 5 * g + 5].double().T for g in range(3)], 1)
    assert out.dtype == F32
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


COUNTS = [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("accumulate", [F32, F64])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_grouped_linear_gives_every_expert_its_rows(dtype, accumulate, counts):
    rows = sum(counts)
    x, weight = seeded(rows, 32).to(dtype), seeded(4, 16, 32, seed=1).to(dtype)
    offsets = torch.tensor(counts).cumsum(0)
    out = gemm.grouped_linear(x, weight, offsets, accumulate)
    parts = x.double().split(counts)
    exact = torch.cat([part @ w.double().T for part, w in zip(parts, weight, strict=True)])
    assert out.dtype == dtype
    assert out.shape == (rows, 16)
    if rows:
        magnitude = torch.cat([p.abs() @ w.double().abs().T for p, w in zip(parts, weight, strict=True)])
        assert_rounded_once(out, exact, magnitude)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_both_forms_of_the_grouped_product_and_its_gradients_agree(monkeypatch, counts):
    """The padded form serves devices without a grouped product; here it must give what the grouped one gives."""
    results = []
    for has_grouped_mm in (True, False):
        if not has_grouped_mm:
            monkeypatch.setattr(gemm, "_has_grouped_mm", lambda x: False)
        x, weight = seeded(sum(counts), 32).requires_grad_(), seeded(4, 16, 32, seed=1).requires_grad_()
        out = gemm.grouped_linear(x, weight, torch.tensor(counts).cumsum(0))
        if sum(counts):
            (out * seeded(*out.shape, seed=2)).sum().backward()
            assert x.grad.abs().sum(-1).min() > 0
            results.append((out.detach(), x.grad, weight.grad))
    if results:
        for first, second in zip(*results, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("out_dtype", [BF16, F32])
def test_float64_sums_do_not_show_the_number_of_rows(out_dtype):
    x, weight = seeded(67, 512).bfloat16(), seeded(40, 512, seed=1).bfloat16()
    whole = gemm.linear(x, weight, F64, out_dtype)
    for size in (1, 2, 3, 5, 8, 17, 33, 66):
        assert torch.equal(gemm.linear(x[:size], weight, F64, out_dtype), whole[:size])
    assert torch.equal(torch.cat([gemm.linear(row, weight, F64, out_dtype) for row in x.split(1)]), whole)
