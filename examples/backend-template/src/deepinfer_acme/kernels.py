"""Builds and loads the C++ kernels of `csrc/`; afterwards they are the ops of `torch.ops.deepinfer_acme`.

They use torch's stable C++ interface: a build takes seconds, needs a C++20 compiler but no Python headers, and is kept
in the user's cache folder. Called by the op groups while ops are bound.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from deepinfer.hooks import BackendError

SOURCES = (Path(__file__).parent / "csrc" / "swiglu.cpp",)
OLDEST_TORCH = (2, 10)
"""The first torch whose stable interface has everything the kernels use."""

_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared")


def problems() -> list[str]:
    """Why the kernels cannot be built on this machine, each with what was found and what is needed."""
    found = []
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        found.append(f"torch {torch.__version__}, the kernels need {'.'.join(map(str, OLDEST_TORCH))} or newer")
    compiler = _compiler()
    if shutil.which(compiler[0]) is None:
        found.append(f"no C++ compiler {compiler[0]!r} on the path; install one (apt install g++) or set CXX")
    return found


def load() -> None:
    """Load the kernels, building them first if this version was never built here. May be called again.

    Raises `BackendError` with the compiler's own words if the build fails.
    """
    library = _cache() / f"kernels-{_key()}.so"
    if not library.exists():
        _build(library)
    torch.ops.load_library(str(library))


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer-acme"


def _key() -> str:
    """Changes with whatever a build depends on."""
    text = "\0".join([*_compiler(), *_FLAGS, torch.__version__, platform.machine()])
    return hashlib.sha256(b"\0".join([text.encode(), *(path.read_bytes() for path in SOURCES)])).hexdigest()[:16]


def _build(library: Path) -> None:
    """Compile into a folder of our own and move the result in place: ranks that start together build side by side."""
    library.parent.mkdir(parents=True, exist_ok=True)
    home = Path(torch.__file__).parent
    links = [f"-I{home / 'include'}", f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [*_compiler(), *_FLAGS, *map(str, SOURCES), *links, "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise BackendError(
                f"the kernels cannot be built: {shlex.join(command)} ended with {result.returncode}:\n"
                f"{result.stderr.strip()}\n"
                f"  Repair the compiler, or name another one: CXX=clang++"
            )
        os.replace(made, library)
