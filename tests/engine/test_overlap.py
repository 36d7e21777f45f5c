"""Planning ahead: what is in flight when, who waits for whom, and how little of the host's time the device notices."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
from stub_executor import MODES, PLAIN, StubExecutor, assert_idle, expected_tokens, make_engine, run_all

from deepinfer.engine.policy import AlternationPolicy
from deepinfer.errors import EngineError
from deepinfer.runner.executor import LocalExecutor, WorkerThread, load_on_thread
from deepinfer.runner.inputs import StepTiming
from deepinfer.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OVERLAP = pytest.mark.parametrize("mode", ["overlap"], indirect=True)
AHEAD = pytest.mark.parametrize("mode", ["overlap", "drafts"], indirect=True)


@OVERLAP
def test_the_next_step_is_launched_before_the_last_one_is_asked_for():
    events = []

    class Watched(StubExecutor):
        def launch(self, batch):
            handle, step = super().launch(batch), batch.step_id
            events.append(f"launch {step}")
            result = handle.result
            handle.result = lambda: (events.append(f"result {step}"), result())[1]
            return handle

    engine = make_engine(Watched(), max_num_batched_tokens=8)
    engine.add_request(token_ids=[6] * 12, params=GREEDY)  # two chunks, so prefill is overlapped too
    run_all(engine)
    wanted = ["launch 1"]
    for step in range(2, 8):
        wanted += [f"launch {step}", f"result {step - 1}"]
    assert events == [*wanted, "result 7"]


@PLAIN
def test_no_step_is_wasted_on_requests_that_reach_their_length():
    """The length is known in advance, so planning ahead costs not a single row."""
    executor = StubExecutor()
    engine = make_engine(executor)
    for length, tokens in ((3, 1), (5, 4), (9, 2)):
        engine.add_request(
            token_ids=[6] * length, params=SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        )
    run_all(engine)
    assert sum(batch.num_rows for batch in executor.batches if batch.kind == "decode") == 0 + 3 + 1
    assert engine.stats.generated_tokens == 7


@AHEAD
def test_rows_of_a_request_that_ended_meanwhile_are_dropped():
    """An end token is seen one step late: its rows of that step go nowhere, and its memory comes back after it."""
    executor = StubExecutor()
    engine = make_engine(executor)
    params = SamplingParams(temperature=0, max_tokens=9, golden_token_ids=[30, 31, 1])
    other = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.add_request(token_ids=[7, 8], params=params)
    engine.add_request(token_ids=[7, 9], params=other)
    results = {}
    while "0" not in results:
        results |= {result.request_id: result for result in engine.step()}
    scheduler = engine.scheduler
    assert (results["0"].token_ids, results["0"].finish_reason) == ([30, 31, 1], "stop")
    assert scheduler.slots.num_used == 2, "the step in flight still has its rows"
    assert scheduler.num_running == 1
    engine.step()
    assert scheduler.slots.num_used == 1
    results |= run_all(engine)
    assert results["1"].token_ids == expected_tokens([7, 9], other)[0]
    assert_idle(engine)


@AHEAD
def test_an_id_may_be_used_again_while_its_old_owner_is_in_flight():
    engine = make_engine()
    engine.add_request(token_ids=[7, 8], params=GREEDY, request_id="x")
    engine.add_request(token_ids=[7, 9], params=GREEDY, request_id="y")
    engine.step()
    assert engine.abort_request("x") == ["x"]
    engine.take_outputs()
    engine.add_request(token_ids=[40, 41], params=GREEDY, request_id="x")
    results = run_all(engine)
    assert results["x"].token_ids == expected_tokens([40, 41], GREEDY)[0]
    assert results["y"].token_ids == expected_tokens([7, 9], GREEDY)[0]
    assert_idle(engine)


@AHEAD
def test_nobody_in_flight_is_preempted():
    """Memory runs out with every sequence in flight: the engine waits a step instead."""
    engine = make_engine(StubExecutor(num_blocks=6))
    for _ in range(2):
        engine.add_request(token_ids=[6] * 14, params=SamplingParams(temperature=0, max_tokens=25, ignore_eos=True))
    preempt, seen = engine.scheduler._preempt, []

    def watched(seq):
        seen.append(int(engine.scheduler.table.in_flight[seq.slot]))
        preempt(seq)

    engine.scheduler._preempt = watched
    results = run_all(engine)
    assert seen and not any(seen)
    assert sum(result.metrics.num_preemptions for result in results.values()) == len(seen)


class TimedDevice(StubExecutor):
    """A device that computes for `seconds` a step on a thread of its own, and notes how long it stood still."""

    def __init__(self, seconds: float, **arguments) -> None:
        super().__init__(**arguments)
        self._seconds, self._thread, self._free_since = seconds, WorkerThread(), None

    def launch(self, batch):
        handle = super().launch(batch)
        task = self._thread.submit(self._work)

        def result():
            timing, found = task.wait(), handle.result()
            found.timing = timing
            return found

        handle_of_step = type("Handle", (), {"result": staticmethod(result)})
        return handle_of_step()

    def _work(self) -> StepTiming:
        began = time.perf_counter()
        waited = 0.0 if self._free_since is None else began - self._free_since
        time.sleep(self._seconds)
        self._free_since = time.perf_counter()
        return StepTiming(1000 * (self._free_since - began), 1000 * waited)

    def close(self) -> None:
        super().close()
        self._thread.close()


class SlowPolicy(AlternationPolicy):
    """Planning takes 4 ms."""

    def prefer_prefill(self, view):
        time.sleep(0.004)
        return super().prefer_prefill(view)


@PLAIN
def test_the_device_hardly_waits_for_a_host_that_is_quicker_than_it(mode):
    """At least 80 % of the scheduling time is hidden behind device steps that are longer; in order nothing is."""
    engine = make_engine(TimedDevice(0.009))
    engine.scheduler.policy = SlowPolicy()
    for length in (3, 5):
        engine.add_request(token_ids=[6] * length, params=SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    run_all(engine)
    stats = engine.stats
    engine.close()
    assert stats.host_seconds / stats.steps > 0.004
    share = stats.device_wait_seconds / stats.host_seconds
    assert share < 0.2 if mode is MODES["overlap"] else share > 0.8


def test_pauses_of_an_idle_engine_are_not_the_hosts_fault():
    engine = make_engine(TimedDevice(0.001))
    for _ in range(2):
        engine.add_request(token_ids=[6, 7], params=SamplingParams(temperature=0, max_tokens=1))
        run_all(engine)
        time.sleep(0.05)
    engine.close()
    assert engine.stats.device_wait_seconds < 0.02


# --- the worker's thread ---


class FakeWorker:
    """Runs batches that are functions."""

    capacity = None

    def __init__(self) -> None:
        self.log: list = []
        self.runner = self

    def zero_slots(self, slots) -> None:
        self.log.append(("zero", slots))

    def run(self, batch):
        self.log.append(("run", threading.current_thread().name))
        return batch()

    def close(self) -> None:
        self.log.append(("close", None))


class Done:
    def __init__(self, value) -> None:
        self.value = value

    def result(self):
        return self.value


def test_steps_run_in_order_on_one_thread_and_resets_come_before_their_step():
    worker = FakeWorker()
    executor = load_on_thread(lambda: (worker.log.append(("load", threading.current_thread().name)), worker)[1])
    gate = threading.Event()
    first = executor.launch(lambda: (gate.wait(10), Done(1))[1])
    executor.zero_slots([3])
    executor.zero_slots([4, 5])
    second = executor.launch(lambda: Done(2))
    gate.set()
    assert (second.result(), first.result(), first.result()) == (2, 1, 1)
    executor.close()
    executor.close()
    name = "deepinfer-worker"
    assert worker.log == [
        ("load", name),
        ("run", name),
        ("zero", [3]),
        ("zero", [4, 5]),
        ("run", name),
        ("close", None),
    ]
    with pytest.raises(RuntimeError, match="closed"):
        executor.launch(lambda: Done(3))


def test_a_failing_step_raises_at_its_own_handle_and_the_thread_goes_on():
    executor = load_on_thread(FakeWorker)
    handles = [executor.launch(lambda: 1 / 0), executor.launch(lambda: Done(2))]
    assert handles[1].result() == 2
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            handles[0].result()
    executor.close()


def assert_threads(count: int) -> None:
    """So many threads are there, soon."""
    for _ in range(200):
        if threading.active_count() == count:
            return
        time.sleep(0.01)
    raise AssertionError(f"{threading.active_count()} threads are there, expected {count}")


def test_a_worker_that_cannot_be_loaded_leaves_no_thread():
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        load_on_thread(lambda: 1 / 0)
    assert_threads(before)


def test_an_executor_that_nobody_closes_keeps_neither_worker_nor_thread():
    before = threading.active_count()
    executor = load_on_thread(FakeWorker)
    executor.launch(lambda: Done(1)).result()
    worker = weakref.ref(executor.worker)
    del executor
    assert_threads(before)
    gc.collect()  # the fake refers to itself
    assert worker() is None


def test_without_overlap_a_step_runs_in_the_callers_thread():
    worker = FakeWorker()
    executor = LocalExecutor(worker)
    assert executor.launch(lambda: Done(1)).result() == 1
    assert worker.log == [("run", threading.current_thread().name)]


@AHEAD
def test_failure_of_a_result_ends_everything_and_leaves_the_pipeline_empty():
    executor = StubExecutor()
    engine = make_engine(executor)
    engine.add_request(token_ids=[7, 8], params=GREEDY)
    engine.step()
    launch = executor.launch

    def failing(batch):
        handle = launch(batch)
        handle.result = lambda: np.zeros(1)[5]
        return handle

    executor.launch = failing
    with pytest.raises(EngineError, match="IndexError"):
        for _ in range(3):
            engine.step()
    (result,) = engine.take_outputs()
    assert result.finish_reason == "error"
    assert_idle(engine)
    executor.launch = launch
    engine.add_request(token_ids=[7, 9], params=GREEDY)
    assert run_all(engine)["1"].token_ids == expected_tokens([7, 9], GREEDY)[0]
