"""How many drafts of each sequence a step verifies, and whether it drafts for the next one.

The scheduler asks when it plans a decode step and the engine reports what came of it. A schedule sees confidences,
rates and limits, never tokens. With steps planned ahead the confidences it knows are one step older than the drafts it
decides on; `fresh` says whether they are those drafts' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deepinfer.speculate.confidence import Calibration, cumulative
from deepinfer.speculate.costs import CostModel

PROBE_INTERVAL = 48
"""Steps between two looks at drafts while drafting is not worth its cost."""
PATIENCE = 4
"""Steps over which drafting must have lost before it pauses."""
BLEND = 0.5
"""Weight of a sequence's own record beside confidences that are one step old."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is known of n sequences that decode next.

    confidences  float32 [n, N]  latest that the host knows; NaN = none yet, 0 = no draft
    record       float64 [n, N]  running share of the sequence's own drafts that were accepted, by position; NaN = none
    limits       int64 [n]       drafts that there are and that could still be of use
    fresh        the confidences are those of the drafts to verify
    """

    confidences: np.ndarray
    record: np.ndarray
    limits: np.ndarray
    fresh: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a decode step of n sequences.

    rows, drafted, milliseconds  of the step; milliseconds None where nobody timed it
    confidences [n, N] of the verified drafts (NaN = unknown), verified [n], accepted [n]
    """

    rows: int
    drafted: bool
    milliseconds: float | None
    confidences: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray


class VerificationSchedule(Protocol):
    """One per engine."""

    def choose(self, choice: Choice) -> np.ndarray:
        """Drafts to verify, int64 [n], at most `choice.limits`."""
        ...

    def draft_next(self) -> bool:
        """Whether the step just chosen should draft for the one after it. Asked once a decode step, after `choose`."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """A decode step is committed."""
        ...


class FixedSchedule:
    """Every draft of every step."""

    def choose(self, choice: Choice) -> np.ndarray:
        """All there are; those of confidence 0 are none."""
        if not choice.fresh:
            return choice.limits
        there = np.logical_and.accumulate(choice.confidences != 0, axis=1).sum(1)
        return np.minimum(there, choice.limits)

    def draft_next(self) -> bool:
        """Always."""
        return True

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn."""


class ConfidenceSchedule:
    """As many drafts as their chance of acceptance is worth: the most expected tokens a second.

    budgeted  True under the rejection rule: whether a draft is verified must not depend on the draft itself or on later
              ones, or accepting becomes biased. Drafts are then cut where their rate falls below a bound that the steps
              before have set; a rate depends on earlier drafts only. Under the coupled rule the output does not depend
              on the choice at all, and the best total is chosen.
    """

    def __init__(self, num_drafts: int, costs: CostModel, budgeted: bool = False) -> None:
        self.costs = costs
        self.calibration = Calibration(num_drafts)
        self._budgeted, self._bound = budgeted, 0.5
        self._gain = 1.0  # running value of drafting over not drafting
        self._losing = 0
        self._paused = 0  # steps since drafting paused, 0 = it goes on

    def choose(self, choice: Choice) -> np.ndarray:
        """See `VerificationSchedule`."""
        known = ~np.isnan(choice.confidences[:, 0])
        rates = self.calibration.apply(cumulative(np.nan_to_num(choice.confidences, nan=0.5)))
        if not choice.fresh:
            record = np.where(np.isnan(choice.record), rates, choice.record)
            rates = np.minimum.accumulate((1 - BLEND) * rates + BLEND * record, axis=1)
        paused = self._paused
        if known.any():
            self._judge(rates[known])
        places = np.arange(rates.shape[1])
        usable = np.where(places < choice.limits[:, None], rates, -1.0)
        if paused if self._budgeted else self._paused:
            return np.zeros(len(usable), dtype=np.int64)
        counts, bound = self._best(usable)
        if self._budgeted:
            counts, self._bound = (usable >= self._bound).sum(1), bound
        return counts

    def _best(self, usable: np.ndarray) -> tuple[np.ndarray, float]:
        """The choice [n] with the most expected tokens a second, and the smallest rate in it (1 if it is empty)."""
        count, width = usable.shape
        order = np.argsort(-usable, axis=None, kind="stable")
        sorted_rates = usable.reshape(-1)[order]
        sorted_rates = sorted_rates[sorted_rates >= 0]
        expected = count + np.concatenate(([0.0], np.cumsum(sorted_rates)))
        cost = self.costs.step(count + np.arange(len(expected))) + self.costs.drafting(count)
        best = int(np.argmax(expected / cost))
        chosen = np.bincount(order[:best] // width, minlength=count)
        return chosen.astype(np.int64), float(sorted_rates[best - 1]) if best else 1.0

    def _judge(self, rates: np.ndarray) -> None:
        """Pause drafting that loses, and resume when a look at drafts promises a gain."""
        count = len(rates)
        chosen, _ = self._best(rates)
        expected = count + sum(float(rates[i, :k].sum()) for i, k in enumerate(chosen.tolist()))
        with_drafts = expected / float(self.costs.step(np.array(count + chosen.sum())) + self.costs.drafting(count))
        without = count / float(self.costs.step(np.array(count)))
        gain = with_drafts / without
        self._gain += 0.25 * (gain - self._gain)
        if self._paused:
            if gain > 1.03:
                self._paused, self._losing, self._gain = 0, 0, gain
            return
        self._losing = self._losing + 1 if self._gain < 1.0 else 0
        if self._losing >= PATIENCE:
            self._paused = 1

    def draft_next(self) -> bool:
        """See `VerificationSchedule`."""
        if not self._paused:
            return True
        self._paused += 1
        return self._paused % PROBE_INTERVAL == 0

    def observe(self, outcome: Outcome) -> None:
        """See `VerificationSchedule`."""
        if outcome.milliseconds is not None:
            self.costs.observe(outcome.rows, len(outcome.verified), outcome.drafted, outcome.milliseconds)
        known = ~np.isnan(outcome.confidences[:, 0])
        if known.any():
            rates = cumulative(outcome.confidences[known])
            self.calibration.observe(rates, outcome.verified[known], outcome.accepted[known])
