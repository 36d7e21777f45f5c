"""Which kernel libraries are here, judged by what they offer: modules, functions and parameters, never version strings.

Several distributions install different builds under one module name, so a version says nothing. The op groups ask
`Libraries.missing(need)` in `refuse()`; `deepinfer doctor` prints `Libraries.findings()`. Nothing is imported before an
op group is created.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import Any

SM100_EXTRA = "DG_FORCE_BUILD=1 pip install --no-build-isolation 'deepinfer-nvidia[sm100]'"
"""Builds the libraries of compute capability 10.x from source; needs nvcc 13.1 or newer and an installed torch."""

TILE_KERNELS = "pip install --no-deps --ignore-requires-python 'tile-kernels>=2.1,<3'"
"""Its metadata asks for Python 3.12; it runs on 3.11."""

SM90_EXTRA = "pip install 'deepinfer-nvidia[sm90]'"

KNOWN: Mapping[str, tuple[str, str]] = {
    "flash_mla": ("sparse attention over 528- and 288-byte rows", SM100_EXTRA),
    "deep_gemm": ("block-scaled products, index scores, fused experts, gate and residual sites", SM100_EXTRA),
    "deep_ep": ("expert dispatch and combine between ranks", SM100_EXTRA),
    "deep_select": ("top-k", SM100_EXTRA),
    "tile_kernels": ("quantizers, norms, mHC parts, gate, Engram", TILE_KERNELS),
    "triton": ("compiler of this package's own kernels", "pip install 'triton>=3.6,<4' (torch's CUDA builds bring it)"),
    "tilelang": ("compiler of tile_kernels", "pip install 'tilelang>=0.1.15,<0.2'"),
    "humming": ("grouped MXFP4 products on Hopper", SM90_EXTRA),
    "cuda.bindings.runtime": (
        "registered host memory, IPC, event nodes in graphs",
        "pip install 'cuda-python>=13,<14'",
    ),
}
"""{module: (what it is used for, command that installs it)}"""


@dataclass(frozen=True, slots=True)
class Need:
    """What an op calls in one module.

    functions   {dotted name below the module: parameters it must take}. A function whose parameters cannot be read (a
                compiled one without a signature in its docstring) is taken at its name.
    """

    module: str
    functions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Libraries:
    """The libraries of this process. `modules` replaces imports by module objects, None standing for a missing one."""

    def __init__(self, modules: Mapping[str, Any] | None = None) -> None:
        self._given = dict(modules or {})
        self._found: dict[str, ModuleType | str] = {}

    def get(self, name: str) -> Any:
        """A module whose presence `missing` has confirmed."""
        module = self._module(name)
        if isinstance(module, str):
            raise ImportError(module)
        return module

    def missing(self, *needs: Need) -> list[str]:
        """Every reason why `needs` are not met, each with what was found and how to install what is wanted."""
        return [reason for need in needs for reason in self._reasons(need)]

    def _reasons(self, need: Need) -> list[str]:
        module = self._module(need.module)
        install = KNOWN[need.module][1] if need.module in KNOWN else f"pip install {need.module}"
        if isinstance(module, str):
            return [f"{module}; install it: {install}"]
        reasons = []
        for name, parameters in need.functions.items():
            function = _attribute(module, name)
            if function is None:
                reasons.append(
                    f"{need.module} ({_installed_by(need.module)}) has no {name}; a build that has it: {install}"
                )
                continue
            known = parameters_of(function)
            lacking = [p for p in parameters if known is not None and p not in known]
            if lacking:
                what = f"{need.module}.{name} ({_installed_by(need.module)}) has no parameter {', '.join(lacking)}"
                reasons.append(f"{what}; a build that has it: {install}")
        return reasons

    def _module(self, name: str) -> ModuleType | str:
        """The module, or why it cannot be had."""
        if name in self._given:
            return self._given[name] if self._given[name] is not None else f"no module {name}"
        if name not in self._found:
            self._found[name] = _import(name)
        return self._found[name]

    def findings(self) -> list[tuple[str, str]]:
        """(module, where it comes from and what it lacks) of every known library, for `deepinfer doctor`."""
        rows = []
        for name, (purpose, install) in KNOWN.items():
            module = self._module(name)
            if isinstance(module, str):
                rows.append((name, f"{module}; {purpose}: {install}"))
            else:
                rows.append((name, f"{_installed_by(name)}; {purpose}"))
        return rows


def _import(name: str) -> ModuleType | str:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return f"no module {name}"
        return f"{name} ({_installed_by(name)}) cannot be imported: {error}"
    except Exception as error:  # a build for another torch or CUDA fails in many ways
        return f"{name} ({_installed_by(name)}) cannot be imported: {type(error).__name__}: {error}"


def _installed_by(module: str) -> str:
    """Distributions that install a module, with their versions: for people, never for decisions."""
    owners = metadata.packages_distributions().get(module.partition(".")[0], ())
    return ", ".join(f"{owner} {metadata.version(owner)}" for owner in dict.fromkeys(owners)) or "no distribution"


def _attribute(module: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        module = getattr(module, part, None)
    return module


def parameters_of(function: Any) -> tuple[str, ...] | None:
    """Names of a function's parameters; None where neither a signature nor its docstring tells, or it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _documented_parameters(getattr(function, "__doc__", None) or "")
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    return tuple(p.name for p in parameters)


def _documented_parameters(text: str) -> tuple[str, ...] | None:
    """From the first line of a compiled function's docstring, which holds its signature."""
    found = re.search(r"\((.*)\)", text.partition("\n")[0])
    if found is None or "*" in found.group(1):
        return None
    return tuple(re.findall(r"(\w+)\s*:", found.group(1)))
