"""The hooks of the NVIDIA backend. Imported after the backend was chosen; this is where torch and CUDA come in."""

from __future__ import annotations

from pathlib import Path

import torch

from deepinfer.hooks import BackendError, OpContext, hookimpl
from deepinfer.hooks.ops import RuntimeOps
from deepinfer_nvidia import probe


class NvidiaPlugin:
    """Opens the GPU; every op without a kernel of this package runs core's body on it."""

    @hookimpl
    def deepinfer_create_runtime(self, context: OpContext) -> RuntimeOps:
        """The GPU's streams, events, memory and graphs, through torch. Raises `BackendError` if there is no GPU."""
        require_device()
        return RuntimeOps(context)


def require_device(root: Path = Path("/")) -> None:
    """Raise unless a GPU, its driver and a torch that can use them are here; the message says what to install."""
    wanted = "DEEPINFER_ACCELERATOR=nvidia needs an NVIDIA GPU, its driver and a CUDA build of torch"
    nodes = probe.device_nodes(root)
    if not nodes:
        driver = probe.driver_version(root)
        state = "no driver is loaded" if driver is None else f"driver {driver} is loaded"
        raise BackendError(
            f"{wanted}; found no device node /dev/nvidia0, and {state}.\n"
            f"  On a machine with a GPU: install the driver and check it with nvidia-smi; in a container, start it\n"
            f"  with the GPUs passed through (docker run --gpus all). Without a GPU: DEEPINFER_ACCELERATOR=cpu"
        )
    if torch.version.cuda is None:
        raise BackendError(
            f"{wanted}; found {', '.join(nodes)}, but torch {torch.__version__} has no CUDA support.\n"
            f"  Install one that has: pip install --force-reinstall torch"
        )
    if not torch.cuda.is_available():
        raise BackendError(
            f"{wanted}; found {', '.join(nodes)} and torch {torch.__version__} for CUDA {torch.version.cuda}, but CUDA "
            f"does not start (driver {probe.driver_version(root) or 'unknown'}).\n"
            f"  Either the driver is too old for that CUDA version, or libcuda.so.1 is missing: check nvidia-smi"
        )
