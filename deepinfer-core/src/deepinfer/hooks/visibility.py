"""Reads the variables that restrict a process to some of a machine's devices, and finds what is wrong with them.

For backends' probe modules: no torch, no driver. A device library drops numbers it does not know and fails later with
a misleading one; a second variable may name devices that belong to somebody else. Both are said before any device is
opened. The names of the variables are the backend's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which devices a process may use.

    variable  the one that decides, None if none is set (all devices)
    mask      its text
    devices   numbers or identifiers as given, in order; without a variable 0 .. present - 1
    problems  everything wrong with the variables, each with the value found and what is allowed
    """

    variable: str | None
    mask: str
    devices: tuple[str, ...]
    problems: tuple[str, ...]


def read_visibility(
    variable: str,
    present: int,
    aliases: Sequence[str] = (),
    identifiers: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Visibility:
    """The mask of `variable`, or of the first alias that is set.

    variable     the device library's own variable
    present      devices on this machine; 0 = unknown or none, then numbers are not compared with it
    aliases      variables that mean the same in other software; all that are set must agree
    identifiers  pattern of entries that are no numbers but allowed, e.g. "UUID-[0-9a-f-]+"
    """
    environ = os.environ if environ is None else environ
    given = {name: environ[name] for name in (variable, *aliases) if name in environ}
    if not given:
        return Visibility(None, "", tuple(str(i) for i in range(present)), ())
    name, mask = next(iter(given.items()))
    devices = _entries(mask)
    problems = [
        f"{name}={mask} and {other}={text} disagree; set one of them, or both to the same devices"
        for other, text in given.items()
        if _entries(text) != devices
    ]
    problems += [f"{name}={mask} {problem}" for problem in _mask_problems(devices, present, identifiers)]
    return Visibility(name, mask, devices, tuple(problems))


def _entries(mask: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in mask.split(",")) if mask.strip() else ()


def _mask_problems(devices: Sequence[str], present: int, identifiers: str | None) -> list[str]:
    if not devices:
        return [f"hides every device of {present or 'this machine'}; unset it or list devices such as 0,1"]
    problems = []
    strange = [d for d in devices if not d.isdecimal() and not (identifiers and re.fullmatch(identifiers, d))]
    if strange:
        named = ", ".join(map(repr, strange))
        problems.append(f"holds {named}, expected device numbers separated by commas, such as 0,1")
    repeated = [d for d in dict.fromkeys(devices) if devices.count(d) > 1]
    if repeated:
        problems.append(f"names {', '.join(repeated)} more than once")
    absent = [d for d in devices if d.isdecimal() and int(d) >= present] if present else []
    if absent:
        problems.append(
            f"asks for {len(devices)} devices, this machine has {present}: no device {', '.join(absent)}, "
            f"numbers are 0 to {present - 1}"
        )
    return problems
