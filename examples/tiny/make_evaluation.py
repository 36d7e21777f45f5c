"""Makes the evaluation sets from seeds that training never uses.

    python make_evaluation.py --cache FOLDER        writes evaluation/*.jsonl and evaluation/texts.txt

Only needed after a change of a family; `evaluation_sets.py` tells what the files look like. Knows no model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from corpus import read_corpus
from evaluation_sets import FOLDER, Line
from families import EVALUATION_SEEDS, random_for
from family_arithmetic import arithmetic_exam
from family_chat import chat_item
from family_formats import CONVERSIONS, Conversion, date_in_words, date_to_iso, format_item
from family_lexicon import lexicon_item
from family_recall import draw_facts
from family_records import KINDS, record_item
from family_stories import Cast, draw_cast, questions, tell
from family_types import Item
from family_words import word_item
from words import MORE_NAMES

STORIES, QUESTIONS_PER_STORY, QUESTIONS = 46, 5, 200
ARITHMETIC = (
    ("arithmetic_1_add", 1, "+", 40, 0.9),
    ("arithmetic_1_times", 1, "*", 100, 0.9),
    ("arithmetic_2_add", 2, "+", 80, 0.9),
    ("arithmetic_2_subtract", 2, "-", 80, 0.9),
    ("arithmetic_3_add", 3, "+", 200, None),
)
DISTANCES = (150, 400, 900)
CHARACTERS_PER_TOKEN = 3.94
"""Of the stories with the 8,192-entry tokenizer."""
DATES: tuple[Conversion, ...] = (date_to_iso, date_to_iso, date_in_words)
OTHERS = tuple(dict.fromkeys(conversion for conversion in CONVERSIONS if conversion not in DATES))
HELD_OUT_PIECES, HELD_OUT_CHARACTERS = 6, 4_000
"""Of every source."""


def make_sets() -> tuple[dict[str, list[Line]], str]:
    """All sets and the shared texts. Every set has a block of 10,000 seeds of its own."""
    casts = [draw_cast(random_for("stories", EVALUATION_SEEDS[k])) for k in range(STORIES)]
    stories = [tell(random_for("story_text", EVALUATION_SEEDS[k]), cast) for k, cast in enumerate(casts)]
    texts = "\n".join(stories) + "\n"
    builder = _Builder()
    for name, digits, sign, items, target in ARITHMETIC:
        builder.add(name, "arithmetic", "number", "{0}=", 8, target, items, _arithmetic(digits, sign))
    builder.add("json", "records", "json", "Text: {0}\nJSON:", 96, 0.9, 200, _record)
    builder.add_again(
        "json_schema", "json", {name: {"schema_type": "json", "schema": s} for name, (_, s) in KINDS.items()}, 0.9
    )
    builder.add("dates", "formats", "exact", "{0} ->", 24, 0.9, 100, _conversion(DATES))
    builder.add("formats", "formats", "exact", "{0} ->", 24, 0.9, 100, _conversion(OTHERS))
    for operation, items, target in (
        ("copy", 80, 0.9),
        ("first", 60, 0.9),
        ("last", 60, 0.9),
        ("reverse", 50, None),
        ("sort", 50, None),
    ):
        builder.add(
            f"words_{operation}", "words", "exact", f"{operation}: {{0}}\n=>", 64, target, items, _words(operation)
        )
    builder.add("lexicon", "lexicon", "exact", "The word {0} means", 16, None, 500, _lexicon)
    builder.add("chat", "chat", None, "{0}", 96, None, 50, _chat)
    _add_recall(builder, texts)
    _add_questions(builder, casts, stories)
    _add_patterns(builder)
    return builder.sets, texts


class _Builder:
    """Collects sets and hands every one its block of seeds."""

    def __init__(self) -> None:
        self.sets: dict[str, list[Line]] = {}

    def add(
        self,
        name: str,
        family: str,
        checker: str | None,
        template: str,
        max_tokens: int,
        target: float | None,
        items: int,
        make: Callable[[Random], Line],
        **more: Any,
    ) -> None:
        first = EVALUATION_SEEDS[10_000 * (1 + len(self.sets))]
        lines: dict[str, Line] = {}
        skipped: list[int] = []
        seed = first
        while len(lines) < items:
            line = make(random_for(family, seed))
            key = json.dumps(line["fields"]) + str(line.get("span"))
            if key in lines:
                skipped.append(seed - first)
            lines.setdefault(key, line)
            seed += 1
        head = {
            "set": name, "family": family, "checker": checker or "exact", "template": template, "first_seed": first,
            "max_tokens": max_tokens, "stop": ["\n"], "target": target, **more,
            **({"skipped": skipped} if skipped else {}),
        }  # fmt: skip
        self.sets[name] = [head, *lines.values()]

    def add_again(self, name: str, items_of: str, constraints: Line, target: float) -> None:
        """The items of another set, with structured output."""
        self.sets[name] = [
            {"set": name, "items_of": items_of, "constraints": constraints, "target": target, "stop": []}
        ]


def _fields(item: Item, start: str, end: str) -> str:
    return item.prompt.removeprefix(start).removesuffix(end)


def _arithmetic(digits: int, sign: str) -> Callable[[Random], Line]:
    def make(rng: Random) -> Line:
        item = arithmetic_exam(rng, digits, sign)
        return {"fields": [_fields(item, "", "=")], "answer": item.answer.strip()}

    return make


def _record(rng: Random) -> Line:
    item = record_item(rng)
    kind = item.group.removeprefix("json_")
    return {"fields": [_fields(item, "Text: ", "\nJSON:")], "kind": kind, "answer": item.answer.strip()}


def _conversion(kinds: tuple[Conversion, ...]) -> Callable[[Random], Line]:
    def make(rng: Random) -> Line:
        item = format_item(rng, rng.choice(kinds))
        return {"fields": [_fields(item, "", " ->")], "answer": item.answer.strip()}

    return make


def _words(operation: str) -> Callable[[Random], Line]:
    def make(rng: Random) -> Line:
        item = word_item(rng, operation)
        return {"fields": [_fields(item, f"{operation}: ", "\n=>")], "answer": item.answer.strip()}

    return make


def _lexicon(rng: Random) -> Line:
    item = lexicon_item(rng)
    return {"fields": [_fields(item, "The word ", " means")], "answer": item.answer.strip(" .")}


def _chat(rng: Random) -> Line:
    item = chat_item(rng)
    return {"fields": [item.prompt], "answer": item.reply}


def _add_recall(builder: _Builder, texts: str) -> None:
    for distance in DISTANCES:
        length = round(distance * CHARACTERS_PER_TOKEN)

        def make(rng: Random, length: int = length) -> Line:
            facts = draw_facts(rng, rng.randint(1, 3), "code")
            _, question, answer = rng.choice(facts)
            name = question.removeprefix("What is the code of ").removesuffix("?")
            start = texts.index("\n", rng.randrange(len(texts) - length - 1000)) + 1
            stop = texts.index(".", start + length) + 1
            return {"fields": [" ".join(fact for fact, _, _ in facts), name], "span": [start, stop], "answer": answer}

        target = {150: 0.8, 400: 0.6, 900: 0.4}[distance]
        template = "{0}\n{text}\nQuestion: What is the code of {1}?\nAnswer:"
        builder.add(f"recall_{distance}", "recall", "exact", template, 8, target, 100, make)


def _add_questions(builder: _Builder, casts: list[Cast], stories: list[str]) -> None:
    asked: Iterator[Line] = iter(_story_questions(casts, stories))
    template = "{text}\nQuestion: {0}\nAnswer:"
    builder.add("story_questions", "stories", "exact", template, 8, 0.9, QUESTIONS, lambda rng: next(asked))


def _story_questions(casts: list[Cast], stories: list[str]) -> Iterator[Line]:
    start = 0
    for number, (cast, story) in enumerate(zip(casts, stories, strict=True)):
        found = questions(random_for("story_questions", EVALUATION_SEEDS[number]), cast, story)
        for ask, answer in found[:QUESTIONS_PER_STORY]:
            yield {"fields": [ask], "span": [start, start + len(story)], "answer": answer}
        start += len(story) + 1


PATTERNS = {
    "date": (r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", "date March 5, 2021 ->"),
    "address": (
        r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)(\.(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)){3}",
        "The address of the server is",
    ),
    "color": (r"#[0-9a-f]{6}", "color ="),
    "choice": (r"red|green|blue", "The color of the ball is"),
}


def _add_patterns(builder: _Builder) -> None:
    constraints = {name: {"schema_type": "regex", "schema": pattern} for name, (pattern, _) in PATTERNS.items()}

    def make(rng: Random) -> Line:
        kind = rng.choice(list(PATTERNS))
        return {"fields": [f"{rng.choice(MORE_NAMES)}: {PATTERNS[kind][1]}"], "kind": kind}

    builder.add("patterns", "patterns", "fullmatch", "{0}", 24, 1.0, 100, make, constraints=constraints)
    builder.sets["patterns"][0]["stop"] = []


def held_out_lines(cache: Path) -> list[Line]:
    """The first pieces of the validation documents of every source, each at a line's beginning."""
    lines: list[Line] = []
    taken: dict[str, int] = {}
    for entry in read_corpus(cache):
        if entry["part"] != "valid":
            continue
        text = entry["text"]
        while len(text) >= HELD_OUT_CHARACTERS // 4 and taken.get(entry["source"], 0) < HELD_OUT_PIECES:
            cut = max(text.rfind("\n", 0, HELD_OUT_CHARACTERS), 0) or HELD_OUT_CHARACTERS
            lines.append({"source": entry["source"], "text": text[:cut]})
            taken[entry["source"]] = taken.get(entry["source"], 0) + 1
            text = text[cut:].lstrip("\n")
    return lines


def write(folder: Path, cache: Path | None) -> None:
    sets, texts = make_sets()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "texts.txt").write_text(texts, encoding="utf-8")
    if cache is not None:
        sets["held_out"] = held_out_lines(cache)
    for name, lines in sets.items():
        text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="folder with corpus.jsonl; without it held_out.jsonl stays as it is")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    write(options.out, options.cache)
    return 0


if __name__ == "__main__":
    sys.exit(main())
