"""Checks of answers: small named functions (output, answer) -> whether the output is right.

Called by `score.py` on stored outputs; knows no model. Only the first line of an output counts, except where a check
says otherwise: the models were trained to end an answer with a line break or an end token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

SPECIAL_TOKEN = re.compile(r"<｜[^｜]*｜>")


def first_line(output: str) -> str:
    """The answer as it is meant: up to the first line break or special token, without blanks around it."""
    return SPECIAL_TOKEN.split(output)[0].strip(" ").split("\n")[0].strip()


def exact(output: str, answer: str) -> bool:
    """Same text; a full stop at the end makes no difference."""
    return first_line(output).removesuffix(".") == answer.removesuffix(".")


def number(output: str, answer: str) -> bool:
    """The line is this integer and nothing else (digit groups and a full stop are not accepted as another number)."""
    found = re.fullmatch(r"(-?\d+)\.?", first_line(output))
    return found is not None and int(found.group(1)) == int(answer)


def json_equal(output: str, answer: str) -> bool:
    """A JSON value with the same fields and values, of the same types; the order of the fields is free."""
    try:
        found = json.loads(first_line(output))
    except ValueError:
        return False
    return _same(found, json.loads(answer))


def fullmatch(output: str, answer: str) -> bool:
    """The whole output, without an end token, matches the regular expression `answer`."""
    return re.fullmatch(answer, SPECIAL_TOKEN.split(output)[0]) is not None


def valid_json(output: str, schema: dict[str, Any]) -> bool:
    """The whole output is a JSON object with the fields of the schema, of their types, and no others."""
    try:
        found = json.loads(SPECIAL_TOKEN.split(output)[0])
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() == schema["properties"].keys() and all(
        _fits(found[name], kind) for name, kind in schema["properties"].items()
    )  # fmt: skip


def _fits(value: Any, kind: dict[str, Any]) -> bool:
    if kind["type"] == "array":
        return isinstance(value, list) and all(_fits(entry, kind["items"]) for entry in value)
    return type(value) is {"string": str, "integer": int, "boolean": bool}[kind["type"]]


def _same(a: Any, b: Any) -> bool:
    """Equality that tells true from 1 and 1.0 from 1."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


CHECKERS: dict[str, Callable[[str, str], bool]] = {
    "exact": exact,
    "number": number,
    "json": json_equal,
    "fullmatch": fullmatch,
}
