"""Core's bodies of the gemm, experts, residual and engram ops, called through a bound table.

What each op means is tested on the reference functions; here: both numeric modes, stored weight formats, rows that do
not depend on their neighbours, gradients, and opaque operands.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.hooks.ops import gemm as gemm_ops
from deepinfer.hooks.ops.experts import MoeWeights
from deepinfer.hooks.ops.residual import Pending, SiteWeights
from deepinfer.hooks.types import QuantTensor, Weight
from deepinfer.reference import quant
from deepinfer.reference.engram import derive_constants

from .op_tables import EXACT, ORDER_FREE, SMOOTH, SMOOTH_ORDER_FREE, TRAITS, op_table

H, M, EXPERTS, INNER, EPS = 256, 4, 16, 128, TRAITS.rms_norm_eps
SIZES = (1, 2, 3, 5, 8, 17, 31)
ROWS = 37


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def activations(numerics, *shape, seed=0):
    return seeded(*shape, seed=seed).to(numerics.activation_dtype)


@functools.cache
def dense_fp8(out, width, seed=0):
    return Weight(*quant.quantize_weight_fp8_block32(seeded(out, width, seed=seed) * 0.05), "fp8_block32")


@functools.cache
def expert_fp4(out, width, seed=0):
    return Weight(*quant.quantize_weight_mxfp4(seeded(EXPERTS, out, width, seed=seed) * 0.05), "mxfp4_row32")


def trainable(weight):
    """The same weight as float32 numbers that take a gradient."""
    values = quant.dequantize_weight(weight.values, weight.scales, weight.format, torch.float32)
    return Weight(values.requires_grad_(), None, "f32")


def moe_weights(ops, convert=lambda weight: weight):
    def dense(*args):
        return ops.gemm.prepare_weight(convert(dense_fp8(*args)))

    def experts(*args):
        return ops.gemm.prepare_expert_weight(convert(expert_fp4(*args)))

    gate = Weight(seeded(EXPERTS, H, seed=9).bfloat16() * 0.3, None, "bf16")
    return MoeWeights(
        gate=ops.gemm.prepare_weight(convert(gate)), bias=seeded(EXPERTS, seed=8), bias_vl=seeded(EXPERTS, seed=7),
        w13=experts(2 * INNER, H, 1), w2=experts(H, INNER, 2), shared_w13=dense(2 * INNER, H, 3),
        shared_w2=dense(H, INNER, 4), top_k=4, scaling=1.5, limit=10.0,
    )  # fmt: skip


def site_weights():
    return SiteWeights(seeded(24, M * H, seed=1) * 0.1, seeded(24, seed=2), torch.tensor([1.0, 0.5, 2.0]))


def pending_output(numerics, rows):
    post, comb = seeded(rows, M, seed=4).abs(), seeded(rows, M, M, seed=5).abs()
    return Pending(activations(numerics, rows, H, seed=3), post, comb)


@functools.cache
def engram_table():
    return Weight(*quant.quantize_rows_fp8(seeded(6090, 256, seed=6)), "fp8_row32")


# Every op as a function of some rows, for the row-independence test


def op_cases(ops, numerics):
    """{op: (function of rows [Q, ...], the rows)}; results are compared row by row."""
    gemm, experts, residual, engram = ops.gemm, ops.experts, ops.residual, ops.engram
    fp8 = gemm.prepare_weight(dense_fp8(96, H))
    bf16 = gemm.prepare_weight(Weight(seeded(40, H).bfloat16(), None, "bf16"))
    blocks, norm_weight = gemm.prepare_weight(dense_fp8(2 * 64, H, 2)), seeded(H, seed=11).bfloat16()
    moe, site = moe_weights(ops), site_weights()
    table, constants = engram.prepare_table(engram_table()), derive_constants([1], 997, 4, 2, 473)[1]
    x, wide = activations(numerics, ROWS, H), activations(numerics, ROWS, 2, H, seed=1)
    streams, pending = activations(numerics, ROWS, M, H, seed=2), pending_output(numerics, ROWS)
    kv, gate = activations(numerics, ROWS, M + 1, H, seed=3), seeded(M, H, seed=4)
    gate_up, row_weight = activations(numerics, ROWS, 2 * INNER, seed=5) * 6, seeded(ROWS, seed=6).abs()
    pre = seeded(ROWS, M, seed=6).abs()
    ids = torch.randint(0, 473, (ROWS, 4), generator=torch.Generator().manual_seed(3))

    def through_site(streams, y, post, comb, pre):
        out = residual.site(streams, Pending(y, post, comb), pre, site, norm_weight)
        return [out.streams, out.pre, out.post, out.comb, out.u, out.x]

    return {
        "gemm.linear fp8": (lambda x: gemm.linear(gemm.quantize(x), fp8), (x,)),
        "gemm.linear bf16": (lambda x: gemm.linear(x, bf16), (x,)),
        "gemm.linear float32": (lambda x: gemm.linear(x, bf16, torch.float32), (x,)),
        "gemm.block_diagonal_linear": (lambda x: gemm.block_diagonal_linear(gemm.quantize(x), blocks), (wide,)),
        "gemm.rms_norm_quantize": (lambda x: list(gemm.rms_norm_quantize(x, norm_weight, EPS)), (x,)),
        "gemm.swiglu": (lambda g, w: gemm.swiglu(g, 10.0, w), (gate_up, row_weight)),
        "gemm.swiglu_quantize": (lambda g, w: gemm.swiglu_quantize(g, 10.0, w), (gate_up, row_weight)),
        "experts.route": (lambda u: list(experts.route(u, moe.gate, moe.bias, 4, 1.5)), (x,)),
        "experts.moe": (lambda u: experts.moe(u, gemm.quantize(u), moe), (x,)),
        "residual.mix": (lambda s: list(residual.mix(s, site)), (streams,)),
        "residual.collapse": (residual.collapse, (streams, pre)),
        "residual.site": (through_site, (streams, pending.y, pending.post, pending.comb, pre)),
        "residual.stream_mean": (residual.stream_mean, (streams,)),
        "residual.head": (lambda s: residual.head(s, site.fn[:4], site.base[:4], site.scale[:1]), (streams,)),
        "engram.hash, fetch": (lambda n: engram.fetch(table, engram.hash(n, constants)), (ids,)),
        "engram.inject": (lambda s, kv: engram.inject(s, kv, gate), (streams, kv)),
    }


CASES = list(op_cases(op_table(EXACT), EXACT))


def tensors(result):
    results = result if isinstance(result, list) else [result]
    return [r.dequantize() if isinstance(r, QuantTensor) else r for r in results]


@pytest.mark.parametrize("numerics", [ORDER_FREE, SMOOTH_ORDER_FREE], ids=["exact", "smooth"])
@pytest.mark.parametrize("case", CASES)
def test_a_row_alone_equals_the_row_in_any_batch(case, numerics):
    function, operands = op_cases(op_table(numerics), numerics)[case]
    whole = tensors(function(*operands))
    for size in SIZES:
        for first in (0, ROWS - size):
            part = tensors(function(*(operand[first : first + size] for operand in operands)))
            for found, expected in zip(part, whole, strict=True):
                assert torch.equal(found, expected[first : first + size]), f"rows {first} .. {first + size - 1}"


@pytest.mark.parametrize("case", CASES)
def test_modes_have_their_dtypes_and_agree_up_to_rounding(case):
    """Exact results are the smooth ones plus quantization noise; order-free sums change neither beyond a rounding."""
    results = {}
    for numerics in (EXACT, ORDER_FREE, SMOOTH, SMOOTH_ORDER_FREE):
        function, operands = op_cases(op_table(numerics), numerics)[case]
        operands = [x.bfloat16().to(x.dtype) if x.is_floating_point() else x for x in operands]
        results[numerics] = tensors(function(*operands))
    for exact, exact64, smooth, smooth64 in zip(*results.values(), strict=True):
        assert exact.dtype == exact64.dtype
        assert smooth.dtype == smooth64.dtype
        assert smooth.dtype in (torch.float32, torch.int64)
        if smooth.dtype == torch.int64:
            continue
        scale = smooth.norm()
        assert (smooth - smooth64).norm() <= 1e-5 * scale
        assert (exact.float() - exact64.float()).norm() <= 0.03 * scale
        assert (exact.float() - smooth).norm() <= 0.2 * scale


# Weights


@pytest.mark.parametrize("numerics", [EXACT, SMOOTH], ids=["exact", "smooth"])
def test_exact_mode_keeps_weights_as_stored_and_smooth_mode_dequantizes_once(numerics):
    ops, stored = op_table(numerics), dense_fp8(64, 96)
    prepared = ops.gemm.prepare_weight(stored)
    dense = quant.dequantize_weight(stored.values, stored.scales, stored.format, torch.float32)
    if numerics.quantize:
        assert prepared.nbytes == stored.nbytes
    else:
        assert torch.equal(prepared.values, dense)
    x = QuantTensor(activations(numerics, 5, 96))
    exact = x.values.double() @ dense.double().T
    torch.testing.assert_close(ops.gemm.linear(x, prepared).double(), exact, rtol=2**-8, atol=1e-6)


def test_float32_weights_are_not_rounded_in_exact_mode():
    ops, weight, x = op_table(EXACT), seeded(8, 64), seeded(3, 64, seed=1).bfloat16()
    out = ops.gemm.linear(x, ops.gemm.prepare_weight(Weight(weight, None, "f32")), torch.float32)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


def test_block_diagonal_result_is_quantized_from_the_sums():
    ops, stored, x = op_table(EXACT), dense_fp8(2 * 64, H), activations(EXACT, 9, 2, H)
    found = ops.gemm.block_diagonal_linear(QuantTensor(x), stored).dequantize()
    dense = quant.dequantize_weight(stored.values, stored.scales, stored.format).double().view(2, 64, H)
    sums = torch.einsum("qgk,gok->qgo", x.double(), dense).flatten(1)
    expected, rounded_before = quant.fake_q8(sums.float()), quant.fake_q8(sums.bfloat16())
    assert (found != expected).float().mean() < 0.002
    assert (found != rounded_before).float().mean() > 0.005


@pytest.mark.parametrize("numerics", [EXACT, ORDER_FREE, SMOOTH], ids=["exact", "order-free", "smooth"])
def test_sliced_experts_give_the_same_rows(numerics, monkeypatch):
    """Real layers dequantize a few experts at a time; experts without rows at the start, inside and at the end."""
    ops = op_table(numerics)
    prepared, x = ops.gemm.prepare_expert_weight(expert_fp4(64, H)), QuantTensor(activations(numerics, 40, H))
    counts = torch.tensor([0, 0, 0, 7, 3, 0, 0, 0, 0, 0, 20, 10, 0, 0, 0, 0])
    whole = ops.gemm.grouped_linear(x, prepared, counts.cumsum(0))
    for experts in (1, 3, 5):
        monkeypatch.setattr(gemm_ops, "EXPERT_SLICE", experts * 64 * H)
        sliced = ops.gemm.grouped_linear(x, prepared, counts.cumsum(0))
        torch.testing.assert_close(sliced, whole, rtol=2**-7 if numerics.quantize else 1e-5, atol=1e-5)
        empty = ops.gemm.grouped_linear(QuantTensor(x.values[:0]), prepared, torch.zeros(EXPERTS, dtype=torch.int64))
        assert empty.shape == (0, 64)
        assert empty.dtype == numerics.activation_dtype


@dataclass(frozen=True, slots=True)
class ForeignQuant(QuantTensor):
    """A backend's own storage: codes and scales."""

    scales: torch.Tensor

    def dequantize(self):
        return quant.decode_q8(self.values, self.scales)

    def take(self, rows):
        return ForeignQuant(self.values[rows], self.scales[rows])


def test_a_foreign_quantized_layout_is_read_without_loss():
    ops, x = op_table(EXACT), activations(EXACT, 12, H)
    weights, own, foreign = moe_weights(ops), ops.gemm.quantize(x), ForeignQuant(*quant.encode_q8(x))
    assert torch.equal(ops.gemm.linear(foreign, weights.shared_w13), ops.gemm.linear(own, weights.shared_w13))
    assert torch.equal(ops.experts.moe(x, foreign, weights), ops.experts.moe(x, own, weights))


# Mixture of experts


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
def test_moe_equals_a_loop_over_tokens(image):
    """Float64 walk over rows and slots with the ids and weights of `route`; smooth numerics."""
    ops, rows = op_table(SMOOTH), 11
    weights, u = moe_weights(ops), seeded(rows, H)
    mask = (torch.arange(rows) % 2 == 0) if image else None
    ids, routing = ops.experts.route(u, weights.gate, weights.bias, 4, 1.5, weights.bias_vl, mask)
    found = ops.experts.moe(u, QuantTensor(u), weights, mask)

    def expert(x, w13, w2, weight):
        gate, up = (w13.double() @ x).chunk(2)
        gate, up = gate.clamp(max=10), up.clamp(-10, 10)
        return w2.double() @ (gate * gate.sigmoid() * up * weight)

    for row in range(rows):
        x = u[row].double()
        total = expert(x, weights.shared_w13.values, weights.shared_w2.values, 1.0)
        for e, weight in zip(ids[row], routing[row].double(), strict=True):
            total = total + expert(x, weights.w13.values[e], weights.w2.values[e], weight)
        torch.testing.assert_close(found[row].double(), total, rtol=1e-4, atol=1e-5)


def test_moe_without_rows():
    ops = op_table(EXACT)
    out = ops.experts.moe(activations(EXACT, 0, H), QuantTensor(activations(EXACT, 0, H)), moe_weights(ops))
    assert out.shape == (0, H)
    assert out.dtype == torch.bfloat16


# Residual


def test_site_uses_the_previous_weights_and_hands_on_its_own():
    ops, site, norm = op_table(EXACT), site_weights(), torch.ones(H).bfloat16()
    streams, pending = activations(EXACT, 7, M, H), pending_output(EXACT, 7)
    previous = torch.tensor([[1.0, 0, 0, 0]]).repeat(7, 1)
    out = ops.residual.site(streams, pending, previous, site, norm)
    written = ops.residual.write_back(streams, pending)
    assert torch.equal(out.streams, written)
    mixed = ops.residual.mix(written, site)
    assert all(torch.equal(a, b) for a, b in zip((out.pre, out.post, out.comb), mixed, strict=True))
    assert torch.equal(out.u, ops.gemm.rms_norm(written[:, 0], norm, EPS))
    assert torch.equal(out.x.dequantize(), quant.fake_q8(out.u))
    unshifted = ops.residual.site(written, None, None, site, norm)
    assert torch.equal(unshifted.u, ops.gemm.rms_norm(ops.residual.collapse(written, out.pre), norm, EPS))
    assert torch.equal(unshifted.streams, written)


# Engram


def resident_bytes(path):
    """Memory that this process holds of a mapped file, from the kernel's own account."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    total = 0
    for line in lines:
        if line.endswith(str(path)):
            total += next(int(entry.split()[1]) * 1024 for entry in lines if entry.startswith("Rss:"))
    return total


def test_fetch_reads_only_the_rows_asked_for(tmp_path):
    """A mapped table of 1 GB in a sparse file: fetching three rows may touch a few pages around them."""
    rows = 2**22
    last, small = rows - 1, quant.quantize_rows_fp8(seeded(4, 256))
    mapped = {}
    for name, width, source in (("values", 256, small[0].view(torch.uint8)), ("scales", 8, small[1])):
        path = tmp_path / name
        path.touch()
        table = np.memmap(path, dtype=np.uint8, mode="r+", shape=(rows, width))
        for index, row in zip((5, last, 77), source, strict=False):
            table[index] = row.numpy()
        table.flush()
        mapped[name] = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", shape=(rows, width)))
        del table
    ops = op_table(EXACT)
    values = mapped["values"].view(torch.float8_e4m3fn)
    table = ops.engram.prepare_table(Weight(values, mapped["scales"], "fp8_row32"))
    dense = quant.dequantize_weight(*small, "fp8_row32")
    found = ops.engram.fetch(table, torch.tensor([[5, last], [-1, 77]])).dequantize().view(2, 2, 256)
    assert torch.equal(found[0], dense[:2])
    assert torch.equal(found[1, 0], torch.zeros(256).bfloat16())
    assert torch.equal(found[1, 1], dense[2])
    assert 0 < resident_bytes(tmp_path / "values") < 2**20


# Gradients


def test_gradient_reaches_every_parameter_and_input_in_smooth_mode():
    ops = op_table(SMOOTH)
    weights, site = moe_weights(ops, trainable), site_weights()
    table = Weight(seeded(6090, 256, seed=6).requires_grad_(), None, "f32")
    parameters = {
        "streams": seeded(24, M, H).requires_grad_(), "norm": seeded(H, seed=2).abs().requires_grad_(),
        "gate weight": seeded(M, H, seed=3).requires_grad_(), "fn": site.fn.requires_grad_(),
        "base": site.base.requires_grad_(), "scale": site.scale.requires_grad_(), "table": table.values,
        "engram wkv": seeded(5 * H, 6 * 256, seed=5).mul_(0.02).requires_grad_(),
    }  # fmt: skip
    parameters |= {name: getattr(weights, name).values for name in ("gate", "w13", "w2", "shared_w13", "shared_w2")}

    constants = derive_constants([1], 997, 4, 2, 473)[1]
    ids = torch.randint(0, 473, (24, 4), generator=torch.Generator().manual_seed(3))
    fetched = ops.engram.fetch(ops.engram.prepare_table(table), ops.engram.hash(ids, constants))
    wkv = ops.gemm.prepare_weight(Weight(parameters["engram wkv"], None, "f32"))
    kv = ops.gemm.linear(fetched, wkv).view(24, M + 1, H)
    streams = ops.engram.inject(parameters["streams"], kv, parameters["gate weight"])
    first = ops.residual.site(streams, None, torch.full((24, M), 0.25), site, parameters["norm"])
    y = ops.experts.moe(first.u, first.x, weights)
    last = ops.residual.site(first.streams, Pending(y, first.post, first.comb), first.pre, site, parameters["norm"])
    (ops.residual.collapse(last.streams, last.pre) * seeded(24, H, seed=12)).sum().backward()
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name
    assert (weights.w13.values.grad.flatten(1).abs().sum(1) > 0).sum() >= 12, "experts with rows learn"


def test_smooth_gradients_equal_finite_differences():
    """Directional derivative of a site with its experts, float64 sums; routing is held fixed by a small step."""
    ops = op_table(SMOOTH_ORDER_FREE)
    weights, site, norm = moe_weights(ops), site_weights(), torch.ones(H)
    streams, direction = seeded(6, M, H).requires_grad_(), seeded(6, M, H, seed=1)
    pre, probe = torch.full((6, M), 0.25), seeded(6, M, H, seed=2)

    def value(streams):
        out = ops.residual.site(streams, None, pre, site, norm)
        y = ops.experts.moe(out.u, out.x, weights)
        return (ops.residual.write_back(out.streams, Pending(y, out.post, out.comb)) * probe).double().sum()

    value(streams).backward()
    step = 1e-3
    with torch.no_grad():
        slope = (value(streams + step * direction) - value(streams - step * direction)) / (2 * step)
    torch.testing.assert_close((streams.grad * direction).double().sum(), slope, rtol=2e-3, atol=1e-2)


def test_exact_mode_passes_gradients_through_its_quantizers():
    """Exact and smooth gradients point the same way: rounding is treated as the identity."""
    grads = []
    for numerics in (EXACT, SMOOTH):
        ops = op_table(numerics)
        weights, u = moe_weights(ops), activations(EXACT, 10, H).to(numerics.activation_dtype).requires_grad_()
        y = ops.experts.moe(u, ops.gemm.quantize(u), weights)
        site = ops.residual.site(ops.residual.expand(y), None, torch.full((10, M), 0.25), site_weights(), torch.ones(H))
        out = ops.gemm.block_diagonal_linear(
            QuantTensor(site.x.dequantize().view(10, 2, 128)), ops.gemm.prepare_weight(dense_fp8(64, 128))
        )
        (out.dequantize().float() * seeded(10, 64, seed=9)).sum().backward()
        grads.append(u.grad.double().flatten())
    cosine = torch.nn.functional.cosine_similarity(*grads, dim=0)
    assert cosine > 0.9
