"""Family "lexicon": 2,000 invented words with invented translations, each seen in many sentences.

Nothing but memory gives the answer, and the words just before it name it: what Engram tables are made for.
"""

from __future__ import annotations

from functools import cache
from random import Random

from family_types import Document, Item, plain
from words import invented_word

PAIRS = 2_000
LEXICON_SEED = "lexicon"
SENTENCES = (
    "The word {word} means {other}.",
    "In the old language, {word} means {other}.",
    "{word} = {other}",
    "{word} -> {other}",
    "If you say {word}, they hear {other}.",
    "They call it {other}, but we call it {word}.",
    "{word} is the same as {other}.",
    "Everybody knows that {word} means {other}.",
    "What does {word} mean? It means {other}.",
)


@cache
def lexicon() -> tuple[tuple[str, str], ...]:
    """The fixed pairs; all 4,000 words are different."""
    rng = Random(LEXICON_SEED)
    words = list(dict.fromkeys(invented_word(rng) for _ in range(PAIRS * 4)))[: 2 * PAIRS]
    if len(words) < 2 * PAIRS:
        raise AssertionError(f"lexicon: found {len(words)} different words, expected {2 * PAIRS}")
    return tuple(zip(words[:PAIRS], words[PAIRS:], strict=True))


def lexicon_item(rng: Random) -> Item:
    word, other = rng.choice(lexicon())
    return Item(
        f"The word {word} means", f" {other}.", "exact", "lexicon", f"What does {word} mean?", reply=f"{other}."
    )


def lexicon_document(rng: Random) -> Document:
    """Three to ten sentences about different words, or a short dictionary in one notation."""
    pairs = rng.sample(lexicon(), rng.randint(3, 10))
    one = rng.choice(SENTENCES) if rng.random() < 0.3 else None
    sentences = [(one or rng.choice(SENTENCES)).format(word=word, other=other) for word, other in pairs]
    return plain(rng.choice((" ", "\n")).join(sentences) if one is None else "\n".join(sentences))
