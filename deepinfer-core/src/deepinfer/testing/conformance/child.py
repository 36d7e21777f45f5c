"""What level 0 looks at in a process of its own: `python -m deepinfer.testing.conformance.child TASK NAME`.

Each task prints one JSON object as its last line; `hygiene.py` judges it. A fresh process, because importing a module
can be timed only once, and because a backend that breaks something must not break the kit.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from deepinfer.hooks import discover, record  # what every entry module may count on being loaded


def entry(name: str) -> dict[str, Any]:
    """Import the entry module of a backend, ask its probe, and say what that took and changed."""
    target = discover.find(discover.BACKENDS, name, name).target
    watch = _Watch()
    start = time.perf_counter()
    module = import_module(target.partition(":")[0])
    seconds = time.perf_counter() - start
    after = watch.report() | {"seconds": seconds}
    found = getattr(module, target.partition(":")[2])
    return {"import": after, "probe": _probe(found)}


def _probe(found: Any) -> dict[str, Any] | None:
    if not isinstance(found, record.Backend) or found.probe is None:
        return None
    watch = _Watch()
    start = time.perf_counter()
    module, _, function = found.probe.partition(":")
    answer = getattr(import_module(module), function)()
    return watch.report() | {"seconds": time.perf_counter() - start, "answer": repr(answer)}


class _Watch:
    """What a piece of code changed in its process."""

    def __init__(self) -> None:
        self.modules, self.environment, self.threads = set(sys.modules), dict(os.environ), threading.active_count()

    def report(self) -> dict[str, Any]:
        now = dict(os.environ)
        names = sorted(self.environment.keys() | now.keys())
        return {
            "compiled": sorted(name for name in set(sys.modules) - self.modules if _is_compiled(sys.modules[name])),
            "torch": "torch" in sys.modules,
            "environment": [name for name in names if self.environment.get(name) != now.get(name)],
            "threads": threading.active_count() - self.threads,
        }


def _is_compiled(module: ModuleType | None) -> bool:
    """Whether a module is a shared library that does not come with Python."""
    file = getattr(module, "__file__", None) or ""
    return file.endswith((".so", ".pyd", ".dylib")) and "lib-dynload" not in file


def purity(name: str) -> dict[str, Any]:
    """Open a backend and bind its ops; what changed in torch, deepinfer, builtins and the environment at each step."""
    import torch  # loaded before the first snapshot: importing it is no change

    from deepinfer.hooks import open_backend
    from deepinfer.hooks.purity import changes, snapshot
    from deepinfer.testing.subject import make_subject

    assert torch.__version__
    before = snapshot()
    loaded = open_backend(name)
    opened = changes(before)
    before = snapshot()
    try:
        loaded.device()
    except Exception as error:
        return {"opened": opened, "declared": dict(loaded.environment), "absent": _message(error)}
    registered = changes(before)
    before = snapshot()
    try:
        make_subject(loaded)
    except Exception as error:
        return {"opened": opened, "declared": dict(loaded.environment), "absent": _message(error)}
    bound = changes(before)
    return {"opened": opened, "registered": registered, "bound": bound, "declared": dict(loaded.environment)}


def missing(name: str) -> dict[str, Any]:
    """Ask a backend's runtime for a device that no host has."""
    from deepinfer.testing.subject import make_subject

    try:
        subject = make_subject(name)
        device = subject.ops.runtime.select(999)
    except Exception as error:
        return {"error": _message(error)}
    return {"error": None, "device": str(device)}


def _message(error: Exception) -> dict[str, str]:
    return {"type": type(error).__name__, "text": str(error)}


TASKS: dict[str, Callable[[str], dict[str, Any]]] = {"entry": entry, "purity": purity, "missing": missing}

if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](sys.argv[2])))
