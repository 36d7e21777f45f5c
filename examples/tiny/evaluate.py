"""Asks a model everything in the evaluation sets and writes the raw outputs; `score.py` judges them afterwards.

    python evaluate.py --model CHECKPOINT --out raw.jsonl [--sets json,dates] [--run NAME] [--without-engram]
    python evaluate.py --model CHECKPOINT --out raw.jsonl --run compact --set yoco_prefill_truncation_mode=compact

Greedy. Every engine argument of `deepinfer generate` is accepted. Lines of the output file, appended as results come:
  {"run", "set", "index", "text", "tokens", "finish_reason", "error", "drafts", "accepted"}    an item of a set
  {"run", "set": "held_out", "index", "source", "bytes", "tokens", "nats", "error"}            validation text
Sets with structured output are asked like all others: an engine that does not support it answers with an error, which
the scorer shows. `--without-engram` asks a copy of the checkpoint whose Engram tables are zero.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from evaluation_sets import FOLDER, Exam, held_out, load_set, set_names

from deepinfer import LLM, SamplingParams
from deepinfer.cli.arguments import add_engine_arguments, engine_arguments
from deepinfer.engine.output import RequestOutput


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_engine_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="file of raw outputs; lines are appended")
    parser.add_argument("--sets", default="all", help="names with commas between them; held_out is one of them")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the evaluation sets")
    parser.add_argument("--run", default="default", help="name of this run in the results")
    parser.add_argument("--limit", type=int, help="only the first items of every set")
    parser.add_argument("--without-engram", action="store_true", help="with Engram tables of zeros")
    options = parser.parse_args(arguments)
    names = [*set_names(options.folder), "held_out"] if options.sets == "all" else options.sets.split(",")
    engine = engine_arguments(options)
    with (
        _checkpoint(engine.pop("model"), options.without_engram) as model,
        LLM(model, **engine) as llm,
        options.out.open("a", encoding="utf-8") as out,
    ):
        for name in names:
            run_set(llm, name, out, options.run, options.folder, options.limit)
    return 0


def run_set(llm: LLM, name: str, out: TextIO, run: str, folder: Path = FOLDER, limit: int | None = None) -> None:
    """Ask one set, or score the held-out text, and write a line for each item."""
    if name == "held_out":
        lines: Iterator[dict[str, Any]] = _held_out_lines(llm, folder, limit)
    else:
        lines = _answers(llm, load_set(name, folder)[1][:limit])
    count = 0
    for line in lines:
        out.write(json.dumps({"run": run, "set": name, **line}, ensure_ascii=False) + "\n")
        count += 1
    out.flush()
    print(f"{run}/{name}: {count} outputs", file=sys.stderr)


def _answers(llm: LLM, exams: Sequence[Exam]) -> Iterator[dict[str, Any]]:
    params = [
        SamplingParams(temperature=0, max_tokens=exam.max_tokens, stop=exam.stop, so_args=exam.so_args)
        for exam in exams
    ]
    for output in llm.stream([exam.prompt for exam in exams], params):
        yield _record(exams[output.index], output)


def _record(exam: Exam, output: RequestOutput) -> dict[str, Any]:
    return {
        "index": exam.index, "text": output.text, "tokens": len(output.token_ids),
        "finish_reason": output.finish_reason,
        "error": None if output.error is None else str(output.error),
        "drafts": output.metrics.num_draft_tokens, "accepted": output.metrics.num_accepted_tokens,
    }  # fmt: skip


def _held_out_lines(llm: LLM, folder: Path, limit: int | None) -> Iterator[dict[str, Any]]:
    """Negative log-likelihood of every piece; BOS stands before it and is not counted."""
    pieces = held_out(folder)[:limit]
    for piece, output in zip(pieces, llm.score([piece["text"] for piece in pieces], use_tqdm=False), strict=True):
        known = [value for value in output.token_logprobs if value is not None]
        yield {
            "index": output.index, "source": piece["source"], "bytes": len(piece["text"].encode()),
            "tokens": len(known), "nats": -sum(known), "error": None if output.error is None else str(output.error),
        }  # fmt: skip


@contextmanager
def _checkpoint(model: str, without_engram: bool) -> Iterator[str]:
    """The checkpoint, or a temporary copy without Engram memory."""
    if not without_engram:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        zero_engram(Path(model), Path(folder))
        yield folder


def zero_engram(checkpoint: Path, folder: Path) -> list[str]:
    """Copy a checkpoint with all Engram table values 0, so that nothing is ever injected; names of the tables.

    Raises ValueError where the checkpoint has no Engram table.
    """
    zeroed: list[str] = []
    for path in sorted(checkpoint.iterdir()):
        target = folder / path.name
        if path.suffix != ".safetensors":
            if path.is_file():
                os.symlink(path.resolve(), target)
            continue
        shutil.copyfile(path, target)
        with target.open("r+b") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            for name, tensor in header.items():
                if name.endswith("engram.embed.weight"):
                    start, stop = tensor["data_offsets"]
                    file.seek(8 + length + start)
                    file.write(bytes(stop - start))
                    zeroed.append(name)
    if not zeroed:
        raise ValueError(f"{checkpoint}: found no tensor named *.engram.embed.weight, expected at least one")
    return zeroed


if __name__ == "__main__":
    sys.exit(main())
