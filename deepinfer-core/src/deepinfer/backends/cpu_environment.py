"""Variables the `cpu` backend wants in the process before torch is imported. Imports the standard library only."""

from __future__ import annotations

import sys


def environment() -> dict[str, str]:
    """Let threads that wait for each other sleep soon instead of spinning for milliseconds.

    torch's OpenMP threads (GNU's) spin at the end of every parallel loop. When anything else wants one of the cores,
    the spinning thread takes the time that the thread it waits for needs: prefill was 5 to 7 times slower on two shared
    cores. Some microseconds of spinning keep most of the speed of an idle machine (docs/performance.md). Too late once
    torch is there.
    """
    return {} if "torch" in sys.modules else {"GOMP_SPINCOUNT": "2000"}
