"""A small strict reader of JSON objects: every key is declared with the values it may take, nothing else passes.

`config.py` declares its dataclasses with the field helpers below and calls `read`. This module knows no key of any
model; it collects all faults of an object so that one error names every key that is wrong.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar

from deepinfer.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule:
    """What a key accepts: `convert` returns the stored value or raises ValueError, `expected` says it in words."""

    convert: Callable[[Any], Any]
    expected: str


def only(value: Any, *, default: Any = MISSING) -> Any:
    """A key the model honours with exactly one value."""

    def convert(found: Any) -> Any:
        if isinstance(found, bool) != isinstance(value, bool) or _frozen(found) != _frozen(value):
            raise ValueError
        return _frozen(value)

    return _declare(Rule(convert, f"{_shown(value)}, the only supported value"), default)


def one_of(*values: str, default: Any = MISSING) -> Any:
    """A string key with a closed list of values."""

    def convert(found: Any) -> str:
        if not isinstance(found, str) or found not in values:
            raise ValueError
        return found

    return _declare(Rule(convert, " or ".join(map(_shown, values))), default)


def integer(minimum: int = 1, *, multiple: int = 1, maximum: int | None = None) -> Any:
    """An integer key (booleans and 4.0 are not integers)."""

    def convert(found: Any) -> int:
        value = _as_int(found)
        if value < minimum or value % multiple or (maximum is not None and value > maximum):
            raise ValueError
        return value

    upper = "" if maximum is None else f" and at most {maximum}"
    divisor = "" if multiple == 1 else f", a multiple of {multiple}"
    return _declare(Rule(convert, f"an integer of at least {minimum}{upper}{divisor}"))


def optional_layer() -> Any:
    """A layer number or null. Negative numbers mean different things in different programs and are refused."""

    def convert(found: Any) -> int | None:
        if found is None:
            return None
        value = _as_int(found)
        if value < 0:
            raise ValueError
        return value

    return _declare(Rule(convert, "a layer number, or null to switch it off"))


def integers(minimum: int = 0, *, default: Any = MISSING) -> Any:
    """A list of integers, stored as a tuple."""

    def convert(found: Any) -> tuple[int, ...]:
        if not isinstance(found, list):
            raise ValueError
        values = tuple(_as_int(value) for value in found)
        if any(value < minimum for value in values):
            raise ValueError
        return values

    return _declare(Rule(convert, f"a list of integers of at least {minimum}"), default)


def positive(*, nullable: bool = False) -> Any:
    """A finite number above zero, stored as float; with `nullable` also null."""

    def convert(found: Any) -> float | None:
        if found is None and nullable:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ValueError
        if not math.isfinite(found) or found <= 0:
            raise ValueError
        return float(found)

    return _declare(Rule(convert, "a positive number" + (" or null" if nullable else "")))


def boolean(*, default: Any = MISSING) -> Any:
    """true or false."""

    def convert(found: Any) -> bool:
        if not isinstance(found, bool):
            raise ValueError
        return found

    return _declare(Rule(convert, "true or false"), default)


def anything(default: Any) -> Any:
    """A key that other programs use and this one does not: any value, kept as found."""
    return _declare(Rule(_frozen, "any value"), default)


def section(cls: type, *, nullable: bool = False) -> Mapping[str, Any]:
    """Field metadata of a nested object read as `cls`; with `nullable` it may be null, which gives None."""
    return {"section": cls, "nullable": nullable}


def read(cls: type[T], raw: Any, where: str, spellings: Mapping[str, str]) -> T:
    """Build dataclass `cls` from the JSON object `raw`.

    `where` prefixes key names in messages ("text_config."), `spellings` maps names other programs use to the
    published one. Raises ConfigError with one line per fault: key, found, expected.
    """
    faults: list[str] = []
    values = _read_object(cls, raw, where, spellings, faults)
    if faults:
        raise ConfigError("\n".join(faults))
    return values


def _read_object(cls: type, raw: Any, where: str, spellings: Mapping[str, str], faults: list[str]) -> Any:
    if not isinstance(raw, Mapping):
        faults.append(f"{where.rstrip('.') or 'config'}: found {_shown(raw)}, expected an object")
        return None
    before = len(faults)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.metadata}
    faults.extend(_unknown_key(key, raw[key], where, fields, spellings) for key in raw if key not in fields)
    values = {}
    for name, field in fields.items():
        if name in raw:
            values[name] = _read_value(field, raw[name], where + name, spellings, faults)
        elif field.default is MISSING:
            faults.append(f"{where}{name}: found no such key, expected {_expected(field)}")
    return cls(**values) if len(faults) == before else None


def _read_value(field: Any, found: Any, path: str, spellings: Mapping[str, str], faults: list[str]) -> Any:
    nested = field.metadata.get("section")
    if nested is not None:
        if found is None and field.metadata["nullable"]:
            return None
        return _read_object(nested, found, path + ".", spellings, faults)
    try:
        return field.metadata["rule"].convert(found)
    except ValueError:
        faults.append(f"{path}: found {_shown(found)}, expected {_expected(field)}")
        return None


def _unknown_key(key: str, value: Any, where: str, fields: Mapping[str, Any], spellings: Mapping[str, str]) -> str:
    published = spellings.get(key)
    if published is None:
        near = difflib.get_close_matches(key, fields, n=1)
        published = where + near[0] if near else None
    hint = f"expected the published spelling {published}" if published else "expected published keys only"
    return f"{where}{key}: found unknown key with value {_shown(value)}, {hint}"


def _declare(rule: Rule, default: Any = MISSING) -> Any:
    if default is MISSING:
        return dataclasses.field(metadata={"rule": rule})
    return dataclasses.field(default=default, metadata={"rule": rule})


def _expected(field: Any) -> str:
    return "an object" if "section" in field.metadata else field.metadata["rule"].expected


def _as_int(found: Any) -> int:
    if isinstance(found, bool) or not isinstance(found, int):
        raise ValueError
    return found


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    """The value as JSON writes it, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."
