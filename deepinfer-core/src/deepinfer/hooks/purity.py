"""Finds out whether loading a plugin changed what it does not own: attributes of torch, deepinfer, builtins.

Used by tests and the conformance kit: `before = snapshot()`, load the plugin, `changes(before)`. Compares identities:
a replaced function is found whatever takes its place. Also watches the import system and the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

WATCHED = ("builtins", "torch", "deepinfer")

_ABSENT = object()
# written by the import system and the interpreter themselves
_IGNORED = frozenset({"__warningregistry__", "__cached__", "__spec__", "__loader__", "__annotations__", "__doc__"})


@dataclass(frozen=True)
class Snapshot:
    """Attributes of the watched modules and of the classes they define, by dotted name; values keep them alive."""

    roots: tuple[str, ...]
    owners: Mapping[str, Mapping[str, Any]] = field(repr=False)
    import_system: Mapping[str, tuple[Any, ...]] = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)


def snapshot(roots: Iterable[str] = WATCHED) -> Snapshot:
    """What the watched packages look like now: all their loaded modules, and the classes defined there."""
    roots = tuple(roots)
    owners = {name: dict(vars(module)) for name, module in _modules(roots)}
    owners |= {name: dict(vars(klass)) for name, klass in _classes(roots)}
    return Snapshot(roots, owners, _import_system(), dict(os.environ))


def changes(before: Snapshot) -> list[str]:
    """What differs from `before`, one line each; modules loaded since then are no change."""
    now = snapshot(before.roots)
    found = [line for name, was in before.owners.items() for line in _changed(name, was, now.owners.get(name))]
    for what, entries in before.import_system.items():
        if [id(e) for e in entries] != [id(e) for e in now.import_system[what]]:
            found.append(f"sys.{what} was changed")
    for variable in sorted(before.environment.keys() | now.environment.keys()):
        if before.environment.get(variable) != now.environment.get(variable):
            found.append(f"environment variable {variable} was changed")
    return found


def _modules(roots: tuple[str, ...]) -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and any(name == root or name.startswith(f"{root}.") for root in roots):
            yield name, module


def _classes(roots: tuple[str, ...]) -> Iterator[tuple[str, type]]:
    """Classes under the name of the module that defines them, so that a re-export is not counted twice."""
    for name, module in _modules(roots):
        for value in list(vars(module).values()):
            # type(), not isinstance(), which asks the object itself: deprecated names of torch answer with a warning
            if issubclass(type(value), type) and value.__module__ == name:
                yield f"{name}.{value.__qualname__}", value


def _import_system() -> dict[str, tuple[Any, ...]]:
    return {"meta_path": tuple(sys.meta_path), "path_hooks": tuple(sys.path_hooks)}


def _changed(owner: str, was: Mapping[str, Any], now: Mapping[str, Any] | None) -> Iterator[str]:
    if now is None:  # a class that is gone, which its module's attributes tell, or an unloaded module
        return
    for name in was.keys() | now.keys():
        old, new = was.get(name, _ABSENT), now.get(name, _ABSENT)
        if old is new or name in _IGNORED or _is_submodule(owner, name, new):
            continue
        what = "added" if old is _ABSENT else "removed" if new is _ABSENT else "replaced"
        yield f"{owner}.{name} was {what}"


def _is_submodule(owner: str, name: str, value: object) -> bool:
    """The import system puts a loaded submodule into its package; that is nobody's assignment."""
    return isinstance(value, ModuleType) and value.__name__ == f"{owner}.{name}"
