"""Is there a GPU, and which GPUs may this process use? Answered from files and variables, before torch is imported."""

from __future__ import annotations

import re
from pathlib import Path

from deepinfer.hooks import BackendError, Visibility, read_visibility

VARIABLE = "CUDA_VISIBLE_DEVICES"
ALIASES = ("ASCEND_RT_VISIBLE_DEVICES",)
"""Set by launch scripts that serve several kinds of machines; they must not contradict the GPUs' own variable."""

LIBRARY_VARIABLES = {
    "NCCL_CUMEM_ENABLE": "1",  # DeepEP's windows need memory that NCCL allocated with cuMem
    "NCCL_PXN_DISABLE": "1",
    "NCCL_GIN_ERROR_QUERY_SEC": "432000",
    # what DeepEP sets anew for every communicator
    "NCCL_NO_CACHE": "NCCL_WIN_STRIDE,NCCL_GIN_TYPE,NCCL_GIN_GDAKI_MAX_QP_RD_ATOMIC",
    "EP_AVOID_RECORD_STREAM": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "CUDA_SCALE_LAUNCH_QUEUES": "4x",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether CUDA works must not open it
}
"""Settings of NCCL, DeepEP, torch and CUDA that the backend counts on; a user's own value stays."""

_IDENTIFIERS = r"(GPU|MIG)-[0-9A-Za-z/-]+"


def device_nodes(root: Path = Path("/")) -> list[str]:
    """Names of the GPUs' device nodes: nvidia0, nvidia1, ..."""
    nodes = [path.name for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return sorted(nodes, key=lambda name: int(name.removeprefix("nvidia")))


def driver_version(root: Path = Path("/")) -> str | None:
    """Version of the loaded kernel driver, None if none is loaded."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


def visibility(root: Path = Path("/")) -> Visibility:
    """GPUs this process may use, and what is wrong with the variables that say so."""
    return read_visibility(VARIABLE, len(device_nodes(root)), ALIASES, _IDENTIFIERS)


def present(root: Path = Path("/")) -> bool:
    """Whether this machine has a GPU that the process may use. Raises `BackendError` for a mask that is wrong.

    A mask that hides every GPU is an answer, not a mistake: another backend, or the CPU, is wanted.
    """
    if not device_nodes(root):
        return False
    seen = visibility(root)
    if seen.variable is not None and seen.mask.strip() in ("", "-1"):
        return False
    if seen.problems:
        raise BackendError("; ".join(seen.problems))
    return True


def problems() -> list[str]:
    """What is wrong with the variables, for core's list of unmet requirements."""
    return list(visibility().problems)


def environment() -> dict[str, str]:
    """Variables to set before torch is imported: the libraries', and the GPUs' mask where only its alias is given."""
    seen = visibility()
    return LIBRARY_VARIABLES | ({VARIABLE: seen.mask} if seen.variable in ALIASES else {})
