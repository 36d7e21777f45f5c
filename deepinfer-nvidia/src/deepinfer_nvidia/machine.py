"""What the op groups of this backend know of the machine: the GPU's facts and the libraries that were found.

Made once by the plugin and handed to every op group; tests make their own. `refuse()` decides on these values only,
never on a version string.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepinfer.hooks import OpContext
from deepinfer_nvidia.libraries import Libraries


@dataclass(frozen=True, slots=True)
class Chip:
    """One GPU as its driver describes it.

    major, minor  compute capability: (9, 0) Hopper, (10, 0) and (10, 3) data-centre Blackwell
    sms           streaming multiprocessors
    memory        bytes
    """

    name: str
    major: int
    minor: int
    sms: int
    memory: int

    @property
    def capability(self) -> str:
        """Compute capability as text, e.g. "9.0"."""
        return f"{self.major}.{self.minor}"

    @classmethod
    def current(cls) -> Chip:
        """The process's current GPU. Needs a working CUDA (`plugin.require_device`)."""
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls(found.name, found.major, found.minor, found.multi_processor_count, found.total_memory)


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU and the libraries beside it."""

    chip: Chip
    libraries: Libraries = field(default_factory=Libraries)


class OnMachine:
    """Mixin of every op group of this backend, before the contract: `class Gemm(OnMachine, GemmOps)`."""

    def __init__(self, context: OpContext, machine: Machine) -> None:
        super().__init__(context)  # type: ignore[call-arg]
        self.machine = machine
