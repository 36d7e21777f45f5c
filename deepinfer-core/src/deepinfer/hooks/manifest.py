"""What all ranks of a run must agree on: backend, plugins, versions, op table. Sent by the parent, checked by workers.

A worker opens its backend and binds its ops by itself, then compares; a rank that resolved differently stops the start
instead of giving slightly different numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deepinfer.errors import BackendError
from deepinfer.hooks.table import OpTable

if TYPE_CHECKING:
    from deepinfer.hooks.load import LoadedBackend


@dataclass(frozen=True, slots=True)
class Manifest:
    """accelerator: name of the backend. plugins: (name, distribution, version) of everything loaded, most preferred
    first. digest: of the op table."""

    accelerator: str
    plugins: tuple[tuple[str, str, str], ...]
    digest: str

    @classmethod
    def of(cls, loaded: LoadedBackend, ops: OpTable) -> Manifest:
        """The manifest of this process."""
        return cls(loaded.name, tuple((p.name, p.distribution, p.version) for p in loaded.providers), ops.digest)

    def to_json(self) -> dict[str, Any]:
        """A dict of strings and lists."""
        return {**asdict(self), "plugins": [list(plugin) for plugin in self.plugins]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Inverse of `to_json`."""
        return cls(data["accelerator"], tuple((p[0], p[1], p[2]) for p in data["plugins"]), data["digest"])

    def check(self, expected: Manifest, rank: int | None = None) -> None:
        """Raise `BackendError` that lists every difference between this process and `expected`, the parent's."""
        lines = []
        if self.accelerator != expected.accelerator:
            lines.append(f"backend: {self.accelerator}, expected {expected.accelerator}")
        if self.plugins != expected.plugins:
            lines.append(f"plugins: {_text(self.plugins)}, expected {_text(expected.plugins)}")
        if self.digest != expected.digest:
            lines.append(f"op table: digest {self.digest[:12]}, expected {expected.digest[:12]}")
        if lines:
            who = "this process" if rank is None else f"rank {rank}"
            raise BackendError(
                f"{who} resolved its ops differently from the parent:\n"
                + "\n".join(f"  {line}" for line in lines)
                + "\n  Install the same versions for all ranks and give them the same DEEPINFER_* variables."
            )


def _text(plugins: tuple[tuple[str, str, str], ...]) -> str:
    return ", ".join(f"{name} {version} ({distribution})" for name, distribution, version in plugins) or "none"
