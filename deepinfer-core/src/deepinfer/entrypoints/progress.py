"""`Progress`: a tqdm bar over requests that also shows the rate of tokens."""

from __future__ import annotations

import time

from deepinfer.engine.output import RequestOutput
from deepinfer.engine.stats import EngineStats

_REFRESH_SECONDS = 0.2


class Progress:
    """Counts finished requests; use as a context manager. Does nothing with `enabled=False`.

    The rates shown are tokens read (prompt) and tokens written (output) per second since the start.
    """

    def __init__(self, total: int, enabled: bool, stats: EngineStats) -> None:
        self._bar = None
        self._began = self._shown = time.monotonic()
        self._before = (stats.prompt_tokens, stats.generated_tokens)
        if enabled and total:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc="requests", unit="req", dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, stats: EngineStats) -> None:
        """A step was run: show the rates, a few times a second."""
        now = time.monotonic()
        if self._bar is None or now - self._shown < _REFRESH_SECONDS:
            return
        self._shown = now
        self._show_rates(stats, now)

    def finished(self, output: RequestOutput) -> None:
        """A request ended."""
        if self._bar is not None:
            self._bar.update(1)

    def _show_rates(self, stats: EngineStats, now: float) -> None:
        assert self._bar is not None
        seconds = max(now - self._began, 1e-9)
        read = (stats.prompt_tokens - self._before[0]) / seconds
        written = (stats.generated_tokens - self._before[1]) / seconds
        self._bar.set_postfix_str(f"in {read:.0f} tok/s, out {written:.1f} tok/s")
