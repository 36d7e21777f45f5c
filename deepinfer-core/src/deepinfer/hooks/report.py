"""The op table for people and for programs: `deepinfer ops` as text in 120 columns, and as JSON rows.

Called by the CLI and by whoever stores a table beside a result. Reads bindings only.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from deepinfer.hooks.table import REFERENCE, Binding, OpTable

WIDTH = 120


def rows(ops: OpTable) -> list[dict[str, Any]]:
    """One JSON-ready dict an op, in the order of the contracts.

    Keys: op, version, level, status, grain, kind (native, decomposed, reference), provider, distribution,
    distribution_version, impl, layout (None without), refused: [{provider, distribution, distribution_version,
    implements, reasons}], most preferred first.
    """
    return [_row(binding) for binding in ops.bindings]


def _row(binding: Binding) -> dict[str, Any]:
    spec, provider = binding.spec, binding.provider
    return {
        "op": spec.name,
        "version": spec.version,
        "level": spec.level,
        "status": spec.status,
        "grain": spec.grain,
        "kind": binding.kind,
        "provider": provider.name,
        "distribution": provider.distribution,
        "distribution_version": provider.version,
        "impl": binding.implementation,
        "layout": binding.layout,
        "refused": [
            {
                "provider": refusal.provider.name,
                "distribution": refusal.provider.distribution,
                "distribution_version": refusal.provider.version,
                "implements": refusal.implements,
                "reasons": list(refusal.reasons),
            }
            for refusal in binding.refused
        ],
    }


def summary(ops: OpTable) -> str:
    """One line: how many ops, who serves them, the digest's first twelve digits."""
    kinds = Counter(binding.kind for binding in ops.bindings)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in ("native", "decomposed", "reference"))
    return f"{len(ops.bindings)} ops: {counts}; digest {ops.digest[:12]}"


def refusals(ops: OpTable) -> str:
    """Every op that fell back because an implementation refused, with all reasons; empty if none did."""
    fallen = [b for b in ops.bindings if any(refusal.implements for refusal in b.refused)]
    return "\n".join(binding.explain() for binding in fallen)


def text(ops: OpTable, width: int = WIDTH) -> str:
    """The whole table: a heading, then the groups with one line an op and one for each refusal with reasons."""
    bindings = ops.bindings
    heading = ("op", "v", "level", "status", "grain", "served by", "layout", "implementation")
    lines = [_cells(binding) for binding in bindings]
    # the last column takes what is left, so only the others need a width
    widths = [max(len(line[i]) for line in (heading, *lines)) for i in range(len(heading) - 1)]
    out = [summary(ops), *_providers(bindings), "", _line(heading, widths, width)]
    group = None
    for binding, cells in zip(bindings, lines, strict=True):
        if binding.spec.group != group:
            group = binding.spec.group
            out.append("-" * width)
        out.append(_line(cells, widths, width))
        for refusal in binding.refused:
            if refusal.implements:
                out += textwrap.wrap(f"refused by {refusal}", width, initial_indent="    ", subsequent_indent="      ")
    return "\n".join(out)


def _cells(binding: Binding) -> tuple[str, ...]:
    spec = binding.spec
    who = binding.provider.name if binding.provider.name != REFERENCE else f"core {binding.kind}"
    # core's own body is the contract's method of the same name; saying so a hundred times hides the native ones
    implementation = "" if binding.kind != "native" else ".".join(binding.implementation.split(".")[-2:])
    return (
        spec.name, str(spec.version), spec.level, spec.status, spec.grain, who, binding.layout or "-", implementation,
    )  # fmt: skip


def _line(cells: Sequence[str], widths: Sequence[int], width: int) -> str:
    fixed = "  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=False))
    line = f"{fixed}  {cells[-1]}".rstrip()
    return line if len(line) <= width else line[: width - 3] + "..."


def _providers(bindings: Iterable[Binding]) -> list[str]:
    """One line a provider: its distribution, and how many ops it serves."""
    served = Counter(binding.provider for binding in bindings)
    return [f"  {provider} serves {count}" for provider, count in served.most_common()]
