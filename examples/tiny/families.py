"""The generated families of the training mix: names, shares, seeds. Called by `tokens.py`, `tokenizer.py`, evaluation.

A document depends on (family, seed) only. Training, validation and evaluation draw seeds from ranges that share
nothing; the numbers of a range are used in order, so "the first 1,000 documents" means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from family_arithmetic import arithmetic_document, arithmetic_item
from family_chat import chat_document, chat_item
from family_formats import format_document, format_item
from family_lexicon import lexicon_document, lexicon_item
from family_recall import recall_document
from family_records import record_document, record_item
from family_regular import regular_document
from family_stories import story_document, story_item
from family_types import Document, Family, text_of
from family_words import word_document, word_item

TRAIN_SEEDS = range(0, 1_000_000_000)
VALID_SEEDS = range(1_000_000_000, 1_100_000_000)
EVALUATION_SEEDS = range(2_000_000_000, 2_100_000_000)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("stories", 0.36, story_document, story_item),
        Family("arithmetic", 0.12, arithmetic_document, arithmetic_item),
        Family("records", 0.15, record_document, record_item),
        Family("formats", 0.09, format_document, format_item),
        Family("words", 0.07, word_document, word_item),
        Family("recall", 0.08, recall_document),
        Family("lexicon", 0.04, lexicon_document, lexicon_item),
        Family("chat", 0.07, chat_document, chat_item),
        Family("regular", 0.02, regular_document),
    )
}
CI_SHARES = {"stories": 0.40, "arithmetic": 0.20, "records": 0.22, "formats": 0.12, "regular": 0.06}
"""Families of the small companion model and their shares."""


def random_for(family: str, seed: int) -> Random:
    """The only source of chance of a document or item."""
    return Random(f"{family}/{seed}")


def document(family: str, seed: int) -> Document:
    """The document of a family with this seed: pieces of (text, loss weight)."""
    return FAMILIES[family].document(random_for(family, seed))


def documents(family: str, seeds: range) -> Iterator[Document]:
    """Documents of consecutive seeds."""
    return (document(family, seed) for seed in seeds)


def sample_text(characters: int, shares: dict[str, float] | None = None) -> Iterator[str]:
    """About so many characters of training documents in these shares (default: the mix), for training a tokenizer."""
    for name, share in (shares or {family.name: family.share for family in FAMILIES.values()}).items():
        left = characters * share
        for pieces in documents(name, TRAIN_SEEDS):
            text = text_of(pieces)
            yield text
            left -= len(text)
            if left <= 0:
                break
