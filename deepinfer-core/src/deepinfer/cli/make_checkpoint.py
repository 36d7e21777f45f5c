"""`deepinfer make-checkpoint`: writes a deterministic random checkpoint in the published format."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepinfer.cli.text import format_bytes

HELP = """\
Writes a complete checkpoint in the published format: config, tokenizer, FP8 and FP4 weights with their scales, index.
The weights are random, so the texts are noise; everything that reads, stores and computes is the real thing."""
EXAMPLES = """\
example:
  deepinfer make-checkpoint --config tiny --out /tmp/tiny
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `deepinfer make-checkpoint`."""
    add = parser.add_argument
    add("--config", default="tiny", metavar="NAME|FILE", help="tiny, micro, full or a config.json (default: tiny)")
    add("--out", required=True, type=Path, metavar="DIR", help="directory to create; must be empty if it exists")
    add("--seed", type=int, default=0, metavar="N", help="the same seed writes the same bytes (default: 0)")
    add(
        "--shards", type=int, metavar="N", help="weight files besides the Engram tables' (default: at least 2, of 5 GB)"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the checkpoint and says what it is."""
    from tqdm import tqdm

    from deepinfer.models.deepseek_v41.config import ModelConfig
    from deepinfer.testing.checkpoint import write_checkpoint

    config = ModelConfig.load(args.config)
    with tqdm(unit="B", unit_scale=True, desc="writing", disable=not sys.stderr.isatty()) as bar:

        def show(written: int, total: int) -> None:
            bar.total = total
            bar.update(written - bar.n)

        write_checkpoint(config, args.out, seed=args.seed, shards=args.shards, progress=show)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: random {args.config} checkpoint, seed {args.seed}, {format_bytes(size)}")
    return 0
