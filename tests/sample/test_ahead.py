"""Rows whose position only the device knows: the same tokens, reports and refusals as rows with known positions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.sample.ahead import VerifyRows
from deepinfer.sample.rows import AheadRules
from deepinfer.sample.sampler import Sampler

V, EOS = 40, (3, 17)
PARAMS = [
    dict(temperature=0, min_tokens=4, stop_token_ids=[5, 6]),
    dict(temperature=1.0, min_tokens=2, top_logprobs=2),
    dict(temperature=0.7, top_p=0.8, golden_token_ids=[-1, 9, -1, 11]),
    dict(temperature=0, golden_token_ids=[1, 2], first_n_token_no_eos=1),
]
COUNTS, PROMPTS, GENERATED = [3, 1, 4, 2], [10, 20, 30, 40], [2, 1, 0, 1]
"""Rows, prompt lengths and tokens generated so far of four sequences."""


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2
    logits[:, [3, 5, 6]] += 6  # what the rules forbid is what the model wants
    return logits


def known(make_batch):
    """The batch of all rows with everything spelled out."""
    owners = np.repeat(np.arange(4), COUNTS)
    outputs = [GENERATED[s] + j for s in range(4) for j in range(COUNTS[s])]
    positions = [PROMPTS[s] + output for s, output in zip(owners.tolist(), outputs, strict=True)]
    seeds = [100 + s for s in owners.tolist()]
    return make_batch([PARAMS[s] for s in owners.tolist()], seeds=seeds, positions=positions, outputs=outputs)


def unknown(make_batch, slack: int = 3):
    """The same rows for a host that is `slack` tokens behind: rules with windows instead of answers."""
    batch = known(make_batch)
    golden = np.full((4, 12), -1, np.int32)
    golden_from = np.array(PROMPTS) + np.array(GENERATED) - slack
    for s, params in enumerate(PARAMS):
        for index, token in enumerate(params.get("golden_token_ids", ())):
            place = PROMPTS[s] + index - golden_from[s]
            if place >= 0:
                golden[s, place] = token
    early = [max(p.get("min_tokens", 0), p.get("first_n_token_no_eos", 0)) for p in PARAMS]
    rules = AheadRules(
        counts=np.array(COUNTS),
        eos_from=np.array(PROMPTS) + np.array(early),
        golden=golden,
        golden_from=golden_from,
        forbidden=np.array([(0, 5, PROMPTS[0] + 4), (0, 6, PROMPTS[0] + 4)]),
    )
    rows = len(batch.golden)
    return dataclasses.replace(
        batch, position=np.full(rows, -1), forbid_eos=np.zeros(rows, bool), golden=np.full(rows, -1, np.int32),
        forbidden=None, ahead=rules,
    )  # fmt: skip


def rows_of(drafts: list[int], logprobs: torch.Tensor | None = None) -> VerifyRows:
    counts, starts = np.array(COUNTS), np.cumsum(COUNTS) - COUNTS
    sequence = np.repeat(np.arange(4), COUNTS)
    positions = np.array(PROMPTS)[sequence] + np.array(GENERATED)[sequence] + np.arange(10) - starts[sequence]
    tensors = (torch.from_numpy(x) for x in (starts, sequence, positions, np.array(drafts)))
    return VerifyRows(counts, *tensors, logprobs)


def test_where_two_rules_forbid_the_same_id_the_stricter_one_counts(ops, make_batch):
    batch = make_batch([dict(temperature=0)] * 3, positions=[7, 8, 9])
    rows = VerifyRows(
        np.array([3]),
        torch.tensor([0]),
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([7, 8, 9]),
        torch.full((3,), -1),
    )
    logits = torch.zeros(3, V)
    logits[:, 3] = 9.0
    for eos_from, until in ((8, 9), (9, 8)):
        batch.ahead = AheadRules(np.array([3]), np.array([eos_from]), forbidden=np.array([(0, 3, until), (0, 99, 50)]))
        found = Sampler(ops, V, eos_ids=EOS).launch(logits, batch, rows).result()
        assert found.token_ids.tolist() == [0, 0, 3]


@pytest.mark.parametrize("seed", range(4))
def test_rows_ahead_equal_rows_with_known_positions(ops, make_batch, seed):
    sampler, logits = Sampler(ops, V, eos_ids=EOS, sum_smaller=True), logits_of(10, seed)
    wanted = sampler.sample(logits, known(make_batch))
    pending = sampler.launch(logits, unknown(make_batch), rows_of([-1] * 10))
    found = pending.result()
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.error == wanted.error == [None] * 10
    for name in ("logprobs", "top_ids", "top_logprobs", "sum_smaller"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    assert pending.accepted.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_accepted_drafts_are_the_prefix_that_agrees(ops, make_batch, rule):
    """Greedy and forced tokens decide under either rule; sampled ones under the coupled rule."""
    logits = logits_of(10)
    truth = Sampler(ops, V, eos_ids=EOS).sample(logits, known(make_batch)).token_ids.tolist()
    right = [*truth[:2], -1, -1, *truth[4:7], -1, truth[8], -1]
    certain = torch.full((10, V), -torch.inf)
    certain[range(10), [max(0, token) for token in right]] = 0.0
    sampler = Sampler(ops, V, eos_ids=EOS, rule=rule)
    for wrong, accepted in ((None, [2, 0, 3, 1]), (0, [0, 0, 3, 1]), (1, [1, 0, 3, 1]), (8, [2, 0, 3, 0])):
        drafts = [(token + 1) % V if row == wrong else token for row, token in enumerate(right)]
        pending = sampler.launch(logits, unknown(make_batch), rows_of(drafts, certain if rule == "rejection" else None))
        found = pending.accepted.tolist()
        if rule == "coupled":
            assert pending.result().token_ids.tolist() == truth
            assert found == accepted
        else:
            assert (found[0], found[1], found[3]) == (accepted[0], accepted[1], accepted[3])


def test_all_greedy_rows_take_the_short_way_to_the_same_end(ops, make_batch):
    """A batch with one sampled row goes through `sampling.verify`, one without does not; greedy rows must not
    notice."""
    logits, counts = logits_of(4, 7), np.array([4])
    rows = VerifyRows(
        counts, torch.tensor([0]), torch.zeros(4, dtype=torch.int64), torch.arange(5, 9), torch.tensor([8, 9, 10, -1])
    )
    best = logits.argmax(-1).tolist()
    rows.draft_ids[:2] = torch.tensor(best[:2])
    batch = make_batch([dict(temperature=0)] * 4, positions=[5, 6, 7, 8])
    batch.ahead = AheadRules(counts, np.zeros(1, np.int64))
    alone = Sampler(ops, V).launch(logits, batch, rows)
    assert (alone.token_ids.tolist(), alone.accepted.tolist()) == (best, [2])
    mixed_batch = make_batch([dict(temperature=0)] * 4 + [dict(temperature=1.0)], positions=[5, 6, 7, 8, 3])
    mixed_batch.ahead = AheadRules(np.array([4, 1]), np.zeros(2, np.int64))
    mixed_rows = VerifyRows(
        np.array([4, 1]), torch.tensor([0, 4]), torch.tensor([0, 0, 0, 0, 1]), torch.tensor([5, 6, 7, 8, 3]),
        torch.cat((rows.draft_ids, torch.tensor([-1]))),
    )  # fmt: skip
    mixed = Sampler(ops, V).launch(torch.cat((logits, logits_of(1, 9))), mixed_batch, mixed_rows)
    assert (mixed.token_ids[:4].tolist(), mixed.accepted[0].item()) == (best, 2)


def test_a_row_without_tokens_says_so_and_at_which_position(ops, make_batch):
    """Forbidden by the rules is not the same as non-finite."""
    batch = unknown(make_batch)
    logits = torch.full((10, V), -torch.inf)
    logits[:, 3] = 1.0
    logits[9, 2] = torch.nan
    result = Sampler(ops, V, eos_ids=EOS).launch(logits, batch, rows_of([-1] * 10)).result()
    assert "no token is allowed" in result.error[0] and "position 12" in result.error[0]
    assert result.error[2] is None, "behind min_tokens the end token may come"
    assert "NaN" in result.error[9] and "position 42" in result.error[9]
    assert result.token_ids[[0, 9]].tolist() == [-1, -1]


def test_an_unknown_rule_is_refused(ops):
    with pytest.raises(ConfigError, match="'strict', expected one of coupled, rejection"):
        Sampler(ops, V, rule="strict")
