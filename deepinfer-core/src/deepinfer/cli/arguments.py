"""Flags that several commands share: an engine's (one flag a field of `EngineConfig`) and a request's sampling.

Used by the command modules and by the scripts in `examples/`. Imports neither torch nor the engine, so that `--help`
is quick.
"""

from __future__ import annotations

import argparse
from typing import Any

from deepinfer.config import argument_fields, default_of
from deepinfer.errors import ConfigError

DEFAULT_MODEL = "deepseek-ai/DeepSeek-V4.1-Flash-1017"
"""Hub id of the published checkpoint; `DEEPINFER_HF_MODEL_DIR` names a local copy of it."""

_FLAG_NAMES = {"op_overrides": "--op"}
_TYPES = {"str": str, "int": int, "float": float}


def add_engine_arguments(parser: argparse.ArgumentParser, model: str | None = DEFAULT_MODEL) -> None:
    """Adds one kebab-case flag for every argument of an engine, and --set for everything else in `deepinfer env`."""
    group = parser.add_argument_group("engine")
    for argument in argument_fields():
        if argument.name != "decode_sequence":  # shapes the return value of the library call, nothing a command shows
            _add_flag(group, argument, model)
    group.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="give a setting of `deepinfer env` for this run, e.g. batch_invariant=1 (repeatable)",
    )


def _add_flag(group: Any, argument: Any, model: str | None) -> None:
    flag = _FLAG_NAMES.get(argument.name, "--" + argument.name.replace("_", "-"))
    kind, text = str(argument.type).partition(" | ")[0], argument.metadata["help"]
    options: dict[str, Any] = {"dest": argument.name, "help": text, "default": argparse.SUPPRESS}
    if argument.name == "model":
        group.add_argument(flag, **options | {"default": model, "help": f"{text} (default: {model})"})
    elif kind == "bool":
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif kind.startswith("tuple"):
        group.add_argument(flag, action="append", metavar="PATTERN=PROVIDER", **options)
    else:
        default = default_of(argument)
        options["help"] = text if default is None else f"{text} (default: {default})"
        choices = argument.metadata["choices"]
        shape = {"choices": choices} if choices else {"metavar": kind.upper(), "type": _TYPES[kind]}
        group.add_argument(flag, **shape, **options)


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM` (and `EngineConfig.create`) for parsed flags: only what the user gave, plus --set."""
    names = {argument.name for argument in argument_fields()}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    return parse_assignments(getattr(args, "set", [])) | given


def parse_assignments(pairs: list[str]) -> dict[str, Any]:
    """`["NAME=VALUE"]` as a dict; names may carry the DEEPINFER_ prefix and any case."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {pair!r}: expected NAME=VALUE, e.g. --set batch_invariant=1")
        values[name.strip().lower().removeprefix("deepinfer_")] = value.strip()
    return values


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int = 256) -> None:
    """Adds the flags of `SamplingParams` that make sense for every prompt of a command alike."""
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"longest answer (default: {max_tokens})")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 = always the likeliest token (default: 1.0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens that sum to P")
    add("--top-k", type=int, default=-1, metavar="K", help="sample from the K likeliest tokens (default: all)")
    add("--sampling-seed", type=int, dest="seq_seed", metavar="N", help="the same seed gives the same answer")
    add("--stop", action="append", default=[], metavar="TEXT", help="end the answer at this text (repeatable)")
    add("--stop-token-id", type=int, action="append", default=[], metavar="ID", help="end at this token (repeatable)")
    add("--min-tokens", type=int, default=0, metavar="N", help="no end before N tokens")
    add("--ignore-eos", action="store_true", help="do not stop at the end-of-text token")


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams` for parsed flags."""
    return {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seq_seed": args.seq_seed,
        "stop": args.stop,
        "stop_token_ids": args.stop_token_id,
        "min_tokens": args.min_tokens,
        "ignore_eos": args.ignore_eos,
    }
