"""Policies: whether the next step should be a prefill or a decode, and which waiting request goes first.

The scheduler asks `StepPolicy` before every step and reports what was planned, and `RequestOrder` whenever it could
admit a request. Policies see numbers, never sequences; others can be handed to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class QueueView:
    """What a policy may look at.

    waiting     requests in the queue
    prefilling  a prompt is half computed and holds memory
    running     sequences that could decode
    kv_usage    share of cache blocks in use, 0 .. 1
    """

    waiting: int
    prefilling: bool
    running: int
    kv_usage: float


class StepPolicy(Protocol):
    """Decides between prefill and decode."""

    def prefer_prefill(self, view: QueueView) -> bool:
        """True if the next step should be a prefill, if one can be formed; else a decode, if one can."""
        ...

    def planned(self, kind: str) -> None:
        """The step that was planned, "prefill" or "decode"."""
        ...


@dataclass(slots=True)
class AlternationPolicy:
    """Prefill as soon as something waits, but never let running sequences starve.

    max_kv_usage         new prompts are admitted beside running sequences only up to this usage, so that these have
                         room to grow; a half computed prompt goes on regardless
    max_prefill_streak   prefill steps in a row while sequences run, then comes one decode step
    attempt_interval     decode steps between two attempts to prefill while sequences run; 1 = attempt at once
    """

    max_kv_usage: float = 0.9
    max_prefill_streak: int = 8
    attempt_interval: int = 1
    prefill_streak: int = 0
    decode_streak: int = 0

    def prefer_prefill(self, view: QueueView) -> bool:
        """True if the next step should be a prefill, if one can be formed."""
        if not view.running:
            return True
        if not view.waiting and not view.prefilling:
            return False
        if self.prefill_streak >= self.max_prefill_streak or self.decode_streak % self.attempt_interval:
            return False
        return view.prefilling or view.kv_usage <= self.max_kv_usage

    def planned(self, kind: str) -> None:
        """Note the kind of the step that was planned."""
        if kind == "prefill":
            self.prefill_streak, self.decode_streak = self.prefill_streak + 1, 0
        else:
            self.prefill_streak, self.decode_streak = 0, self.decode_streak + 1


@dataclass(frozen=True, slots=True)
class WaitingView:
    """What an order may look at.

    priority  as given with the request, lower = sooner
    waited    seconds since it arrived
    arrival   seconds of the monotonic clock
    """

    priority: int
    waited: float
    arrival: float


class RequestOrder(Protocol):
    """Decides which of several waiting requests is admitted next. Asked for the first one of each priority: within a
    priority it is always first come, first served."""

    def rank(self, view: WaitingView) -> Any:
        """Something comparable; the smallest goes first."""
        ...


@dataclass(frozen=True, slots=True)
class PriorityOrder:
    """Lower priorities first, then by arrival.

    ageing  seconds of waiting that are worth one step of priority, so that nobody starves behind a stream of more
            urgent requests; None = no ageing
    """

    ageing: float | None = None

    def rank(self, view: WaitingView) -> tuple[float, float]:
        """See `RequestOrder`."""
        gained = 0 if self.ageing is None else view.waited / self.ageing
        return view.priority - gained, view.arrival
