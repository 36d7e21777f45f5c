"""The records a distribution puts behind its entry point: `Backend` (a device) and `OpPack` (kernels without one).

Written by plugin authors, read by `discover.py`. Importing this module costs a few milliseconds and touches neither
torch nor pluggy, so that every installed backend can be asked whether its device is present.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, fields
from typing import Any

from deepinfer.errors import BackendError

PLUGIN_API = (0, 1)
"""(major, minor) of the plugin interface this core offers. A new hook, op or record field raises minor."""

RESERVED_NAMES = ("core", "reference")
"""Names that mean core's own op bodies in overrides and reports; no plugin may carry them."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def api_accepted(api: tuple[int, int]) -> bool:
    """Whether a plugin written for `api` runs on this core: equal major, minor not newer than core's."""
    return api[0] == PLUGIN_API[0] and api[1] <= PLUGIN_API[1]


@dataclass(frozen=True, init=False)
class Requires:
    """What a plugin needs at run time. Core checks every entry before it imports the plugin and reports all failures.

    torch    version specifier, e.g. ">=2.13,<2.15"
    python   version specifier of the interpreter
    wheels   requirement strings of distributions, e.g. ("acme-kernels>=1.2",)
    check    "module:function" returning a list of failures as text, for what no wheel says: driver, toolkit, device
             files. It may read files; it must not import torch or a device library.
    """

    torch: str | None = None
    python: str | None = None
    wheels: tuple[str, ...] = ()
    check: str | None = None
    unknown: tuple[str, ...] = field(default=(), repr=False)

    def __init__(
        self,
        torch: str | None = None,
        python: str | None = None,
        wheels: tuple[str, ...] = (),
        check: str | None = None,
        **unknown: Any,
    ) -> None:
        _fill(self, torch=torch, python=python, wheels=tuple(wheels), check=check, unknown=tuple(unknown))
        if check is not None:
            _require_target("Requires.check", check)


@dataclass(frozen=True, init=False)
class OpPack:
    """Kernels without a device of their own, loaded only when `DEEPINFER_OP_PACKS` names them.

    name      what `DEEPINFER_OP_PACKS` and `--op` call it; equal to the entry point's name
    api       the (major, minor) of `PLUGIN_API` it was written for
    plugin    "module:Class" whose methods are hook implementations
    requires  run-time needs
    """

    name: str
    api: tuple[int, int]
    plugin: str
    requires: Requires

    def __init__(
        self, name: str, api: tuple[int, int], plugin: str = "", requires: Requires | None = None, **unknown: Any
    ) -> None:
        _fill(self, name=name, api=_checked_api(name, api), plugin=plugin, requires=requires or Requires())
        _validate(self, unknown, required=("plugin",), targets=("plugin",))


@dataclass(frozen=True, init=False)
class Backend:
    """An installed accelerator. The whole `__init__.py` of a backend is one of these.

    name         what `DEEPINFER_ACCELERATOR` and `--op` call it; equal to the entry point's name
    api          the (major, minor) of `PLUGIN_API` it was written for
    device_type  `torch.device` type its tensors live on, unless `deepinfer_register_device` names a device
    plugin       "module:Class" whose methods are hook implementations; imported after selection
    probe        "module:function" -> bool: is the device present? Reads files only. None: never chosen unasked.
    environment  "module:function" -> dict[str, str], applied before torch is imported
    requires     run-time needs, all checked before `plugin` is imported

    Raises `BackendError` for an unknown field or a malformed one. A record written for a newer API than this core's
    keeps whatever it brings: selection refuses it by its version, which says more than its first unknown field.
    """

    name: str
    api: tuple[int, int]
    device_type: str
    plugin: str
    probe: str | None
    environment: str | None
    requires: Requires

    def __init__(
        self,
        name: str,
        api: tuple[int, int],
        device_type: str = "",
        plugin: str = "",
        probe: str | None = None,
        environment: str | None = None,
        requires: Requires | None = None,
        **unknown: Any,
    ) -> None:
        _fill(self, name=name, api=_checked_api(name, api), device_type=device_type, plugin=plugin)
        _fill(self, probe=probe, environment=environment, requires=requires or Requires())
        _validate(self, unknown, required=("device_type", "plugin"), targets=("plugin", "probe", "environment"))


def _fill(record: object, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(record, name, value)


def _checked_api(name: str, api: tuple[int, int]) -> tuple[int, int]:
    """`api` as a pair of ints; checked before all else because everything else depends on it."""
    if isinstance(api, (tuple, list)) and len(api) == 2 and all(type(part) is int and part >= 0 for part in api):
        return (api[0], api[1])
    raise BackendError(f"backend {name!r}: api={api!r}, expected the (major, minor) it was written for, as (0, 1)")


def _validate(record: Any, unknown: dict[str, Any], required: tuple[str, ...], targets: tuple[str, ...]) -> None:
    """Raise `BackendError` for what this core cannot honour in a record whose API it accepts."""
    if not api_accepted(record.api):
        return
    kind = type(record).__name__
    if not isinstance(record.name, str) or not _NAME.fullmatch(record.name):
        raise BackendError(f"{kind} name {record.name!r}: expected lower-case letters, digits and underscores")
    if record.name in RESERVED_NAMES:
        raise BackendError(f"{kind} name {record.name!r} is reserved for core's own ops; choose another")
    _refuse_unknown(f"{kind} {record.name}", kind, tuple(unknown), record)
    _refuse_unknown(f"{kind} {record.name}: Requires", "Requires", record.requires.unknown, record.requires)
    for attribute in required:
        if not getattr(record, attribute):
            raise BackendError(f"{kind} {record.name}: {attribute} is missing")
    for attribute in targets:
        if getattr(record, attribute) is not None:
            _require_target(f"{kind} {record.name}: {attribute}", getattr(record, attribute))


def _refuse_unknown(who: str, kind: str, names: tuple[str, ...], record: Any) -> None:
    if not names:
        return
    known = [f.name for f in fields(record) if f.name != "unknown"]
    close = difflib.get_close_matches(names[0], known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise BackendError(f"{who} has no field {names[0]!r}. Fields of {kind}: {', '.join(known)}.{hint}")


def _require_target(what: str, target: str) -> None:
    if not isinstance(target, str) or not _TARGET.fullmatch(target):
        raise BackendError(f'{what}={target!r}, expected "module:name"')
