"""Every request ends with exactly one result, whatever happens to it, and nothing it held is lost."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from stub_executor import (
    IMAGE,
    MODEL,
    PLAIN,
    VOCAB,
    StubExecutor,
    assert_idle,
    expected_tokens,
    make_config,
    make_engine,
    run_all,
)

from deepinfer.engine.engine import Engine
from deepinfer.environ import Settings
from deepinfer.errors import ConfigError, EngineError, RequestError
from deepinfer.sampling_params import SamplingParams

CANARY = [6, 7, 8]
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def run_canary(engine) -> None:
    """R4: afterwards the engine works as before and holds nothing."""
    name = engine.add_request(token_ids=CANARY, params=PARAMS)
    assert run_all(engine)[name].token_ids == expected_tokens(CANARY, PARAMS)[0]
    assert_idle(engine)


# --- requests that are wrong ---


@pytest.mark.parametrize(
    ("token_ids", "names"),
    [
        ([0, VOCAB], [str(VOCAB), "position 1", f"[0, {VOCAB})"]),
        ([6, -1, 7], ["-1", "position 1"]),
        ([6, 2**31 + 5], [str(2**31 + 5), "position 1"]),
        ([2**70, 6], [str(2**70), "position 0"]),
        ([2**63, -1], [str(2**63), "position 0"]),
        (np.array([6, 2**40], dtype=np.uint64), [str(2**40), "position 1"]),
        ([6, IMAGE], [str(IMAGE), "image"]),
        ([6.0, 7.0], ["6.0", "float"]),
        ([True, False], ["True", "bool"]),
        ([6, None], ["None", "position 1"]),
        ([[6, 7], [8, 9]], ["2 dimensions"]),
        ([[6], [8, 9]], ["list of token ids"]),
        ([], ["empty"]),
        (np.zeros(0, dtype=np.int64), ["empty"]),
    ],
)
def test_bad_token_ids_fail_alone_and_by_name(token_ids, names):
    """SC06: the wrong request has its error in its place, the others are untouched."""
    engine = make_engine()
    engine.add_request(token_ids=[6, 9, 10], params=PARAMS)
    engine.add_request(token_ids=token_ids, params=PARAMS)
    engine.add_request(token_ids=[6, 11], params=PARAMS)
    results = run_all(engine)
    assert [results[str(n)].finish_reason for n in range(3)] == ["length", "error", "length"]
    assert isinstance(results["1"].error, RequestError)
    assert all(name in str(results["1"].error) for name in names), results["1"].error
    assert len(results["1"]) == 0
    assert results["0"].token_ids == expected_tokens([6, 9, 10], PARAMS)[0]
    assert results["2"].token_ids == expected_tokens([6, 11], PARAMS)[0]
    run_canary(engine)


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"temperature": float("nan")}, ["temperature"]),
        ({"temprature": 1.0}, ["temprature", "temperature"]),
        ({"max_tokens": 1.5}, ["max_tokens"]),
        ({"stop_token_ids": [VOCAB]}, ["stop_token_ids", str(VOCAB)]),
        ({"golden_token_ids": [3, VOCAB + 1]}, ["golden_token_ids", str(VOCAB + 1)]),
        ({"so_args": {"schema_type": "regex", "schema": "a"}}, ["structured output", "tokenizer"]),
        ({"stop": ["x"]}, ["tokenizer"]),
        (7, ["sampling_params", "int"]),
    ],
)
def test_bad_parameters_end_only_their_request(params, names):
    engine = make_engine()
    engine.add_request(token_ids=[6, 9], params=params)
    (result,) = run_all(engine).values()
    assert result.finish_reason == "error"
    assert all(name in str(result.error) for name in names), result.error
    run_canary(engine)


def test_images_are_refused_and_an_empty_image_list_is_not():
    engine = make_engine()
    engine.add_request(
        token_ids=CANARY, params=PARAMS, multi_modal_data={"image_bytes": [b"x"], "image_sizes": [(1, 1)]}
    )
    engine.add_request(token_ids=CANARY, params=PARAMS, multi_modal_data={"image_bytes": [], "image_sizes": []})
    results = run_all(engine)
    assert "vision" in str(results["0"].error)
    assert results["1"].token_ids == expected_tokens(CANARY, PARAMS)[0]


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize(("length", "tokens"), [(63, 1), (64, None), (65, None), (62, 2)])
def test_prompts_at_the_length_limit(length, tokens, max_tokens):
    """SC02: max_model_len - 1 yields one token, from max_model_len on an error that names both lengths."""
    engine = make_engine(max_model_len=64)
    prompt = [6 + i % 50 for i in range(length)]
    engine.add_request(token_ids=prompt, params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    (result,) = run_all(engine).values()
    if tokens is None:
        assert result.finish_reason == "error"
        assert str(length) in str(result.error)
        assert "max_model_len=64" in str(result.error)
        assert len(result) == 0
    else:
        assert (len(result), result.finish_reason) == (min(tokens, max_tokens), "length")
        assert result.error is None
    run_canary(engine)


def test_prompt_larger_than_the_whole_cache_is_refused():
    engine = make_engine(StubExecutor(num_blocks=5))
    engine.add_request(token_ids=[6] * 32, params=PARAMS)
    engine.add_request(token_ids=[6] * 33, params=PARAMS)
    results = run_all(engine)
    assert results["0"].error is None or results["0"].finish_reason == "insufficient_system_resource"
    assert len(results["0"]) >= 1
    assert all(word in str(results["1"].error) for word in ("33", "32", "num_kv_blocks"))
    run_canary(engine)


def test_prompt_logprobs_are_refused_where_prefill_is_truncated():
    engine = make_engine(settings=Settings(yoco_prefill_truncation_mode="mask", yoco_prefill_keep_tokens=140))
    engine.add_request(token_ids=CANARY, params=SamplingParams(prompt_logprobs=True))
    (result,) = run_all(engine).values()
    assert "YOCO_PREFILL_TRUNCATION_MODE" in str(result.error)


def test_request_id_in_use_is_the_callers_mistake():
    engine = make_engine()
    engine.add_request(token_ids=CANARY, params=PARAMS, request_id="x")
    with pytest.raises(ValueError, match="'x'"):
        engine.add_request(token_ids=CANARY, params=PARAMS, request_id="x")
    assert list(run_all(engine)) == ["x"]
    engine.add_request(token_ids=CANARY, params=PARAMS, request_id="x")
    assert list(run_all(engine)) == ["x"]


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(1, 9), (9, 1)])
def test_executor_without_room_is_refused_at_start(num_blocks, num_slots):
    with pytest.raises(ConfigError, match="at least 2"):
        make_engine(StubExecutor(num_blocks=num_blocks, num_slots=num_slots))


# --- abort ---


def test_abort_of_unknown_ids_does_nothing():
    engine = make_engine()
    assert engine.abort_request("nobody") == []
    assert engine.abort_request(["nobody", "else"]) == []
    assert engine.take_outputs() == []


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 6, 9])
def test_abort_at_any_moment_gives_one_result_and_everything_back(steps):
    """SC07: waiting (0), half prefilled (1, 2), running (3, ...), finished (the last); also twice the same id."""
    engine = make_engine(max_num_batched_tokens=16)
    long, params = [6 + i % 60 for i in range(40)], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    name = engine.add_request(token_ids=long, params=params)
    other = engine.add_request(token_ids=CANARY, params=PARAMS)
    early = {result.request_id: result for _ in range(steps) for result in engine.step()}
    aborted = engine.abort_request([name, name])
    assert aborted == ([] if name in early else [name])
    assert engine.abort_request(name) == []
    results = early | run_all(engine)
    assert set(results) == {name, other}
    tokens = results[name].token_ids
    assert tokens == expected_tokens(long, params)[0][: len(tokens)]
    assert results[name].finish_reason == ("length" if name in early else "abort")
    assert results[name].error is None
    assert results[other].token_ids == expected_tokens(CANARY, PARAMS)[0]
    run_canary(engine)


def test_abort_of_a_preempted_request():
    engine = make_engine(StubExecutor(num_blocks=6))
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    for _ in range(2):
        engine.add_request(token_ids=[6] * 14, params=params)
    engine.step()
    while not engine.scheduler.num_waiting:
        engine.step()
    assert engine.abort_request("1") == ["1"]
    results = run_all(engine)
    assert results["1"].finish_reason == "abort"
    assert results["1"].metrics.num_preemptions == 1
    tokens = results["1"].token_ids
    assert tokens
    assert tokens == expected_tokens([6] * 14, params)[0][: len(tokens)]
    assert results["0"].token_ids == expected_tokens([6] * 14, params)[0]
    assert_idle(engine)


# --- failures while running ---


def test_row_without_a_token_ends_only_its_request():
    """SA03, engine part: non-finite logits of one request at its third token."""

    def refuse(history):
        return "non-finite logits: NaN" if history[:2] == [50, 51] and len(history) == 4 else None

    engine = make_engine(StubExecutor(refuse=refuse))
    engine.add_request(token_ids=[50, 51], params=PARAMS)
    engine.add_request(token_ids=CANARY, params=PARAMS)
    results = run_all(engine)
    assert results["0"].finish_reason == "error"
    assert "non-finite logits" in str(results["0"].error)
    assert results["0"].token_ids == expected_tokens([50, 51], PARAMS)[0][:2]
    assert results["1"].token_ids == expected_tokens(CANARY, PARAMS)[0]
    run_canary(engine)


@pytest.mark.parametrize("step", [1, 2, 4])
def test_failing_executor_ends_all_requests_and_the_next_run_works(step):
    executor = StubExecutor()
    engine = make_engine(executor, max_num_batched_tokens=16)
    for length in (40, 3, 5):
        engine.add_request(token_ids=[6] * length, params=PARAMS)
    executor.fail_at = {step}
    with pytest.raises(EngineError, match=f"step {step}") as caught:
        run_all(engine)
    assert isinstance(caught.value.__cause__, RuntimeError)
    results = {result.request_id: result for result in engine.take_outputs()}
    assert set(results) == {"0", "1", "2"}
    for result in results.values():
        assert result.finish_reason == "error"
        assert "injected failure" in str(result.error)
    assert_idle(engine)
    assert gc.isenabled()
    run_canary(engine)


def test_failure_while_zeroing_slots_is_a_failure_too():
    executor = StubExecutor()
    engine = make_engine(executor)
    zero_slots = executor.zero_slots
    executor.zero_slots = lambda slots: 1 / 0
    engine.add_request(token_ids=CANARY, params=PARAMS)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        engine.step()
    executor.zero_slots = zero_slots
    engine.take_outputs()
    run_canary(engine)


def test_interrupt_is_passed_on_and_leaves_a_usable_engine():
    executor = StubExecutor()
    engine = make_engine(executor)
    engine.add_request(token_ids=CANARY, params=PARAMS)
    engine.step()
    launch = executor.launch

    def interrupted(batch):
        raise KeyboardInterrupt

    executor.launch = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    executor.launch = launch
    (result,) = engine.take_outputs()
    assert (result.finish_reason, len(result)) == ("error", 1)
    run_canary(engine)


def test_close_aborts_and_is_idempotent():
    executor = StubExecutor()
    engine = make_engine(executor)
    engine.add_request(token_ids=CANARY, params=PARAMS)
    engine.step()
    engine.close()
    engine.close()
    assert executor.closed == 1
    (result,) = engine.take_outputs()
    assert result.finish_reason == "abort"
    assert_idle(engine)
    for call in (engine.step, lambda: engine.add_request(token_ids=CANARY)):
        with pytest.raises(EngineError, match="closed"):
            call()


# --- bookkeeping ---


@PLAIN
def test_metrics_follow_the_clock():
    ticks = iter(range(1, 10_000))
    engine = Engine(make_config(), StubExecutor(), None, MODEL, clock=lambda: float(next(ticks)))
    engine.add_request(token_ids=CANARY, params=PARAMS)
    (result,) = run_all(engine).values()
    metrics = result.metrics
    assert metrics.arrival_time < metrics.first_scheduled_time < metrics.first_token_time < metrics.finish_time
    assert metrics.queue_time == metrics.first_scheduled_time - metrics.arrival_time
    assert metrics.ttft == metrics.first_token_time - metrics.arrival_time
    assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (0, 0)


@PLAIN
def test_stats_count_steps_and_tokens():
    engine = make_engine(max_num_batched_tokens=16)
    engine.add_request(token_ids=[6] * 40, params=PARAMS)
    engine.add_request(token_ids=[VOCAB])
    run_all(engine)
    stats = engine.stats
    assert (stats.prefill_steps, stats.decode_steps, stats.prompt_tokens) == (3, 4, 40)
    assert (stats.generated_tokens, stats.finished, stats.steps) == (5, 2, 7)
    assert "2 finished" in stats.line()


def test_automatic_garbage_collection_pauses_only_while_busy():
    assert gc.isenabled()
    engine = make_engine()
    engine.add_request(token_ids=CANARY, params=PARAMS)
    engine.step()
    assert not gc.isenabled()
    run_all(engine)
    assert gc.isenabled()
    engine = make_engine(settings=Settings(gc_interval_step=0))
    engine.add_request(token_ids=CANARY, params=PARAMS)
    engine.step()
    assert gc.isenabled()


def test_ending_in_flight_keeps_memory_until_the_step_is_done_and_drops_its_token():
    """The seam for running a step ahead."""
    engine = make_engine()
    engine.add_request(token_ids=CANARY, params=PARAMS)
    engine.add_request(token_ids=[50, 51], params=PARAMS)
    scheduler = engine.scheduler
    step = engine._launch(scheduler.plan())
    assert engine.abort_request("0") == ["0"]
    (aborted,) = engine.take_outputs()
    slot = int(step.plan.slots[0])
    assert (scheduler.blocks.num_used, scheduler.slots.num_used) == (2, 2)
    assert (scheduler.table.scheduled[slot], scheduler.table.completed[slot]) == (3, 0)
    engine._commit(step)
    assert (scheduler.blocks.num_used, scheduler.slots.num_used) == (1, 1)
    assert (aborted.finish_reason, len(aborted)) == ("abort", 0)
    assert run_all(engine)["1"].token_ids == expected_tokens([50, 51], PARAMS)[0]
    assert_idle(engine)


def test_long_run_does_not_grow():
    """Thousands of steps with many requests in turn: the pools and tables are as before, no result is kept."""
    executor = StubExecutor(num_blocks=30, num_slots=9)
    engine = make_engine(executor)
    for round_ in range(60):
        for length in (3, 9, 20):
            engine.add_request(
                token_ids=[6 + round_ % 50] * length, params=SamplingParams(temperature=0, max_tokens=30)
            )
        run_all(engine)
        executor.batches.clear()
        assert_idle(engine)
    assert engine.stats.steps > 500
    assert engine.stats.finished == 180
