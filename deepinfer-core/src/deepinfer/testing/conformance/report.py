"""What a run of the kit leaves behind: the summary on the terminal, `report.json` and `report.md`.

Formats results and op tables; runs nothing and judges nothing. `report.md` holds the matrix that backends put into
their README; `report.json` is what level 5 of a later run compares its times with.
"""

from __future__ import annotations

import json
import os
import platform
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepinfer.hooks import LoadedBackend, OpTable
from deepinfer.hooks import report as op_report
from deepinfer.testing.results import FAIL, PASS, SKIP, STATUSES, XFAIL, XPASS, CaseResult, count

FORMAT = 1
WIDTH = 120

LEVELS = ("hygiene", "ops", "properties", "blocks", "engine", "speed")
"""Names of the levels, by number."""

MATRIX = ("native", "decomposed", "reference", XFAIL, FAIL)
"""Columns of the matrix: who serves an op, or that it does not pass."""


@dataclass
class Report:
    """A finished or running run.

    backend, against  the backend under test, and the one it is compared with
    ops               its op table
    options           what the command was asked for: levels, op, quick, seed, config
    """

    backend: LoadedBackend
    ops: OpTable
    model: str
    options: Mapping[str, Any]
    against: LoadedBackend | None = None
    results: list[CaseResult] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something was run and nothing failed."""
        return bool(self.results) and not any(result.bad for result in self.results)

    # --- for people -------------------------------------------------------------------------------------------------

    def heading(self) -> str:
        """Who is tested, and the state of its op table."""
        versus = f" against {who(self.against)}" if self.against else ""
        seed = self.options.get("seed", 0)
        first = f"deepinfer conformance: {who(self.backend)}{versus}, model {self.model}, seed {seed}"
        return f"{first}\n  {op_report.summary(self.ops)}\n\n{self._row('level', *STATUSES, 'time')}"

    def level_line(self, level: int) -> str:
        """One line of the table of levels."""
        mine = [result for result in self.results if result.level == level]
        return self._counted(f"{level} {LEVELS[level]}", mine)

    def _counted(self, name: str, results: Sequence[CaseResult]) -> str:
        counts = count(results)
        seconds = sum(result.seconds for result in results)
        return self._row(name, *(str(counts[status] or "-") for status in STATUSES), f"{seconds:.1f} s")

    @staticmethod
    def _row(name: str, *cells: str) -> str:
        return f"  {name:<14}" + "".join(f"{cell:>8}" for cell in cells)

    def ending(self) -> str:
        """Totals, failures, skips by reason, and the verdict."""
        parts = [self._counted("total", self.results)]
        bad = [result for result in self.results if result.bad]
        if bad:
            parts.append("\n".join([f"\nfailed: {len(bad)}", *(failure_text(result) for result in bad)]))
        expected = [result for result in self.results if result.status == XFAIL]
        if expected:
            lines = [f"  {r.level} {r.name}: {r.detail.splitlines()[0]}" for r in expected]
            parts.append("\n".join([f"\nfailed as expected: {len(expected)}", *lines]))
        skips = skip_reasons(self.results)
        if skips:
            lines = [_wrapped(f"  {number:>4} x  ", reason) for reason, number in skips.most_common()]
            parts.append("\n".join([f"\nskipped: {sum(skips.values())}", *lines]))
        parts.append(f"\n{self.verdict()}")
        return "\n".join(parts)

    def verdict(self) -> str:
        """One line."""
        if not self.results:
            return f"{self.backend.name}: no case was run"
        if self.ok:
            return f"{self.backend.name} passes: {count(self.results)[PASS]} cases"
        ops = dict.fromkeys(result.op for result in self.results if result.bad and result.op)
        where = f" in {', '.join(ops)}" if ops else ""
        return f"{self.backend.name} FAILS: {sum(result.bad for result in self.results)} cases{where}"

    # --- for programs -----------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        counts = count(self.results)
        return {
            "format": FORMAT,
            "backend": _backend(self.backend),
            "against": None if self.against is None else _backend(self.against),
            "model": self.model,
            "options": dict(self.options),
            "environment": environment(),
            "digest": self.ops.digest,
            "ok": self.ok,
            "counts": {status: counts[status] for status in STATUSES},
            "skips": dict(skip_reasons(self.results)),
            "matrix": self.matrix(),
            "worst": [dict(row) for row in self.worst()],
            "timings": {f"{r.op}: {r.case}": dict(r.figures) for r in self.results if r.figures and r.op},
            "cases": [result.to_json() for result in self.results],
        }

    def matrix(self) -> list[dict[str, Any]]:
        """One row an op: that of `deepinfer ops`, with its state and its numbers of cases."""
        by_op: dict[str | None, list[CaseResult]] = {}
        for result in self.results:
            by_op.setdefault(result.op, []).append(result)
        return [row | _state(row["kind"], by_op.get(row["op"], [])) for row in op_report.rows(self.ops)]

    def worst(self) -> list[dict[str, Any]]:
        """The element nearest to its bound (or farthest beyond it) of every op, the most critical op first."""
        rows: dict[str, dict[str, Any]] = {}
        for result in self.results:
            share = _share(result)
            name = result.op or f"level {result.level}"
            if share is not None and share >= rows.get(name, {"share": -1.0})["share"]:
                worst = result.to_json()["worst"]
                rows[name] = {"op": name, "case": result.case, "share": share, **worst}
        return sorted(rows.values(), key=lambda row: -row["share"])

    def write(self, directory: str | Path) -> Path:
        """Write report.json and report.md; returns the directory."""
        from deepinfer.testing.conformance.page import markdown

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False)
        (directory / "report.json").write_text(text + "\n", encoding="utf-8")
        (directory / "report.md").write_text(markdown(self), encoding="utf-8")
        return directory


def environment() -> dict[str, Any]:
    """Versions and variables that results depend on."""
    packages = ("deepinfer-core", "torch", "numpy", "pluggy", "safetensors")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": {name: metadata.version(name) for name in packages},
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("DEEPINFER_")},
    }


def skip_reasons(results: Iterable[CaseResult]) -> Counter[str]:
    """{reason: number of cases skipped for it}."""
    return Counter(result.detail for result in results if result.status == SKIP)


def who(backend: LoadedBackend) -> str:
    """A backend with version, distribution and device."""
    return f"{backend.name} {backend.entry.version} ({backend.entry.distribution}) on {backend.device_type}"


def _backend(backend: LoadedBackend) -> dict[str, Any]:
    return {
        "name": backend.name,
        "distribution": backend.entry.distribution,
        "version": backend.entry.version,
        "api": list(backend.record.api),
        "device_type": backend.device_type,
        "plugins": [[p.name, p.distribution, p.version] for p in backend.providers],
        "environment": dict(backend.environment),
    }


def _state(kind: str, results: Sequence[CaseResult]) -> dict[str, Any]:
    counts = count(results)
    state = FAIL if counts[FAIL] or counts[XPASS] else XFAIL if counts[XFAIL] else kind
    return {"state": state, "cases": {status: counts[status] for status in STATUSES if counts[status]}}


def _share(result: CaseResult) -> float | None:
    """Error as a share of its bound."""
    worst = result.worst
    if worst is None or not worst.get("bound") or "error" not in worst:
        return None
    return float(worst["error"]) / float(worst["bound"])


def failure_text(result: CaseResult) -> str:
    """A failing case with everything that is known about it."""
    first, *rest = result.detail.splitlines() or [""]
    status = "" if result.status == FAIL else f" [{result.status}]"
    lines = [f"  {result.level} {result.name}{status}", _wrapped("      ", first), *(f"      {line}" for line in rest)]
    worst = result.to_json()["worst"]
    if worst and "found" in worst:
        part = f" of {worst['part']}" if worst.get("part") else ""
        lines.append(
            f"      worst{part} at {worst['index']}: found {number(worst['found'])}, expected "
            f"{number(worst['expected'])}, error {number(worst['error'])}, allowed {number(worst['bound'])}"
        )
    return "\n".join(lines)


def number(value: Any) -> str:
    """A float with six digits, anything else as it is."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _wrapped(head: str, text: str) -> str:
    body = " ".join(text.split())
    return "\n".join(textwrap.wrap(body, WIDTH, initial_indent=head, subsequent_indent=" " * (len(head) + 2))) or head
