"""The Acme device: an emulator that computes in host memory, so this package runs on any machine.

Core's own bodies serve the CPU and every torch accelerator; override what your device does differently. What they
cannot guess, such as graphs, is listed in the contract `RuntimeOps`.
"""

from __future__ import annotations

from dataclasses import replace

from deepinfer.hooks import provides
from deepinfer.hooks.devices.facts import DeviceProperties
from deepinfer.hooks.ops import RuntimeOps

DEVICE_NAME = "Acme emulator in host memory"


class AcmeRuntime(RuntimeOps):
    """Everything is finished when a call returns: streams, events and graphs are core's synchronous ones."""

    @provides(version=1)
    def properties(self) -> DeviceProperties:
        """The host's processor under the device's own name."""
        return replace(super().properties(), name=DEVICE_NAME)
