"""Is there an NPU, and which NPUs may this process use? Answered from files and variables, before torch is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from deepinfer.hooks import BackendError, Visibility, read_visibility

VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
ALIASES = ("CUDA_VISIBLE_DEVICES",)
"""Launch scripts of the original set this one on every kind of machine."""

TOOLKIT_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
TOOLKIT_PLACES = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/latest", "usr/local/Ascend/cann")


def device_nodes(root: Path = Path("/")) -> list[str]:
    """Names of the NPUs' device nodes, davinci0 and so on; on newer machines the devices of the unified bus."""
    nodes = [path.name for path in (root / "dev").glob("davinci*") if re.fullmatch(r"davinci\d+", path.name)]
    if nodes:
        return sorted(nodes, key=lambda name: int(name.removeprefix("davinci")))
    return sorted(path.name for path in (root / "sys/class/ubcore").glob("udma*") if _has_compute(path))


def _has_compute(device: Path) -> bool:
    """Whether a device of the unified bus brings compute units."""
    try:
        return int((device / "device/ub_totalues").read_text(encoding="ascii")) > 0
    except (OSError, ValueError):
        return False


def toolkit(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Path | None:
    """Folder of the CANN toolkit that holds libascendcl.so, None if there is none."""
    environ = os.environ if environ is None else environ
    places = [Path(environ[name]) for name in TOOLKIT_VARIABLES if environ.get(name)]
    places += [root / place for place in TOOLKIT_PLACES]
    return next((place for place in places if (place / "lib64/libascendcl.so").exists()), None)


def visibility(root: Path = Path("/")) -> Visibility:
    """NPUs this process may use, and what is wrong with the variables that say so."""
    return read_visibility(VARIABLE, len(device_nodes(root)), ALIASES)


def present(root: Path = Path("/")) -> bool:
    """Whether this machine has an NPU that the process may use. Raises `BackendError` for a mask that is wrong.

    A mask that hides every NPU is an answer, not a mistake: another backend, or the CPU, is wanted.
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
    """Variables to set before torch is imported.

    torch must not load torch_npu by itself: with the toolkit missing, `import torch` would fail. The plugin loads it,
    after it has checked. The NPUs' own mask is set where only its alias is given.
    """
    wanted = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    seen = visibility()
    if seen.variable in ALIASES:
        wanted[VARIABLE] = seen.mask
    return wanted
