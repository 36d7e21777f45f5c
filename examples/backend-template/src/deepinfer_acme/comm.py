"""Collectives between Acme devices: Gloo over host memory, until there is a transport of our own.

To replace it, register your library with torch.distributed, set `transport` to its name and `stages_through_host` to
False; override single ops where your library has something better. One provider serves the whole group.
"""

from __future__ import annotations

from typing import ClassVar

from deepinfer.hooks.ops import CommunicatorOps


class AcmeCommunicator(CommunicatorOps):
    """Every op is core's body over this transport."""

    transport: ClassVar[str] = "gloo"
    stages_through_host: ClassVar[bool] = True
