"""This package's own kernels, in Triton: one file an idea, each with its launch beside it. Called by `sm90.*`.

Every launch takes plain tensors and returns plain tensors; none knows steps, caches or models. With
`TRITON_INTERPRET=1` set before the first import they run on the CPU, one program after the other. Nothing here is
imported before an op group asks `problems` and finds none.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

from deepinfer_nvidia.libraries import Libraries, Need


def problems(device: torch.device, libraries: Libraries) -> list[str]:
    """Why no kernel of this package can run on tensors of `device`; empty if they can."""
    found = libraries.missing(Need("triton"))
    if device.type != "cuda" and not interpreted():
        found.append(f"device={device.type}, allowed cuda (any device with TRITON_INTERPRET=1)")
    return found


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def load(name: str) -> ModuleType:
    """The kernel file `name`; imported when first called, because it imports Triton."""
    return importlib.import_module(f"{__name__}.{name}")
