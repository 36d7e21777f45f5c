"""Routing, ordering by expert, combination: against tile_kernels bit for bit, ties, images, order of additions."""

from __future__ import annotations

import pytest
import torch

from deepinfer.reference import experts

from .tile_kernels_oracle import tile_kernels


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tk_route(logits, bias, top_k, **kwargs):
    return tile_kernels().moe_topk_gate_forward(logits, top_k, False, 0, 1.5, 0, "sqrtsoftplus", bias=bias, **kwargs)


@pytest.mark.parametrize(("rows", "count", "top_k"), [(1, 16, 4), (50, 16, 4), (33, 384, 6), (20, 8, 2)])
def test_route_equals_tile_kernels(rows, count, top_k):
    logits, bias = seeded(rows, count) * 12, seeded(count, seed=1)
    ids, weights = experts.route(logits, bias, top_k, 1.5)
    expected_ids, expected_weights = tk_route(logits, bias, top_k)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(weights, expected_weights)
    torch.testing.assert_close(weights.sum(-1), torch.full((rows,), 1.5))


def test_image_rows_are_selected_with_their_own_bias():
    logits, bias, bias_vl = seeded(40, 16), seeded(16, seed=1), seeded(16, seed=2)
    image = torch.arange(40) % 3 == 0
    ids, weights = experts.route(logits, bias, 4, 1.5, bias_vl, image)
    expected = tk_route(logits, bias, 4, image_bias=bias_vl, image_token_mask=image)
    assert torch.equal(ids, expected[0])
    assert torch.equal(weights, expected[1])
    assert not torch.equal(ids, experts.route(logits, bias, 4, 1.5)[0])


def test_ties_go_to_the_lower_expert_and_bias_never_enters_a_weight():
    ids, weights = experts.route(torch.zeros(1, 6), torch.tensor([0.0, 1, 0, 1, 0, 0]), 4, 1.5)
    assert ids.tolist() == [[1, 3, 0, 2]]
    assert torch.equal(weights, torch.full((1, 4), 0.375))


def test_softplus_is_linear_above_twenty_and_never_nan_below():
    ids, weights = experts.route(torch.tensor([[400.0, 100.0, -200.0]]), torch.zeros(3), 2, 1.0)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[2 / 3, 1 / 3]]))
    _, weights = experts.route(torch.full((1, 3), -200.0), torch.zeros(3), 2, 1.0)
    assert torch.equal(weights, torch.zeros(1, 2))  # all scores underflow: 0 / 1e-20


@pytest.mark.parametrize("accumulate", [torch.float32, torch.float64])
def test_route_gradient_reaches_chosen_logits_only(accumulate):
    logits = seeded(3, 8).requires_grad_()
    ids, weights = experts.route(logits, torch.zeros(8), 2, 1.5, accumulate=accumulate)
    (weights * torch.tensor([1.0, -2.0])).sum().backward()
    chosen = torch.zeros(3, 8, dtype=torch.bool).scatter_(1, ids, True)
    assert (logits.grad[chosen] != 0).all()
    assert (logits.grad[~chosen] == 0).all()


@pytest.mark.parametrize("count", [3, 16])
def test_sort_by_expert_is_stable_and_invertible(count):
    ids = torch.randint(0, count, (37, 4), generator=torch.Generator().manual_seed(0))
    order, offsets, position = experts.sort_by_expert(ids, count)
    flat = ids.flatten()
    assert torch.equal(order, torch.argsort(flat, stable=True))
    assert torch.equal(offsets, torch.bincount(flat, minlength=count).cumsum(0))
    assert torch.equal(order[position.flatten()], torch.arange(flat.numel()))


def test_sort_by_expert_without_rows():
    order, offsets, position = experts.sort_by_expert(torch.empty(0, 4, dtype=torch.int64), 5)
    assert order.numel() == 0
    assert offsets.tolist() == [0] * 5
    assert position.shape == (0, 4)


def test_combine_adds_shared_first_then_slots_in_order():
    """Numbers chosen so that any other order of float32 additions gives another sum."""
    shared = torch.tensor([[1.0]])
    rows = torch.tensor([[2.0**25], [-(2.0**25)], [3.0]])
    assert experts.combine(rows, torch.tensor([[0, 1, 2]]), shared).tolist() == [[3.0]]
    assert experts.combine(rows, torch.tensor([[2, 0, 1]]), shared).tolist() == [[4.0]]
    assert experts.combine(rows, torch.tensor([[0, 2, 1]]), shared).tolist() == [[4.0]]
    assert experts.combine(rows, torch.tensor([[0, 1, 2]]), shared, torch.float64).tolist() == [[4.0]]


def test_dispatch_then_combine_with_identity_experts_is_the_weighted_sum():
    x, ids = seeded(9, 8).double(), torch.randint(0, 5, (9, 3), generator=torch.Generator().manual_seed(4))
    weights = torch.rand(9, 3, dtype=torch.float64)
    order, _, position = experts.sort_by_expert(ids, 5)
    rows = x[order // 3] * weights.flatten()[order].unsqueeze(1)
    out = experts.combine(rows, position, torch.zeros(9, 8).double(), torch.float64)
    torch.testing.assert_close(out, x * weights.sum(1, keepdim=True))
