"""Judges raw outputs of `evaluate.py`, without the model: writes result tables as JSON and prints them.

    python score.py raw.jsonl [more.jsonl ...] --out evaluation.json

The result: {"runs": {run: {"sets": {set: SET}, "held_out": {source: LOSS}}}} with
SET  = {"items", "answered", "errors", "correct", "rate", "target", "reached", "first_error", "mean_accepted_length"};
       rate counts unanswered items as wrong; rate, reached and mean_accepted_length are null where they have no meaning
LOSS = {"nats_per_token", "bits_per_byte", "tokens", "bytes"}, and "all" over all sources together
Where one item has several lines in a run, the last one counts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from checkers import CHECKERS, valid_json
from evaluation_sets import FOLDER, Exam, load_set

Line = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("raw", type=Path, nargs="+", help="files written by evaluate.py")
    parser.add_argument("--out", type=Path, required=True, help="file for the results")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the evaluation sets")
    options = parser.parse_args(arguments)
    lines = [json.loads(line) for path in options.raw for line in path.read_text(encoding="utf-8").splitlines()]
    results = score(lines, options.folder)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    return 0


def score(lines: Iterable[Line], folder: Path = FOLDER) -> dict[str, Any]:
    """Results of all runs in the lines."""
    grouped: dict[str, dict[str, dict[int, Line]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        grouped[line["run"]][line["set"]][line["index"]] = line
    runs: dict[str, Any] = {}
    for run, sets in grouped.items():
        scored = {
            name: score_set(name, list(found.values()), folder) for name, found in sets.items() if name != "held_out"
        }
        runs[run] = {"sets": scored, "held_out": losses(list(sets["held_out"].values()) if "held_out" in sets else [])}
    return {"runs": runs}


def score_set(name: str, lines: Sequence[Line], folder: Path = FOLDER) -> dict[str, Any]:
    """Result of one set. Every item that was asked counts, those that ended with an error as wrong."""
    head, exams = load_set(name, folder)
    answered = [line for line in lines if line["error"] is None]
    correct = sum(
        CHECKERS[exams[line["index"]].checker](line["text"], exams[line["index"]].answer) for line in answered
    )
    rate = correct / len(lines) if answered else None
    errors = [line["error"] for line in lines if line["error"] is not None]
    result = {
        "items": len(lines), "answered": len(answered), "errors": len(errors), "correct": correct, "rate": rate,
        "target": head["target"], "reached": None if rate is None or head["target"] is None else rate >= head["target"],
        "first_error": errors[0] if errors else None, "mean_accepted_length": accepted_length(answered),
    }  # fmt: skip
    if "constraints" in head and head["checker"] == "json" and answered:
        result["valid_rate"] = sum(_valid(exams[line["index"]], line) for line in answered) / len(lines)
    return result


def _valid(exam: Exam, line: Line) -> bool:
    assert exam.so_args is not None
    return valid_json(line["text"], exam.so_args["schema"])


def accepted_length(lines: Sequence[Line]) -> float | None:
    """Tokens per verification step: every step yields its accepted drafts and one more token. None without drafts.

    The first token of an answer comes from the prompt, without drafts.
    """
    drafted = [line for line in lines if line["drafts"]]
    steps = sum(line["tokens"] - 1 - line["accepted"] for line in drafted)
    return sum(line["tokens"] - 1 for line in drafted) / steps if steps > 0 else None


def losses(lines: Sequence[Line]) -> dict[str, Any]:
    """Held-out loss of every source and of all together."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for line in lines:
        if line["error"] is not None:
            raise ValueError(
                f"held-out piece {line['index']} ({line['source']}): found error {line['error']!r}, expected a loss"
            )
        for key in (line["source"], "all"):
            for place, what in enumerate(("nats", "tokens", "bytes")):
                sums[key][place] += line[what]
    return {
        key: {
            "nats_per_token": nats / tokens, "bits_per_byte": nats / size / math.log(2),
            "tokens": int(tokens), "bytes": int(size),
        }
        for key, (nats, tokens, size) in sums.items()
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """The results as text, one line a set."""
    rows = []
    for run, found in results["runs"].items():
        for name, result in sorted(found["sets"].items()):
            rate = "not run" if result["rate"] is None else f"{result['rate']:7.1%}"
            wanted = "" if result["target"] is None else f" wanted {result['target']:.0%}"
            failed = f" {result['errors']} errors: {result['first_error']}" if result["errors"] else ""
            rows.append(f"{run:12} {name:24} {rate} of {result['items']}{wanted}{failed}")
        for source, loss in found["held_out"].items():
            rows.append(
                f"{run:12} {source:24} {loss['nats_per_token']:.3f} nats/token, {loss['bits_per_byte']:.3f} bits/byte"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
