"""What a generated document and a question with one exact answer are. Used by every family; knows no family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

ANSWER, QUESTION = 1.0, 0.3
"""Loss weights: what the model has to know, and what it only has to read."""

Piece = tuple[str, float]
"""(text, loss weight). Pieces are tokenized one by one, so their borders must lie where a prompt would end."""

Document = list[Piece]


@dataclass(frozen=True, slots=True)
class Item:
    """A question and its only right answer.

    prompt   plain form, ends where the answer begins (never with a blank)    answer   exact text that follows
    ask      the same as a person would say it in a chat                       reply   exact answer in the chat
    thought  steps that lead to the answer, or ""                              checker  name of a check in `checkers.py`
    group    set of the evaluation it belongs to
    """

    prompt: str
    answer: str
    checker: str
    group: str
    ask: str = ""
    thought: str = ""
    reply: str = ""
    schema: dict | None = field(default=None, compare=False)

    def pieces(self) -> Document:
        return [(self.prompt, QUESTION), (self.answer, ANSWER)]


@dataclass(frozen=True, slots=True)
class Family:
    """A generated family: documents from a random number generator, and items where it has exact answers."""

    name: str
    share: float
    """part of all generated tokens"""
    document: Callable[[Random], Document] = field(repr=False)
    item: Callable[[Random], Item] | None = field(default=None, repr=False)


def plain(text: str) -> Document:
    """A document of which every token counts in full."""
    return [(text, ANSWER)]


def joined(items: Sequence[Item], separator: str = "\n") -> Document:
    """Items below each other, each answer directly behind its question."""
    pieces: Document = []
    for number, item in enumerate(items):
        (prompt, question), answer = item.pieces()
        pieces += [((separator if number else "") + prompt, question), answer]
    return pieces


def text_of(document: Document) -> str:
    return "".join(text for text, _ in document)
