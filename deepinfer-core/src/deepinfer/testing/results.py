"""What one case of the conformance kit came to. Made by every level, read by the reports and the pytest plugin."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

PASS, FAIL, XFAIL, XPASS, SKIP = "pass", "fail", "xfail", "xpass", "skip"
STATUSES = (PASS, FAIL, XFAIL, XPASS, SKIP)

BAD = frozenset({FAIL, XPASS})
"""Statuses that fail a run: an expected failure that passes is as wrong as a failure nobody expects."""

Worst = Mapping[str, Any]
"""The worst element of a comparison: error, bound, index, found, expected."""


@dataclass(frozen=True)
class CaseResult:
    """One case and its outcome.

    level    0 to 5
    op       "<group>.<method>", None for a case about no single op
    case     name of the case, unique together with level and op
    status   pass, fail, xfail (expected to fail and did), xpass (expected to and did not), skip (`detail` says why)
    detail   why, in words; may have several lines
    worst    the worst element of the comparison, where there was one
    seconds  wall-clock time of the case
    figures  measured numbers of level 5, by name
    """

    level: int
    op: str | None
    case: str
    status: str
    detail: str = ""
    worst: Worst | None = None
    seconds: float = 0.0
    figures: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status!r}, expected one of {', '.join(STATUSES)}")
        if self.status == SKIP and not self.detail:
            raise ValueError(f"{self.case}: a skipped case has to say why")

    @property
    def name(self) -> str:
        """Op and case in one line, as reports and test ids show it."""
        return f"{self.op}: {self.case}" if self.op else self.case

    @property
    def bad(self) -> bool:
        """Whether it fails the run."""
        return self.status in BAD

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict with the fields' names as keys."""
        worst = None if self.worst is None else {key: plain(value) for key, value in self.worst.items()}
        return {**vars(self), "worst": worst, "figures": None if self.figures is None else dict(self.figures)}


def plain(value: Any) -> Any:
    """A number, tensor scalar, index or anything else as JSON holds it; numbers JSON lacks become text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def nearest(candidates: Iterable[Worst | None]) -> Worst | None:
    """The worst element that came nearest to its bound."""

    def share(worst: Worst) -> float:
        bound = worst.get("bound") or 0.0
        return worst.get("error", 0.0) / bound if bound else 0.0

    return max((worst for worst in candidates if worst is not None), key=share, default=None)


class Skip(Exception):  # noqa: N818  not an error
    """Raised inside a case that cannot run here; the message is the reason."""


class Failure(Exception):  # noqa: N818  a finding, not an error of the kit
    """Raised inside a case that found something wrong; `worst` as in `CaseResult`."""

    def __init__(self, detail: str, worst: Worst | None = None) -> None:
        super().__init__(detail)
        self.worst = worst


def run_case(level: int, op: str | None, case: str, body: Callable[[], str | Worst | None]) -> CaseResult:
    """Run a case's body and say what it came to.

    body  returns None, a remark, or the worst element of a comparison that passed; raises `Failure`, `Skip`, or
          anything else, which is a failure, too: a backend that raises must not end the whole run
    """
    start = time.perf_counter()
    try:
        outcome = body()
        remark = outcome if isinstance(outcome, str) else ""
        worst = outcome if isinstance(outcome, Mapping) else None
        result = CaseResult(level, op, case, PASS, remark, worst)
    except Skip as reason:
        result = CaseResult(level, op, case, SKIP, str(reason))
    except Failure as failure:
        result = CaseResult(level, op, case, FAIL, str(failure), failure.worst)
    except Exception as error:
        result = CaseResult(level, op, case, FAIL, _story(error))
    return replace(result, seconds=time.perf_counter() - start)


def _story(error: Exception) -> str:
    """The exception in one line, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"\n  at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"raised {type(error).__name__}: {error}{where}"


@dataclass(frozen=True)
class Case:
    """A case that has not run yet; fields as in `CaseResult`, `body` as `run_case` takes it."""

    level: int
    op: str | None
    name: str
    body: Callable[[], str | Worst | None]

    def run(self) -> CaseResult:
        """Run it."""
        return run_case(self.level, self.op, self.name, self.body)


def count(results: Iterable[CaseResult]) -> Counter[str]:
    """{status: number of cases}."""
    return Counter(result.status for result in results)
