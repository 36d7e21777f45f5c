"""`Sampler` as the engine sees it: greedy, seeds, masks, forced tokens, reports, and one bad row among good ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.sample.sampler import Sampler, SamplingBatch

V = 96


def logits_of(rows, width=V, seed=0, scale=3.0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def take(batch: SamplingBatch, rows) -> SamplingBatch:
    """The batch of some rows only."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return SamplingBatch(**{name: None if value is None else value[rows] for name, value in values.items()})


MIXED = [
    dict(temperature=0), dict(temperature=0.7), dict(temperature=1.0, top_p=0.8), dict(temperature=2.0, top_k=3),
    dict(temperature=0, top_p=0.5), dict(temperature=1e-6), dict(top_p=0.9, top_k=7),
    dict(temperature=0.9, top_logprobs=4),
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-5, 1e-4, 1e-2])
@pytest.mark.parametrize("top_p", [1e-4, 1e-9, 1.0])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_small_temperatures_are_greedy_and_finite(ops, make_batch, temperature, top_p, scale):
    logits = logits_of(16, seed=5) * scale
    rows = Sampler(ops, V).sample(logits, make_batch([dict(temperature=temperature, top_p=top_p)] * 16))
    assert rows.error == [None] * 16
    assert np.isfinite(rows.logprobs).all()
    assert (rows.logprobs <= 0).all()
    if temperature <= 1e-4 or top_p < 1 or scale > 1:
        assert rows.token_ids.tolist() == logits.argmax(-1).tolist()


def test_near_ties_at_the_greedy_limit_are_not_left_to_chance(ops, make_batch):
    logits = torch.zeros(64, V)
    logits[:, 40] = 1e-6
    rows = Sampler(ops, V).sample(logits, make_batch([dict(temperature=1e-4)] * 64))
    assert set(rows.token_ids.tolist()) == {40}


def test_exact_ties_lowest_id_alone_and_in_a_batch(ops, make_batch):
    logits = logits_of(8)
    logits[:, [70, 13]] = 30.0
    sampler = Sampler(ops, V)
    params = [dict(temperature=0, top_logprobs=2)]
    together = sampler.sample(logits, make_batch(params * 8))
    assert together.token_ids.tolist() == [13] * 8
    assert together.top_ids.tolist() == [[13, 70]] * 8  # the reported rank follows the same rule
    assert sampler.sample(logits[:1], make_batch(params)).token_ids.tolist() == [13]


def test_rows_do_not_depend_on_batch_order_or_chunking(ops, make_batch):
    logits, sampler = logits_of(8), Sampler(ops, V, sum_smaller=True)
    batch = make_batch(MIXED, seeds=range(100, 108), positions=range(8))
    together = sampler.sample(logits, batch)
    for rows in ([7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 2], [3], [5, 1], [4, 4]):
        part = sampler.sample(logits[rows], take(batch, rows))
        for name in ("token_ids", "logprobs", "sum_smaller"):
            assert np.array_equal(getattr(part, name), getattr(together, name)[rows]), (rows, name)


def test_greedy_alone_equals_greedy_beside_sampled_rows(ops, make_batch):
    """The all-greedy shortcut gives the tokens and the very same logprobs as the general path."""
    logits, sampler = logits_of(6, width=3000), Sampler(ops, 3000)
    alone = sampler.sample(logits, make_batch([dict(temperature=0)] * 6))
    mixed = sampler.sample(logits, make_batch([dict(temperature=0, top_k=2)] * 5 + [dict(top_p=0.9, top_logprobs=3)]))
    assert np.array_equal(alone.token_ids[:5], mixed.token_ids[:5])
    assert np.array_equal(alone.logprobs[:5], mixed.logprobs[:5])
    assert alone.top_ids is None
    assert mixed.top_ids.shape == (6, 3)
    expected = logits.double().log_softmax(-1).amax(-1)
    np.testing.assert_allclose(alone.logprobs, expected, rtol=1e-6)  # temperature 1, not the one-hot's 0


def test_seed_and_position_decide(ops, make_batch):
    logits, sampler = torch.zeros(1, V).expand(40, V), Sampler(ops, V)

    def run(seeds, positions):
        return sampler.sample(logits, make_batch([{}] * 40, seeds=seeds, positions=positions)).token_ids

    by_seed, by_position = run(range(40), [7] * 40), run([7] * 40, range(40))
    assert len(set(by_seed.tolist())) > 15
    assert len(set(by_position.tolist())) > 15
    assert len(set(run([3] * 40, [9] * 40).tolist())) == 1
    assert np.array_equal(run(range(40), [7] * 40), by_seed)


def test_large_seeds_use_all_64_bits(ops, make_batch):
    logits, sampler = torch.zeros(4, V), Sampler(ops, V)
    seeds = [1, 1 + 2**32, 1 + 2**63, 2**64 - 1]
    rows = [sampler.sample(logits, make_batch([{}] * 4, seeds=seeds, positions=[p] * 4)).token_ids for p in range(12)]
    streams = np.stack(rows, 1)
    assert len({tuple(stream) for stream in streams.tolist()}) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "row of nan", "row of -inf"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_non_finite_row_ends_alone(ops, make_batch, value, temperature):
    logits, sampler = logits_of(3), Sampler(ops, V, sum_smaller=True)
    batch = make_batch([dict(temperature=temperature, top_p=0.9, top_logprobs=2)] * 3, positions=[5, 6, 7])
    clean = sampler.sample(logits, batch)
    broken = logits.clone()
    if value == "row of nan":
        broken[1] = torch.nan
    elif value == "row of -inf":
        broken[1] = -torch.inf
    else:
        broken[1, 17] = value
    rows = sampler.sample(broken, batch)
    assert rows.error[0] is None
    assert rows.error[2] is None
    assert "non-finite logits" in rows.error[1]
    assert "position 6" in rows.error[1]
    assert rows.token_ids[1] == -1
    for name in ("token_ids", "logprobs", "top_ids", "top_logprobs", "sum_smaller"):
        assert np.array_equal(getattr(rows, name)[[0, 2]], getattr(clean, name)[[0, 2]])


def test_bans_apply_to_greedy_and_sampled_rows(ops, make_batch):
    logits = logits_of(200)
    logits[:, 90:] += 50  # head rows without a token would win
    sampler = Sampler(ops, V, blacklist="0..3,7, 10..12", banned_ids=range(90, V))
    rows = sampler.sample(logits, make_batch([dict(temperature=t, top_logprobs=5) for t in (0, 2) for _ in range(100)]))
    banned = {0, 1, 2, 3, 7, 10, 11, 12, *range(90, V)}
    assert not banned & set(rows.token_ids.tolist())
    assert not banned & set(rows.top_ids.flatten().tolist())
    assert rows.error == [None] * 200


def test_banning_everything_is_refused():
    with pytest.raises(ConfigError, match="all 8 token ids are banned"):
        Sampler(_NoOps(), 8, blacklist="0..7")
    with pytest.raises(ConfigError, match="banned_ids: token id 8 is outside"):
        Sampler(_NoOps(), 8, banned_ids=[8])
    with pytest.raises(ConfigError, match="FORCE_TOPK=-1"):
        Sampler(_NoOps(), 8, force_topk=-1)


class _NoOps:
    sampling = None


def test_end_tokens_and_stop_ids_wait_for_min_tokens(ops, make_batch):
    logits = torch.zeros(3, V)
    logits[:, 5], logits[:, 6], logits[:, 7], logits[:, 8] = 9.0, 8.0, 7.0, 6.0
    sampler = Sampler(ops, V, eos_ids=[5, 6])
    params = dict(temperature=0, min_tokens=2, stop_token_ids=[7, 10_000])
    rows = sampler.sample(logits, make_batch([params] * 3, outputs=[0, 1, 2]))
    assert rows.token_ids.tolist() == [8, 8, 5]
    first = make_batch([dict(temperature=0, first_n_token_no_eos=1)] * 2, outputs=[0, 1])
    assert sampler.sample(logits[:2], first).token_ids.tolist() == [7, 5]
    logits[:, 5:7] = 0
    rows = sampler.sample(logits, make_batch([params] * 3, outputs=[0, 1, 2]))
    assert rows.token_ids.tolist() == [8, 8, 7]


def test_grammar_mask(ops, make_batch):
    batch = make_batch([dict(temperature=0), dict(temperature=1), dict(temperature=0)])
    batch.allowed_mask = np.full((3, 3), -1, np.int32)
    batch.allowed_mask[1] = 0
    batch.allowed_mask[1, 2] = np.int32(1 << 4)  # id 68
    batch.allowed_mask[2] = 0
    rows = Sampler(ops, V).sample(logits_of(3), batch)
    assert rows.token_ids[:2].tolist() == [int(logits_of(3)[0].argmax()), 68]
    assert rows.logprobs[1] == 0
    assert rows.error[:2] == [None, None]
    assert "no token is allowed" in rows.error[2]


def test_golden_tokens_are_emitted_with_the_models_logprob(ops, make_batch):
    logits = logits_of(4)
    params = [dict(temperature=0, golden_token_ids=[3, -1]), dict(temperature=1, top_k=1, golden_token_ids=[3])]
    rows = Sampler(ops, V).sample(logits, make_batch(params * 2, outputs=[0, 0, 1, 1]))
    assert rows.token_ids[:2].tolist() == [3, 3]
    np.testing.assert_allclose(rows.logprobs[0], logits[0].log_softmax(-1)[3], rtol=1e-6)
    assert rows.logprobs[1] == -9999.0  # pruned by top-k, forced all the same
    assert rows.token_ids[2:].tolist() == logits[2:].argmax(-1).tolist()


def test_golden_token_outside_the_vocabulary_fails_its_row_only(ops, make_batch):
    rows = Sampler(ops, V).sample(logits_of(2), make_batch([dict(golden_token_ids=[V]), {}], outputs=[0, 0]))
    assert rows.token_ids[0] == -1
    assert f"golden_token_ids: {V}" in rows.error[0]
    assert rows.error[1] is None
    assert rows.token_ids[1] >= 0


def test_reports_come_from_the_processed_distribution(ops, make_batch):
    logits = logits_of(50)
    params = [dict(temperature=0.5, top_k=4, top_logprobs=6)] * 50
    rows = Sampler(ops, V, sum_smaller=True).sample(logits, make_batch(params))
    for r in range(50):
        order = logits[r].double().argsort(descending=True)[:4]
        expected = (logits[r, order].double() / 0.5).log_softmax(-1)
        assert rows.top_ids[r, :4].tolist() == order.tolist()
        np.testing.assert_allclose(rows.top_logprobs[r, :4], expected, atol=1e-6)
        assert (rows.top_logprobs[r, 4:] == -9999).all()
        rank = order.tolist().index(int(rows.token_ids[r]))
        np.testing.assert_allclose(rows.logprobs[r], expected[rank], atol=1e-6)
        np.testing.assert_allclose(rows.sum_smaller[r], expected[rank:].exp().sum(), atol=1e-6)


def test_force_topk_changes_sampled_and_greedy_rows(ops, make_batch):
    logits = torch.zeros(400, V)
    rows = Sampler(ops, V, force_topk=2).sample(
        logits, make_batch([dict(temperature=t) for t in (0, 5) for _ in range(200)])
    )
    assert set(rows.token_ids[:200].tolist()) == {0}
    assert set(rows.token_ids[200:].tolist()) == {0, 1}
    np.testing.assert_allclose(rows.logprobs, np.log(0.5), rtol=1e-6)


def test_launch_leaves_tokens_on_the_device_for_the_next_step(ops, make_batch):
    logits, sampler = logits_of(2), Sampler(ops, V)
    pending = sampler.launch(logits, make_batch([dict(temperature=0)] * 2))
    assert torch.equal(pending.token_ids, logits.argmax(-1))
    assert pending.result().token_ids.tolist() == pending.token_ids.tolist()


def test_empty_batch_and_wrong_shape(ops, make_batch):
    rows = Sampler(ops, V).sample(torch.empty(0, V), make_batch([]))
    assert rows.token_ids.shape == (0,)
    assert rows.error == []
    with pytest.raises(ValueError, match="2 rows"):
        Sampler(ops, V).sample(torch.empty(3, V), make_batch([{}, {}]))


def test_frequencies_follow_temperature_and_filters(ops, make_batch):
    count = 6000
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, -9.0]).expand(count, 5)
    batch = make_batch([dict(temperature=2.0, top_p=0.85)] * count, seeds=range(count))
    ids = Sampler(ops, 5).sample(logits, batch).token_ids
    weights = np.exp(np.array([1.0, 2.0, 3.0]) / 2)  # masses .455 .276 .167: the fourth token starts at .898 > .85
    expected = weights / weights.sum()
    found = np.bincount(ids, minlength=5) / count
    assert found[0] == 0
    assert found[4] == 0
    assert (abs(found[1:4] - expected) < 4 * np.sqrt(expected * (1 - expected) / count)).all()
