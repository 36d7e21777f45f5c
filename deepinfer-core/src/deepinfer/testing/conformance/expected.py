"""`conformance.toml`: which cases of a backend are expected to fail, which ops it has yet, which levels it leaves out.

Read by the runner and by the pytest plugin. Nothing here is silent: an expected failure that passes fails the run, one
that has outlived the core version it was accepted until is an error, and everything left out counts as a skip with its
reason.

    op_allowlist = ["gemm.*", "attention.rope"]        # optional; other ops are not judged yet

    [[xfail]]
    op = "gemm.linear"                                 # pattern; "-" for cases about no single op
    case = "float32 *"                                 # pattern
    reason = "accumulates in bfloat16"
    issue = "https://example.org/acme/issues/7"
    until = "0.2"                                      # last version of deepinfer-core this is accepted for

    [[exclude_level]]
    level = 4
    reason = "no device memory for caches on the simulator"
"""

from __future__ import annotations

import difflib
import fnmatch
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError
from deepinfer.testing.results import FAIL, PASS, SKIP, XFAIL, XPASS, CaseResult

NO_OP = "-"
"""Stands for cases about no single op."""

XFAIL_KEYS = ("op", "case", "reason", "issue", "until")
TOP_KEYS = ("op_allowlist", "xfail", "exclude_level")
LEVELS = range(6)


@dataclass(frozen=True, slots=True)
class ExpectedFailure:
    """One `[[xfail]]`. op, case: patterns; until: last core version it is accepted for."""

    op: str
    case: str
    reason: str
    issue: str
    until: str

    def matches(self, result: CaseResult) -> bool:
        """Whether it is about this case."""
        return fnmatch.fnmatchcase(result.op or NO_OP, self.op) and fnmatch.fnmatchcase(result.case, self.case)

    def __str__(self) -> str:
        return f"[[xfail]] op={self.op!r} case={self.case!r}"


@dataclass(frozen=True)
class Expectations:
    """A whole file. The default expects every case of every op to pass."""

    source: str = "conformance.toml"
    xfails: tuple[ExpectedFailure, ...] = ()
    allowlist: tuple[str, ...] = ("*",)
    excluded: Mapping[int, str] = field(default_factory=dict)

    def apply(self, result: CaseResult) -> CaseResult:
        """The result with expected failures marked as such."""
        entry = next((entry for entry in self.xfails if entry.matches(result)), None)
        if entry is None or result.status not in (PASS, FAIL):
            return result
        why = f"{entry.reason} ({entry.issue}, until core {entry.until})"
        if result.status == PASS:
            return replace(result, status=XPASS, detail=f"passes, but {self.source} expects it to fail: {why}")
        return replace(result, status=XFAIL, detail=f"{why}\n{result.detail}")

    def allows(self, op: str) -> bool:
        """Whether an op is judged."""
        return any(fnmatch.fnmatchcase(op, pattern) for pattern in self.allowlist)

    def left_out(self, ops: Iterable[str]) -> list[CaseResult]:
        """A skip for every op that is not on the allowlist."""
        reason = f"not on the op_allowlist of {self.source}"
        return [CaseResult(1, op, "all cases of the op", SKIP, reason) for op in ops if not self.allows(op)]

    def unused(self, results: Sequence[CaseResult]) -> list[CaseResult]:
        """A failure for every entry that is about none of the cases of a complete run."""
        return [self._unused(entry, results) for entry in self.xfails if not any(map(entry.matches, results))]

    def _unused(self, entry: ExpectedFailure, results: Sequence[CaseResult]) -> CaseResult:
        cases = list(dict.fromkeys(r.case for r in results if fnmatch.fnmatchcase(r.op or NO_OP, entry.op)))
        close = difflib.get_close_matches(entry.case, cases, n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]!r}?" if close else f"Cases: {', '.join(map(repr, cases[:8])) or 'none'}"
        return CaseResult(0, None, str(entry), FAIL, f"{self.source}: matches no case of this run. {hint}")


def read_expectations(path: str | Path | None, ops: Sequence[str], core: str | None = None) -> Expectations:
    """Read a file; None: every case has to pass.

    ops   names of all ops there are
    core  version of core; None: the installed one
    Raises ConfigError that lists everything wrong: unknown keys, entries without one of their keys, patterns that match
    no op, entries that have expired.
    """
    if path is None:
        return Expectations()
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    problems = _problems(data, ops, core or metadata.version("deepinfer-core"))
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return Expectations(
        source=path.name,
        xfails=tuple(ExpectedFailure(**entry) for entry in data.get("xfail", ())),
        allowlist=tuple(data.get("op_allowlist", ("*",))),
        excluded={entry["level"]: entry["reason"] for entry in data.get("exclude_level", ())},
    )


def _problems(data: Mapping[str, Any], ops: Sequence[str], core: str) -> list[str]:
    problems = [_unknown(key, TOP_KEYS, "key") for key in data if key not in TOP_KEYS]
    for name in ("xfail", "exclude_level"):
        if not isinstance(data.get(name, []), list):
            return [*problems, f"{name}: expected a list of tables, written [[{name}]]"]
    for number, entry in enumerate(data.get("xfail", ()), 1):
        problems += [f"[[xfail]] number {number}: {problem}" for problem in _xfail_problems(entry, ops, core)]
    for number, entry in enumerate(data.get("exclude_level", ()), 1):
        problems += [f"[[exclude_level]] number {number}: {problem}" for problem in _level_problems(entry)]
    return problems + _allowlist_problems(data.get("op_allowlist", ["*"]), ops)


def _xfail_problems(entry: Mapping[str, Any], ops: Sequence[str], core: str) -> list[str]:
    from packaging.version import InvalidVersion, Version

    problems = [_unknown(key, XFAIL_KEYS, "key") for key in entry if key not in XFAIL_KEYS]
    for key in XFAIL_KEYS:
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            problems.append(f"{key} is missing; every entry has {', '.join(XFAIL_KEYS)}, each a text")
    if problems:
        return problems
    if entry["op"] != NO_OP and not fnmatch.filter(ops, entry["op"]):
        problems.append(_unknown(entry["op"], [*ops, NO_OP], "op"))
    try:
        if Version(core) > Version(entry["until"]):
            problems.append(
                f"expired: {entry['op']} {entry['case']!r} was accepted until core {entry['until']}, this is {core}. "
                f"Repair it or renew the entry ({entry['issue']})"
            )
    except InvalidVersion:
        problems.append(f"until={entry['until']!r} is no version, e.g. 0.2")
    return problems


def _level_problems(entry: Mapping[str, Any]) -> list[str]:
    problems = [_unknown(key, ("level", "reason"), "key") for key in entry if key not in ("level", "reason")]
    if entry.get("level") not in LEVELS or isinstance(entry.get("level"), bool):
        problems.append(f"level={entry.get('level')!r}, expected 0 to 5")
    if not isinstance(entry.get("reason"), str) or not entry["reason"].strip():
        problems.append("reason is missing; a level that is left out needs one")
    return problems


def _allowlist_problems(patterns: Any, ops: Sequence[str]) -> list[str]:
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        return [f"op_allowlist={patterns!r}, expected a list of patterns"]
    return ["op_allowlist: " + _unknown(p, ops, "op") for p in patterns if not fnmatch.filter(ops, p)]


def _unknown(found: str, known: Sequence[str], what: str) -> str:
    close = difflib.get_close_matches(found, known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]}?" if close else f" There are: {', '.join(known[:12])}"
    return f"unknown {what} {found!r}.{hint}"
