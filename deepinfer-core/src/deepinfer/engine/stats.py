"""`EngineStats`: running totals of an engine, for logs, progress bars and benchmarks.

The engine adds to it once a step. Times are seconds of the monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made.

    prompt_tokens     rows of prefill steps, recomputed ones included
    generated_tokens  sampled rows
    finished          requests that ended, refused ones included
    prefill_seconds, decode_seconds   from the launch of a step to its result
    host_seconds      everything else the engine did: planning, building batches, committing
    """

    prefill_steps: int = 0
    decode_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Steps of both kinds."""
        return self.prefill_steps + self.decode_steps

    @property
    def device_seconds(self) -> float:
        """From launch to result, both kinds."""
        return self.prefill_seconds + self.decode_seconds

    def add_step(self, kind: str, rows: int, sampled: int, seconds: float) -> None:
        """Count one committed step of `rows` rows, `sampled` of which yielded a token."""
        self.generated_tokens += sampled
        if kind == "prefill":
            self.prefill_steps += 1
            self.prompt_tokens += rows
            self.prefill_seconds += seconds
        else:
            self.decode_steps += 1
            self.decode_seconds += seconds

    def line(self) -> str:
        """One line for the log."""
        prefill = self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0
        decode = self.decode_steps / self.decode_seconds if self.decode_seconds else 0.0
        host = 1000 * self.host_seconds / self.steps if self.steps else 0.0
        return (
            f"{self.steps} steps, {self.prompt_tokens} prompt tokens ({prefill:.0f}/s), "
            f"{self.generated_tokens} generated, {decode:.1f} decode steps/s, host {host:.2f} ms a step, "
            f"{self.finished} finished, {self.preemptions} preemptions"
        )
