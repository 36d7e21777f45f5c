"""Family "regular": text that a rule continues - counting, alphabets, repeated sentences, brackets, tables, files."""

from __future__ import annotations

import string
from collections.abc import Callable
from random import Random

from family_stories import story
from family_types import Document, plain
from words import CITIES, COLORS, COMMON_WORDS, MONTHS, MORE_NAMES, MORE_THINGS, WEEKDAYS, number_words


def counting(rng: Random) -> str:
    start, step, count = rng.randint(0, 200), rng.choice((1, 1, 1, 2, 3, 5, 10)), rng.randint(5, 40)
    numbers = range(start, start + step * count, step)
    if rng.random() < 0.3:
        return ", ".join(map(number_words, list(numbers)[:15]))
    return rng.choice((", ", " ", "\n")).join(map(str, numbers))


def alphabet(rng: Random) -> str:
    letters = rng.choice((string.ascii_lowercase, string.ascii_uppercase))
    start = rng.randrange(20)
    order = letters[start:] if rng.random() < 0.8 else letters[::-1]
    return rng.choice((" ", ", ", "")).join(order)


def cycle(rng: Random) -> str:
    names, start = rng.choice((WEEKDAYS, MONTHS)), rng.randrange(7)
    return rng.choice((", ", "\n", " ")).join(names[(start + i) % len(names)] for i in range(rng.randint(6, 20)))


def times_table(rng: Random) -> str:
    factor, sign = rng.randint(1, 20), rng.choice(("x", "*", "times"))
    return "\n".join(f"{i} {sign} {factor} = {i * factor}" for i in range(1, rng.randint(8, 13)))


def repeated(rng: Random) -> str:
    sentence = rng.choice(story(rng).split(". ")).rstrip(".") + "."
    return rng.choice((" ", "\n")).join([sentence] * rng.randint(3, 10))


def brackets(rng: Random) -> str:
    """Balanced brackets of three kinds, innermost closed first."""
    pairs, open_now, text = ("()", "[]", "{}"), [], []
    for _ in range(rng.randint(10, 60)):
        if open_now and rng.random() < 0.5:
            text.append(open_now.pop())
        else:
            pair = rng.choice(pairs)
            text.append(pair[0])
            open_now.append(pair[1])
    return "".join((*text, *reversed(open_now)))


def _rows(rng: Random) -> list[list[str]]:
    makers: dict[str, Callable[[int], str]] = {
        "id": lambda number: str(number + 1),
        "name": lambda _: rng.choice(MORE_NAMES),
        "city": lambda _: rng.choice(CITIES),
        "item": lambda _: rng.choice(MORE_THINGS),
        "color": lambda _: rng.choice(COLORS),
        "count": lambda _: str(rng.randint(1, 99)),
    }
    columns = ["id", *rng.sample(list(makers)[1:], rng.randint(2, 4))]
    return [columns, *([makers[column](number) for column in columns] for number in range(rng.randint(3, 10)))]


def csv_table(rng: Random) -> str:
    mark = rng.choice((",", ";", "\t"))
    return "\n".join(mark.join(row) for row in _rows(rng))


def markdown_table(rng: Random) -> str:
    head, *rows = _rows(rng)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ini_file(rng: Random) -> str:
    sections = []
    for section in rng.sample(COMMON_WORDS, rng.randint(1, 3)):
        keys = rng.sample(COMMON_WORDS, rng.randint(2, 5))
        values = [rng.choice(("true", "false", str(rng.randint(0, 999)), rng.choice(COLORS))) for _ in keys]
        sections.append(f"[{section}]\n" + "\n".join(f"{k} = {v}" for k, v in zip(keys, values, strict=True)))
    return "\n\n".join(sections)


KINDS = (counting, alphabet, cycle, times_table, repeated, brackets, csv_table, markdown_table, ini_file)


def regular_document(rng: Random) -> Document:
    return plain(rng.choice(KINDS)(rng))
