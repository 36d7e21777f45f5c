"""`Scheduler`: which sequences run in the next step, and who holds which memory.

The engine adds sequences, asks for a plan, launches it, and reports its completion and every end. A plan is a pure
prefill (chunks of prompts, in order of arrival) or a pure decode (one row for every running sequence). The scheduler
counts tokens as *scheduled* when it plans them and as *completed* when the step is done; memory that a step in flight
still uses is released when that step completes. Knows no tokens' meaning, no texts, no device.

Memory: a sequence gets its state slot and all blocks of its prompt when it is admitted and one more block whenever
decoding crosses a block border. If none is free, the most recently admitted sequence gives everything back and is
recomputed later; the oldest always advances, so everybody finishes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.engine.batch import SlotTable, StepPlan
from deepinfer.engine.blocks import Availability, BlockPool
from deepinfer.engine.policy import AlternationPolicy, QueueView
from deepinfer.engine.sequence import Sequence, Status
from deepinfer.errors import RequestError
from deepinfer.runner.inputs import CacheCapacity


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

    def __init__(self, config: EngineConfig, capacity: CacheCapacity, policy: AlternationPolicy) -> None:
        assert config.max_model_len is not None
        assert config.max_num_batched_tokens is not None
        self.config = config
        self.policy = policy
        self.block_size = capacity.block_size
        self.blocks = BlockPool(capacity.num_blocks)
        self.slots = BlockPool(capacity.num_slots)
        self.table = SlotTable(capacity.num_slots, -(-config.runtime_max_model_len // capacity.block_size))
        self._stopped: list[Sequence] = []  # ended by the scheduler itself, not reported yet
        self._budget = config.max_num_batched_tokens
        self._max_context = config.settings.prefill_max_sum_seqlen_k
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._prefilling: Sequence | None = None
        self._running: dict[str, Sequence] = {}  # in order of admission
        self._running_slots: np.ndarray | None = None  # [running], None = to be rebuilt
        self._deferred: list[Sequence] = []  # ended, memory still used by a step in flight

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
        self._waiting[seq.request_id] = seq

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run. Its rows count as scheduled from now on."""
        view = QueueView(len(self._waiting), self._prefilling is not None, len(self._running), self.blocks.usage)
        if self.policy.prefer_prefill(view):
            plan = self._plan_prefill() or self._plan_decode()
        else:
            plan = self._plan_decode() or self._plan_prefill()
        if plan is not None:
            self.policy.planned(plan.kind)
            self.table.scheduled[plan.slots] += plan.q_lens
            self.table.in_flight[plan.slots] += 1
        return plan

    def complete(self, plan: StepPlan) -> None:
        """The step is done: count its rows as completed and release what had to wait for it."""
        self.table.completed[plan.slots] += plan.q_lens
        self.table.in_flight[plan.slots] -= 1
        self._release_deferred()

    def forget_steps(self) -> None:
        """Every step in flight is lost (the executor failed): nothing uses memory any more."""
        self.table.in_flight[:] = 0
        self._release_deferred()

    def remove(self, seq: Sequence) -> None:
        """Take a finished sequence out of its queue and release its memory, at once or after the steps in flight."""
        assert seq.finished
        if self._running.pop(seq.request_id, None) is not None:
            self._running_slots = None
        self._waiting.pop(seq.request_id, None)
        if self._prefilling is seq:
            self._prefilling = None
        self._release(seq)

    def take_stopped(self) -> list[Sequence]:
        """Sequences that planning had to end for lack of memory, for the engine to report."""
        stopped, self._stopped = self._stopped, []
        return stopped

    # --- prefill -----------------------------------------------------------------------------------------------------

    def _plan_prefill(self) -> StepPlan | None:
        """Chunks in order: the half computed prompt first, then new ones while budget and memory last."""
        chunks: list[Chunk] = []
        budget, context = self._budget, 0
        while budget > 0 and (not chunks or chunks[-1].last):
            seq = self._prefilling or self._admit(budget, context)
            if seq is None:
                break
            chunk = self._chunk(seq, budget)
            chunks.append(chunk)
            budget -= chunk.count
            context += chunk.start + chunk.count
            if chunk.last:
                self._start_running(seq)
        return self._prefill_plan(chunks) if chunks else None

    def _chunk(self, seq: Sequence, budget: int) -> Chunk:
        assert seq.source is not None
        start = int(self.table.scheduled[seq.slot])
        return Chunk(seq, start, min(len(seq.source) - start, budget))

    def _admit(self, budget: int, context: int) -> Sequence | None:
        """Give the first waiting sequence its memory; None if it has to wait (nobody overtakes it).

        context  tokens of context the step reads already; `prefill_max_sum_seqlen_k` bounds it beyond one sequence.
        """
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return None
        seq = next(iter(self._waiting.values()))
        length = seq.length
        if not self.config.chunked_prefill and length > budget:
            return None
        if self._max_context is not None and context and context + min(length, budget) > self._max_context:
            return None
        needed = -(-length // self.block_size)
        available = self.blocks.can_allocate(needed)
        assert available is not Availability.NEVER, (length, self.blocks.num_total)
        if available is not Availability.OK or self.slots.can_allocate(1) is not Availability.OK:
            return None
        del self._waiting[seq.request_id]
        seq.status, seq.source = Status.PREFILLING, seq.all_tokens()
        (seq.slot,) = self.slots.allocate(1)
        seq.blocks = self.blocks.allocate(needed)
        self.table.assign(seq)
        self._prefilling = seq
        return seq

    def _start_running(self, seq: Sequence) -> None:
        """Its prompt is scheduled to the end: from the next step on it decodes, unless it is only scored."""
        seq.status, self._prefilling = Status.RUNNING, None
        if not seq.request.score_only:
            self._running[seq.request_id] = seq
            self._running_slots = None

    def _prefill_plan(self, chunks: list[Chunk]) -> StepPlan:
        return StepPlan(
            kind="prefill",
            sequences=[chunk.seq for chunk in chunks],
            slots=np.array([chunk.seq.slot for chunk in chunks], dtype=np.int64),
            q_starts=np.array([chunk.start for chunk in chunks], dtype=np.int64),
            q_lens=np.array([chunk.count for chunk in chunks], dtype=np.int64),
            sampled=np.array([chunk.last and not chunk.seq.request.score_only for chunk in chunks], dtype=np.bool_),
            fresh_slots=[chunk.seq.slot for chunk in chunks if not chunk.start],
        )

    # --- decode ------------------------------------------------------------------------------------------------------

    def _plan_decode(self) -> StepPlan | None:
        """One row for every running sequence, after each has the block its next token goes to."""
        if not self._running:
            return None
        self._grow_tables()
        if not self._running:
            return None
        slots = self._slots_in_order()
        count = len(slots)
        return StepPlan(
            kind="decode",
            sequences=list(self._running.values()),
            slots=slots,
            q_starts=self.table.scheduled[slots],
            q_lens=np.ones(count, dtype=np.int64),
            sampled=np.ones(count, dtype=np.bool_),
            fresh_slots=[],
        )

    def _slots_in_order(self) -> np.ndarray:
        if self._running_slots is None:
            self._running_slots = np.array([seq.slot for seq in self._running.values()], dtype=np.int64)
        return self._running_slots

    def _grow_tables(self) -> None:
        """A new block for each sequence whose next token begins one, oldest first."""
        slots = self._slots_in_order()
        full = self.table.scheduled[slots] >= self.table.num_blocks[slots] * self.block_size
        if not full.any():
            return
        sequences = list(self._running.values())
        for index in np.flatnonzero(full).tolist():
            if sequences[index].status is Status.RUNNING:  # else preempted for an older one
                self._grow(sequences[index])

    def _grow(self, seq: Sequence) -> None:
        while self.blocks.can_allocate(1) is not Availability.OK:
            victim = self._prefilling or next(reversed(self._running.values()))
            if victim is seq and len(self._running) == 1:
                self._stop(seq, f"the whole cache of {self.blocks.num_total} blocks is not enough to go on")
                return
            self._preempt(victim)
            if victim is seq:
                return
        (block,) = self.blocks.allocate(1)
        self.table.add_block(seq, block)

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
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self._waiting[seq.request_id] = seq
        self._waiting.move_to_end(seq.request_id, last=False)

    def _stop(self, seq: Sequence, why: str) -> None:
        """End a sequence for lack of memory; the engine reports it."""
        error = RequestError(f"ended after {len(seq.output_ids)} tokens (length {seq.length}): {why}")
        seq.finish("insufficient_system_resource", error=error)
        self.remove(seq)
        self._stopped.append(seq)

    def _release_deferred(self) -> None:
        ended, self._deferred = self._deferred, []
        for seq in ended:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """Return slot and blocks to their pools, or remember to once no step in flight uses them."""
        if not seq.slot:
            return
        if self.table.in_flight[seq.slot]:
            self._deferred.append(seq)
            return
        self.blocks.free(seq.blocks)
        self.slots.free([seq.slot])
        self.table.num_blocks[seq.slot] = 0
        seq.slot, seq.blocks, seq.source = 0, [], None
