"""Family "words": operations on two to eight words: copy, reverse, sort, first, last, count."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from family_types import Document, Item, joined
from words import COMMON_WORDS, random_string

OPERATIONS: dict[str, Callable[[list[str]], list[str]]] = {
    "copy": lambda words: words,
    "reverse": lambda words: words[::-1],
    "sort": sorted,
    "first": lambda words: words[:1],
    "last": lambda words: words[-1:],
    "count": lambda words: [str(len(words))],
}
WEIGHTS = (4, 2, 2, 2, 2, 1)
ASKED = {
    "copy": "Repeat these words: {}", "reverse": "Write these words in reverse order: {}",
    "sort": "Sort these words by the alphabet: {}", "first": "What is the first of these words? {}",
    "last": "What is the last of these words? {}", "count": "How many words are these? {}",
}  # fmt: skip


def word_item(rng: Random, operation: str | None = None) -> Item:
    name = operation or rng.choices(list(OPERATIONS), WEIGHTS)[0]
    count = rng.randint(2, 8)
    words = rng.sample(COMMON_WORDS, count) if rng.random() < 0.6 else [random_string(rng) for _ in range(count)]
    wanted = " ".join(OPERATIONS[name](words))
    shown = " ".join(words)
    return Item(f"{name}: {shown}\n=>", f" {wanted}", "exact", f"words_{name}", ASKED[name].format(shown), reply=wanted)


def word_document(rng: Random) -> Document:
    """One to four operations."""
    return joined([word_item(rng) for _ in range(rng.randint(1, 4))])
