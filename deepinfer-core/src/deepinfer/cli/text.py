"""Plain tables and sizes for the terminal. Used by the commands; knows nothing about what it prints."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart, header first."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints `format_table`."""
    print(format_table(header, rows))


def format_bytes(count: float) -> str:
    """A size with three significant digits and a decimal unit (kB = 1000 bytes), as disks and papers give it."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
