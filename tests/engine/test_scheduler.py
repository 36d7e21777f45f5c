"""The scheduler by itself: order, budgets, alternation, who is preempted, what a plan contains."""

from __future__ import annotations

import numpy as np
import pytest
from stub_executor import IN_ORDER, StubExecutor, make_config, make_engine

from deepinfer.engine.engine import default_policy
from deepinfer.engine.policy import AlternationPolicy, QueueView
from deepinfer.environ import Settings
from deepinfer.sampling_params import SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def kinds(executor: StubExecutor) -> str:
    """The steps so far as a string of p and d."""
    return "".join(batch.kind[0] for batch in executor.batches)


def steps(engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def test_chunks_of_one_prompt_go_first_and_the_rest_of_the_budget_to_the_next():
    executor = StubExecutor()
    engine = make_engine(executor, max_num_batched_tokens=16)
    for length in (40, 5, 20):
        engine.add_request(token_ids=[6] * length, params=LONG)
    while engine.scheduler.num_waiting or kinds(executor).count("p") < 5:
        engine.step()
    chunks = [
        list(zip(b.q_starts.tolist(), b.q_lens.tolist(), strict=True)) for b in executor.batches if b.kind == "prefill"
    ]
    assert chunks == [[(0, 16)], [(16, 16)], [(32, 8), (0, 5), (0, 3)], [(3, 16)], [(19, 1)]]
    sampled = [b.sampled.tolist() for b in executor.batches if b.kind == "prefill"]
    assert sampled == [[False], [False], [True, True, False], [False], [True]]


@IN_ORDER
def test_history_of_a_chunk_comes_from_the_same_sequence():
    """V403: every chunk border of a 12-token prompt, with a neighbour's rows right before it."""
    for budget in range(3, 9):
        executor = StubExecutor()
        engine = make_engine(executor, max_num_batched_tokens=budget, max_num_seqs=2)
        engine.add_request(token_ids=[50, 51], params=LONG)
        engine.add_request(token_ids=list(range(20, 32)), params=LONG)
        steps(engine, 20)
        rows = [b.history[i].tolist() for b in executor.batches for i, s in enumerate(b.slots) if s == 2]
        starts = [int(b.q_starts[i]) for b in executor.batches for i, s in enumerate(b.slots) if s == 2]
        for start, history in zip(starts, rows, strict=True):
            if start < 12:
                assert history == [-1, -1, -1, *range(20, 32)][start : start + 3]


@IN_ORDER
def test_prefill_waits_for_no_vote_and_decode_follows():
    executor = StubExecutor()
    engine = make_engine(executor)
    engine.add_request(token_ids=[6, 7], params=LONG)
    steps(engine, 3)
    engine.add_request(token_ids=[6, 8], params=LONG)
    steps(engine, 2)
    assert kinds(executor) == "pddpd"


@IN_ORDER
def test_decode_never_starves_behind_a_stream_of_prompts():
    executor = StubExecutor(num_slots=40, num_blocks=400)
    engine = make_engine(executor, max_num_seqs=32, max_num_batched_tokens=32)
    for _ in range(30):
        engine.add_request(token_ids=[6] * 32, params=LONG)
    steps(engine, 34)
    assert kinds(executor) == "p" * 8 + "d" + "p" * 8 + "d" + "p" * 8 + "d" + "p" * 6 + "d"


@IN_ORDER
def test_chunks_go_on_at_high_usage_but_new_prompts_wait():
    executor = StubExecutor(num_blocks=11)
    engine = make_engine(executor, max_num_batched_tokens=16)
    engine.add_request(token_ids=[6, 7], params=LONG)  # 1 block
    engine.step()
    engine.add_request(token_ids=[6] * 70, params=LONG)  # 9 blocks: usage 100 % after its first chunk
    engine.add_request(token_ids=[6], params=LONG)
    steps(engine, 6)
    assert kinds(executor) == "pppppp" + "d"
    assert engine.scheduler.num_waiting == 1


def test_max_num_seqs_bounds_what_runs():
    executor = StubExecutor()
    engine = make_engine(executor, max_num_seqs=3)
    for _ in range(5):
        engine.add_request(token_ids=[6, 7], params=LONG)
    steps(engine, 4)
    assert max(batch.num_sequences for batch in executor.batches) == 3
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (3, 2)


def test_a_request_that_has_to_wait_is_not_overtaken():
    executor = StubExecutor(num_blocks=8)
    engine = make_engine(executor)
    engine.add_request(token_ids=[6] * 30, params=LONG)  # 4 of 7 blocks
    engine.step()
    engine.add_request(token_ids=[7] * 30, params=LONG)  # does not fit now
    engine.add_request(token_ids=[8], params=LONG)  # would fit
    steps(engine, 3)
    assert {int(slot) for batch in executor.batches for slot in batch.slots} == {1}


def test_the_most_recently_admitted_gives_way():
    executor = StubExecutor(num_blocks=7)
    engine = make_engine(executor)
    names = [engine.add_request(token_ids=[6] * 14, params=LONG) for _ in range(3)]  # 2 blocks each: all 6
    steps(engine, 4)  # at 16 tokens the first needs a third block
    waiting = list(engine.scheduler._waiting)
    assert waiting == [names[2]]
    steps(engine, 9)
    assert list(engine.scheduler._waiting) == [names[1], names[2]]  # back in the order of arrival


@IN_ORDER
def test_scheduled_and_completed_tokens_are_kept_apart():
    engine = make_engine()
    engine.add_request(token_ids=[6, 7, 8], params=LONG)
    scheduler = engine.scheduler
    plan = scheduler.plan()
    table, slot = scheduler.table, int(plan.slots[0])
    assert (table.scheduled[slot], table.completed[slot], table.in_flight[slot]) == (3, 0, 1)
    scheduler.complete(plan, plan.q_lens)
    assert (table.scheduled[slot], table.completed[slot], table.in_flight[slot]) == (3, 3, 0)


@IN_ORDER
def test_decode_plan_is_in_order_of_admission_and_pure():
    executor = StubExecutor()
    engine = make_engine(executor)
    for _ in range(4):
        engine.add_request(token_ids=[6, 7], params=LONG)
    steps(engine, 2)
    plan = engine.scheduler.plan()
    assert plan.kind == "decode"
    assert [seq.request_id for seq in plan.sequences] == ["0", "1", "2", "3"]
    np.testing.assert_array_equal(plan.q_lens, 1)
    assert not plan.fresh_slots


# --- the policy ---


def view(waiting=1, prefilling=False, running=1, usage=0.5):
    return QueueView(waiting, prefilling, running, usage)


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        (view(), True),
        (view(usage=0.9), True),
        (view(usage=0.95), False),
        (view(usage=0.95, prefilling=True), True),
        (view(usage=0.95, running=0), True),
        (view(waiting=0), False),
        (view(waiting=0, prefilling=True), True),
    ],
)
def test_default_policy(state, wanted):
    assert AlternationPolicy().prefer_prefill(state) is wanted


def test_attempt_interval_counts_decode_steps_and_only_where_it_was_set():
    policy = AlternationPolicy(attempt_interval=3)
    answers = []
    for _ in range(8):
        answers.append(policy.prefer_prefill(view()))
        policy.planned("decode")
    assert answers == [True, False, False, True, False, False, True, False]
    assert default_policy(make_config()).attempt_interval == 1
    chosen = Settings.load({"DEEPINFER_PREFILL_ATTEMPT_INTERVAL": "70"})
    assert default_policy(make_config(settings=chosen)).attempt_interval == 70
