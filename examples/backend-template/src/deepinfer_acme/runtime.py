"""The Acme device: an emulator that computes in host memory, so this package runs on any machine.

Core's own bodies serve the CPU and every torch accelerator; override what your device does differently. What they
cannot guess, such as graphs, is listed in the contract `RuntimeOps`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from deepinfer.hooks import BackendError, DeviceProperties, provides
from deepinfer.hooks.ops import RuntimeOps

DEVICE_NAME = "Acme emulator in host memory"
DEVICES = 8
"""Devices of one host; a real backend counts what is there."""


class AcmeRuntime(RuntimeOps):
    """Everything is finished when a call returns: streams, events and graphs are core's synchronous ones."""

    @provides(version=1)
    def select(self, index: int) -> torch.device:
        """All emulated devices share the host's memory, so they are one `torch.device`."""
        if not 0 <= index < DEVICES:
            raise BackendError(
                f"rank {index} of this host has no Acme device of its own: found {DEVICES}, numbered from 0.\n"
                f"  Start at most {DEVICES} ranks on this host"
            )
        return super().select(index)

    @provides(version=1)
    def properties(self) -> DeviceProperties:
        """The host's processor under the device's own name."""
        return replace(super().properties(), name=DEVICE_NAME)
