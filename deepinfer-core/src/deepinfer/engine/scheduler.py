"""`Scheduler`: which sequences run in the next step, and who holds which memory.

The engine adds sequences, asks for a plan, launches it, and reports its completion and every end. A plan is a pure
prefill (chunks of prompts, in order of arrival) or a pure decode (the newest token of every running sequence and the
drafts behind it). Knows no tokens' meaning, no texts, no device.

Steps are planned before those in flight are committed. The scheduler counts tokens as *scheduled* when it plans them,
as if every draft were accepted, and as *completed* when the step is done; memory that a step in flight still uses is
released when that step completes.

Memory: a sequence gets its state slot and all blocks of its prompt when it is admitted and one more block whenever
decoding crosses a block border. If none is free, the most recently admitted sequence gives everything back, once no
step in flight uses it, and is recomputed later; the oldest always advances, so everybody finishes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.engine.batch import SlotTable, StepPlan
from deepinfer.engine.memory import SequenceMemory
from deepinfer.engine.policy import PriorityOrder, QueueView, RequestOrder, StepPolicy
from deepinfer.engine.prefix import NOTHING
from deepinfer.engine.prefix_use import make_prefix_use
from deepinfer.engine.queue import WaitingQueue
from deepinfer.engine.sequence import Sequence, Status
from deepinfer.errors import RequestError
from deepinfer.runner.inputs import CacheCapacity
from deepinfer.speculate.schedule import Choice, FixedSchedule, VerificationSchedule


class Chunk(NamedTuple):
    """The next `count` prompt rows of a sequence, from `start` on."""

    seq: Sequence
    start: int
    count: int

    @property
    def last(self) -> bool:
        """True if the prompt is complete with it."""
        assert self.seq.source is not None
        return self.start + self.count == len(self.seq.source)


class Scheduler:
    """Queues, memory pools and the slot table of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        capacity: CacheCapacity,
        policy: StepPolicy,
        schedule: VerificationSchedule | None = None,
        choose_late: bool = False,
        order: RequestOrder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.max_model_len is not None
        assert config.max_num_batched_tokens is not None
        self.config = config
        self.policy = policy
        self.block_size = capacity.block_size
        blocks = -(-config.runtime_max_model_len // capacity.block_size)
        self.table = SlotTable(capacity.num_slots, blocks, capacity.block_size, config.num_draft_tokens)
        self.memory = SequenceMemory(capacity, self.table)
        self.blocks, self.slots = self.memory.blocks, self.memory.slots
        self.schedule = FixedSchedule() if schedule is None else schedule
        self._choose_late = choose_late  # the executor asks the schedule when the step begins
        self._stopped: list[Sequence] = []  # ended by the scheduler itself, not reported yet
        self._budget = config.max_num_batched_tokens
        self._max_context = config.settings.prefill_max_sum_seqlen_k
        self._waiting = WaitingQueue(PriorityOrder() if order is None else order, clock)
        self.prefix = make_prefix_use(config, capacity, self.blocks)
        self._prefilling: Sequence | None = None
        self._running: dict[str, Sequence] = {}  # in order of admission
        self._running_slots: np.ndarray | None = None  # [running], None = to be rebuilt
        self._num_drafts = config.num_draft_tokens

    # --- what the engine calls --------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold memory."""
        return len(self._running) + (self._prefilling is not None)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self._waiting.add(seq)

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run. Its rows count as scheduled from now on."""
        if self.prefix is not None:
            self.prefix.cache.begin_plan()
        view = QueueView(len(self._waiting), self._prefilling is not None, len(self._running), self.blocks.usage)
        if self.policy.prefer_prefill(view):
            plan = self._plan_prefill() or self._plan_decode()
        else:
            plan = self._plan_decode() or self._plan_prefill()
        if plan is not None:
            self.policy.planned(plan.kind)
            self.table.scheduled[plan.slots] += plan.q_lens
            self.table.in_flight[plan.slots] += 1
            self.table.pending[plan.slots] += plan.sampled
            self.table.surplus[plan.slots] += plan.drafts
            self.table.drafted[plan.slots] = plan.sampled & plan.draft
            if self.prefix is not None and plan.kind == "decode":
                plan.captures = self.prefix.plan_captures(plan, self.table)
        return plan

    def complete(self, plan: StepPlan, kept: np.ndarray) -> None:
        """The step is done: count its rows as completed and release what had to wait for it.

        kept  int64 [n] rows of each sequence that count; the others verified drafts that were refused
        """
        before = self.table.completed[plan.slots]
        self.table.completed[plan.slots] += kept
        self.table.scheduled[plan.slots] -= plan.q_lens - kept
        self.table.in_flight[plan.slots] -= 1
        self.table.pending[plan.slots] -= plan.sampled
        self.table.surplus[plan.slots] -= plan.drafts
        if self.prefix is not None and plan.kind == "decode":
            self.prefix.complete(plan, self.table, before)
        self.memory.release_deferred()

    def forget_steps(self) -> None:
        """Every step in flight is lost (the executor failed): nothing uses memory any more."""
        self.table.in_flight[:] = self.table.pending[:] = self.table.surplus[:] = 0
        if self.prefix is not None:
            self.prefix.cache.cancel_pending()
        self.memory.release_deferred()

    def forget_contents(self) -> None:
        """A step broke: what caches hold cannot be trusted, so nobody may go on from it."""
        if self.prefix is not None:
            self.prefix.cache.clear()

    def remove(self, seq: Sequence) -> None:
        """Take a finished sequence out of its queue and release its memory, at once or after the steps in flight."""
        assert seq.finished
        if self._running.pop(seq.request_id, None) is not None:
            self._running_slots = None
        self._waiting.discard(seq)
        if self.prefix is not None and seq.finish_reason == "error":
            self.prefix.cache.withdraw(seq.blocks)
        if self._prefilling is seq:
            self._prefilling = None
        self.memory.release(seq)

    def take_stopped(self) -> list[Sequence]:
        """Sequences that planning had to end for lack of memory, for the engine to report."""
        stopped, self._stopped = self._stopped, []
        return stopped

    # --- prefill -----------------------------------------------------------------------------------------------------

    def _plan_prefill(self) -> StepPlan | None:
        """Chunks in order: the half computed prompt first, then new ones while budget and memory last."""
        chunks: list[Chunk] = []
        snapshots: list[tuple[int, int, int]] = []
        budget, context = self._budget, 0
        while budget > 0 and (not chunks or chunks[-1].last):
            seq = self._prefilling or self._admit(budget, context)
            if seq is None:
                break
            chunk = self._chunk(seq, budget)
            snapshots += [(len(chunks), end, slot) for end, slot in self._offer_chunk(chunk)]
            chunks.append(chunk)
            budget -= chunk.count
            context += chunk.start + chunk.count
            if chunk.last:
                self._start_running(seq)
        return self._prefill_plan(chunks, snapshots) if chunks else None

    def _chunk(self, seq: Sequence, budget: int) -> Chunk:
        assert seq.source is not None
        start = int(self.table.scheduled[seq.slot])
        return Chunk(seq, start, min(len(seq.source) - start, budget))

    def _admit(self, budget: int, context: int) -> Sequence | None:
        """Give the first waiting sequence its memory; None if it has to wait (nobody overtakes it).

        context  tokens of context the step reads already; `prefill_max_sum_seqlen_k` bounds it beyond one sequence.
        """
        seq = self._waiting.head()
        if seq is None or len(self._running) >= self.config.max_num_seqs:
            return None
        match = NOTHING if self.prefix is None else self.prefix.look(seq)
        rows = seq.length - match.end
        if match.fresh or (not self.config.chunked_prefill and rows > budget):
            return None
        reads = match.end + min(rows, budget)
        if self._max_context is not None and context and context + reads > self._max_context:
            return None
        if not self.memory.take(seq, match):
            return None
        self._waiting.discard(seq)
        seq.status, seq.source = Status.PREFILLING, seq.all_tokens()
        if self.prefix is not None:
            self.prefix.start(seq, match)
        self.table.assign(seq)
        self._prefilling = seq
        return seq

    def _start_running(self, seq: Sequence) -> None:
        """Its prompt is scheduled to the end: from the next step on it decodes, unless it is only scored."""
        seq.status, self._prefilling = Status.RUNNING, None
        if not seq.request.score_only:
            self._running[seq.request_id] = seq
            self._running_slots = None

    def _offer_chunk(self, chunk: Chunk) -> list[tuple[int, int]]:
        """What the chunk computes can be used by the next plan; (end, slot) of the snapshots it makes."""
        if self.prefix is None:
            return []
        stop = chunk.start + chunk.count
        self.table.offered[chunk.seq.slot] = stop // self.block_size
        return self.prefix.plan_chunk(chunk.seq, chunk.start, stop)

    def _prefill_plan(self, chunks: list[Chunk], snapshots: list[tuple[int, int, int]]) -> StepPlan:
        return StepPlan(
            kind="prefill",
            sequences=[chunk.seq for chunk in chunks],
            slots=np.array([chunk.seq.slot for chunk in chunks], dtype=np.int64),
            q_starts=np.array([chunk.start for chunk in chunks], dtype=np.int64),
            q_lens=np.array([chunk.count for chunk in chunks], dtype=np.int64),
            sampled=np.array([chunk.last and not chunk.seq.request.score_only for chunk in chunks], dtype=np.bool_),
            fresh_slots=[chunk.seq.slot for chunk in chunks if not chunk.start],
            draft=self._num_drafts > 0,
            restores=[
                (chunk.seq.restored_from, chunk.seq.slot)
                for chunk in chunks
                if chunk.seq.resumed and chunk.start == chunk.seq.resumed
            ],
            snapshots=snapshots,
        )

    # --- decode ------------------------------------------------------------------------------------------------------

    def _plan_decode(self) -> StepPlan | None:
        """The newest token and the drafts of every running sequence, after each has the blocks its rows go to.

        None if nobody can run, or if a sequence needs memory that only a step in flight can give.
        """
        sequences, slots = self._decoding()
        if not len(slots):
            return None
        drafts = self._drafts(slots)
        if not self._grow_tables(sequences, slots, drafts):
            return None
        alive = np.array([seq.status is Status.RUNNING for seq in sequences], dtype=np.bool_)
        if not alive.all():  # some were preempted for older ones
            sequences = [seq for seq in sequences if seq.status is Status.RUNNING]
            slots, drafts = slots[alive], drafts[alive]
        if not sequences:
            return None
        return StepPlan(
            kind="decode",
            sequences=sequences,
            slots=slots,
            q_starts=self.table.scheduled[slots],
            q_lens=1 + drafts,
            sampled=np.ones(len(slots), dtype=np.bool_),
            fresh_slots=[],
            optimistic=bool(drafts.any() or self.table.surplus[slots].any()),
            draft=self._num_drafts > 0 and self.schedule.draft_next(),
            choose=self._late_choice(slots, drafts),
        )

    def _decoding(self) -> tuple[list[Sequence], np.ndarray]:
        """Running sequences and their slots, without those that the steps in flight will bring to their length."""
        slots, table = self._slots_in_order(), self.table
        sequences = list(self._running.values())
        ending = table.length[slots] + table.pending[slots] >= table.max_len[slots]
        if not ending.any():
            return sequences, slots
        return [seq for seq, ends in zip(sequences, ending.tolist(), strict=True) if not ends], slots[~ending]

    def _drafts(self, slots: np.ndarray) -> np.ndarray:
        """int64 [n]: drafts to verify in the next step; none that could only lie behind the request's last token."""
        if not self._num_drafts:
            return np.zeros(len(slots), dtype=np.int64)
        table = self.table
        room = table.max_len[slots] - (table.length[slots] + table.pending[slots]) - 1
        limits = np.where(table.drafted[slots], np.minimum(self._num_drafts, room), 0)
        fresh = not table.pending[slots].any()
        choice = Choice(table.confidences[slots], table.record[slots], limits, fresh)
        return limits if self._choose_late else np.minimum(self.schedule.choose(choice), limits)

    def _late_choice(self, slots: np.ndarray, drafts: np.ndarray) -> Callable[[np.ndarray], np.ndarray] | None:
        """Lets the executor ask how many of these drafts are worth verifying, once their confidences are known."""
        if not self._choose_late or not drafts.any():
            return None
        record, schedule = self.table.record[slots], self.schedule
        return lambda confidences: schedule.choose(Choice(confidences, record, drafts, fresh=True))

    def _slots_in_order(self) -> np.ndarray:
        if self._running_slots is None:
            self._running_slots = np.array([seq.slot for seq in self._running.values()], dtype=np.int64)
        return self._running_slots

    def _grow_tables(self, sequences: list[Sequence], slots: np.ndarray, drafts: np.ndarray) -> bool:
        """New blocks for the sequences whose next rows need them, oldest first; False if a step in flight has to be
        done before. Where memory is short a sequence goes without drafts. [in-place drafts]"""
        ends = self._block_ends(slots, drafts)
        for index in np.flatnonzero(ends > self.table.num_blocks[slots] * self.block_size).tolist():
            seq = sequences[index]
            if seq.status is not Status.RUNNING:
                continue  # preempted for an older one
            if drafts[index] and not self.memory.grow(seq, int(ends[index])):
                drafts[index] = 0
            end = int(self._block_ends(slots[index], drafts[index]))
            while seq.status is Status.RUNNING and not self.memory.grow(seq, end):
                if not self._make_room(seq):
                    return False
        return True

    def _block_ends(self, slots: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """Tokens the blocks of these sequences must hold. The last token of a request is never fed back."""
        return np.minimum(self.table.scheduled[slots] + 1 + drafts, self.table.max_len[slots] - 1)

    def _make_room(self, seq: Sequence) -> bool:
        """Preempt the most recently admitted sequence of those with the least urgent priority, which may be `seq`
        itself; False if it is in flight."""
        holders = [*self._running.values(), *([self._prefilling] if self._prefilling else [])]
        victim = max(reversed(holders), key=lambda holder: holder.request.priority)
        if self.table.in_flight[victim.slot]:
            return False
        if victim is seq and len(self._running) == 1:
            self._stop(seq, f"the whole cache of {self.blocks.num_total} blocks is not enough to go on")
        else:
            self._preempt(victim)
        return True

    # --- giving memory back ------------------------------------------------------------------------------------------

    def _preempt(self, seq: Sequence) -> None:
        """Take everything from a sequence; it waits in front of the queue to be recomputed.

        With `stop_preempted_request` a running one ends instead; a prompt that was only half computed has lost nothing
        a user could see and always waits.
        """
        assert not self.table.in_flight[seq.slot], "a sequence in flight cannot be preempted"
        if self.config.stop_preempted_request and seq.status is Status.RUNNING:
            self._stop(seq, "preempted to make room for older requests, and stop_preempted_request is set")
            return
        if self._running.pop(seq.request_id, None) is not None:
            self._running_slots = None
        if self._prefilling is seq:
            self._prefilling = None
        self.memory.release(seq)
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self._waiting.put_back(seq)

    def _stop(self, seq: Sequence, why: str) -> None:
        """End a sequence for lack of memory; the engine reports it."""
        error = RequestError(f"ended after {len(seq.output_ids)} tokens (length {seq.length}): {why}")
        seq.finish("insufficient_system_resource", error=error)
        self.remove(seq)
        self._stopped.append(seq)
