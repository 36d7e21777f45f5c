"""`deepinfer bench`: how fast a model runs here, and with --profile what every kind of step cost and who waited for
whom."""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import TYPE_CHECKING, Any

from deepinfer.cli.arguments import add_engine_arguments, engine_arguments
from deepinfer.cli.text import print_table

if TYPE_CHECKING:
    from deepinfer import LLM
    from deepinfer.engine.stats import EngineStats, StepRecord

HELP = "Runs requests of random tokens, or of given texts, and prints rates; compares best when the machine is idle."
EXAMPLES = """\
examples:
  deepinfer bench --model /tmp/tiny --requests 8 --max-tokens 64 --profile
  deepinfer bench --model /tmp/tiny --set zero_overhead_scheduling=0 --profile
  deepinfer bench --model /tmp/tiny --set use_nextn_decode=5 --proposer ngram --prompt "one two three one two three"

--profile shows per kind of step: rows, milliseconds on the device, and milliseconds the device stood still before it
because the host was not ready.
"""

Row = tuple[str, str, str]

SMALLEST_TOKEN, PLACEHOLDERS = 10, 20
"""Token ids that random prompts leave out: special ones at the beginning, placeholders (images) at the end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `deepinfer bench`."""
    add = parser.add_argument
    add("--requests", type=int, default=8, metavar="N", help="requests that run together (default: 8)")
    add("--prompt-length", type=int, default=64, metavar="TOKENS", help="length of random prompts (default: 64)")
    add("--prompt", action="append", default=[], metavar="TEXT", help="use this text instead (repeatable)")
    add("--max-tokens", type=int, default=64, metavar="N", help="tokens each generates (default: 64)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 = always the likeliest token (default: 0)")
    add("--profile", action="store_true", help="also print what the steps cost")
    add("--json", action="store_true", help="print JSON")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if a request failed."""
    from deepinfer import LLM

    with LLM(**engine_arguments(args)) as llm:
        _generate(llm, args, 1, 4)  # first use allocates and compiles
        llm.stats.reset(record=args.profile)
        outputs, seconds = _generate(llm, args, args.requests, args.max_tokens)
        stats = llm.stats
    rows = figures(stats, sum(len(output) for output in outputs), seconds)
    if args.json:
        print(json.dumps(_as_json(rows, stats, args.profile), indent=2))
    else:
        print_table(("figure", "value", "unit"), rows)
        if args.profile:
            print()
            print_table(_HEADER, profile(stats))
    failed = [output for output in outputs if output.error is not None]
    return 1 if failed else 0


def _generate(llm: LLM, args: argparse.Namespace, count: int, max_tokens: int) -> tuple[list[Any], float]:
    """Results and wall seconds of `count` requests."""
    from deepinfer import SamplingParams

    source, largest = random.Random(0), llm.get_tokenizer().vocab_size - PLACEHOLDERS
    params = SamplingParams(temperature=args.temperature, max_tokens=max_tokens, ignore_eos=True, seq_seed=1)
    prompts = [args.prompt[index % len(args.prompt)] for index in range(count)] if args.prompt else None
    ids = [[source.randrange(SMALLEST_TOKEN, largest) for _ in range(args.prompt_length)] for _ in range(count)]
    started = time.perf_counter()
    results = llm.generate(prompts, params, None if prompts else ids, use_tqdm=False)
    return list(results), time.perf_counter() - started


def figures(stats: EngineStats, tokens: int, seconds: float) -> list[Row]:
    """Rates of a run."""
    steps = max(1, stats.steps)
    prefill = stats.prompt_tokens / stats.prefill_seconds if stats.prefill_seconds else 0.0
    hidden = max(0.0, 1 - stats.device_wait_seconds / stats.host_seconds) if stats.host_seconds else 0.0
    rows = [
        ("output", f"{tokens / seconds:,.1f}", "tokens/s"),
        ("prefill", f"{prefill:,.1f}", "tokens/s"),
        ("steps", f"{stats.steps}", ""),
        ("device", f"{1000 * stats.device_seconds / steps:.3f}", "ms/step"),
        ("host", f"{1000 * stats.host_seconds / steps:.3f}", "ms/step"),
        ("device waited for host", f"{1000 * stats.device_wait_seconds / steps:.3f}", "ms/step"),
        ("host time hidden", f"{100 * hidden:.0f}", "%"),
    ]
    if stats.speculation is not None:
        spec = stats.speculation
        shares = " ".join(f"{share:.2f}" for share in spec.acceptance)
        rows += [
            ("drafts verified", f"{int(spec.verified.sum())} of {int(spec.generated.sum())}", ""),
            ("accepted by position", shares, ""),
            ("calibration error", f"{spec.calibration_error:.3f}", ""),
        ]
    return rows


_HEADER = ("step", "steps", "rows", "device ms", "95 %", "waited ms", "95 %", "waited in all ms")


def profile(stats: EngineStats) -> list[tuple[str, ...]]:
    """One row a kind of step: medians, 95th percentiles, sums."""
    rows = []
    for kind in ("prefill", "decode"):
        records = [record for record in stats.records or () if record.kind == kind]
        if records:
            rows.append((kind, str(len(records)), *_spread(records)))
    return rows


def _spread(records: list[StepRecord]) -> tuple[str, ...]:
    import numpy as np

    rows, busy, waited = (np.array([getattr(r, name) for r in records]) for name in ("rows", "busy", "waited"))
    numbers = [np.median(busy), np.percentile(busy, 95), np.median(waited), np.percentile(waited, 95), waited.sum()]
    return (f"{rows.mean():.1f}", *(f"{number:.3f}" for number in numbers))


def _as_json(rows: list[Row], stats: EngineStats, records: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"figures": [{"name": name, "value": value, "unit": unit} for name, value, unit in rows]}
    if records:
        result["steps"] = [record._asdict() for record in stats.records or ()]
    return result
