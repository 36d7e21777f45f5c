"""Token ids that must never be sampled: the syntax of `DEEPINFER_DECODE_TOKEN_BLACKLIST` and checks of id lists.

Called by `Sampler` when an engine starts; knows nothing of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from deepinfer.errors import ConfigError

BLACKLIST_NAME = "DEEPINFER_DECODE_TOKEN_BLACKLIST"

_ITEM = re.compile(r"(\d+)(?:\.\.(\d+))?")


def parse_blacklist(text: str, vocab_size: int) -> tuple[int, ...]:
    """Ids of a list such as "0..3,7,10..12": single ids and inclusive ranges, strictly increasing, below vocab_size.

    Empty text gives no ids. Raises `ConfigError` naming the variable, the item and what was expected.
    """
    ids: list[int] = []
    if not text.strip():
        return ()
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise ConfigError(f"{BLACKLIST_NAME}: found {item.strip()!r}, expected an id or a range such as 10..12")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first or (ids and first <= ids[-1]):
            raise ConfigError(f"{BLACKLIST_NAME}: ids must be strictly increasing, found {item.strip()!r}{_after(ids)}")
        if last >= vocab_size:
            raise ConfigError(f"{BLACKLIST_NAME}: {item.strip()!r} is out of range, ids are 0 .. {vocab_size - 1}")
        ids.extend(range(first, last + 1))
    return tuple(ids)


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Sorted distinct ids; raises `ConfigError` naming `name` for an id outside 0 .. vocab_size-1."""
    distinct = sorted(set(ids))
    for token in distinct[:1] + distinct[-1:]:
        if not 0 <= token < vocab_size:
            raise ConfigError(f"{name}: token id {token} is outside the vocabulary, ids are 0 .. {vocab_size - 1}")
    return tuple(distinct)


def _after(ids: list[int]) -> str:
    return f" after {ids[-1]}" if ids else ""
