"""`deepinfer conformance`: holds an installed backend to the reference. Also installed as `deepinfer-conformance`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer.testing.conformance.runner import Options

HELP = """\
Holds a backend to core's reference. Levels: 0 hygiene (import, metadata, purity), 1 every op on many inputs,
2 properties (repeatable, batch invariant, ...), 3 the model's blocks, 4 a whole engine on a small model, 5 speed.
Exits with 1 if a case failed. Nothing is skipped silently: every skip counts and prints its reason."""
EXAMPLES = """\
examples:
  deepinfer conformance --backend acme --quick              a first look, about a minute
  deepinfer conformance --backend acme --report report      everything but speed, with report.md and report.json
  deepinfer conformance --backend acme --op 'gemm.*'        levels 1 and 2 of some ops
  deepinfer conformance --backend acme --level 5            how fast every op is
  deepinfer conformance --backend acme --against cpu        two backends side by side
"""

DEFAULT_FILE = Path("conformance.toml")
"""Read from the working directory if it is there and nothing else is asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `deepinfer conformance`."""
    add = parser.add_argument
    add("--backend", required=True, metavar="NAME", help="the backend to test, as DEEPINFER_ACCELERATOR names it")
    add("--level", metavar="LEVELS", help="a level, a range or a list, e.g. 1, 0-2, 0,4 (default: 0-4; with --op 1-2)")
    add("--op", metavar="PATTERN", help="only these ops, e.g. 'gemm.*' or attention.rope")
    add("--quick", action="store_true", help="leave slow samples and the second of similar cases out")
    add("--report", type=Path, metavar="DIR", help="write report.json and report.md there")
    add("--against", metavar="NAME", help="compare with another installed backend instead")
    add("--config", type=Path, metavar="FILE", help="expected failures (default: conformance.toml, if it is here)")
    add("--seed", type=int, default=0, metavar="N", help="of all random inputs (default: 0)")
    add("--model", default="micro", metavar="NAME", help="built-in model whose sizes are used (default: micro)")
    add(
        "--bind", action="append", default=[], metavar="PATTERN=PROVIDER",
        help="bind ops elsewhere, as --op of other commands does (repeatable)",
    )  # fmt: skip
    add("--check-speed", action="store_true", help="level 5 fails for ops that are slower than core's, or than before")
    add("--last-report", type=Path, metavar="FILE", help="report.json that level 5 compares times with")


def run(args: argparse.Namespace) -> int:
    """Runs the kit; 1 if a case failed."""
    from deepinfer.hooks import open_backend

    if args.against == args.backend:
        raise ConfigError(f"--against {args.against}: expected another backend than the one under test")
    opened = [open_backend(name) for name in (args.backend, args.against) if name]  # before torch is imported
    from deepinfer.testing.conformance.against import run_against
    from deepinfer.testing.conformance.runner import run_conformance

    options = read_options(args)
    if args.against:
        report = run_against(opened[0], opened[1], options, _show)
    else:
        report = run_conformance(opened[0], options, _show)
    if args.report is not None:
        print(f"\n{report.write(args.report)}: report.md, report.json")
    return 0 if report.ok else 1


def read_options(args: argparse.Namespace) -> Options:
    """What the flags ask for. ConfigError for flags that do not go together."""
    from deepinfer.testing.conformance.expected import read_expectations
    from deepinfer.testing.conformance.runner import Options, op_names, parse_levels

    levels = None if args.level is None else parse_levels(args.level)
    if args.check_speed and 5 not in (levels or ()):
        raise ConfigError("--check-speed goes with --level 5; no other level looks at times")
    file = args.config or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)
    return Options(
        levels=levels,
        op=args.op,
        quick=args.quick,
        seed=args.seed,
        config=args.model,
        overrides=tuple(args.bind),
        check_speed=args.check_speed,
        last_report=args.last_report,
        expected=read_expectations(file, op_names()),
    )


def _show(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The program `deepinfer-conformance`."""
    from deepinfer.cli.main import main as deepinfer

    return deepinfer(["conformance", *(sys.argv[1:] if argv is None else argv)])
