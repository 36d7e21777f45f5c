"""`AlternationPolicy`: whether the next step should be a prefill or a decode.

The scheduler asks before every step and reports what was planned. A policy sees counts, never sequences; another one
can be handed to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass


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
