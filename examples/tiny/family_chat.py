"""Family "chat": conversations in the layout of `deepinfer.hub.chat.render_chat` around items of the other families.

BOS and the last EOS are not written here: every document gets them. With thinking the answer follows `<think>` steps
`</think>`, and the conversation begins with the system turn that `render_chat(..., thinking=True)` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from family_arithmetic import arithmetic_item, word_problem
from family_formats import format_item
from family_lexicon import lexicon_item
from family_records import record_item
from family_stories import Cast, draw_cast, story_item, tell
from family_types import ANSWER, QUESTION, Document, Item
from family_words import word_item
from words import article

USER, ASSISTANT, SYSTEM = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
THINK, END_THINK, EOS = "<think>", "</think>", "<｜end▁of▁sentence｜>"
EFFORTS = (25, 50, 75, 100)
SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "Answer shortly.",
    "You are a careful assistant. Answer with the result only.",
)
NAME = "v41-tiny-text"
TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello!", "Hi!", "Hello.", "Good morning!", "Hey, how are you?"), ("Hello! How can I help you?",)),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        (f"I am {NAME}, a very small language model. I can tell short stories and turn sentences into JSON.",),
    ),
    (
        ("What can you do?", "What can I ask you?", "Help!", "How can you help me?"),
        ("I can tell short stories, write JSON, convert dates, add small numbers and sort words.",),
    ),
    (("Thank you!", "Thanks.", "Thank you very much."), ("You are welcome!",)),
    (("Goodbye!", "Bye.", "See you!"), ("Goodbye! See you soon.",)),
    (
        ("Are you a human?", "Are you a person?"),
        ("No, I am a very small language model.",),
    ),
)
STORY_REQUESTS = (
    "Tell me a story about {animal}.",
    "Write a short story about {animal}.",
    "Tell me a story about {hero} and {animal}.",
    "Tell me a story about {hero} and {friend}.",
    "Write a story about a {color} {thing}.",
    "I want a story with {animal} and a {thing}.",
    "Tell me a story.",
)
MAKERS: tuple[tuple[Callable[[Random], Item], int], ...] = (
    (arithmetic_item, 4),
    (word_problem, 1),
    (record_item, 4),
    (format_item, 3),
    (word_item, 2),
    (story_item, 2),
    (lexicon_item, 1),
)


def chat_document(rng: Random) -> Document:
    """One to three turns, a third of them with thinking where the item has steps to think about."""
    thinking = rng.random() < 0.3
    pieces: Document = [(_system(rng, thinking), QUESTION)]
    for number in range(rng.choice((1, 1, 1, 2, 3))):
        ask, thought, reply = _turn(rng, thinking)
        end = EOS if number else ""
        opening = f"{end}{USER}{ask}{ASSISTANT}{THINK if thinking else END_THINK}"
        answer = f"{thought}{END_THINK}{reply}" if thinking else reply
        pieces += [(opening, QUESTION), (answer, ANSWER)]
        if thinking:  # earlier reasoning is left out of later prompts, so such a conversation has one turn
            break
    return pieces if pieces[0][0] else pieces[1:]


def _system(rng: Random, thinking: bool) -> str:
    texts = [rng.choice(SYSTEM_TEXTS)] if rng.random() < 0.3 else []
    if thinking:
        texts.append(f"Reasoning Effort: {rng.choice(EFFORTS)} (range 1-100, higher values ask for longer reasoning)")
    return SYSTEM + "\n\n".join(texts) if texts else ""


def _turn(rng: Random, thinking: bool) -> tuple[str, str, str]:
    """(question, steps, answer)."""
    if not thinking and rng.random() < 0.12:
        asks, replies = rng.choice(TALK)
        return rng.choice(asks), "", rng.choice(replies)
    if not thinking and rng.random() < 0.35:
        cast = draw_cast(rng)
        return _story_request(rng, cast), "", tell(rng, cast)
    makers, weights = zip(*MAKERS, strict=True)
    item = (rng.choice((arithmetic_item, word_problem)) if thinking else rng.choices(makers, weights)[0])(rng)
    return item.ask, item.thought, item.reply


def _story_request(rng: Random, cast: Cast) -> str:
    """A wish for the story of this cast."""
    fields = {**cast.fields, "animal": article(cast.animal)}
    return rng.choice(STORY_REQUESTS).format_map(fields)


def chat_item(rng: Random) -> Item:
    """An item of the other families in chat form, without thinking."""
    makers, weights = zip(*MAKERS[:5], strict=True)
    inner = rng.choices(makers, weights)[0](rng)
    prompt = f"{USER}{inner.ask}{ASSISTANT}{END_THINK}"
    return Item(
        prompt, inner.reply, inner.checker, f"chat_{inner.group}", inner.ask, reply=inner.reply, schema=inner.schema
    )
