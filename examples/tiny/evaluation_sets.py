"""Reads the evaluation sets in `evaluation/`; `make_evaluation.py` wrote them.

A set is one JSON-lines file. Its first line describes the set: name, family, checker, template of the prompt, first
seed, max_tokens, stop, target (wanted rate; null = report only), "constraints" for structured output. Every further
line is one item: "fields" for the template, "answer", optionally "span" (characters of `texts.txt` that stand for
{text} in the template) and "kind" (which constraint). Items have consecutive seeds; those that would repeat an earlier
item are left out, "skipped" lists their distances from the first seed. A set with "items_of" has the items of another
one. `held_out.jsonl` holds pieces of validation text of every source: {"source", "text"}.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "evaluation"


@dataclass(frozen=True, slots=True)
class Exam:
    """One item ready to be asked. `so_args` is None where the answer is free."""

    set: str
    index: int
    seed: int
    prompt: str
    answer: str
    checker: str
    max_tokens: int
    stop: tuple[str, ...]
    so_args: dict[str, Any] | None = None


Line = dict[str, Any]


def load_set(name: str, folder: Path = FOLDER) -> tuple[Line, list[Exam]]:
    """(description, items) of one set. Raises FileNotFoundError for a set that does not exist."""
    head, *lines = _read(folder / f"{name}.jsonl")
    if "items_of" in head:
        base, *lines = _read(folder / f"{head['items_of']}.jsonl")
        head = base | head
    texts = (folder / "texts.txt").read_text(encoding="utf-8")
    skipped = set(head.get("skipped", ()))
    offsets = (offset for offset in count() if offset not in skipped)
    numbered = zip(offsets, enumerate(lines), strict=False)
    return head, [_exam(head, line, number, head["first_seed"] + offset, texts) for offset, (number, line) in numbered]


def _exam(head: Line, line: Line, number: int, seed: int, texts: str) -> Exam:
    start, stop = line.get("span", (0, 0))
    prompt = head["template"].format(*line["fields"], text=texts[start:stop])
    so_args = head["constraints"][line["kind"]] if "constraints" in head else None
    answer = so_args["schema"] if head["checker"] == "fullmatch" and so_args else line["answer"]
    return Exam(
        head["set"], number, seed, prompt, answer, head["checker"], head["max_tokens"], tuple(head["stop"]), so_args
    )


def set_names(folder: Path = FOLDER) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.jsonl") if path.stem != "held_out")


def held_out(folder: Path = FOLDER) -> list[Line]:
    """Pieces of validation text: {"source", "text"}."""
    return _read(folder / "held_out.jsonl")


def _read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
