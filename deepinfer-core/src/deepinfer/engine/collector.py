"""`CollectorPause`: keeps Python's garbage collector out of the step loop.

While requests are unfinished the engine collects every `interval` steps instead of whenever Python feels like it: a
full collection in the middle of a decode step would delay every running request. Automatic collection is back as soon
as the engine is idle, and nothing changes if the process had switched it off itself.
"""

from __future__ import annotations

import gc


class CollectorPause:
    """One per engine. `interval` 0 leaves the collector alone."""

    __slots__ = ("_interval", "_paused", "_steps")

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._paused = False
        self._steps = 0

    def tick(self, busy: bool) -> None:
        """Called after every step; `busy` = requests are unfinished."""
        if not self._interval:
            return
        if not busy:
            self.release()
        elif gc.isenabled():
            gc.disable()
            self._paused = True
        self._steps += 1
        if self._steps % self._interval == 0:
            gc.collect()

    def release(self) -> None:
        """Give automatic collection back if this object took it."""
        if self._paused:
            gc.enable()
            self._paused = False

    def __del__(self) -> None:
        """An engine that is dropped in the middle of its work leaves the process as it was."""
        self.release()
