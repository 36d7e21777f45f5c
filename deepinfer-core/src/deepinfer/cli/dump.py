"""`--dump-op`: the engine of a command, with one op's calls watched. Used by commands that generate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.cli.arguments import engine_arguments

if TYPE_CHECKING:
    from deepinfer import LLM

DUMP_DIR = Path()
"""Where stored calls go: the working directory."""


def add_dump_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --dump-op and --dump-dir."""
    group = parser.add_argument_group("looking at an op")
    group.add_argument(
        "--dump-op",
        metavar="NAME[:n]",
        help="store the n-th call of an op, or the first that fails, for `deepinfer replay`",
    )
    group.add_argument("--dump-dir", type=Path, default=DUMP_DIR, metavar="DIR", help="where to (default: here)")


@contextmanager
def open_llm(args: argparse.Namespace) -> Iterator[LLM]:
    """The engine that the flags ask for, closed in the end; what --dump-op stored is said on standard error."""
    from deepinfer import LLM

    if args.dump_op is None:
        with LLM(**engine_arguments(args)) as llm:
            yield llm
        return
    from deepinfer.config import EngineConfig
    from deepinfer.entrypoints.build import build_engine
    from deepinfer.hooks import open_backend

    config = EngineConfig.create(**engine_arguments(args))
    backend = open_backend(config.accelerator, settings=config.settings)  # before torch is imported
    from deepinfer.testing.capture import CallDumper

    dumper = CallDumper(args.dump_op, args.dump_dir)
    try:
        with LLM.from_engine(*build_engine(config, backend, (dumper,))) as llm:
            yield llm
    finally:
        print(f"deepinfer: --dump-op {args.dump_op}: {dumper.outcome()}", file=sys.stderr)
