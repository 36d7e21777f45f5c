"""Writes the status matrix of this package's README from the package itself and from committed conformance reports.

    python deepinfer-nvidia/status.py            # after an op was added, or a report

An op is native where a class of the family implements it, composed or reference where core's body serves. It counts as
run on hardware only if docs/evidence/nvidia-<family>/report.json, written by the conformance kit there, says so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "deepinfer-nvidia" / "src")]

from deepinfer.hooks import OpSpec  # noqa: E402  the path comes first
from deepinfer.hooks.ops import contracts  # noqa: E402
from deepinfer_nvidia import groups  # noqa: E402
from deepinfer_nvidia.communicator import Communicator  # noqa: E402
from deepinfer_nvidia.runtime import Runtime  # noqa: E402

README = Path(__file__).parent / "README.md"
EVIDENCE = ROOT / "docs" / "evidence"
FAMILIES = {"sm90": 9, "sm100": 10}
BEGIN, END = "<!-- status: python deepinfer-nvidia/status.py -->", "<!-- end of status -->"
WHOLE = {"runtime": Runtime, "communicator": Communicator}
"""Groups with one class for every GPU."""


def matrix(evidence: Path = EVIDENCE) -> str:
    """The table in Markdown."""
    reports = {family: read_report(evidence / f"nvidia-{family}" / "report.json") for family in FAMILIES}
    lines = ["| op | compute capability 9.x | compute capability 10.x |", "|---|---|---|"]
    for contract in contracts():
        for spec in contract.op_specs.values():
            cells = [state(contract, spec, family, reports[family]) for family in FAMILIES]
            lines.append(f"| `{spec.name}` | {cells[0]} | {cells[1]} |")
    return "\n".join([*lines, "", *map(heading, FAMILIES, reports.values())])


def read_report(file: Path) -> dict[str, Any] | None:
    """A conformance report, None where there is none."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def heading(family: str, report: dict[str, Any] | None) -> str:
    """What a column rests on."""
    if report is None:
        return f"* {family}: nothing has run on hardware."
    verdict = "passes" if report["ok"] else "does not pass"
    return f"* {family}: model {report['model']}, levels {report['options']['levels']}, {verdict}."


def state(contract: type[Any], spec: OpSpec, family: str, report: dict[str, Any] | None) -> str:
    """One cell."""
    owner = implementation(contract, spec, family)
    if owner is None:
        return "composed" if spec.composed else "reference"
    ran = {row["op"]: row for row in report["matrix"]}.get(spec.name) if report else None
    if ran is None or ran.get("kind") != "native" or not ran["cases"].get("pass"):
        return f"native ({owner}), not run on hardware"
    if ran["state"] != "native":
        return f"native ({owner}), **fails on hardware**"
    return f"native ({owner}), {ran['cases']['pass']} cases passed on hardware"


def implementation(contract: type[Any], spec: OpSpec, family: str) -> str | None:
    """Family of the class that implements an op for a chip; "torch" for the groups that are one for all."""
    if contract.group in WHOLE:
        own = getattr(WHOLE[contract.group], spec.method) is not getattr(contract, spec.method)
        return "torch" if own else None
    for made in groups.group_classes(contract.group, FAMILIES[family]):
        if getattr(made, spec.method) is not getattr(contract, spec.method):
            return made.__module__.split(".")[1]
    return None


def updated(text: str, table: str) -> str:
    """A README with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8"), matrix()), encoding="utf-8")
