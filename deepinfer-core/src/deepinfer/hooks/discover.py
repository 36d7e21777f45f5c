"""Finds installed backends and op packs through entry points, and chooses the backend of this run.

Called by `load.open_backend` and by the listing of `deepinfer doctor`. Reads package metadata and the light entry
modules only: no plugin module, no torch, no device library is imported here. Knows nothing about ops.
"""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from deepinfer.errors import BackendError
from deepinfer.hooks.record import Backend, OpPack
from deepinfer.hooks.requirements import check_api

logger = logging.getLogger("deepinfer.hooks")

BACKENDS = "deepinfer.backends"
OP_PACKS = "deepinfer.op_packs"
VARIABLE = "DEEPINFER_ACCELERATOR"

DEFAULT_BACKEND = "cpu"
"""Backend of a machine on which no installed backend finds its device."""

_Record = TypeVar("_Record", Backend, OpPack)


@dataclass(frozen=True, slots=True)
class Installed:
    """One entry point of a group, as package metadata describes it; nothing of it is imported.

    kind          "backend" or "op pack"
    distribution  name of the distribution that brings it, `version` its version
    file          where its entry points are written, to tell two installations apart
    """

    kind: str
    name: str
    target: str
    distribution: str
    version: str
    file: str
    requirements: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.name} ({self.distribution} {self.version})"


def installed(group: str = BACKENDS, name: str | None = None) -> list[Installed]:
    """Entry points of `group`, sorted by name and distribution; with `name` only those."""
    found = metadata.entry_points(group=group) if name is None else metadata.entry_points(group=group, name=name)
    kind = "op pack" if group == OP_PACKS else "backend"
    entries = [_describe(kind, entry) for entry in found]
    return sorted(entries, key=lambda e: (e.name, e.distribution, e.file))


def _describe(kind: str, entry: metadata.EntryPoint) -> Installed:
    dist = entry.dist
    if dist is None:
        return Installed(kind, entry.name, entry.value, "unknown distribution", "?", "?", ())
    folder = getattr(dist, "_path", None)
    file = Path(folder) / "entry_points.txt" if folder is not None else Path(str(dist.locate_file("")))
    version, requires = dist.version or "?", tuple(dist.requires or ())
    return Installed(kind, entry.name, entry.value, dist.metadata["Name"] or "?", version, str(file), requires)


def refuse_original() -> None:
    """Raise if the distribution `deepinfer` is installed: it owns the same import name as this one.

    Two distributions that write into one package directory overwrite each other's files, and uninstalling either
    breaks the other, so the way out names both.
    """
    try:
        original = metadata.distribution("deepinfer")
    except metadata.PackageNotFoundError:
        return
    place = original.locate_file("deepinfer")
    raise BackendError(
        f"the distribution deepinfer {original.version} is installed ({place}); it and deepinfer-core both provide the "
        f"package 'deepinfer' and overwrite each other's files.\n"
        f"  Remove both, then install this one: pip uninstall -y deepinfer deepinfer-core && pip install deepinfer-core"
    )


def find(group: str, name: str, wanted: str) -> Installed:
    """The one entry `name` of `group`; `wanted` is how the user asked for it, e.g. "DEEPINFER_ACCELERATOR=acme"."""
    entries = installed(group, name)
    refuse_duplicates(entries)
    if entries:
        return entries[0]
    names = sorted({entry.name for entry in installed(group)})
    close = difflib.get_close_matches(name.lower(), names, n=1)
    kind = "op pack" if group == OP_PACKS else "backend"
    message = f"{wanted}: no such {kind}. Installed: {', '.join(names) or 'none'}."
    if close:
        message += f" Did you mean {close[0]}?"
    package = "deepinfer-<name>" if close else f"deepinfer-{name}"
    raise BackendError(f"{message}\n  Every {kind} is a package of its own: pip install {package}")


def refuse_duplicates(entries: Iterable[Installed]) -> None:
    """Raise if two entries carry one name, naming both distributions and files."""
    seen: dict[str, Installed] = {}
    for entry in entries:
        other = seen.setdefault(entry.name, entry)
        if other is not entry:
            raise BackendError(
                f"the {entry.kind} name {entry.name} is registered twice:\n"
                f"  {other.distribution} {other.version}  {other.file}  -> {other.target}\n"
                f"  {entry.distribution} {entry.version}  {entry.file}  -> {entry.target}\n"
                f"  Uninstall one of them: pip uninstall {other.distribution}  or  pip uninstall {entry.distribution}"
            )


def load_record(entry: Installed, kind: type[_Record]) -> _Record:
    """Import the entry module and return its record, with its plugin API accepted and its name checked."""
    record = resolve(entry, entry.target, f"{entry} cannot be imported")
    if not isinstance(record, kind):
        raise BackendError(
            f"{entry}: entry point {entry.target} is of type {type(record).__name__}, "
            f"expected a deepinfer.hooks.{kind.__name__}"
        )
    check_api(entry, record.api)
    if record.name != entry.name:
        raise BackendError(
            f"{entry}: its record is named {record.name!r}, its entry point {entry.name!r}; they must be equal.\n"
            f"  Entry points are written in {entry.file}"
        )
    return record


def resolve(entry: Installed, target: str, problem: str) -> Any:
    """The object "module:name" of a plugin. Any failure becomes a `BackendError` that chains the original."""
    module, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise BackendError(
            f"{problem}: {type(error).__name__}: {error}\n"
            f"  Looked for {target}, registered in {entry.file}\n"
            f"  {_way_out(entry)}"
        ) from error
    return found


def call(entry: Installed, target: str, what: str) -> Any:
    """Result of the plugin's function "module:function"; `what` names its purpose in messages."""
    function: Callable[[], Any] = resolve(entry, target, f"{entry}: its {what} cannot be imported")
    try:
        return function()
    except (Exception, SystemExit) as error:
        named = str(error) if isinstance(error, BackendError) else f"{type(error).__name__}: {error}"
        raise BackendError(f"{entry}: its {what} ({target}) failed: {named}\n  {_way_out(entry)}") from error


def _way_out(entry: Installed) -> str:
    if entry.kind == "op pack":
        return f"Repair or uninstall {entry.distribution}, or take {entry.name} out of DEEPINFER_OP_PACKS"
    if entry.name == DEFAULT_BACKEND:
        return f"Repair the installation: pip install --force-reinstall --no-deps {entry.distribution}"
    return (
        f"Repair or uninstall {entry.distribution}, or choose another backend, e.g. {VARIABLE}={DEFAULT_BACKEND}; "
        f"nothing falls back by itself"
    )


def select(name: str | None, wanted: str = "") -> tuple[Installed, Backend, str]:
    """The backend of this run, its record, and in words why it was chosen.

    name    what the user asked for: exactly this entry is imported. None: every installed backend is asked whether
            its device is present; one yes decides, two are an error, none means `cpu`.
    wanted  how the user asked, for messages; DEEPINFER_ACCELERATOR if empty

    Raises `BackendError` for an unknown name, a name registered twice, and for every backend that cannot be imported
    or asked; a broken backend never leads to another one.
    """
    refuse_original()
    if name:
        wanted = wanted or f"{VARIABLE}={name}"
        entry = find(BACKENDS, name, wanted)
        return entry, load_record(entry, Backend), f"chosen by {wanted}"
    return _probe_all()


def _probe_all() -> tuple[Installed, Backend, str]:
    entries = installed(BACKENDS)
    refuse_duplicates(entries)
    asked = [entry for entry in entries if entry.name != DEFAULT_BACKEND]
    present = [(entry, record) for entry in asked if is_present(entry, record := load_record(entry, Backend))]
    if len(present) > 1:
        names = [entry.name for entry, _ in present]
        who = ", ".join(str(entry).removeprefix("backend ") for entry, _ in present)
        raise BackendError(
            f"{len(present)} backends find their device on this machine: {who}.\n"
            f"  Choose one: {' or '.join(f'{VARIABLE}={n}' for n in names)}"
        )
    if present:
        return *present[0], "its device is present"
    if DEFAULT_BACKEND not in {entry.name for entry in entries}:
        raise BackendError(
            "no backend is installed, not even core's own cpu: deepinfer-core is importable but not installed.\n"
            "  Install it: pip install deepinfer-core"
        )
    reason = f"{', '.join(e.name for e in asked)} found no device" if asked else "no other backend is installed"
    # A warning: it must be seen without any logging set-up, and a run on the wrong device costs hours.
    logger.warning("no accelerator: %s; running on %s (%s is not set)", reason, DEFAULT_BACKEND, VARIABLE)
    entry = find(BACKENDS, DEFAULT_BACKEND, DEFAULT_BACKEND)
    return entry, load_record(entry, Backend), f"no accelerator: {reason}"


def is_present(entry: Installed, record: Backend) -> bool:
    """Whether the backend's own probe finds its device; False without a probe."""
    if record.probe is None:
        return False
    answer = call(entry, record.probe, "probe")
    if not isinstance(answer, bool):
        raise BackendError(f"{entry}: its probe ({record.probe}) returned {answer!r}, expected True or False")
    return answer


@dataclass(frozen=True, slots=True)
class BackendState:
    """One line of a listing: an installed backend and whether it can be chosen here.

    state   "present", "absent", "on request" (it has no probe) or "broken"
    detail  for "broken" the message, else empty
    """

    entry: Installed
    state: str
    detail: str = ""


def survey() -> list[BackendState]:
    """Every installed backend with its state. Raises nothing: a broken one is listed as broken, with the cause."""
    states = []
    for entry in installed(BACKENDS):
        try:
            refuse_duplicates(installed(BACKENDS, entry.name))
            record = load_record(entry, Backend)
            state = "on request" if record.probe is None else ("present" if is_present(entry, record) else "absent")
            states.append(BackendState(entry, state))
        except BackendError as error:
            states.append(BackendState(entry, "broken", str(error)))
    return states
