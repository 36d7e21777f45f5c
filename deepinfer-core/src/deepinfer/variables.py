"""How one `DEEPINFER_*` variable is declared, parsed and described: the record, the parsers and the spelling help.

Called by `environ` (which declares every variable of core) and by backends (which declare their own, see
`environ.installed_variables`). Knows no variable by name and never reads the process environment.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError

PREFIX = "DEEPINFER_"


@dataclass(frozen=True, slots=True)
class Parser:
    """Turns text into a value. `expected` completes the sentence "expected ..." in error messages and in the docs."""

    type_name: str
    expected: str
    parse: Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: what `deepinfer env` and `docs/settings.md` print, and how its text is read.

    name     without the `DEEPINFER_` prefix, upper case
    default  value when neither an argument nor the environment gives one
    unit     "s", "bytes", "steps", ... or "" where the value has none
    active   False: accepted so that existing scripts keep working, but nothing in this version reads it
    """

    name: str
    parser: Parser
    default: Any
    help: str
    unit: str = ""
    group: str = "general"
    active: bool = True

    @property
    def full_name(self) -> str:
        """The name as it appears in the environment."""
        return PREFIX + self.name

    @property
    def field(self) -> str:
        """The attribute of `Settings` and the keyword argument that carry it."""
        return self.name.lower()

    def parse(self, text: str) -> Any:
        """The typed value of `text`; a `ConfigError` names variable, value and expected form."""
        try:
            return self.parser.parse(text.strip())
        except ValueError as error:
            detail = f" ({error})" if str(error) else ""
            raise ConfigError(f"{self.full_name}={text!r}: expected {self.parser.expected}{detail}") from error

    def coerce(self, value: Any) -> Any:
        """The typed value of an argument given in Python: text is parsed, anything else must survive a round trip."""
        text = as_text(value)
        return self.parse(text) if text.strip() else self.default


def as_text(value: Any) -> str:
    """The spelling of a value in the environment, the inverse of parsing ("" for None)."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list | tuple):
        return ",".join(as_text(item) for item in value)
    return str(value)


def closest(name: str, known: Iterable[str]) -> str:
    """ " Did you mean X?" for the nearest known spelling, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]}?" if matches else ""


# --- parsers ---------------------------------------------------------------------------------------------------------

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered not in _TRUE + _FALSE:
        raise ValueError
    return lowered in _TRUE


BOOL = Parser("bool", "a boolean: 0/1, true/false, yes/no or on/off", _parse_bool)
TEXT = Parser("str", "text", str)


def _parse_path(text: str) -> Path:
    return Path(text).expanduser()


PATH = Parser("path", "a path", _parse_path)


def integer(low: int | None = None, high: int | None = None) -> Parser:
    """A whole number within inclusive bounds."""

    def parse(text: str) -> int:
        value = _read(int, text)
        if (low is not None and value < low) or (high is not None and value > high):
            raise ValueError
        return value

    return Parser("int", "an integer" + _bounds(low, high), parse)


def number(low: float | None = None, high: float | None = None, zero_or_at_least: float | None = None) -> Parser:
    """A finite number within inclusive bounds; `zero_or_at_least=x` allows 0 and everything from x on."""

    def parse(text: str) -> float:
        value = _read(float, text)
        outside = (low is not None and value < low) or (high is not None and value > high)
        if not math.isfinite(value) or outside:
            raise ValueError
        if zero_or_at_least is not None and value != 0 and value < zero_or_at_least:
            raise ValueError
        return value

    special = f" that is 0 or at least {zero_or_at_least}" if zero_or_at_least is not None else _bounds(low, high)
    return Parser("float", "a number" + special, parse)


def choice(*allowed: str) -> Parser:
    """One of a few words, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError
        return text.lower()

    return Parser("str", "one of " + ", ".join(allowed), parse)


def _parse_words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


WORDS = Parser("list", "a comma-separated list", _parse_words)


def _parse_numbers(text: str) -> tuple[float, ...]:
    values = tuple(_read(float, word) for word in text.split(","))
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError("every number must be finite and above 0")
    return values


NUMBERS = Parser("floats", "a positive number or a comma-separated list of them", _parse_numbers)


def _read(kind: type, text: str) -> Any:
    """int(text) or float(text) without Python's own wording of the error."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError from None


def _bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" in {low}..{high}"
    if low is not None:
        return f" of at least {low}"
    return f" of at most {high}" if high is not None else ""
