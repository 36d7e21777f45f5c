"""Measures DeepInfer on this machine and prints a table; the definitions are in docs/performance.md.

    python examples/benchmark.py --model /tmp/tiny                       # everything, minutes on two cores
    python examples/benchmark.py --model /tmp/tiny --only decode --batch 32
    python examples/benchmark.py --model /tmp/tiny --json > result.json
    python examples/benchmark.py --model TRAINED --only speculation --drafts 5 --batches 1,4,32

Sections: prefill, decode (a model through `LLM`), scheduler, memory (the engine over an executor that computes
nothing), loader (a fresh process that only loads), speculation (only with --drafts: no drafts, a fixed number, and as
many as they are worth, on the same texts). Prompts are random token ids, greedy, without end token; those of the
speculation section are texts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer import LLM, SamplingParams
from deepinfer.cli.arguments import add_engine_arguments, engine_arguments
from deepinfer.cli.text import print_table
from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import ModelInfo
from deepinfer.environ import Settings
from deepinfer.errors import DeepInferError
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.runner.inputs import CacheCapacity, StepBatch, StepResult
from deepinfer.sample.rows import SampledRows

SECTIONS = ("prefill", "decode", "scheduler", "memory", "loader", "speculation")
SMALLEST_TOKEN, PLACEHOLDERS = 10, 20
"""Token ids that random prompts leave out: special ones at the beginning, placeholders (images) at the end."""

REPETITION = (
    "one two three four five six seven eight one two three four five six seven eight one two three four",
    "the cat sat on the mat. the cat sat on the mat. the cat sat on the mat. the cat",
    '{"name": "a", "size": 1}\n{"name": "b", "size": 2}\n{"name": "c", "size": 3}\n{"name": "d", "size":',
    '[{"id": 1, "ok": true}, {"id": 2, "ok": true}, {"id": 3, "ok": true}, {"id": 4, "ok":',
)
"""Texts that go on as they began, unless --texts names others."""

Row = tuple[str, float, str]
"""(figure, value, unit)"""


# --- a model through LLM --------------------------------------------------------------------------------------------


def random_prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` random ids, the same ones every time."""
    source, largest = random.Random(0), llm.get_tokenizer().vocab_size - PLACEHOLDERS
    return [[source.randrange(SMALLEST_TOKEN, largest) for _ in range(length)] for _ in range(count)]


def run(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[list[Any], float]:
    """Results and wall seconds; a failed request ends the measurement."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    started = time.perf_counter()
    results = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    seconds = time.perf_counter() - started
    for result in results:
        if result.error is not None:
            raise result.error
    return results, seconds


def measure_prefill(llm: LLM, args: argparse.Namespace) -> list[Row]:
    """Every prompt yields one token, so that all steps are prefill steps."""
    prompts = random_prompts(llm, args.prompts, args.prompt_length)
    run(llm, prompts[:1], 1)  # first use allocates and compiles
    _, seconds = run(llm, prompts, 1)
    return [("prefill", args.prompts * args.prompt_length / seconds, "tokens/s")]


def measure_decode(llm: LLM, args: argparse.Namespace) -> list[Row]:
    """From the moment the last request has its first token to the moment the first one ends: a constant batch."""
    prompts = random_prompts(llm, args.batch, args.decode_context)
    run(llm, prompts[:1], 4)
    results, _ = run(llm, prompts, args.decode_tokens)
    began = max(result.metrics.first_token_time for result in results)
    ended = min(result.metrics.finish_time for result in results)
    rate = (args.decode_tokens - 1) / (ended - began)
    rows: list[Row] = [(f"decode, batch {args.batch}", rate * args.batch, "tokens/s")]
    return rows if llm.config.num_draft_tokens else [("decode steps", rate, "steps/s"), *rows]


def measure_model(args: argparse.Namespace) -> list[Row]:
    """The sections that need a loaded model."""
    wanted = {"prefill": measure_prefill, "decode": measure_decode}
    chosen = [measure for name, measure in wanted.items() if name in args.only]
    if not chosen:
        return []
    with LLM(**arguments_of(args)) as llm:
        return [row for measure in chosen for row in measure(llm, args)]


def arguments_of(args: argparse.Namespace, drafts: int | None = None, varlen: bool | None = None) -> dict[str, Any]:
    """Keyword arguments of `LLM` for the flags, with other drafts than those of the flags if given."""
    return engine_arguments(args) | {
        "use_nextn_decode": args.drafts if drafts is None else drafts,
        "enable_mtp_varlen": args.varlen if varlen is None else varlen,
        "zero_overhead_scheduling": args.overlap,
    }


# --- speculation: the same texts without drafts, with all of them, and with as many as they are worth ----------------


def measure_speculation(args: argparse.Namespace) -> list[Row]:
    """Tokens a second of every way for every batch size, each the best of `--repeats` runs taken in turn."""
    texts = Path(args.texts).read_text(encoding="utf-8").splitlines() if args.texts else REPETITION
    batches = [int(size) for size in args.batches.split(",")]
    ways = {"none": (0, False), f"fixed {args.drafts}": (args.drafts, False), "varlen": (args.drafts, True)}
    llms = {name: LLM(**({"max_num_seqs": max(batches)} | arguments_of(args, *way))) for name, way in ways.items()}
    rows: list[Row] = []
    for batch in batches:
        best = dict.fromkeys(ways, 0.0)
        for _ in range(args.repeats):
            for name, llm in llms.items():
                best[name] = max(best[name], text_rate(llm, texts, batch, args.decode_tokens))
        rows += [(f"{name}, batch {batch}", rate, "tokens/s") for name, rate in best.items()]
        others = max(rate for name, rate in best.items() if name != "varlen")
        rows.append((f"fixed over none, batch {batch}", best[f"fixed {args.drafts}"] / best["none"], "x"))
        rows.append((f"varlen over the better of both, batch {batch}", best["varlen"] / others, "x"))
    for name, llm in llms.items():
        if llm.stats.speculation is not None:
            print(f"{name}: {llm.stats.speculation.line()}", file=sys.stderr)
        llm.close()
    return rows


def text_rate(llm: LLM, texts: Sequence[str], batch: int, max_tokens: int) -> float:
    """Tokens a second from the first tokens on, so that prefill does not count."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    results = llm.generate([texts[index % len(texts)] for index in range(batch)], params, use_tqdm=False)
    for result in results:
        if result.error is not None:
            raise result.error
    began = max(result.metrics.first_token_time for result in results)
    ended = max(result.metrics.finish_time for result in results)
    return batch * (max_tokens - 1) / (ended - began)


# --- the engine over an executor that computes nothing --------------------------------------------------------------


class IdleStep:
    """A step that asks for `count` tokens."""

    def __init__(self, count: int) -> None:
        self._count = count

    def result(self) -> StepResult:
        """One token a sampled sequence."""
        count = self._count
        ids, logprobs = np.full(count, SMALLEST_TOKEN, np.int64), np.zeros(count, np.float32)
        return StepResult(SampledRows(ids, logprobs, None, None, None, [None] * count))


class IdleExecutor:
    """Answers every step with the same token: what is left is the engine's own work."""

    def __init__(self, capacity: CacheCapacity) -> None:
        self.capacity = capacity

    def launch(self, batch: StepBatch) -> IdleStep:
        """Computes nothing."""
        return IdleStep(int(batch.sampled.sum()))

    def zero_slots(self, slots: Sequence[int]) -> None:
        """There is no state."""

    def close(self) -> None:
        """There is nothing to give back."""


def idle_engine(requests: int, max_model_len: int) -> Engine:
    """An engine with room for `requests` requests of the greatest length."""
    settings = Settings(logging_interval_step=0)
    config = EngineConfig.create(settings, model="idle", max_num_seqs=requests, max_model_len=max_model_len)
    blocks = requests * -(-max_model_len // 128) + 1
    executor = IdleExecutor(CacheCapacity(blocks, requests + 1))
    return Engine(config.resolve(ModelConfig.builtin("full")), executor, None, ModelInfo(512, (1,), None))


def measure_scheduler(args: argparse.Namespace) -> list[Row]:
    """Decode steps of a full batch, none of which ends while the clock runs."""
    engine, steps = idle_engine(args.requests, 4096), 500
    params = SamplingParams(temperature=0, max_tokens=steps + 100, ignore_eos=True)
    for _ in range(args.requests):
        engine.add_request(token_ids=[SMALLEST_TOKEN] * 64, params=params)
    for _ in range(50):
        engine.step()
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = time.perf_counter() - started
    assert engine.num_unfinished == args.requests
    engine.close()
    return [(f"scheduler + bookkeeping, {args.requests} requests", 1000 * seconds / steps, "ms/step")]


def measure_memory(args: argparse.Namespace) -> list[Row]:
    """Requests come and go for `--steps` steps; growth is counted after the first tenth of them."""
    engine, source = idle_engine(args.requests, 1024), random.Random(0)
    before = 0
    for step in range(args.steps):
        while engine.num_unfinished < args.requests:
            params = SamplingParams(temperature=0, max_tokens=source.randint(1, 200), ignore_eos=True)
            engine.add_request(token_ids=[SMALLEST_TOKEN] * source.randint(1, 300), params=params)
        engine.step()
        if step == args.steps // 10:
            before = resident_bytes()
    growth = resident_bytes() - before
    engine.close()
    return [(f"memory growth over {args.steps} steps", growth / 1e6, "MB")]


# --- the loader in a process of its own -----------------------------------------------------------------------------


def measure_loader(args: argparse.Namespace) -> list[Row]:
    """Peak memory of a process that loads the checkpoint, beside the checkpoint's size."""
    # the flags before the child's own: a section named twice would start children without end
    command = [sys.executable, __file__, *args.raw, "--loader-child"]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if child.returncode:
        raise DeepInferError("the process that loads the checkpoint failed; its message is above")
    found = json.loads(child.stdout)
    size, peak = found["checkpoint"], found["peak"] - found["before"]
    return [
        ("checkpoint", size / 1e6, "MB"),
        ("loader peak", peak / 1e6, "MB"),
        ("loader limit (1.2 S + 200 MB)", 1.2 * size / 1e6 + 200, "MB"),
    ]


def loader_child(args: argparse.Namespace) -> None:
    """Loads the checkpoint with the smallest caches and prints what it took."""
    arguments = {"max_model_len": 256, "max_num_seqs": 1, "num_kv_blocks": 8} | engine_arguments(args)
    import torch

    torch.ones(8, 8) @ torch.ones(8, 8)  # the libraries' own work space is not the loader's
    before = resident_bytes()
    reset_peak()
    with LLM(**arguments) as llm:
        directory = Path(llm.config.model)
        size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        print(json.dumps({"before": before, "peak": peak_bytes(), "checkpoint": size}))


def resident_bytes() -> int:
    """Memory this process holds now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> None:
    """Forgets the highest memory so far (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Highest memory since `reset_peak` (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


# --- the command ----------------------------------------------------------------------------------------------------


def parse_arguments(raw: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures DeepInfer on this machine.")
    add = parser.add_argument
    add("--only", action="append", choices=SECTIONS, help="sections to measure (repeatable; default: all)")
    add("--prompts", type=int, default=8, metavar="N", help="prompts of the prefill section (default: 8)")
    add("--prompt-length", type=int, default=1024, metavar="TOKENS", help="their length (default: 1024)")
    add("--batch", type=int, default=32, metavar="N", help="requests that decode together (default: 32)")
    add("--decode-context", type=int, default=64, metavar="TOKENS", help="their prompts' length (default: 64)")
    add("--decode-tokens", type=int, default=64, metavar="N", help="tokens each generates (default: 64)")
    add("--requests", type=int, default=256, metavar="N", help="requests of the scheduler section (default: 256)")
    add("--steps", type=int, default=10_000, metavar="N", help="steps of the memory section (default: 10000)")
    add("--drafts", type=int, default=0, metavar="N", help="draft tokens per request and step (default: 0)")
    add("--varlen", action="store_true", help="verify as many of them as they are worth")
    add("--overlap", action=argparse.BooleanOptionalAction, default=True, help="plan a step ahead (default: yes)")
    add("--texts", metavar="FILE", help="prompts of the speculation section, one a line (default: built in)")
    add("--batches", default="1,4,16", metavar="N,N", help="its batch sizes (default: 1,4,16)")
    add("--repeats", type=int, default=3, metavar="N", help="its runs of each way, the best counts (default: 3)")
    add("--json", action="store_true", help="print JSON")
    add("--loader-child", action="store_true", help=argparse.SUPPRESS)
    add_engine_arguments(parser)
    args = parser.parse_args(raw)
    args.only, args.raw = args.only or SECTIONS, raw
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    if args.loader_child:
        loader_child(args)
        return
    rows = measure_model(args)
    engines = {"scheduler": measure_scheduler, "memory": measure_memory, "loader": measure_loader}
    if args.drafts:
        engines["speculation"] = measure_speculation
    for name, measure in engines.items():
        rows += measure(args) if name in args.only else []
    if args.json:
        machine = {"system": platform.platform(), "cores": len(os.sched_getaffinity(0)), "arguments": args.raw}
        figures = [{"name": name, "value": value, "unit": unit} for name, value, unit in rows]
        print(json.dumps({"machine": machine, "figures": figures}, indent=2))
    else:
        print_table(("figure", "value", "unit"), [(name, f"{value:,.2f}", unit) for name, value, unit in rows])


if __name__ == "__main__":
    try:
        main()
    except DeepInferError as error:
        sys.exit(f"benchmark: {error}")
