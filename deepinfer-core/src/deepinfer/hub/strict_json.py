"""JSON as the standard has it: a key given twice and NaN are errors, where Python's reader would pick something.

Used for every JSON file of a checkpoint.
"""

from __future__ import annotations

import json
from typing import Any


def loads(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError with a message fit for users."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in entries if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is given twice")
    return entries


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")
