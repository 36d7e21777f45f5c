"""The `deepinfer` command: finds the sub-command, imports only that one, and turns typed errors into one clean message.

A command module offers `HELP`, `add_arguments(parser)` and `run(args) -> int`, and may offer `USAGE` and `EXAMPLES`; it
imports torch and the engine inside `run` only, so that every `--help` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from rich_argparse import RawDescriptionRichHelpFormatter

from deepinfer.environ import variable_of
from deepinfer.errors import ConfigError, DeepInferError

COMMANDS = {
    "generate": "complete prompts and print the texts",
    "chat": "talk to the model, interactively or with one message",
    "bench": "how fast a model runs here, and what its steps cost",
    "doctor": "what is installed, what works, what would fit in memory",
    "ops": "which implementation serves every operation, and why",
    "env": "every setting: type, default, value and where it comes from",
    "conformance": "hold an installed backend to the reference",
    "bisect": "name the op that makes a backend's output diverge",
    "replay": "run a stored call of an op again, against the reference",
    "new-backend": "create a backend package from the template",
    "make-checkpoint": "write a small random checkpoint in the published format",
}
"""Name and one-line description of every command; the module is the name with an underscore."""

_DESCRIPTION = "Offline inference for DeepSeek-V4.1 on any accelerator, or on none."

_EPILOG = """\
first steps:
  deepinfer doctor                                           is this machine ready?
  deepinfer make-checkpoint --config tiny --out /tmp/tiny    a model of 35 MB (it has learned nothing)
  deepinfer generate --model /tmp/tiny "Once upon a time"    run it
  deepinfer generate "Once upon a time"                      run the published model (about 510 GB)

`deepinfer COMMAND --help` explains a command. Settings also come from DEEPINFER_* variables: see `deepinfer env`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0 done, 1 some requests failed, 2 wrong use, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, commands = build_parser(arguments)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    debug = args.debug or _early("debug")
    try:
        _configure_logging("debug" if debug else _early("log_level"))
        return commands[args.command].run(args)
    except DeepInferError as error:
        if debug:
            raise
        print(f"deepinfer: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("deepinfer: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, e.g. `deepinfer ops | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def build_parser(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    """The parser and the modules of the commands that `arguments` name; other commands are listed, not imported."""
    parser = argparse.ArgumentParser(
        prog="deepinfer",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, help="print the version and exit")
    parser.set_defaults(debug=False)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    modules = {}
    for name, text in COMMANDS.items():
        command = subparsers.add_parser(name, help=text, formatter_class=parser.formatter_class)
        command.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
        if name in arguments:
            modules[name] = importlib.import_module("deepinfer.cli." + name.replace("-", "_"))
            command.description, command.epilog = modules[name].HELP, getattr(modules[name], "EXAMPLES", None)
            command.usage = getattr(modules[name], "USAGE", None)
            modules[name].add_arguments(command)
    return parser, modules


class _HelpFormatter(RawDescriptionRichHelpFormatter):
    """Headings as they are written."""

    group_name_formatter = str


class _ShowVersion(argparse.Action):
    """Prints the installed version; read from the package metadata only when asked for."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"deepinfer-core {version('deepinfer-core')}")
        parser.exit()


def _early(field: str):
    """A setting needed before `Settings.load()`; a wrong value waits for the command that reports them all."""
    variable = variable_of(field)
    try:
        return variable.coerce(os.environ.get(variable.full_name))
    except ConfigError:
        return variable.default


def _configure_logging(level: str) -> None:
    """Messages of the `deepinfer` loggers go to stderr, so that stdout holds results only."""
    root = logging.getLogger("deepinfer")
    root.setLevel(level.upper())
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("deepinfer: %(message)s"))
        root.addHandler(handler)
