"""Family "formats": a value in one notation and the same value in another one, with exactly one right answer."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from family_types import Document, Item, joined
from words import COMMON_WORDS, MONTHS, number_words

Conversion = Callable[[Random], tuple[str, str, str]]
"""-> (name, value as given, value wanted)"""


def _date(rng: Random) -> tuple[int, int, int]:
    month = rng.randint(1, 12)
    return rng.randint(1900, 2099), month, rng.randint(1, 28 if month == 2 else 30 if month in (4, 6, 9, 11) else 31)


def date_to_iso(rng: Random) -> tuple[str, str, str]:
    year, month, day = _date(rng)
    name = MONTHS[month - 1]
    given = rng.choice(
        (f"{name} {day}, {year}", f"{day} {name} {year}", f"{day}.{month}.{year}", f"{name[:3]} {day} {year}")
    )
    return "date", given, f"{year}-{month:02d}-{day:02d}"


def date_in_words(rng: Random) -> tuple[str, str, str]:
    year, month, day = _date(rng)
    return "iso date", f"{year}-{month:02d}-{day:02d}", f"{MONTHS[month - 1]} {day}, {year}"


def time_to_24(rng: Random) -> tuple[str, str, str]:
    hour, minute = rng.randrange(24), rng.randrange(60)
    return "time", f"{(hour - 1) % 12 + 1}:{minute:02d} {'am' if hour < 12 else 'pm'}", f"{hour:02d}:{minute:02d}"


def time_to_12(rng: Random) -> tuple[str, str, str]:
    _name, given, wanted = time_to_24(rng)
    return "clock", wanted, given


def color_to_rgb(rng: Random) -> tuple[str, str, str]:
    r, g, b = (rng.randrange(256) for _ in range(3))
    return "color", f"#{r:02x}{g:02x}{b:02x}", f"r={r} g={g} b={b}"


def color_to_hex(rng: Random) -> tuple[str, str, str]:
    _name, given, wanted = color_to_rgb(rng)
    return "rgb", wanted, given


def address_to_hex(rng: Random) -> tuple[str, str, str]:
    parts = [rng.randrange(256) for _ in range(4)]
    return "ip", ".".join(map(str, parts)), "".join(f"{part:02x}" for part in parts)


def number_in_words(rng: Random) -> tuple[str, str, str]:
    value = rng.randrange(10 ** rng.randint(1, 4))
    return "number", f"{value}", number_words(value)


def words_to_number(rng: Random) -> tuple[str, str, str]:
    _name, given, wanted = number_in_words(rng)
    return "words", wanted, given


def snake_to_camel(rng: Random) -> tuple[str, str, str]:
    parts = rng.sample(COMMON_WORDS, rng.randint(2, 4))
    return "snake", "_".join(parts), "".join(part.capitalize() for part in parts)


def camel_to_snake(rng: Random) -> tuple[str, str, str]:
    _name, given, wanted = snake_to_camel(rng)
    return "camel", wanted, given


def kilo(rng: Random) -> tuple[str, str, str]:
    value, (large, small) = rng.randint(1, 99), rng.choice((("km", "m"), ("kg", "g"), ("kB", "B")))
    return "unit", f"{value} {large}", f"{value}000 {small}"


CONVERSIONS: tuple[Conversion, ...] = (
    date_to_iso, date_to_iso, date_to_iso, date_in_words, time_to_24, time_to_24, time_to_12, color_to_rgb,
    color_to_hex, address_to_hex, number_in_words, words_to_number, snake_to_camel, camel_to_snake, kilo,
)  # fmt: skip
ASKED = {
    "date": "Write the date {} as year-month-day.",
    "iso date": "Write the date {} with the name of the month.",
    "time": "Write {} as 24-hour time.",
    "clock": "Write {} with am or pm.",
    "color": "What are the parts of the color {}?",
    "rgb": "Write the color {} in hexadecimal.",
    "ip": "Write the address {} in hexadecimal.",
    "number": "Write {} in words.",
    "words": "Write {} in figures.",
    "snake": "Write {} in camel case.",
    "camel": "Write {} in snake case.",
    "unit": "Convert {} to the smaller unit.",
}


def format_item(rng: Random, conversion: Conversion | None = None) -> Item:
    name, given, wanted = (conversion or rng.choice(CONVERSIONS))(rng)
    group = "format_" + name.replace(" ", "_")
    return Item(f"{name} {given} ->", f" {wanted}", "exact", group, ask=ASKED[name].format(given), reply=wanted)


def format_document(rng: Random) -> Document:
    """One to six conversions, of one kind or mixed."""
    conversion = rng.choice(CONVERSIONS) if rng.random() < 0.5 else None
    return joined([format_item(rng, conversion) for _ in range(rng.randint(1, 6))])
