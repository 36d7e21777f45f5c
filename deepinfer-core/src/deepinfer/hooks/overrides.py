"""User overrides: `--op 'attention.*=reference'` and `DEEPINFER_OPS`, parsed and matched against the ops there are.

Called by `bind.py`. The last override that matches an op wins, so a command line refines what the environment says.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepinfer.errors import OpBindingError
from deepinfer.hooks.table import REFERENCE


@dataclass(frozen=True, slots=True)
class Override:
    """One `PATTERN=PROVIDER`. pattern: shell style over "<group>.<method>"; provider: a name, `reference` = core."""

    pattern: str
    provider: str

    @property
    def exact(self) -> bool:
        """Names one op, without wildcards."""
        return not set(self.pattern) & set("*?[")

    def matches(self, op: str) -> bool:
        return fnmatch.fnmatchcase(op, self.pattern)

    def __str__(self) -> str:
        return f"{self.pattern}={self.provider}"


def parse_overrides(texts: Iterable[str], ops: Sequence[str], providers: Sequence[str]) -> list[Override]:
    """Overrides in order. Each text holds one or more, separated by commas.

    Raises `OpBindingError`, with suggestions, for a malformed override, a pattern that matches none of `ops` and a
    provider that is not among `providers`.
    """
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    return [_parse(part, ops, providers) for part in parts]


def _parse(text: str, ops: Sequence[str], providers: Sequence[str]) -> Override:
    pattern, equals, provider = (part.strip() for part in text.partition("="))
    if not equals or not pattern or not provider:
        raise OpBindingError(f"op override {text!r}: expected PATTERN=PROVIDER, e.g. 'attention.*=reference'")
    override = Override(pattern, provider)
    if not any(override.matches(op) for op in ops):
        raise OpBindingError(f"op override {text!r}: {pattern!r} matches no op.{similar_ops(pattern, ops)}")
    known = [*providers, REFERENCE]
    if provider not in known:
        close = difflib.get_close_matches(provider, known, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise OpBindingError(
            f"op override {text!r}: no provider {provider!r} is loaded. Providers: {', '.join(known)}.{hint}"
        )
    return override


def similar_ops(pattern: str, ops: Sequence[str]) -> str:
    """Names near a pattern that matches none of `ops`, as a sentence with a blank in front."""
    groups = sorted({op.partition(".")[0] for op in ops})
    close = difflib.get_close_matches(pattern, ops, n=3, cutoff=0.8)
    group = difflib.get_close_matches(pattern.partition(".")[0], groups, n=1)
    if close:
        return f" Did you mean {' or '.join(close)}?"
    if group:
        inside = [op for op in ops if op.startswith(f"{group[0]}.")]
        return f" Ops of group {group[0]}: {', '.join(inside)}"
    return f" Groups: {', '.join(groups)}"


def override_for(op: str, overrides: Sequence[Override]) -> Override | None:
    """The last override that matches `op`."""
    return next((override for override in reversed(overrides) if override.matches(op)), None)
