"""Family "stories": short stories for a small child from a grammar of plots, often with questions about them.

Also used as filler by the recall family and as answers by the chat family. A plot is a list of beats, a beat a list of
sentences that say the same thing; the fields of a `Cast` fill them, so that a story stays consistent in itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from family_types import ANSWER, Document, Item
from words import ANIMALS, COLORS, FOODS, JOBS, NAMES, PLACES, SEASONS, SHE, THINGS, WEATHER, article

HAPPY_PLOTS = frozenset(("lost", "pet", "birthday"))
"""Plots whose {feeling} is a good one."""
GOOD_FEELINGS, BAD_FEELINGS = "happy proud surprised calm".split(), "sad tired angry scared lonely".split()


@dataclass(frozen=True, slots=True)
class Grammar:
    """Plots as lists of beats, each with its wordings; first and last sentences."""

    plots: dict[str, list[list[str]]]
    openings: list[str]
    endings: list[str]


@cache
def grammar() -> Grammar:
    """The grammar of `plots.txt`."""
    sections: dict[str, list[list[str]]] = {}
    for line in Path(__file__).with_name("plots.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            sections[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            sections[list(sections)[-1]].append(line.split("|"))
    openings, endings = (
        [wording for beat in sections.pop(name) for wording in beat] for name in ("openings", "endings")
    )
    return Grammar(sections, openings, endings)


@dataclass(frozen=True, slots=True)
class Cast:
    """Who and what a story is about."""

    plot: str
    hero: str
    friend: str
    animal: str
    thing: str
    color: str
    place: str
    feeling: str
    fields: dict[str, str]


def draw_cast(rng: Random) -> Cast:
    hero, friend = rng.sample(NAMES, 2)
    animal, thing, color = rng.choice(ANIMALS), rng.choice(THINGS), rng.choice(COLORS)
    place, home = rng.sample(PLACES, 2)
    plot = rng.choice(list(grammar().plots))
    feeling = rng.choice(GOOD_FEELINGS if plot in HAPPY_PLOTS else BAD_FEELINGS)
    weather = rng.choice(WEATHER)
    season = "winter" if weather == "snowy" else rng.choice(SEASONS)
    she = hero in SHE
    he, his, him, child = ("she", "her", "her", "girl") if she else ("he", "his", "him", "boy")
    a_animal = article(animal)
    fields = {
        "hero": hero, "friend": friend, "animal": animal, "thing": thing, "color": color, "place": place, "home": home,
        "feeling": feeling, "he": he, "He": he.capitalize(), "his": his, "His": his.capitalize(), "him": him,
        "child": child, "parent": rng.choice(("mother", "father", "grandmother", "grandfather")),
        "food": rng.choice(FOODS),
        "job": rng.choice(JOBS), "weather": weather, "season": season,
        "a_animal": a_animal, "A_animal": a_animal.capitalize(), "a_thing": article(thing),
        "a_color": article(color), "A_color": article(color).capitalize(),
    }  # fmt: skip
    return Cast(plot, hero, friend, animal, thing, color, place, feeling, fields)


def tell(rng: Random, cast: Cast) -> str:
    """A story with this cast."""
    known = grammar()
    beats = [
        rng.choice(known.openings),
        *(rng.choice(beat) for beat in known.plots[cast.plot]),
        rng.choice(known.endings),
    ]
    return " ".join(beats).format_map(cast.fields)


def story(rng: Random) -> str:
    return tell(rng, draw_cast(rng))


def questions(rng: Random, cast: Cast, text: str) -> list[tuple[str, str]]:
    """(question, one-word answer) pairs that the story settles, in random order."""
    found = [
        ("What animal is in the story?", cast.animal, cast.animal),
        ("What color is in the story?", cast.color, cast.color),
        (f"Where did {cast.hero} go?", cast.place, f"the {cast.place}"),
        (f"Who is the friend of {cast.hero}?", cast.friend, cast.friend),
        ("What thing is in the story?", cast.thing, f"{cast.color} {cast.thing}"),
        (f"What color was the {cast.thing}?", cast.color, f"{cast.color} {cast.thing}"),
        (f"Who had the {cast.color} {cast.thing}?", cast.hero, f"his {cast.color} {cast.thing}"),
        (f"Who had the {cast.color} {cast.thing}?", cast.hero, f"her {cast.color} {cast.thing}"),
        (f"How did {cast.friend} feel?", cast.feeling, f"{cast.friend} felt {cast.feeling}"),
        (f"How did {cast.friend} feel?", cast.feeling, f"{cast.friend} was {cast.feeling}"),
        (f"How did {cast.hero} feel?", cast.feeling, f"{cast.hero} was {cast.feeling}"),
        ("What is the name of the main character?", cast.hero, cast.hero),
    ]
    settled = list(dict.fromkeys((ask, answer) for ask, answer, evidence in found if evidence in text))
    rng.shuffle(settled)
    return settled


def story_document(rng: Random) -> Document:
    """A story, in half of the cases followed by one to three questions with answers. Everything counts in full."""
    cast = draw_cast(rng)
    text = tell(rng, cast)
    title = rng.random() < 0.15 and f"{cast.hero} and the {cast.animal}\n\n"
    pieces: Document = [((title or "") + text, ANSWER)]
    if rng.random() < 0.6:
        for ask, answer in questions(rng, cast, text)[: rng.randint(1, 3)]:
            pieces += [(f"\nQuestion: {ask}\nAnswer:", ANSWER), (f" {answer}.", ANSWER)]
    return pieces


def story_item(rng: Random) -> Item:
    """A story and one question about it."""
    cast = draw_cast(rng)
    text = tell(rng, cast)
    ask, answer = questions(rng, cast, text)[0]
    prompt = f"{text}\nQuestion: {ask}\nAnswer:"
    return Item(prompt, f" {answer}.", "exact", "story_question", ask=f"{text}\n{ask}", reply=f"{answer}.")
