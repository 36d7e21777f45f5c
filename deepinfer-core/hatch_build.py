"""Packs the backend template (`deepinfer new-backend` copies it) into wheel and sdist, from its one place on disk.

In the repository that place is `examples/backend-template`, in an unpacked sdist `backend-template`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NOT_PACKED = {"__pycache__", "build", "dist"}


class TemplateHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling before it collects files. An editable install reads the template where it is."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        places = (root / "backend-template", root.parent / "examples" / "backend-template")
        source = next((place for place in places if (place / "pyproject.toml").exists()), None)
        if source is None:
            raise FileNotFoundError(f"the backend template is missing; looked in {' and '.join(map(str, places))}")
        target = "backend-template" if self.target_name == "sdist" else "deepinfer/templates/backend"
        for path in sorted(source.rglob("*")):
            inside = path.relative_to(source)
            if path.is_file() and not any(part in NOT_PACKED or part.startswith(".") for part in inside.parts):
                build_data["force_include"][str(path)] = f"{target}/{inside.as_posix()}"
