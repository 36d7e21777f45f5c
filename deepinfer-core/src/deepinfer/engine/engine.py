"""`Engine`: requests in, results out, one step at a time.

`entrypoints.driver` drives it for `LLM`; a benchmark or a test can do the same with any `Executor`. One request's way:
`admission` checks it, the `scheduler` plans steps, `batch` turns a plan into arrays, the executor runs it,
`step.commit_rows` extends the sequences, and whoever ends becomes a `RequestOutput` (`report`).

    plan -> launch -> commit

`step()` keeps `depth` steps launched and commits the oldest. With zero-overhead scheduling (the default) the depth is
2: the next step is planned and launched while the device still works on the one before, whose tokens reach it on the
device. Without, a step is planned after the one before it has been committed. The results are the same. A sequence that
turns out to have ended may have rows in one more step: they are dropped, and its memory is released after that step.

Every request ends with exactly one `RequestOutput`, however it ends. Not thread-safe; the driver is.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.engine.admission import Admission, Ask
from deepinfer.engine.batch import StepPlan, build_batch
from deepinfer.engine.collector import CollectorPause
from deepinfer.engine.grammars import GrammarDesk
from deepinfer.engine.output import RequestOutput
from deepinfer.engine.policy import AlternationPolicy, RequestOrder, StepPolicy
from deepinfer.engine.report import finished_output, refused_output
from deepinfer.engine.request import EngineTokenizer, ModelInfo
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.speculation import DraftBooks
from deepinfer.engine.stats import EngineStats
from deepinfer.engine.step import commit_rows
from deepinfer.errors import ConfigError, EngineError, RequestError
from deepinfer.runner.inputs import CacheCapacity, Executor, StepBatch, StepHandle
from deepinfer.speculate.schedule import ConfidenceSchedule, FixedSchedule, VerificationSchedule
from deepinfer.structured.builder import GrammarBuilder

logger = logging.getLogger("deepinfer.engine")

OVERLAPPED_DEPTH = 2
"""steps launched and not committed, with zero-overhead scheduling"""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on its way, from launch to commit."""

    plan: StepPlan
    batch: StepBatch
    handle: StepHandle
    launch_time: float
    follows: bool
    """the engine had work all the time since the step before, so that a pause of the device is the host's fault"""


class Engine:
    """The step loop over one executor.

    config     resolved (`EngineConfig.resolve`)
    tokenizer  None: requests must bring token ids, and results have no text
    policy     prefill/decode alternation; None = the default
    order      which waiting request goes first; None = by priority, then by arrival
    clock      seconds, monotonic
    grammars   compiles what `so_args` ask for; None: such requests are refused
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: EngineTokenizer | None,
        model: ModelInfo,
        *,
        policy: StepPolicy | None = None,
        order: RequestOrder | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarBuilder | None = None,
    ) -> None:
        assert config.max_model_len is not None, "resolve() the config first"
        capacity = executor.capacity
        _check_capacity(capacity)
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.stats = EngineStats()
        schedule = make_schedule(config, executor)
        policy = default_policy(config) if policy is None else policy
        self.scheduler = Scheduler(config, capacity, policy, schedule, chooses_late(config, executor), order, clock)
        drafts = config.num_draft_tokens
        self._drafts = DraftBooks(self.scheduler.table, self.scheduler.schedule, drafts) if drafts else None
        self.stats.speculation = None if self._drafts is None else self._drafts.stats
        self._admission = Admission(config, capacity, tokenizer, model, clock)
        self._grammars = GrammarDesk(grammars, config.settings.so_whitespace)
        self._executor = executor
        self._clock = clock
        self._eos_ids = np.array(model.eos_ids, dtype=np.int64)
        self._collector = CollectorPause(config.settings.gc_interval_step)
        self._live: dict[str, Sequence] = {}
        self._depth = OVERLAPPED_DEPTH if config.overlap else 1
        self._in_flight: deque[LaunchedStep] = deque()
        self._busy = False
        self._outputs: list[RequestOutput] = []
        self._num_requests = 0
        self._num_launched = 0
        self._closed = False

    # --- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, ask: Ask | None = None, *, request_id: str | None = None, **fields: Any) -> str:
        """Queue a request, given as an `Ask` or by its fields; returns its id.

        A wrong request is not queued: its result, with the error, is there at once. ValueError if the id is in use.
        """
        if self._closed:
            raise EngineError("the engine is closed")
        number = self._num_requests
        request_id = str(number) if request_id is None else request_id
        if request_id in self._live:
            raise ValueError(f"request id {request_id!r} belongs to an unfinished request")
        self._num_requests += 1
        ask = Ask(**fields) if ask is None else ask
        try:
            seq = self._admission.admit(ask, number, request_id)
            if seq.request.params.so_args is not None:
                self._grammars.add(seq)
        except RequestError as error:
            self._add_output(refused_output(request_id, ask.prompt, error, self._clock()))
            return request_id
        self._live[request_id] = seq
        if seq.request.params.so_args is None:
            self.scheduler.add(seq)
        return request_id

    def abort_request(self, request_ids: str | Iterable[str]) -> list[str]:
        """End requests wherever they are; returns the ids that ended by this (unknown and finished ones are not in it).

        Each still gets its result, with the tokens it has so far and finish reason "abort".
        """
        wanted = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        aborted = [request_id for request_id in dict.fromkeys(wanted) if request_id in self._live]
        for request_id in aborted:
            seq = self._live[request_id]
            seq.finish("abort")
            self._end(seq)
        if not self._live:  # no further step may follow
            self._drain()
            self._collector.release()
        return aborted

    @property
    def has_unfinished(self) -> bool:
        """True while a request has no result yet. No step is in flight without one."""
        return bool(self._live)

    @property
    def num_unfinished(self) -> int:
        """Requests without a result."""
        return len(self._live)

    def close(self) -> None:
        """Abort what is unfinished and give the device back. Idempotent."""
        if not self._closed:
            self._closed = True
            self.abort_request(list(self._live))
            self._collector.release()
            self._grammars.close()
            self._executor.close()

    # --- the step loop -----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Launch what can be launched, commit the oldest step; returns the results that are new since the last call.

        If the executor fails, every unfinished request ends with an error (`take_outputs` has the results), all
        memory is free again, and EngineError is raised from the cause.
        """
        if self._closed:
            raise EngineError("the engine is closed")
        began, blocked = self._clock(), self.stats.blocked_seconds
        try:
            self._take_compiled()
            while len(self._in_flight) < self._depth and (plan := self._plan()) is not None:
                self._in_flight.append(self._launch(plan))
            if self._in_flight:
                self._commit(self._in_flight.popleft())
            elif self._grammars:
                self._grammars.wait()
            else:
                assert not self._live, "requests are waiting, but nothing can be planned"
            if not self._live:
                self._drain()
        except BaseException as error:
            self._fail(error)
        self.stats.host_seconds += self._clock() - began - (self.stats.blocked_seconds - blocked)
        self._busy = self.has_unfinished
        self._collector.tick(self._busy)
        self._log()
        return self.take_outputs()

    def take_outputs(self) -> list[RequestOutput]:
        """Results nobody has taken yet."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take_compiled(self) -> None:
        """Queue the requests whose grammar is ready, end those whose grammar failed."""
        for seq in self._grammars.take_ready():
            if seq.finished:
                self._report(seq)
            else:
                self.scheduler.add(seq)

    def _plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        for seq in self.scheduler.take_stopped():
            self._report(seq)
        return plan

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        self._num_launched += 1
        if plan.kind == "prefill":
            now = self._clock()
            for seq in plan.sequences:
                seq.first_scheduled_time = now if seq.first_scheduled_time is None else seq.first_scheduled_time
        if plan.fresh_slots:
            self._executor.zero_slots(plan.fresh_slots)
        if plan.restores:
            self._executor.copy_slots(plan.restores)
        batch = build_batch(plan, self.scheduler.table, self._num_launched)
        batch.masks = self._grammars.masks(plan, self.scheduler.table)
        if batch.masks is not None and not self._in_flight:
            batch.masks.open()
        launch_time = self._clock()
        handle = self._executor.launch(batch)
        if plan.captures:
            self._executor.copy_slots([(capture.seq.slot, capture.slot) for capture in plan.captures])
        self.stats.blocked_seconds += self._clock() - launch_time
        follows, self._busy = self._busy, True
        return LaunchedStep(plan, batch, handle, launch_time, follows)

    def _commit(self, step: LaunchedStep) -> None:
        asked = self._clock()
        result = step.handle.result()
        now = self._clock()
        self.stats.blocked_seconds += now - asked
        plan = step.plan
        before = [] if self._drafts is None else self._drafts.lengths(plan)
        ended = commit_rows(plan, result, self.scheduler.table, self._eos_ids, now)
        if self._drafts is not None:
            self._drafts.commit(plan, result, before)
            self._grammars.note_drafts(plan, result, self.scheduler.table)
        if self._in_flight and self._in_flight[0].batch.masks is not None:
            self._in_flight[0].batch.masks.open()
        self.scheduler.complete(plan, plan.q_lens if result.accepted is None else result.accepted + 1)
        self.stats.add_step(plan, result, now - step.launch_time, step.follows)
        for seq in ended:
            self._end(seq)

    # --- how requests end --------------------------------------------------------------------------------------------

    def _end(self, seq: Sequence) -> None:
        """A sequence has finished: give its memory back and report it."""
        self._grammars.discard(seq)
        self.scheduler.remove(seq)
        self._report(seq)

    def _report(self, seq: Sequence) -> None:
        del self._live[seq.request_id]
        self.stats.preemptions += seq.num_preemptions
        self._add_output(finished_output(seq, self.tokenizer, self._clock()))

    def _add_output(self, output: RequestOutput) -> None:
        self.stats.finished += 1
        self._outputs.append(output)

    def _fail(self, error: BaseException) -> None:
        """Leave no request without a result and no memory in use, then raise."""
        self._drain()
        self.scheduler.forget_contents()
        where = f"step {self._num_launched}"
        cause = RequestError(f"the engine failed in {where}: {type(error).__name__}: {error}")
        cause.__cause__ = error
        for seq in list(self._live.values()):
            if not seq.finished:
                seq.finish("error", error=cause)
            self._end(seq)
        self._collector.release()
        if not isinstance(error, Exception):
            raise error
        raise EngineError(f"{where} failed: {type(error).__name__}: {error}") from error

    def _drain(self) -> None:
        """Wait for the steps in flight, whose rows belong to nobody any more, and release what they used."""
        while self._in_flight:
            step = self._in_flight.popleft()
            if step.batch.masks is not None:
                step.batch.masks.cancel()
            if not _settle(step.handle):
                self.scheduler.forget_contents()
        self.scheduler.forget_steps()

    def _log(self) -> None:
        every = self.config.settings.logging_interval_step
        if every > 0 and self._num_launched and self._num_launched % every == 0:
            scheduler = self.scheduler
            queues = f"{scheduler.num_running} running, {scheduler.num_waiting} waiting"
            logger.info("%s, cache %.0f %%; %s", queues, 100 * scheduler.blocks.usage, self.stats.line())


def default_policy(config: EngineConfig) -> AlternationPolicy:
    """Prefill as soon as possible; DEEPINFER_PREFILL_ATTEMPT_INTERVAL counts only where somebody has set it."""
    settings = config.settings
    chosen = settings.origin("prefill_attempt_interval") != "default"
    return AlternationPolicy(attempt_interval=settings.prefill_attempt_interval if chosen else 1)


def make_schedule(config: EngineConfig, executor: Executor) -> VerificationSchedule:
    """How many drafts are verified: all, or with DEEPINFER_ENABLE_MTP_VARLEN as many as they are worth by the costs
    that the executor has measured."""
    if not config.settings.enable_mtp_varlen or not config.num_draft_tokens:
        return FixedSchedule()
    return ConfidenceSchedule(config.num_draft_tokens, executor.costs(), config.verification == "rejection")


def chooses_late(config: EngineConfig, executor: Executor) -> bool:
    """Whether the schedule is asked when a step begins, with the confidences of its own drafts."""
    return config.num_draft_tokens > 0 and executor.chooses


def _check_capacity(capacity: CacheCapacity) -> None:
    if capacity.num_blocks < 2 or capacity.num_slots < 2:
        raise ConfigError(
            f"the executor offers {capacity.num_blocks} cache blocks and {capacity.num_slots} state slots, expected at "
            "least 2 of each (id 0 is reserved): raise num_kv_blocks, max_num_seqs or the share of memory"
        )


def _settle(handle: StepHandle) -> bool:
    """Wait for a step whose result nobody wants any more; False if it failed, which nobody has to be told."""
    try:
        handle.result()
    except Exception:
        logger.debug("a step in flight failed as well", exc_info=True)
        return False
    return True
