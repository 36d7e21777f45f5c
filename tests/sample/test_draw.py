"""The draw: exact integer procedure, right frequencies, dependence on (seed, position, purpose, draft) only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.reference import rng, sampling


def chi_square_z(counts, probabilities):
    """Chi-square of counts against probabilities, as standard normal deviations (Wilson-Hilferty)."""
    expected = np.asarray(probabilities, float) * counts.sum()
    freedom = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))


def words_of(seed, position, purpose=0, draft=0):
    return [int(w) for w in rng.random_words(torch.tensor([seed]), torch.tensor([position]), purpose, draft)]


def test_draw_is_the_documented_integer_procedure():
    logprobs = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)).mul(3).log_softmax(-1)
    logprobs[:, ::7] = -torch.inf
    seeds, positions = torch.arange(50) * 7919 - 5, torch.arange(50) * 3
    found = sampling.draw(logprobs, seeds, positions)
    for r in range(50):
        weights = [int(np.exp(float(lp)) * 2**31) for lp in logprobs[r]]
        w0, w1, _, _ = words_of(int(seeds[r]), int(positions[r]))
        target = (((w0 >> 1) << 31 | w1 >> 1) * sum(weights)) >> 62
        running = np.cumsum(np.array(weights, np.int64))
        assert int(found[r]) == next(token for token, mass in enumerate(running) if mass > target)
    assert (found % 7 != 0).all()


def test_weights_are_31_bit_fixed_point():
    """Over 20,000 nearly equal tokens another scale, or probabilities rounded to float32, would pick other tokens."""
    logprobs = torch.randn(20, 20_000, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    seeds, positions = torch.arange(20), torch.full((20,), 77)
    found = sampling.draw(logprobs, seeds, positions)
    for r in range(20):
        through = np.cumsum((np.exp(logprobs[r].double().numpy()) * 2**31).astype(np.int64))
        w0, w1, _, _ = words_of(r, 77)
        target = (((w0 >> 1) << 31 | w1 >> 1) * int(through[-1])) >> 62
        assert int(found[r]) == int((through <= target).sum())


def test_every_unit_of_weight_belongs_to_its_token():
    weights, total = torch.tensor([[2, 0, 3, 0]]), 5
    tokens = []
    for unit in range(total):
        bits = -(-unit * 2**62 // total)  # the smallest 62-bit number that maps to this unit
        words = tuple(torch.tensor([word]) for word in (bits >> 31 << 1, (bits & (2**31 - 1)) << 1, 0, 0))
        tokens.append(int(sampling.draw_weighted(weights.clone(), words)))
    assert tokens == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("vary", ["seed", "position", "draft"])
def test_frequencies(vary):
    count = 40_000
    probabilities = torch.tensor([0.4, 0.05, 0.0, 0.25, 0.2, 0.1])
    logprobs = probabilities.log().expand(count, -1)
    steps, fixed = torch.arange(count), torch.full((count,), 11)
    seeds, positions, drafts = {
        "seed": (steps, fixed, 0), "position": (fixed, steps, 0), "draft": (fixed, fixed, steps)}[vary]  # fmt: skip
    ids = sampling.draw(logprobs, seeds, positions, rng.PURPOSE_TARGET, drafts)
    counts = np.bincount(ids.numpy(), minlength=6)
    assert counts[2] == 0
    alive = [0, 1, 3, 4, 5]
    assert chi_square_z(counts[alive], probabilities[alive].numpy()) < 4


def test_chi_square_would_notice_a_wrong_distribution():
    counts = np.bincount(np.random.default_rng(0).choice(5, 40_000, p=[0.41, 0.05, 0.25, 0.2, 0.09]), minlength=5)
    assert chi_square_z(counts, [0.4, 0.05, 0.25, 0.2, 0.1]) > 4


def test_streams_of_neighbouring_seeds_positions_and_purposes_are_independent():
    count, logprobs = 20_000, torch.full((20_000, 4), 0.25).log()
    seeds, positions = torch.arange(count), torch.full((count,), 5)
    base = sampling.draw(logprobs, seeds, positions)
    others = {
        "seed": sampling.draw(logprobs, seeds + 1, positions),
        "position": sampling.draw(logprobs, seeds, positions + 1),
        "purpose": sampling.draw(logprobs, seeds, positions, rng.PURPOSE_DRAFT),
        "draft": sampling.draw(logprobs, seeds, positions, rng.PURPOSE_TARGET, 1),
    }
    for name, other in others.items():
        pairs = np.bincount((base * 4 + other).numpy(), minlength=16)
        assert chi_square_z(pairs, np.full(16, 1 / 16)) < 4, name


def test_draw_ignores_batch_and_order():
    logprobs = torch.randn(33, 1000, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    seeds, positions = torch.randint(-(2**62), 2**62, (33,)), torch.randint(0, 2**20, (33,))
    together = sampling.draw(logprobs, seeds, positions)
    order = torch.randperm(33)
    assert torch.equal(sampling.draw(logprobs[order], seeds[order], positions[order]), together[order])
    for r in range(33):
        one = slice(r, r + 1)
        assert torch.equal(sampling.draw(logprobs[one], seeds[one], positions[one]), together[one])
    assert len(set(together.tolist())) > 10


def test_rows_without_a_distribution_give_minus_one_and_harm_nobody():
    logprobs = torch.full((4, 8), 1 / 8).log()
    seeds, positions = torch.arange(4), torch.arange(4)
    clean = sampling.draw(logprobs, seeds, positions)
    logprobs[1] = -torch.inf
    logprobs[2, 3] = torch.nan
    assert sampling.draw(logprobs, seeds, positions).tolist() == [int(clean[0]), -1, -1, int(clean[3])]


def test_one_hot_rows_draw_their_token_for_every_seed():
    logprobs = torch.full((500, 9), -torch.inf)
    logprobs[torch.arange(500), torch.arange(500) % 9] = 0.0
    found = sampling.draw(logprobs, torch.arange(500), torch.zeros(500, dtype=torch.int64))
    assert torch.equal(found, torch.arange(500) % 9)


def test_no_rows():
    empty = torch.empty(0, dtype=torch.int64)
    assert sampling.draw(torch.empty(0, 5), empty, empty).shape == (0,)
    assert sampling.process(torch.empty(0, 5), torch.empty(0), None, None).shape == (0, 5)
