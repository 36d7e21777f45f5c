"""Dispatch, experts, combine over DeepEP's and DeepGEMM's doubles equal core's sub-layer of one rank."""

from __future__ import annotations

import pytest
import torch
from doubles import deep_ep, deep_gemm

from deepinfer.reference import activation, experts, gemm, quant
from deepinfer_nvidia.libraries import Libraries
from deepinfer_nvidia.sm100.exchange import EXCHANGE, ExpertExchange
from deepinfer_nvidia.sm100.formats import quantize_fp8
from deepinfer_nvidia.sm100.mega import SoloGroup
from deepinfer_nvidia.sm100.weights import ExpertWeight, pack_scales

ROWS, HIDDEN, INNER, EXPERTS, TOP_K, TILE = 23, 256, 128, 8, 3, 128


@pytest.fixture
def operands():
    source = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, HIDDEN, generator=source).bfloat16()
    ids = torch.rand(ROWS, EXPERTS, generator=source).topk(TOP_K).indices
    weights = torch.rand(ROWS, TOP_K, generator=source)
    w13, w2 = (
        quant.encode_q4u(torch.randn(EXPERTS, *size, generator=source))
        for size in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    shared = torch.randn(ROWS, HIDDEN, generator=source).bfloat16()
    return x, ids, weights, w13, w2, shared


def prepared(weight):
    codes, scales = weight
    return ExpertWeight(codes.view(torch.int8), pack_scales(scales))


def test_a_sub_layer_through_the_exchange_equals_the_reference(operands):
    x, ids, weights, w13, w2, shared = operands
    exchange = ExpertExchange(deep_ep, SoloGroup(), 64, HIDDEN, TOP_K, TILE)
    arrived = exchange.arrive(quantize_fp8(x), ids, weights, EXPERTS)
    gate_up = arrived.product(deep_gemm, arrived.rows, prepared(w13))
    inner = quantize_fp8(activation.swiglu(gate_up.nan_to_num(), 10.0, arrived.weights.nan_to_num()))
    y = exchange.leave(arrived.product(deep_gemm, inner, prepared(w2)), arrived, shared)

    order, offsets, position = experts.sort_by_expert(ids, EXPERTS)
    rows = quant.fake_q8(x)[order // TOP_K]
    wanted = gemm.grouped_linear(rows, quant.decode_q4u(*w13), offsets, torch.float32, torch.bfloat16)
    wanted = quant.fake_q8(activation.swiglu(wanted, 10.0, weights.flatten()[order]))
    wanted = gemm.grouped_linear(wanted, quant.decode_q4u(*w2), offsets, torch.float32, torch.bfloat16)
    wanted = experts.combine(wanted, position, shared)
    assert torch.allclose(y.float(), wanted.float(), rtol=1.6e-2, atol=1e-3)


def test_groups_begin_at_tiles_and_rows_that_chose_nobody_stay(operands):
    x, ids, weights, _, _, shared = operands
    exchange = ExpertExchange(deep_ep, SoloGroup(), 64, HIDDEN, TOP_K, TILE, in_order=True)
    arrived = exchange.arrive(quantize_fp8(x), ids.fill_(-1), weights, EXPERTS)
    assert arrived.ends.tolist() == [0] * EXPERTS
    assert torch.equal(exchange.leave(torch.zeros(len(arrived.weights), HIDDEN).bfloat16(), arrived, shared), shared)
    exchange.close()
    with pytest.raises(RuntimeError, match="a buffer for FP8 rows"):
        exchange.arrive(quantize_fp8(x), ids, weights, EXPERTS)


def test_a_build_of_the_old_buffer_is_refused():
    assert Libraries({"deep_ep": deep_ep}).missing(EXCHANGE) == []
    old = type("Old", (), {"Buffer": object})
    assert "has no EPBuffer;" in Libraries({"deep_ep": old}).missing(EXCHANGE)[0]
