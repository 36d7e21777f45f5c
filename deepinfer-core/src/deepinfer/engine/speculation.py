"""What a committed step says about drafts: counts for the statistics and the requests, and food for the schedule.

Called by the engine once a step, around `commit_rows`. The drafts a step verified were proposed by the sequence's step
before, whose confidences stand in the slot table until this one is committed.
"""

from __future__ import annotations

import numpy as np

from deepinfer.engine.batch import SlotTable, StepPlan
from deepinfer.engine.sequence import Sequence
from deepinfer.runner.inputs import StepResult
from deepinfer.speculate.confidence import cumulative
from deepinfer.speculate.schedule import Outcome, VerificationSchedule
from deepinfer.speculate.statistics import SpeculationStats

RECORD_WEIGHT = 0.2
"""Weight of the newest step in a sequence's record of accepted drafts."""


class DraftBooks:
    """Keeps the books of one engine with drafts."""

    def __init__(self, table: SlotTable, schedule: VerificationSchedule, num_drafts: int) -> None:
        self.stats = SpeculationStats(num_drafts)
        self._table, self._schedule = table, schedule

    def lengths(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """The sequences of a step that have not ended, with their output so far; to be taken before the commit."""
        return [(seq, -1 if seq.finished else len(seq.output_ids)) for seq in plan.sequences]

    def commit(self, plan: StepPlan, result: StepResult, before: list[tuple[Sequence, int]]) -> None:
        """Count a step. before: what `lengths` said."""
        slots = plan.slots[plan.sampled]
        if plan.kind == "decode":
            alive = np.array([length >= 0 for _, length in before], dtype=np.bool_)
            counts = plan.q_lens if result.counts is None else result.counts
            accepted = np.zeros_like(counts) if result.accepted is None else result.accepted
            self._count(plan, result, alive, counts, accepted)
            for (seq, length), verified in zip(before, (counts - 1).tolist(), strict=True):
                if length >= 0:
                    seq.num_draft_tokens += verified
                    seq.num_accepted_tokens += max(0, len(seq.output_ids) - length - 1)
        if result.drafts is None:
            self._table.confidences[slots] = np.nan
        else:
            self._table.confidences[slots] = result.drafts.confidences
            self.stats.add_proposals(result.drafts.token_ids)

    def _count(
        self, plan: StepPlan, result: StepResult, alive: np.ndarray, counts: np.ndarray, accepted: np.ndarray
    ) -> None:
        if not alive.any():
            return
        table, slots = self._table, plan.slots[alive]
        confidences, verified, accepted = table.confidences[slots], counts[alive] - 1, accepted[alive]
        self.stats.add(confidences, verified, accepted)
        timing = result.timing
        outcome = Outcome(
            int(counts.sum()), plan.draft, None if timing is None else timing.busy, confidences, verified, accepted
        )
        self._schedule.observe(outcome)
        places = np.arange(confidences.shape[1])
        believed = cumulative(np.nan_to_num(confidences, nan=0.5))
        seen = np.where(places < verified[:, None], places < accepted[:, None], believed)
        seen = np.minimum.accumulate(seen, axis=1)  # behind a refused draft nothing is accepted
        record = table.record[slots]
        table.record[slots] = np.where(np.isnan(record), seen, record + RECORD_WEIGHT * (seen - record))
