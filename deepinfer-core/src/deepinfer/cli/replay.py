"""`deepinfer replay`: runs a stored call of an op again and compares it with the reference."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = """\
Runs a call that --dump-op or `deepinfer bisect` stored once more, on the provider named and on core's reference, and
prints how the results differ. Exits with 1 if they do."""
EXAMPLES = """\
examples:
  deepinfer generate --accelerator acme --model /tmp/tiny --dump-op attention.rope:3 "Once upon a time"
  deepinfer replay attention.rope-call3.json                    on the provider that served the call
  deepinfer replay attention.rope-call3.json --op acme          on another one
  deepinfer replay attention.rope-call3.json --op reference     the stored result itself, against the reference
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `deepinfer replay`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="one of the two files of a stored call")
    parser.add_argument("--op", dest="provider", metavar="PROVIDER", help="backend, op pack or reference")


def run(args: argparse.Namespace) -> int:
    """Replays and prints; 1 if the results differ."""
    from deepinfer.testing.replay import replay
    from deepinfer.testing.replay_text import text

    done = replay(args.file, args.provider)
    print(text(done))
    return 0 if done.ok else 1
