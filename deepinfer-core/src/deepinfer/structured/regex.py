"""Regular expressions of users, rewritten for a grammar engine so that every match is one of Python's.

Engines speak dialects: to one a dot matches a newline, to another a leading `]` ends a class. Here Python's own parser
reads an expression and it is written again with nothing but literals, character sets, groups, alternatives and
repetitions, which mean the same everywhere. What has no such form (look-around, back references, word boundaries,
flags) is refused by name. Expressions match from end to end, so `^` and `$` may stand at the ends only.

Inside a JSON string some characters must be escaped; `json_string_regex` writes an expression for the text between the
quotes. Called by `json_schema` and by compilers.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from deepinfer.errors import StructuredOutputError

Ranges = tuple[tuple[int, int], ...]
"""Code points as ascending inclusive ranges that neither touch nor overlap."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_ESCAPED_IN_JSON: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_JSON_ESCAPES = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x09: "\\t", 0x0A: "\\n", 0x0C: "\\f", 0x0D: "\\r"}
_FLAGS = re.IGNORECASE | re.LOCALE | re.MULTILINE | re.DOTALL | re.ASCII


def plain_regex(pattern: str) -> str:
    """The expression for text as it is. Raises StructuredOutputError."""
    return _Writer(pattern, in_json=False).write()


def json_string_regex(pattern: str) -> str:
    """The expression for what stands between the quotes of a JSON string. Raises StructuredOutputError."""
    return _Writer(pattern, in_json=True).write()


class _Writer:
    """Writes one parsed expression."""

    def __init__(self, pattern: str, in_json: bool) -> None:
        self._pattern, self._in_json = pattern, in_json

    def write(self) -> str:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = _parser.parse(self._pattern)
            if tree.state.flags & _FLAGS:
                self._refuse("flags")
            return self._alternatives(tree, first=True, last=True)
        except re.error as error:
            raise StructuredOutputError(f"the regular expression {self._shown()} is wrong: {error}") from None
        except (RecursionError, OverflowError) as error:
            raise StructuredOutputError(f"the regular expression {self._shown()} is too deep: {error}") from None

    def _alternatives(self, tree: Any, first: bool, last: bool) -> str:
        """A whole expression or group; `first` and `last` say whether it begins and ends the text."""
        nodes = list(tree)
        if len(nodes) == 1 and nodes[0][0] is _constants.BRANCH:
            return "|".join(self._sequence(branch, first, last) for branch in nodes[0][1][1])
        return self._sequence(nodes, first, last)

    def _sequence(self, tree: Any, first: bool, last: bool) -> str:
        nodes = list(tree)
        parts = []
        for at, node in enumerate(nodes):
            parts.append(self._node(node, first and at == 0, last and at == len(nodes) - 1))
        return "".join(parts)

    def _node(self, node: tuple[Any, Any], first: bool, last: bool) -> str:
        kind, value = node
        if kind is _constants.AT:
            return self._anchor(value, first, last)
        if kind is _constants.SUBPATTERN:
            _, added, removed, tree = value
            if (added | removed) & _FLAGS:
                self._refuse("flags")
            return f"(?:{self._alternatives(tree, first, last)})"
        if kind is _constants.BRANCH:
            return f"(?:{self._alternatives([node], first, last)})"
        if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            return self._repetition(*value)
        return self._characters(_characters_of(node, self._refuse))

    def _anchor(self, anchor: Any, first: bool, last: bool) -> str:
        begins = anchor in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)
        ends = anchor in (_constants.AT_END, _constants.AT_END_STRING)
        if (begins and first) or (ends and last):
            return ""
        self._refuse("an anchor within the text" if begins or ends else "a word boundary")

    def _repetition(self, low: int, high: int, tree: Any) -> str:
        body = self._alternatives(tree, first=False, last=False)
        if not body or high == 0:
            return ""
        body = f"(?:{body})"
        if high is _constants.MAXREPEAT:
            return body + ({0: "*", 1: "+"}.get(low) or f"{{{low},}}")
        return body + ("?" if (low, high) == (0, 1) else f"{{{low},{high}}}")

    def _characters(self, ranges: Ranges) -> str:
        """One character of a set; in a JSON string those that need an escape stand there with it only if the set has
        no others."""
        ranges = _without(ranges, (_SURROGATES,))
        if not ranges:
            self._refuse("an empty set of characters")
        if not self._in_json:
            return _class(ranges)
        plain = _without(ranges, _ESCAPED_IN_JSON)
        if plain:
            return _class(plain)
        points = [point for low, high in ranges for point in range(low, high + 1)]
        spelled = [_JSON_ESCAPES.get(point, f"\\u{point:04x}") for point in points]
        return "(?:" + "|".join("".join(map(_literal, map(ord, text))) for text in spelled) + ")"

    def _refuse(self, what: str) -> Any:
        raise StructuredOutputError(
            f"the regular expression {self._shown()} uses {what}, which no grammar can follow; it matches from end to "
            "end, with literals, classes, groups, alternatives and repetitions"
        )

    def _shown(self) -> str:
        return repr(self._pattern if len(self._pattern) <= 80 else self._pattern[:77] + "...")


_UNSUPPORTED = {
    "ASSERT": "look-around", "ASSERT_NOT": "look-around", "GROUPREF": "a back reference",
    "GROUPREF_EXISTS": "a conditional group", "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}  # fmt: skip


def _characters_of(node: tuple[Any, Any], refuse: Any, exact: bool = False) -> Ranges:
    """The set that a node matches one character of, or a part of it unless `exact`."""
    kind, value = node
    if kind is _constants.LITERAL:
        return ((value, value),)
    if kind is _constants.NOT_LITERAL:
        return _without(((0, _LAST),), ((value, value),))
    if kind is _constants.ANY:
        return _without(((0, _LAST),), ((0x0A, 0x0A),))
    if kind is _constants.RANGE:
        return (value,)
    if kind is _constants.CATEGORY:
        return _category(str(value), exact)
    if kind is _constants.IN:
        negated = value[0][0] is _constants.NEGATE
        members = _union(r for item in value[negated:] for r in _characters_of(item, refuse, exact=negated))
        return _without(((0, _LAST),), members) if negated else members
    return refuse(_UNSUPPORTED.get(str(kind), str(kind).lower()))


_ASCII: dict[str, Ranges] = {
    "CATEGORY_DIGIT": ((0x30, 0x39),),
    "CATEGORY_WORD": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "CATEGORY_SPACE": ((0x09, 0x0D), (0x20, 0x20)),
}


@cache
def _category(name: str, exact: bool) -> Ranges:
    r"""\d, \w and \s: in ASCII, as schemas mean them, unless `exact`; \D, \W and \S: without anything that Python takes
    for their opposite."""
    if name in _ASCII and not exact:
        return _ASCII[name]
    tests = {"DIGIT": str.isdecimal, "WORD": _is_word, "SPACE": str.isspace}
    test, positive = tests[name.rpartition("_")[2]], name in _ASCII
    return _union((point, point) for point in range(_LAST + 1) if test(chr(point)) is positive)


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    """What is in `ranges` and not in `others`."""
    return tuple(_cut(ranges, others))


def _cut(ranges: Ranges, others: Ranges) -> Iterator[tuple[int, int]]:
    for low, high in ranges:
        for cut_low, cut_high in others:
            if cut_high < low:
                continue
            if cut_low > high:
                break
            if low < cut_low:
                yield low, cut_low - 1
            low = cut_high + 1
        if low <= high:
            yield low, high


def _class(ranges: Ranges) -> str:
    """A set as a class, negated where that is shorter. Surrogates are no characters, so it may say nothing of them."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _literal(ranges[0][0])
    others = _without(((0, _LAST),), _union((*ranges, _SURROGATES)))
    sign, shown = ("^", others) if others and len(others) < len(ranges) else ("", ranges)
    spans = (_member(low) + (f"-{_member(high)}" if high > low else "") for low, high in shown)
    return f"[{sign}{''.join(spans)}]"


def _literal(point: int) -> str:
    """A character outside of classes."""
    return f"\\{chr(point)}" if chr(point) in "^$\\.*+?()[]{}|/" else _printed(point)


def _member(point: int) -> str:
    """A character within a class."""
    return f"\\{chr(point)}" if chr(point) in "-]^\\" else _printed(point)


def _printed(point: int) -> str:
    return chr(point) if 0x20 <= point != 0x7F else f"\\x{point:02x}"
