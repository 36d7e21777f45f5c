"""Verification and the draft block: coupled output is independent of drafts, rejection keeps the distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.hooks.api import OpContext
from deepinfer.hooks.ops.sampling import SamplingOps
from deepinfer.hooks.types import Numerics
from deepinfer.reference import rng
from deepinfer.reference.speculation import RESIDUAL_SHRINK

V = 12


def distributions(rows, seed=0, scale=2.0):
    return (torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale).log_softmax(-1)


def i64(*values):
    return torch.tensor(values, dtype=torch.int64)


def verify(ops, logprobs, drafts, counts, seeds, positions, golden=None, draft_logprobs=None, rule="coupled"):
    """Call with one list per argument."""
    counts = i64(*counts)
    golden = torch.full((len(logprobs),), -1) if golden is None else i64(*golden)
    starts = counts.cumsum(0) - counts
    return ops.sampling.verify(
        logprobs, i64(*drafts), starts, counts, i64(*seeds), i64(*positions), golden, draft_logprobs, rule
    )


def test_coupled_tokens_are_the_draws_without_drafts(ops):
    """Ragged sequences, right and wrong drafts: tokens equal one-at-a-time draws, accepted = matching prefix."""
    counts, seeds, positions = [4, 1, 3, 6], [5, 6, 7, 8], [100, 0, 33, 2**33]
    logprobs = distributions(sum(counts))
    plain = [
        int(ops.sampling.draw(logprobs[r : r + 1], i64(seeds[s]), i64(positions[s] + j)))
        for r, (s, j) in enumerate((s, j) for s, c in enumerate(counts) for j in range(c))
    ]

    def wrong(token):
        return (token + 1) % V

    drafts = [plain[0], plain[1], wrong(plain[2]), -1, -1, wrong(plain[5]), plain[6], -1, *plain[8:13], -1]
    result = verify(ops, logprobs, drafts, counts, seeds, positions)
    assert result.token_ids.tolist() == plain
    assert result.accepted.tolist() == [2, 0, 0, 5]


def test_missing_drafts_and_the_last_row_are_never_accepted(ops):
    logprobs = torch.full((3, V), -torch.inf)
    logprobs[:, 4] = 0.0
    assert verify(ops, logprobs, [4, -1, 4], [3], [1], [0]).accepted.tolist() == [1]
    assert verify(ops, logprobs, [4, 4, 4], [3], [1], [0]).accepted.tolist() == [2]


def test_golden_tokens_decide_acceptance(ops):
    logprobs = distributions(4)
    for rule, proposal in (("coupled", None), ("rejection", distributions(4, 1))):
        result = verify(ops, logprobs, [3, 5, 6, -1], [4], [1], [0], [3, 5, 7, 2], proposal, rule)
        assert result.token_ids.tolist() == [3, 5, 7, 2]
        assert result.accepted.tolist() == [2]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_emitted_distribution_is_the_targets(ops, rule):
    """First emitted token over many seeds, drafts drawn from another distribution: frequencies of the target."""
    count = 20_000
    target, proposal = distributions(1, 2), distributions(1, 3)
    seeds, positions = torch.arange(count), torch.full((count,), 9)
    purpose = rng.PURPOSE_TARGET if rule == "coupled" else rng.PURPOSE_DRAFT
    drafts = ops.sampling.draw(proposal.expand(count, V), seeds, positions, purpose)
    rows = torch.stack([drafts, torch.full_like(drafts, -1)], 1).flatten()
    starts, counts = torch.arange(count) * 2, torch.full((count,), 2)
    result = ops.sampling.verify(
        target.expand(2 * count, V), rows, starts, counts, seeds, positions, torch.full((2 * count,), -1),
        proposal.expand(2 * count, V), rule,
    )  # fmt: skip
    found = np.bincount(result.token_ids[::2].numpy(), minlength=V) / count
    expected = target[0].exp().double().numpy()
    assert (abs(found - expected) < 4.5 * np.sqrt(expected * (1 - expected) / count) + 1e-4).all()
    overlap = float(torch.minimum(target.exp(), proposal.exp()).sum())
    accepted = float(result.accepted.double().mean())
    if rule == "rejection":
        assert abs(accepted - overlap) < 0.02
        residual = (target.double().exp() - proposal.double().exp() * RESIDUAL_SHRINK).clamp(min=0).sum()
        np.testing.assert_allclose(result.accept_probability[::2], 1 - float(residual), atol=1e-6)
    else:
        assert 0 < accepted <= overlap + 0.02
        assert result.accept_probability is None


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_drafts_from_the_target_itself_are_all_accepted(ops, rule):
    count, purpose = 3000, rng.PURPOSE_TARGET if rule == "coupled" else rng.PURPOSE_DRAFT
    target = distributions(1, 4).expand(count, V)
    seeds, positions = torch.arange(count), torch.full((count,), 5)
    drafts = ops.sampling.draw(target, seeds, positions, purpose)
    rows = torch.stack([drafts, torch.full_like(drafts, -1)], 1).flatten()
    twice = target.repeat_interleave(2, 0)
    result = ops.sampling.verify(
        twice, rows, torch.arange(count) * 2, torch.full((count,), 2), seeds, positions, torch.full_like(rows, -1),
        twice, rule,
    )  # fmt: skip
    assert result.accepted.tolist() == [1] * count


def test_rejection_of_impossible_drafts_and_vanishing_residuals(ops):
    target = torch.full((3, V), -torch.inf)
    target[0, 2], target[1, 3], target[2] = 0.0, 0.0, distributions(1)
    proposal = torch.full((3, V), -torch.inf)
    proposal[0, 7] = 0.0  # draft 7 has target probability 0
    proposal[1, 3] = 0.0  # p = q: the residual is one ulp-sized weight at token 3
    proposal[2] = torch.nan  # rows without a draft are ignored
    result = verify(ops, target, [7, 3, -1], [1, 1, 1], [1, 2, 3], [0, 0, 0], None, proposal, "rejection")
    fresh = int(ops.sampling.draw(target[2:], i64(3), i64(0)))
    assert result.token_ids.tolist() == [2, 3, fresh]


def test_rejection_rule_needs_distributions_and_rules_have_names(ops):
    with pytest.raises(ValueError, match="draft_logprobs=None"):
        verify(ops, distributions(1), [-1], [1], [0], [0], rule="rejection")
    with pytest.raises(ValueError, match="'strict', expected one of coupled, rejection"):
        verify(ops, distributions(1), [-1], [1], [0], [0], rule="strict")


def draft_case(n=3, b=4, hidden=8, rank=6):
    g = torch.Generator().manual_seed(9)

    def rand(*shape):
        return torch.randn(*shape, generator=g)

    return dict(
        base_logits=rand(n, b, V), hidden=rand(n, b, hidden).bfloat16(), golden=i64(1, 5, 11),
        markov_embed=rand(V, rank).bfloat16(), markov_head=rand(V, rank).bfloat16(),
        confidence_weight=rand(hidden + rank).bfloat16(), confidence_temperature=torch.tensor([1.0, 2.0, 0.5, 1e-3]),
        temperature=torch.tensor([0.0, 1.0, 0.8]), top_p=torch.tensor([1.0, 1.0, 0.9]), top_k=i64(-1, -1, 5),
        seeds=i64(1, 2, 3), positions=i64(10, 20, 30),
    )  # fmt: skip


def test_draft_block_equals_the_formulas_step_by_step(ops):
    case = draft_case()
    block = ops.sampling.draft_block(**case)
    embed, head, w = (case[name].double() for name in ("markov_embed", "markov_head", "confidence_weight"))
    previous = case["golden"]
    for i in range(4):
        e = embed[previous]
        logits = case["base_logits"][:, i].double() + e @ head.T
        logprobs = ops.sampling.process(logits.float(), case["temperature"], case["top_p"], case["top_k"])
        alive = logprobs.isfinite()
        assert torch.equal(block.logprobs[:, i].isfinite(), alive)
        torch.testing.assert_close(block.logprobs[:, i][alive], logprobs[alive], atol=1e-5, rtol=1e-5)
        previous = ops.sampling.draw(logprobs, case["seeds"], case["positions"] + i)
        assert torch.equal(block.token_ids[:, i], previous)
        z = torch.cat([case["hidden"][:, i].double(), e], -1) @ w / case["confidence_temperature"][i].double()
        torch.testing.assert_close(block.confidences[:, i].double(), z.clamp(-60, 60).sigmoid(), atol=1e-6, rtol=1e-4)
    assert int(block.token_ids[0, 0]) == int((case["base_logits"][0, 0].double() + embed[1] @ head.T).argmax())


def test_draft_block_is_independent_of_the_batch_when_order_free():
    group = SamplingOps(OpContext(torch.device("cpu"), Numerics(order_free=True), None))
    group.ops = type("Table", (), {"sampling": group})
    case = draft_case(hidden=700, rank=256)
    whole = group.draft_block(**case)
    shared = ("markov_embed", "markov_head", "confidence_weight", "confidence_temperature")
    for r in range(3):
        one = {name: value if name in shared else value[r : r + 1] for name, value in case.items()}
        for found, expected in zip(group.draft_block(**one), whole, strict=True):
            assert torch.equal(found[0], expected[r])


def test_uncoupled_drafts_use_other_randomness(ops):
    case = draft_case()
    case.update(base_logits=torch.zeros(3, 4, V), temperature=torch.full((3,), 50.0), top_p=None, top_k=None)
    coupled, independent = ops.sampling.draft_block(**case), ops.sampling.draft_block(**case, coupled=False)
    assert not torch.equal(coupled.token_ids, independent.token_ids)
    for i in range(1, independent.token_ids.shape[1]):
        positions = case["positions"] + i
        drawn = ops.sampling.draw(independent.logprobs[:, i], case["seeds"], positions, rng.PURPOSE_DRAFT, i)
        assert torch.equal(independent.token_ids[:, i], drawn)


def test_coupled_drafts_of_an_equal_head_are_accepted(ops):
    """Draft block and target with the same logits: every draft passes, whatever the temperature."""
    case = draft_case()
    case.update(markov_head=torch.zeros(V, 6))
    block = ops.sampling.draft_block(**case)
    for r in range(3):
        settings = (case[name][r : r + 1].expand(4) for name in ("temperature", "top_p", "top_k"))
        target = ops.sampling.process(case["base_logits"][r], *settings)
        rows, drafts = torch.cat([target, target[:1]]), [*block.token_ids[r].tolist(), -1]
        result = verify(ops, rows, drafts, [5], [int(case["seeds"][r])], [int(case["positions"][r])])
        assert result.accepted.tolist() == [4]
