"""`deepinfer generate`: completes prompts given as arguments, as lines of a file, or as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from deepinfer.cli.arguments import add_engine_arguments, add_sampling_arguments, sampling_arguments
from deepinfer.cli.dump import add_dump_arguments, open_llm
from deepinfer.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer import RequestOutput

USAGE = "deepinfer generate [FLAGS] (PROMPT ... | --prompts-file FILE | --input FILE)"
HELP = "Loads a model, completes every prompt and prints the texts in the order of the prompts."
EXAMPLES = """\
examples:
  deepinfer generate --model /tmp/tiny "Once upon a time" "The capital of France is"
  deepinfer generate --prompts-file prompts.txt --temperature 0 --max-tokens 64
  deepinfer generate --input requests.jsonl --output results.jsonl

A line of --input is {"prompt": "..."} or {"prompt_token_ids": [...]} or {"messages": [...]}, with optional "id" and
"sampling_params": {"max_tokens": 64, ...}, which win over the flags.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `deepinfer generate`."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue")
    add = parser.add_argument
    add("--prompts-file", metavar="FILE", help="one prompt a line; - reads standard input")
    add("--input", type=Path, metavar="FILE", help="JSON lines, one request each")
    add("--output", type=Path, metavar="FILE", help="where the JSON lines of --input go (default: standard output)")
    add("--stream", action="store_true", help="print each result as soon as it is complete, not in order")
    add("--json", action="store_true", help="print one JSON object a result")
    add("--keep-special-tokens", action="store_true", help="leave end-of-text and other special tokens in the texts")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)
    add_dump_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generates and prints; 1 if a request failed."""
    prompts = read_prompts(args)
    params = sampling_arguments(args) | {"skip_special_tokens": not args.keep_special_tokens}
    if args.input is not None:
        return _run_batch(args, params)
    from deepinfer import SamplingParams

    sampling = SamplingParams(**params)  # before the weights are loaded: a wrong flag should not cost minutes
    with open_llm(args) as llm:
        if args.stream:
            results: Iterable[RequestOutput] = llm.stream(prompts, sampling)
        else:
            results = cast("list[RequestOutput]", llm.generate(prompts, sampling, use_tqdm=sys.stderr.isatty()))
        failures = sum(_print(result, args.json, len(prompts)) for result in results)
    return 1 if failures else 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of a command line; ConfigError if there is none, or more than one source of them."""
    sources = [bool(args.prompts), args.prompts_file is not None, args.input is not None]
    if sum(sources) != 1:
        found = "several" if sum(sources) else "none"
        raise ConfigError(f"found {found} of: prompts as arguments, --prompts-file, --input; expected exactly one")
    if args.output is not None and args.input is None:
        raise ConfigError("--output goes with --input; other results are printed")
    if args.prompts_file is None:
        return args.prompts
    text = sys.stdin.read() if args.prompts_file == "-" else _read(Path(args.prompts_file))
    return [line for line in text.splitlines() if line.strip()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from None


def _print(result: RequestOutput, as_json: bool, count: int) -> bool:
    """Prints one result; True if it failed."""
    if as_json:
        print(json.dumps(result_as_dict(result), ensure_ascii=False), flush=True)
    elif result.error is not None:
        print(f"deepinfer: prompt {result.index + 1}: {result.error}", file=sys.stderr)
    elif count == 1:
        print(result.text, flush=True)
    else:
        print(f"--- {result.index + 1}: {result.prompt!r}\n{result.text}", flush=True)
    return result.error is not None


def result_as_dict(result: RequestOutput) -> dict[str, Any]:
    """The JSON object of a result."""
    return {
        "index": result.index,
        "prompt": result.prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "error": None if result.error is None else str(result.error),
    }


def _run_batch(args: argparse.Namespace, params: dict[str, Any]) -> int:
    from deepinfer import SamplingParams
    from deepinfer.entrypoints.batch import run_batch

    SamplingParams(**params)
    lines = _read(args.input).splitlines()
    with _opened(args.output) as out, open_llm(args) as llm:
        errors = run_batch(llm, lines, out, params)
    if errors:
        print(f"deepinfer: {errors} of the requests failed; their lines carry an error", file=sys.stderr)
    return 1 if errors else 0


def _opened(path: Path | None) -> AbstractContextManager[TextIO]:
    """The file to write, or standard output, which stays open."""
    if path is None:
        return nullcontext(sys.stdout)
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
