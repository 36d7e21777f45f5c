"""Tokens: whatever the batch, the chunks and the memory, a request gets what it would get alone."""

from __future__ import annotations

import numpy as np
import pytest
from stub_executor import IN_ORDER, StubExecutor, assert_idle, expected_tokens, make_engine, run_all

from deepinfer.environ import Settings
from deepinfer.sampling_params import SamplingParams

RNG = np.random.default_rng(3)


def prompt_of(length: int) -> list[int]:
    return RNG.integers(6, 90, length).tolist()


GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("copies", [1, 16])
@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17])
def test_prompts_around_block_borders(length, copies):
    """SC03: lengths B-1, B, B+1, 2B-1, 2B, 2B+1 for blocks of B = 8 tokens."""
    engine, prompt = make_engine(max_num_seqs=16), prompt_of(length)
    for _ in range(copies):
        engine.add_request(token_ids=prompt, params=GREEDY)
    results = run_all(engine)
    assert {tuple(result.token_ids) for result in results.values()} == {tuple(expected_tokens(prompt, GREEDY)[0])}
    assert len(results) == copies
    assert_idle(engine)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 13, 64, 200])
def test_chunk_size_changes_nothing(budget):
    prompts = [prompt_of(length) for length in (1, 12, 50, 100)]
    params = SamplingParams(temperature=0, max_tokens=12)
    engine = make_engine(max_num_batched_tokens=budget, max_num_seqs=min(budget, 8))
    for prompt in prompts:
        engine.add_request(token_ids=prompt, params=params)
    results = run_all(engine)
    for number, prompt in enumerate(prompts):
        assert (results[str(number)].token_ids, results[str(number)].finish_reason) == expected_tokens(prompt, params)
    assert_idle(engine)


def pressed_engine(num_blocks: int, **arguments):
    """Eight requests that cannot all stay: blocks of 8 tokens, 60 tokens each in the end."""
    engine = make_engine(StubExecutor(num_blocks=num_blocks), **arguments)
    prompts = [prompt_of(length) for length in (5, 9, 16, 20, 3, 8, 11, 14)]
    return engine, prompts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_blocks", [12, 20, 33])
def test_preempted_requests_continue_seamlessly(num_blocks, temperature):
    """SC04: several of eight are preempted; tokens equal those of a request alone, none missing, none doubled."""
    engine, prompts = pressed_engine(num_blocks)
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(token_ids=prompt, params={**params.to_dict(), "seq_seed": number})
    results = run_all(engine)
    for number, prompt in enumerate(prompts):
        result = results[str(number)]
        assert (result.token_ids, result.finish_reason) == expected_tokens(prompt, params, seed=number)
        assert len(result.logprobs) == len(result.token_ids)
    preempted = [result.metrics.num_preemptions for result in results.values()]
    assert sum(count > 0 for count in preempted) >= 3
    assert engine.stats.preemptions == sum(preempted)
    assert_idle(engine)


def test_some_requests_are_preempted_twice_and_still_right():
    engine, prompts = pressed_engine(12)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for prompt in prompts:
        engine.add_request(token_ids=prompt, params=params)
    results = run_all(engine)
    assert max(result.metrics.num_preemptions for result in results.values()) >= 2
    for number, prompt in enumerate(prompts):
        assert results[str(number)].token_ids == expected_tokens(prompt, params)[0]


@IN_ORDER
def test_half_prefilled_request_is_preempted_before_its_first_token():
    executor = StubExecutor(num_blocks=11)
    engine = make_engine(executor, max_num_batched_tokens=8)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    first, long = prompt_of(8), prompt_of(70)
    engine.add_request(token_ids=first, params=params)
    engine.step()  # the first request fills one block and needs another for its next token
    engine.add_request(token_ids=long, params=GREEDY)  # takes the other nine, 8 tokens a step
    while executor.batches[-1].kind == "prefill":
        engine.step()
    assert engine.scheduler.num_waiting == 1, "the prompt under way has given its blocks back"
    results = run_all(engine)
    assert [results[name].metrics.num_preemptions for name in "01"] == [0, 1]
    assert results["0"].token_ids == expected_tokens(first, params)[0]
    assert results["1"].token_ids == expected_tokens(long, GREEDY)[0]
    assert_idle(engine)


def test_no_block_is_demanded_before_one_is_needed():
    """A pool that holds both sequences exactly: nobody is preempted."""
    engine = make_engine(StubExecutor(num_blocks=5))
    for _ in range(2):
        engine.add_request(token_ids=prompt_of(9), params=SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    results = run_all(engine)
    assert [result.metrics.num_preemptions for result in results.values()] == [0, 0]


def test_stop_preempted_request_ends_it_with_its_tokens():
    engine, prompts = pressed_engine(20, stop_preempted_request=True)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for prompt in prompts:
        engine.add_request(token_ids=prompt, params=params)
    results = run_all(engine)
    stopped = [key for key, result in results.items() if result.finish_reason == "insufficient_system_resource"]
    assert stopped
    for key in stopped:
        tokens = results[key].token_ids
        assert tokens == expected_tokens(prompts[int(key)], params)[0][: len(tokens)]
        assert "stop_preempted_request" in str(results[key].error)
    assert_idle(engine)


def test_cache_too_small_for_the_output_ends_the_request_honestly():
    engine = make_engine(StubExecutor(num_blocks=4))
    prompt = prompt_of(10)
    engine.add_request(token_ids=prompt, params=SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
    (result,) = run_all(engine).values()
    assert result.finish_reason == "insufficient_system_resource"
    assert len(result) == 24 - 10 + 1  # 3 blocks of 8 hold all but the newest token
    assert "cache of 3 blocks" in str(result.error)
    assert_idle(engine)


def test_order_of_prompts_and_of_calls_does_not_matter():
    """SA02: the random stream depends on (seed, position) only."""
    prompts = [prompt_of(length) for length in range(4, 12)]

    def run(order, split):
        outputs = {}
        engine = make_engine()
        for group in (order[:split], order[split:]):
            names = {}
            for seed in group:
                params = SamplingParams(temperature=1.0, max_tokens=20, seq_seed=seed)
                names[engine.add_request(token_ids=prompts[seed], params=params)] = seed
            outputs |= {names[key]: result.token_ids for key, result in run_all(engine).items()}
        return [outputs[seed] for seed in range(8)]

    forward = run(list(range(8)), 8)
    assert forward == run(list(range(8))[::-1], 8) == run(list(range(8)), 3)
    assert forward == [
        expected_tokens(p, SamplingParams(max_tokens=20), seed=seed)[0] for seed, p in enumerate(prompts)
    ]


def test_shared_params_give_a_stream_to_every_request_and_the_engine_seed_repeats_them():
    prompt, params = prompt_of(6), SamplingParams(max_tokens=12, ignore_eos=True)

    def run(seed):
        engine = make_engine(seed=seed)
        for _ in range(4):
            engine.add_request(token_ids=prompt, params=params)
        results = run_all(engine)
        return [tuple(results[str(number)].token_ids) for number in range(4)]

    first = run(1)
    assert len(set(first)) == 4
    assert first == run(1)
    assert not set(first) & set(run(2))


def test_golden_tokens_are_forced_and_minus_one_is_free():
    prompt = prompt_of(5)
    params = SamplingParams(temperature=0, max_tokens=6, golden_token_ids=[40, -1, 41], ignore_eos=True)
    engine = make_engine()
    engine.add_request(token_ids=prompt, params=params)
    (result,) = run_all(engine).values()
    assert result.token_ids == expected_tokens(prompt, params)[0]
    assert (result.token_ids[0], result.token_ids[2]) == (40, 41)


def test_without_chunking_prompts_share_a_step_only_if_they_fit_whole():
    executor = StubExecutor()
    engine = make_engine(executor, chunked_prefill=False, max_model_len=64, max_num_batched_tokens=64)
    prompts = [prompt_of(length) for length in (40, 30, 20)]
    for prompt in prompts:
        engine.add_request(token_ids=prompt, params=GREEDY)
    results = run_all(engine)
    prefills = [batch.q_lens.tolist() for batch in executor.batches if batch.kind == "prefill"]
    assert prefills == [[40], [30, 20]]
    assert [results[str(n)].token_ids for n in range(3)] == [expected_tokens(p, GREEDY)[0] for p in prompts]


def test_a_slot_is_zeroed_for_every_owner():
    """V401: a reused slot starts clean (the stub refuses one that was not zeroed)."""
    executor = StubExecutor(num_slots=2)
    engine = make_engine(executor)
    for length in (30, 5, 12):
        engine.add_request(token_ids=prompt_of(length), params=GREEDY)
    run_all(engine)
    assert executor.zeroed == [1, 1, 1]


def test_data_lens_is_the_length_a_prefill_runs_to():
    executor = StubExecutor(num_blocks=12)
    engine = make_engine(executor, max_num_batched_tokens=16)
    prompts = [prompt_of(30), prompt_of(20)]
    for prompt in prompts:
        engine.add_request(token_ids=prompt, params=SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    results = run_all(engine)
    assert any(result.metrics.num_preemptions for result in results.values())
    first = [batch for batch in executor.batches if batch.kind == "prefill" and 0 in batch.q_starts]
    lengths = [int(length) for batch in first for length in batch.data_lens[batch.q_starts == 0]]
    assert lengths[:2] == [30, 20]
    assert len(lengths) > 2
    assert all(length > 20 for length in lengths[2:])


def test_context_cap_of_a_prefill_step():
    executor = StubExecutor()
    engine = make_engine(executor, settings=Settings(prefill_max_sum_seqlen_k=30))
    for length in (20, 9, 8, 50):
        engine.add_request(token_ids=prompt_of(length), params=GREEDY)
    run_all(engine)
    prefills = [batch.q_lens.tolist() for batch in executor.batches if batch.kind == "prefill"]
    assert prefills == [[20, 9], [8], [50]]  # a single sequence may exceed the cap, otherwise it would never run
