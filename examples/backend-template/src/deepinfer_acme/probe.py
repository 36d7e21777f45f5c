"""Is there an Acme device on this machine? Answered from files, before torch is imported."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT_VARIABLE = "ACME_ROOT"
"""Folder that stands for "/" when devices are looked for; emulators and tests set it."""


def device_nodes(root: Path | None = None) -> list[str]:
    """Names of the device nodes below `root`/dev, in order of their numbers: acme0, acme1, ..."""
    root = Path(os.environ.get(ROOT_VARIABLE) or "/") if root is None else root
    nodes = [path.name for path in (root / "dev").glob("acme*") if re.fullmatch(r"acme\d+", path.name)]
    return sorted(nodes, key=lambda name: int(name.removeprefix("acme")))


def present() -> bool:
    """Whether core may choose this backend without being told to. Under 50 ms, no driver call."""
    return bool(device_nodes())
