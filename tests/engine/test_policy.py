"""Policies: priorities, ageing, and that others can be plugged in."""

from __future__ import annotations

import pytest
from stub_executor import IN_ORDER, MODEL, StubExecutor, assert_idle, expected_tokens, make_config, make_engine, run_all

from deepinfer.engine.engine import Engine
from deepinfer.engine.policy import PriorityOrder, WaitingView
from deepinfer.entrypoints.prompts import asks_of
from deepinfer.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def first_scheduled(engine: Engine, limit: int = 10_000) -> list[str]:
    """Request ids in the order in which they were first scheduled."""
    results = run_all(engine, limit)
    assert_idle(engine)
    assert not any(result.failed for result in results.values())
    return sorted(results, key=lambda name: results[name].metrics.first_scheduled_time)


def clock():
    """A clock that never shows the same time twice."""
    times = iter(range(10**9))
    return lambda: float(next(times))


def engine_of(executor: StubExecutor | None = None, policy=None, order=None, **arguments) -> Engine:
    executor, config = executor or StubExecutor(), make_config(**arguments)
    executor.num_drafts = config.num_draft_tokens
    return Engine(config, executor, None, MODEL, policy=policy, order=order, clock=clock())


def test_lower_priorities_first_and_in_order_of_arrival_within_one():
    engine = engine_of(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1), ("f", 5)):
        engine.add_request(token_ids=[6, 7], params=PARAMS, priority=priority, request_id=name)
    assert first_scheduled(engine) == ["c", "e", "a", "d", "b", "f"]


def test_without_priorities_it_is_first_come_first_served():
    engine = engine_of(max_num_seqs=2)
    for name in "abcdef":
        engine.add_request(token_ids=[6, 7], params=PARAMS, request_id=name)
    assert first_scheduled(engine) == list("abcdef")


@IN_ORDER
def test_the_least_urgent_gives_way_even_if_it_came_first():
    engine = engine_of(StubExecutor(num_blocks=9), max_num_seqs=3)
    prompts = {"low": ([6] * 14, 3), "high": ([7] * 14, 0), "middle": ([8] * 14, 1)}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for name, (prompt, priority) in prompts.items():
        engine.add_request(token_ids=prompt, params=params, priority=priority, request_id=name)
    results = run_all(engine)
    preempted = {name: result.metrics.num_preemptions for name, result in results.items()}
    assert preempted["high"] == 0 < preempted["low"]
    for name, (prompt, _) in prompts.items():
        assert results[name].token_ids == expected_tokens(prompt, params)[0]
    assert_idle(engine)


def test_the_most_urgent_and_oldest_always_advances():
    """Under memory pressure every few steps commit a token of the first request of the lowest priority."""
    engine = engine_of(StubExecutor(num_blocks=8), max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for number in range(8):
        engine.add_request(token_ids=[6 + number] * 12, params=params, priority=number % 3)
    before = -1
    while (first := engine._live.get("0")) is not None:
        for _ in range(4):
            if engine.has_unfinished:
                engine.step()
        assert first.finished or first.num_preemptions == 0
        assert first.finished or len(first.output_ids) > before
        before = len(first.output_ids)
    run_all(engine)
    assert_idle(engine)


def test_ageing_lets_nobody_starve():
    """An unimportant request among a stream of urgent ones: without ageing it is last, with ageing it is not."""
    places = []
    for ageing in (None, 50.0):
        engine = engine_of(order=PriorityOrder(ageing), max_num_seqs=1)
        engine.add_request(token_ids=[6, 7], params=PARAMS, request_id="u", priority=0)
        engine.add_request(token_ids=[6, 7], params=PARAMS, request_id="low", priority=4)
        done, added = [], 0
        while engine.has_unfinished:
            if added < 40 and len(engine.scheduler._waiting) < 3:
                added += 1
                engine.add_request(token_ids=[6, 7], params=PARAMS, request_id=f"u{added}", priority=0)
            done += [output.request_id for output in engine.step()]
        assert len(done) == 42
        places.append(done.index("low"))
    assert places[0] == 41
    assert places[1] < 35


def test_rank_of_the_default_order():
    rank = PriorityOrder().rank
    assert rank(WaitingView(0, 1.0, 9.0)) < rank(WaitingView(1, 100.0, 0.0))
    assert rank(WaitingView(1, 1.0, 1.0)) < rank(WaitingView(1, 0.0, 2.0))
    aged = PriorityOrder(ageing=10.0).rank
    assert aged(WaitingView(1, 11.0, 0.0)) < aged(WaitingView(0, 0.0, 11.0))


@pytest.mark.parametrize("priority", [1.5, "high", True, None])
def test_a_wrong_priority_is_that_request_s_error(priority):
    engine = make_engine()
    bad = engine.add_request(token_ids=[6], params=PARAMS, priority=priority)
    good = engine.add_request(token_ids=[6], params=PARAMS)
    results = run_all(engine)
    assert "priority=" in str(results[bad].error) and "expected int" in str(results[bad].error)
    assert not results[good].failed


@IN_ORDER
def test_both_policies_are_objects_that_can_be_replaced():
    class DecodeFirst:
        """Prefill only when nobody runs."""

        def __init__(self):
            self.kinds = []

        def prefer_prefill(self, view):
            return not view.running

        def planned(self, kind):
            self.kinds.append(kind[0])

    class LastComeFirstServed:
        def rank(self, view):
            return -view.arrival

    policy = DecodeFirst()
    engine = engine_of(policy=policy, order=LastComeFirstServed(), max_num_batched_tokens=8, max_num_seqs=2)
    for priority in range(3):
        engine.add_request(token_ids=[6] * 8, params=PARAMS, priority=priority, request_id=str(priority))
    assert first_scheduled(engine) == ["2", "1", "0"]
    assert "".join(policy.kinds) == "pddddddd" * 3


@pytest.mark.parametrize(("given", "expected"), [(2, [2, 2]), ([1, -1], [1, -1]), (0, [0, 0])])
def test_generate_takes_one_priority_or_one_a_prompt(given, expected):
    asks = asks_of(None, None, [[6], [7]], priority=given)
    assert [ask.priority for ask in asks] == expected
    with pytest.raises(ValueError, match="priority has 3 entries for 2 prompts"):
        asks_of(None, None, [[6], [7]], priority=[1, 2, 3])
