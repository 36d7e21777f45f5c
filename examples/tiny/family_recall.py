"""Family "recall": facts, then other text, then a question about a fact. It needs attention far back.

With stories as filler the distance is 50 to 900 tokens (compressed entries and their selection, beyond the window);
without filler many facts stand close together.
"""

from __future__ import annotations

from random import Random

from family_stories import story
from family_types import Document, Item, plain
from words import CITIES, COLORS, COMMON_WORDS, FOODS, MORE_NAMES

TOKENS_PER_WORD = 1.25
"""Of the stories, with the 8,192-entry tokenizer; only used to choose how much filler to write."""


def code(rng: Random) -> str:
    return f"{rng.randrange(1000, 10000)}"


FACTS = {
    "code": ("The code of {name} is {value}.", "What is the code of {name}?", code),
    "city": ("{name} lives in {value}.", "Where does {name} live?", lambda rng: rng.choice(CITIES)),
    "color": (
        "The favorite color of {name} is {value}.",
        "What is the favorite color of {name}?",
        lambda rng: rng.choice(COLORS),
    ),
    "food": ("{name} likes {value} best.", "What does {name} like best?", lambda rng: rng.choice(FOODS)),
    "password": (
        "The password of {name} is {value}.",
        "What is the password of {name}?",
        lambda rng: rng.choice(COMMON_WORDS),
    ),
}


def draw_facts(rng: Random, count: int, kind: str | None = None) -> list[tuple[str, str, str]]:
    """(sentence, question, answer) of `count` facts about different people."""
    facts = []
    for name in rng.sample(MORE_NAMES, count):
        sentence, question, value = FACTS[kind or rng.choice(("code", "code", *FACTS))]
        wanted = value(rng)
        facts.append((sentence.format(name=name, value=wanted), question.format(name=name), wanted))
    return facts


def filler(rng: Random, tokens: int) -> str:
    """Stories of about so many tokens together, cut at the end of a sentence."""
    wanted, sentences = tokens / TOKENS_PER_WORD, []
    while wanted > 0:
        for sentence in story(rng).split(". "):
            if wanted <= 0:
                break
            sentences.append(sentence.rstrip("."))
            wanted -= len(sentence.split())
    return ". ".join(sentences) + "."


def recall_item(rng: Random, distance: int, kind: str = "code", facts: int | None = None) -> Item:
    """Facts, `distance` tokens of stories, one question."""
    drawn = draw_facts(rng, facts or rng.randint(1, 6), kind)
    _sentence, question, answer = rng.choice(drawn)
    text = "\n".join((" ".join(fact for fact, _, _ in drawn), filler(rng, distance), f"Question: {question}\nAnswer:"))
    return Item(text, f" {answer}.", "exact", f"recall_{distance}")


def recall_document(rng: Random) -> Document:
    """Near recall of pairs (a third), or facts, filler and questions about them in another order."""
    if rng.random() < 0.33:
        return _pairs(rng)
    distance = rng.choice((rng.randint(20, 120), rng.randint(120, 400), rng.randint(400, 900)))
    facts = draw_facts(rng, rng.randint(1, 6), rng.choice(("code", None)))
    asked = rng.sample(facts, len(facts))
    answers = "".join(f"\nQuestion: {question}\nAnswer: {answer}." for _, question, answer in asked)
    return plain(f"{' '.join(fact for fact, _, _ in facts)}\n{filler(rng, distance)}{answers}")


def _pairs(rng: Random) -> Document:
    """Keys with values, then the keys again in another order."""
    count = rng.randint(3, 10)
    keys = rng.sample(COMMON_WORDS if rng.random() < 0.5 else MORE_NAMES, count)
    values = [code(rng) if rng.random() < 0.5 else rng.choice(COMMON_WORDS) for _ in keys]
    mark = rng.choice((" = ", ": ", " -> "))
    lines = [f"{key}{mark}{value}" for key, value in zip(keys, values, strict=True)]
    again = rng.sample(lines, count)
    return plain("\n".join((*lines, "Again:", *again)))
