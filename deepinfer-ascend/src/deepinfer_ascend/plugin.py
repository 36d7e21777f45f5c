"""The hooks of the Ascend backend. Imported after the backend was chosen; this is where torch_npu comes in."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import torch

from deepinfer.hooks import BackendError, OpContext, hookimpl
from deepinfer.hooks.ops import RuntimeOps
from deepinfer_ascend import probe

_WANTED = "DEEPINFER_ACCELERATOR=ascend needs an Ascend NPU, its driver, the CANN toolkit and torch_npu"


class AscendPlugin:
    """Opens the NPU; every op without a kernel of this package runs core's body on it."""

    @hookimpl
    def deepinfer_register_device(self) -> None:
        """Load torch_npu, which teaches torch the device type."""
        require_device()

    @hookimpl
    def deepinfer_create_runtime(self, context: OpContext) -> RuntimeOps:
        """The NPU's streams, events and memory, through torch_npu. Raises `BackendError` if there is no NPU."""
        require_device()
        return RuntimeOps(context)


def require_device(root: Path = Path("/")) -> None:
    """Raise unless an NPU, its toolkit and torch_npu are here; the message says what to install. Loads torch_npu."""
    nodes = probe.device_nodes(root)
    if not nodes:
        raise BackendError(
            f"{_WANTED}; found no device node /dev/davinci0.\n"
            f"  On a machine with an NPU: install the driver and check it with npu-smi info; in a container, start it\n"
            f"  with the devices passed through. Without an NPU: DEEPINFER_ACCELERATOR=cpu"
        )
    found = f"found {', '.join(nodes)}"
    if probe.toolkit(root) is None:
        raise BackendError(
            f"{_WANTED}; {found}, but no CANN toolkit (libascendcl.so) in {' or '.join(probe.TOOLKIT_VARIABLES)} or "
            f"/usr/local/Ascend.\n"
            f"  Install CANN 9.2 and load its environment: source /usr/local/Ascend/ascend-toolkit/set_env.sh"
        )
    if torch.version.cuda is not None:
        raise BackendError(
            f"{_WANTED}; {found}, but torch {torch.__version__} is a CUDA build, which torch_npu does not load into.\n"
            f"  Install the CPU build: pip install --index-url https://download.pytorch.org/whl/cpu torch"
        )
    _load_torch_npu(found)


def _load_torch_npu(found: str) -> None:
    if importlib.util.find_spec("torch_npu") is None:
        version = torch.__version__.partition("+")[0]
        raise BackendError(
            f"{_WANTED}; {found}, but torch_npu is not installed.\n"
            f"  Install the one that matches torch: pip install torch_npu=={version}"
        )
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        raise BackendError(
            f"{_WANTED}; {found}, but torch_npu cannot be loaded: {type(error).__name__}: {error}\n"
            f"  Load the toolkit's environment (source set_env.sh) and install the torch_npu that matches torch "
            f"{torch.__version__}"
        ) from error
