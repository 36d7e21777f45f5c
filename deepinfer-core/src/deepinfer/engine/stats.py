"""`EngineStats`: running totals of an engine, for logs, progress bars and benchmarks.

The engine adds to it once a step. Times are seconds of the monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from deepinfer.engine.batch import StepPlan
from deepinfer.runner.inputs import StepResult
from deepinfer.speculate.statistics import SpeculationStats


class StepRecord(NamedTuple):
    """One committed step. busy: milliseconds on the device; waited: milliseconds it stood still before, 0 after a pause
    of the engine."""

    kind: str
    rows: int
    sequences: int
    busy: float
    waited: float


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made.

    prompt_tokens     rows of prefill steps, recomputed ones included
    cached_tokens     rows that prefill steps did not have to compute, because the prefix cache had them
    generated_tokens  tokens that steps yielded, those of requests that had ended meanwhile included
    finished          requests that ended, refused ones included
    prefill_seconds, decode_seconds   the device's work, where the executor times it; else from launch to result
    blocked_seconds   the engine waited in the executor, for a launch or a result
    host_seconds      everything else the engine did: planning, building batches, committing
    device_wait_seconds  the device stood still between two steps although the engine had work for it
    speculation       counts of drafts, None without speculation
    records           every step since `reset(record=True)`, None if nobody asked
    """

    prefill_steps: int = 0
    decode_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0
    blocked_seconds: float = 0.0
    device_wait_seconds: float = 0.0
    speculation: SpeculationStats | None = None
    records: list[StepRecord] | None = None

    @property
    def steps(self) -> int:
        """Steps of both kinds."""
        return self.prefill_steps + self.decode_steps

    @property
    def device_seconds(self) -> float:
        """The device's work, both kinds."""
        return self.prefill_seconds + self.decode_seconds

    def reset(self, record: bool = False) -> None:
        """Begin anew, with a record of every step if wanted."""
        for entry in fields(self):
            if entry.name != "speculation":
                setattr(self, entry.name, entry.default)
        if self.speculation is not None:
            self.speculation.reset()
        self.records = [] if record else None

    def add_step(self, plan: StepPlan, result: StepResult, seconds: float, follows: bool) -> None:
        """Count one committed step.

        seconds  from its launch to its result
        follows  the engine had work for the device ever since the step before
        """
        sampled = int(plan.sampled.sum())
        self.generated_tokens += sampled if result.accepted is None else sampled + int(result.accepted.sum())
        waited = 0.0
        if result.timing is not None:
            seconds = result.timing.busy / 1000
            waited = result.timing.waited / 1000 if follows else 0.0
        self.device_wait_seconds += waited
        if self.records is not None:
            rows = plan.num_rows if result.counts is None else int(result.counts.sum())
            self.records.append(StepRecord(plan.kind, rows, len(plan.slots), 1000 * seconds, 1000 * waited))
        if plan.kind == "prefill":
            self.prefill_steps += 1
            self.prompt_tokens += plan.num_rows
            self.cached_tokens += plan.num_restored
            self.prefill_seconds += seconds
        else:
            self.decode_steps += 1
            self.decode_seconds += seconds

    def line(self) -> str:
        """One line for the log."""
        prefill = self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0
        decode = self.decode_steps / self.decode_seconds if self.decode_seconds else 0.0
        host = 1000 * self.host_seconds / self.steps if self.steps else 0.0
        wait = 1000 * self.device_wait_seconds / self.steps if self.steps else 0.0
        drafts = "" if self.speculation is None else "; " + self.speculation.line()
        cached = f", {self.cached_tokens} more from the prefix cache" if self.cached_tokens else ""
        return (
            f"{self.steps} steps, {self.prompt_tokens} prompt tokens ({prefill:.0f}/s){cached}, "
            f"{self.generated_tokens} generated, {decode:.1f} decode steps/s, "
            f"host {host:.2f} and device wait {wait:.2f} ms a step, "
            f"{self.finished} finished, {self.preemptions} preemptions{drafts}"
        )
