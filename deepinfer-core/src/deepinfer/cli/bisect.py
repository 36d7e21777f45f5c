"""`deepinfer bisect`: names the op that makes a backend's output diverge from the reference."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepinfer.cli.dump import DUMP_DIR
from deepinfer.errors import ConfigError

HELP = """\
Runs an engine with some of a backend's ops native and the others bound to core's reference, halves the set until the
first op that makes the difference is found, and stores its first wrong call for `deepinfer replay`. Exits with 1 if the
output diverges."""
EXAMPLES = """\
examples:
  deepinfer bisect --backend acme                                              on a small random model
  deepinfer bisect --backend acme --model /tmp/tiny --prompt "Once upon a time"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `deepinfer bisect`."""
    add = parser.add_argument
    add("--backend", required=True, metavar="NAME", help="the backend, as DEEPINFER_ACCELERATOR names it")
    add("--model", type=Path, metavar="DIR", help="checkpoint to run (default: a random one of the conformance kit)")
    add("--prompt", action="append", default=[], metavar="TEXT", help="text to run on --model (repeatable)")
    add("--bind", action="append", default=[], metavar="PATTERN=PROVIDER", help="bind ops elsewhere from the start")
    add(
        "--factor", type=float, default=4.0, metavar="X",
        help="deviation that counts as equal, as a multiple of the reference's own rounding noise (default: 4)",
    )  # fmt: skip
    add("--dump-dir", type=Path, default=DUMP_DIR, metavar="DIR", help="where the wrong call goes (default: here)")


def run(args: argparse.Namespace) -> int:
    """Searches and prints; 1 if the output diverges."""
    if bool(args.prompt) != (args.model is not None):
        raise ConfigError("--model and --prompt go together: texts need a checkpoint, and a checkpoint needs texts")
    from deepinfer.hooks import open_backend

    backend = open_backend(args.backend)  # before torch is imported
    from deepinfer.testing.bisect import bisect, text, text_script

    script = text_script(args.model, args.prompt) if args.prompt else None
    finding = bisect(
        backend, args.model, script, args.dump_dir, args.bind, lambda line: print(line, flush=True), args.factor
    )
    print(text(finding, args.backend))
    return 1 if finding.diverges else 0
