"""`deepinfer ops`: binds every op as an engine would and prints who serves it, and why preferred providers do not."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from deepinfer.cli.arguments import parse_assignments

HELP = """\
Shows which implementation serves every operation of the model on this machine, with its package and version, and every
reason why a more preferred one was refused. Sizes decide refusals: give the model's configuration with --config."""
EXAMPLES = """\
examples:
  deepinfer ops
  deepinfer ops --op 'attention.*=reference'          bind these to core's own code
  deepinfer ops --accelerator acme --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `deepinfer ops`."""
    add = parser.add_argument
    add("--config", default="full", help="tiny, micro, full, a config.json, a checkpoint or a hub id (default: full)")
    add("--accelerator", metavar="NAME", help="backend (default: DEEPINFER_ACCELERATOR, else probe the machine)")
    add(
        "--op", dest="op_overrides", action="append", metavar="PATTERN=PROVIDER", help="bind ops elsewhere (repeatable)"
    )
    add("--numerics", choices=("exact", "smooth"), default="exact", help="rounding rules (default: exact)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of `deepinfer env` (repeatable)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="machine-readable")
    form.add_argument("--markdown", action="store_true", help="the page docs/ops.md: what every operation means")


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    if args.markdown:
        from deepinfer.hooks.docs import ops_page

        sys.stdout.write(ops_page())
        return 0
    from deepinfer.hooks import report

    device_type, table = bind(args)
    if args.json:
        print(json.dumps({"device_type": device_type, "digest": table.digest, "ops": report.rows(table)}, indent=2))
    else:
        print(report.text(table))
    return 0


def bind(args: argparse.Namespace) -> tuple[str, Any]:
    """Device type and op table of a worker with these arguments."""
    from deepinfer.cli.models import read_config
    from deepinfer.config import EngineConfig
    from deepinfer.runner.worker import bind_ops

    model = read_config(args.config)
    config = EngineConfig.create(
        model=args.config,
        load_format="dummy",
        accelerator=args.accelerator,
        op_overrides=tuple(args.op_overrides or ()),
        numerics=args.numerics,
        **parse_assignments(args.set),
    ).resolve(model)
    context, table = bind_ops(config, model)
    return context.device.type, table
