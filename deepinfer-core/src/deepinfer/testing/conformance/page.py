"""`report.md`: a report as a page. Its matrix of ops is what backends put into their README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepinfer.hooks import report as op_report
from deepinfer.testing.conformance.report import (
    LEVELS,
    MATRIX,
    Report,
    environment,
    failure_text,
    number,
    skip_reasons,
    who,
)  # fmt: skip
from deepinfer.testing.results import FAIL, STATUSES, XFAIL, XPASS, count


def markdown(report: Report) -> str:
    """The report as a page."""
    sections = [
        f"# Conformance of {who(report.backend)}",
        f"{report.verdict()}. {op_report.summary(report.ops)}.",
        "## Environment",
        _table(("what", "value"), _environment_rows(report)),
        "## Levels",
        _table(("level", *STATUSES, "seconds"), [_level_row(report, level) for level in _levels(report)]),
        "## Ops",
        _table(("op", *MATRIX), [_matrix_row(row) for row in report.matrix()]),
    ]
    bad = [result for result in report.results if result.bad]
    if bad:
        sections += ["## Failures", "\n".join(["```", *(failure_text(result) for result in bad), "```"])]
    if worst := report.worst():
        rows = [_worst_row(row) for row in worst]
        sections += ["## Worst errors", _table(("op", "case", "error", "allowed", "index", "found", "expected"), rows)]
    if skips := skip_reasons(report.results):
        rows = [(str(number), " ".join(reason.split())) for reason, number in skips.most_common()]
        sections += ["## Skipped", _table(("cases", "reason"), rows)]
    timed = [result for result in report.results if result.figures and result.op]
    if timed:
        rows = [(str(r.op), r.case, r.detail) for r in timed]
        sections += ["## Times", _table(("op", "sample", "time"), rows)]
    return "\n\n".join(sections) + "\n"


def _levels(report: Report) -> list[int]:
    return sorted({result.level for result in report.results})


def _level_row(report: Report, level: int) -> tuple[str, ...]:
    mine = [result for result in report.results if result.level == level]
    counts, seconds = count(mine), sum(result.seconds for result in mine)
    return (f"{level} {LEVELS[level]}", *(str(counts[status] or "") for status in STATUSES), f"{seconds:.1f}")


def _environment_rows(report: Report) -> list[tuple[str, str]]:
    found = environment()
    rows = [("backend", who(report.backend))]
    rows += [("against", who(report.against))] if report.against else []
    rows += [("model", report.model), ("digest", report.ops.digest)]
    rows += [(name, str(found[name])) for name in ("python", "platform", "cores", "threads")]
    rows += list(found["packages"].items())
    rows += [(name, value) for name, value in found["variables"].items()]
    return rows + [(f"--{name}", str(value)) for name, value in report.options.items() if value not in (None, False)]


def _matrix_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    marks = {row["kind"]: "x"}
    if row["state"] in (XFAIL, FAIL):
        marks[row["state"]] = str(sum(row["cases"].get(s, 0) for s in _counted_as(row["state"])))
    return (row["op"], *(marks.get(column, "") for column in MATRIX))


def _counted_as(state: str) -> tuple[str, ...]:
    return (XFAIL,) if state == XFAIL else (FAIL, XPASS)


def _worst_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    values = (number(row["error"]), number(row["bound"]), str(row.get("index", "")))
    return (row["op"], row["case"], *values, number(row.get("found", "")), number(row.get("expected", "")))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
