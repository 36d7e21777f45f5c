"""The hooks of the NVIDIA backend. Imported after the backend was chosen; this is where torch and CUDA come in."""

from __future__ import annotations

from pathlib import Path

import torch

from deepinfer.hooks import BackendError, OpContext, hookimpl
from deepinfer.hooks.ops import (
    AttentionOps,
    CacheOps,
    CommunicatorOps,
    EngramOps,
    ExpertOps,
    GemmOps,
    ResidualOps,
    RuntimeOps,
    SamplingOps,
    StepInputOps,
    VisionOps,
)
from deepinfer_nvidia import groups, probe
from deepinfer_nvidia.communicator import Communicator
from deepinfer_nvidia.groups import Group
from deepinfer_nvidia.libraries import Libraries
from deepinfer_nvidia.machine import Chip, Machine
from deepinfer_nvidia.runtime import Runtime


class NvidiaPlugin:
    """Opens the GPU and creates the op groups that this machine has kernels for; core serves every other op.

    machine  None: the current GPU and the libraries that can be imported, asked when the first group is created
    """

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine
        self._found = Libraries()

    @hookimpl
    def deepinfer_create_runtime(self, context: OpContext) -> RuntimeOps:
        """The GPU's streams, events, memory and graphs, through torch. Raises `BackendError` if there is no GPU."""
        require_device()
        return Runtime(context, self._libraries())

    @hookimpl
    def deepinfer_create_communicator(self, context: OpContext) -> CommunicatorOps:
        """Groups over NCCL."""
        return Communicator(context)

    @hookimpl
    def deepinfer_findings(self) -> list[tuple[str, str]]:
        """The kernel libraries, each with the distribution that installed it or the command that would."""
        return self._libraries().findings()

    @hookimpl
    def deepinfer_create_attention(self, context: OpContext) -> AttentionOps | None:
        """Latent attention and the indexer."""
        return self._create(AttentionOps, context)

    @hookimpl
    def deepinfer_create_gemm(self, context: OpContext) -> GemmOps | None:
        """Products with weights, quantizers, norms, SwiGLU."""
        return self._create(GemmOps, context)

    @hookimpl
    def deepinfer_create_experts(self, context: OpContext) -> ExpertOps | None:
        """Routing, dispatch, expert products, combination."""
        return self._create(ExpertOps, context)

    @hookimpl
    def deepinfer_create_cache(self, context: OpContext) -> CacheOps | None:
        """Caches in the rows that the attention kernels read."""
        return self._create(CacheOps, context)

    @hookimpl
    def deepinfer_create_residual(self, context: OpContext) -> ResidualOps | None:
        """Hyper-connection sites."""
        return self._create(ResidualOps, context)

    @hookimpl
    def deepinfer_create_engram(self, context: OpContext) -> EngramOps | None:
        """N-gram memory."""
        return self._create(EngramOps, context)

    @hookimpl
    def deepinfer_create_sampling(self, context: OpContext) -> SamplingOps | None:
        """From logits to tokens."""
        return self._create(SamplingOps, context)

    @hookimpl
    def deepinfer_create_step_inputs(self, context: OpContext) -> StepInputOps | None:
        """Integer metadata of a step."""
        return self._create(StepInputOps, context)

    @hookimpl
    def deepinfer_create_vision(self, context: OpContext) -> VisionOps | None:
        """Images."""
        return self._create(VisionOps, context)

    def _libraries(self) -> Libraries:
        return self._machine.libraries if self._machine is not None else self._found

    def _create(self, contract: type[Group], context: OpContext) -> Group | None:
        if self._machine is None:
            self._machine = Machine(Chip.current(), self._found)
        return groups.create(contract, context, self._machine)


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
