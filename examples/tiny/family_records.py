"""Family "records": a sentence and the JSON object that says the same. Five kinds of records, several wordings each."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from family_types import Document, Item, joined
from words import (
    ANIMALS,
    CITIES,
    COLORS,
    JOBS,
    LAST_NAMES,
    MONTHS,
    MORE_NAMES,
    MORE_THINGS,
    PLACES,
    WEATHER,
    WEEKDAYS,
    listed,
)

Record = dict[str, Any]


def _schema(**kinds: str) -> dict[str, Any]:
    """JSON schema of an object with exactly these fields: "string", "integer", "boolean" or "strings"."""
    fields = {
        name: {"type": "array", "items": {"type": "string"}} if kind == "strings" else {"type": kind}
        for name, kind in kinds.items()
    }
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def person(rng: Random) -> tuple[str, Record]:
    name, age, place = rng.choice(MORE_NAMES), rng.randint(3, 99), rng.choice(PLACES)
    items = rng.sample(MORE_THINGS, rng.randint(1, 4))
    text = rng.choice((
        f"{name} is {age} years old, lives near the {place} and owns {', '.join(items)}.",
        f"{name}, who lives near the {place}, is {age} and has {listed(items)}.",
        f"Near the {place} lives {name}, {age} years old, with {listed(items)}.",
        f"{name} has {listed(items)}. {name} is {age} years old and lives near the {place}.",
    ))  # fmt: skip
    return text, {"name": name, "age": age, "place": place, "items": items}


def product(rng: Random) -> tuple[str, Record]:
    item, color, price, stock = rng.choice(MORE_THINGS), rng.choice(COLORS), rng.randint(1, 250), rng.random() < 0.5
    text = rng.choice((
        f"The {color} {item} costs {price} dollars and is {'in stock' if stock else 'sold out'}.",
        f"You can{'' if stock else 'not'} buy the {color} {item} today. Its price is {price} dollars.",
        f"{'In stock' if stock else 'Sold out'}: {item}, {color}, {price} dollars.",
    ))  # fmt: skip
    return text, {"item": item, "color": color, "price": price, "in_stock": stock}


def event(rng: Random) -> tuple[str, Record]:
    kind = rng.choice("concert market meeting party race lesson dinner exhibition".split())
    city, day, month, guests = rng.choice(CITIES), rng.randint(1, 28), rng.randint(1, 12), rng.randint(2, 900)
    date = f"{month:02d}-{day:02d}"
    text = rng.choice((
        f"On {MONTHS[month - 1]} {day}, {guests} guests come to the {kind} in {city}.",
        f"The {kind} in {city} is on {MONTHS[month - 1]} {day} with {guests} guests.",
        f"{city} invites {guests} guests to a {kind} on {day} {MONTHS[month - 1]}.",
    ))  # fmt: skip
    return text, {"event": kind, "city": city, "date": date, "guests": guests}


def weather(rng: Random) -> tuple[str, Record]:
    city, day, sky, degrees = rng.choice(CITIES), rng.choice(WEEKDAYS), rng.choice(WEATHER), rng.randint(-15, 39)
    text = rng.choice((
        f"On {day} it will be {sky} in {city} with {degrees} degrees.",
        f"{city}, {day}: {sky}, {degrees} degrees.",
        f"The weather in {city} on {day} is {sky} and the temperature is {degrees} degrees.",
    ))  # fmt: skip
    return text, {"city": city, "day": day, "sky": sky, "degrees": degrees}


def worker(rng: Random) -> tuple[str, Record]:
    first, last, job, city = rng.choice(MORE_NAMES), rng.choice(LAST_NAMES), rng.choice(JOBS), rng.choice(CITIES)
    pets = rng.sample(ANIMALS, rng.randint(0, 2))
    keeps = (
        f"keeps {listed([f'a {pet}' if pet[0] not in 'aeiou' else f'an {pet}' for pet in pets])}"
        if pets
        else "keeps no animals"
    )
    text = rng.choice((
        f"{first} {last} works as a {job} in {city} and {keeps}.",
        f"The {job} {first} {last} from {city} {keeps}.",
        f"In {city}, {first} {last} is a {job} and {keeps}.",
    ))  # fmt: skip
    return text, {"first": first, "last": last, "job": job, "city": city, "pets": pets}


KINDS: dict[str, tuple[Callable[[Random], tuple[str, Record]], dict[str, Any]]] = {
    "person": (person, _schema(name="string", age="integer", place="string", items="strings")),
    "product": (product, _schema(item="string", color="string", price="integer", in_stock="boolean")),
    "event": (event, _schema(event="string", city="string", date="string", guests="integer")),
    "weather": (weather, _schema(city="string", day="string", sky="string", degrees="integer")),
    "worker": (worker, _schema(first="string", last="string", job="string", city="string", pets="strings")),
}
WEIGHTS = (4, 2, 2, 2, 2)


def record_item(rng: Random) -> Item:
    name = rng.choices(list(KINDS), WEIGHTS)[0]
    make, schema = KINDS[name]
    text, record = make(rng)
    answer = json.dumps(record)
    ask = rng.choice((f"Turn this into JSON: {text}", f"Write this as a JSON object. {text}", f"JSON for: {text}"))
    return Item(f"Text: {text}\nJSON:", f" {answer}", "json", f"json_{name}", ask, reply=answer, schema=schema)


def record_document(rng: Random) -> Document:
    """One to three sentences with their objects."""
    return joined([record_item(rng) for _ in range(rng.choice((1, 1, 2, 3)))], "\n\n")
