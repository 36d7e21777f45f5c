"""Collects everything that is wrong with a checkpoint, so that one error tells all of it (or the first part)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from deepinfer.errors import CheckpointError

SHOWN = 20
"""Faults an error lists; the rest is counted."""


@dataclass(slots=True)
class Faults:
    """One line per fault of the checkpoint in `directory`."""

    directory: Path
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Note a fault."""
        self.lines.append(line)

    def raise_if_any(self, headline: str, hint: str = "") -> None:
        """Raise CheckpointError with the headline, the first faults and a hint what to do."""
        if not self.lines:
            return
        shown = [f"  {line}" for line in self.lines[:SHOWN]]
        if len(self.lines) > SHOWN:
            shown.append(f"  ... and {len(self.lines) - SHOWN} more")
        raise CheckpointError("\n".join([f"{self.directory}: {headline}", *shown, *([hint] if hint else [])]))
