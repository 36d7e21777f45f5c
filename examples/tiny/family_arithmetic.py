"""Family "arithmetic": sums, differences and products of numbers with one to four digits, in figures and in words.

Two-digit and three-digit problems whose text hashes into one part of `HELD_OUT` never occur in training documents: they
are what the evaluation asks for. (One-digit products are so few that training sees all of them.)
"""

from __future__ import annotations

import zlib
from random import Random

from family_types import Document, Item, joined
from words import MORE_NAMES, MORE_THINGS

HELD_OUT = 20
"""One problem in so many is kept for the evaluation."""
SIGNS = {"+": "plus", "-": "minus", "*": "times"}
DIGITS = (1, 2, 2, 2, 2, 2, 3, 3, 4)
"""Numbers of digits a training problem has, by how often."""
FORMS = (
    "{a}{sign}{b}=",
    "{a} {sign} {b} =",
    "What is {a} {sign} {b}? Answer:",
    "{a} {word} {b} is",
    "Compute {a}{sign}{b}:",
)


def held_out(a: int, sign: str, b: int) -> bool:
    """Whether a problem belongs to the evaluation."""
    return max(a, b) > 9 and zlib.crc32(f"{a}{sign}{b}".encode()) % HELD_OUT == 0


def problem(rng: Random, digits: int, sign: str, evaluation: bool = False) -> tuple[int, str, int, int]:
    """(a, sign, b, result); the second number may have fewer digits, no result is negative."""
    while True:
        a = rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        b = rng.randrange(10 ** rng.choice((digits, digits, digits, max(1, digits - 1))))
        if sign == "-" and a < b:
            a, b = b, a
        if sign == "*" and digits > 1:
            b %= 10
        if digits == 1 or held_out(a, sign, b) == evaluation:
            return a, sign, b, a + b if sign == "+" else a - b if sign == "-" else a * b


def arithmetic_item(rng: Random) -> Item:
    """A problem of the training kind."""
    digits = rng.choice(DIGITS)
    return _item(rng, problem(rng, digits, rng.choice("++-*" if digits <= 2 else "++-")), f"arithmetic_{digits}")


def arithmetic_exam(rng: Random, digits: int, sign: str) -> Item:
    """A problem that no training document contains (one-digit problems excepted), in the plain form `12+34=`."""
    return _item(rng, problem(rng, digits, sign, evaluation=True), f"arithmetic_{digits}", form=FORMS[0])


def arithmetic_document(rng: Random) -> Document:
    """One to eight problems below each other, or a small word problem."""
    if rng.random() < 0.15:
        return joined([word_problem(rng) for _ in range(rng.randint(1, 2))])
    form = rng.choice(FORMS) if rng.random() < 0.8 else None
    return joined([_with_form(rng, form) for _ in range(rng.randint(1, 8))])


def word_problem(rng: Random) -> Item:
    """Apples that are bought, lost or given away, with numbers below one hundred."""
    digits = rng.choice((1, 1, 2))
    a, sign, b, result = problem(rng, digits, rng.choice("+-"))
    name, thing = rng.choice(MORE_NAMES), rng.choice(MORE_THINGS)
    change = rng.choice(
        ("gets {b} more", "finds {b} more", "buys {b} more") if sign == "+" else ("loses {b}", "gives away {b}")
    )
    noun = thing + ("es" if thing.endswith(("x", "sh", "ch", "s")) else "s")
    noun = "knives" if thing == "knife" else "scarves" if thing == "scarf" else noun
    ask = f"{name} has {a} {noun} and {change.format(b=b)}. How many {noun} does {name} have now?"
    return Item(
        f"{ask} Answer:", f" {result}", "number", "word_problem", ask, f"{a} {sign} {b} = {result}.", f"{result}"
    )


def _with_form(rng: Random, form: str | None) -> Item:
    digits = rng.choice(DIGITS)
    sign = rng.choice("++-*" if digits <= 2 else "++-")
    return _item(rng, problem(rng, digits, sign), f"arithmetic_{digits}", form)


def _item(rng: Random, found: tuple[int, str, int, int], group: str, form: str | None = None) -> Item:
    a, sign, b, result = found
    form = form or rng.choice(FORMS)
    word = SIGNS[sign]
    prompt = form.format(a=a, b=b, sign=sign, word=word)
    answer = f"{result}" if prompt.endswith("=") and " " not in prompt else f" {result}"
    ask = rng.choice(
        (f"What is {a} {sign} {b}?", f"{a} {word} {b}?", f"How much is {a} {word} {b}?", f"Calculate {a}{sign}{b}.")
    )
    return Item(prompt, answer, "number", group, ask, _steps(a, sign, b, result), f"{result}")


def _steps(a: int, sign: str, b: int, result: int) -> str:
    """Digit by digit from the right, the way it is done on paper."""
    if sign == "*" or max(a, b) < 10:
        return f"{a} {SIGNS[sign]} {b} is {result}."
    steps, carry, place = [], 0, 1
    while place <= max(a, b):
        x, y = a // place % 10, b // place % 10
        value = x + y + carry if sign == "+" else x - y - carry
        shown = f" {sign} {carry}" if carry else ""
        digit = value % 10
        steps.append(f"{x} {sign} {y}{shown} = {value}, write {digit}")
        carry = value // 10 if sign == "+" else int(value < 0)
        place *= 10
    if sign == "+" and carry:
        steps.append(f"write {carry}")
    return "; ".join(steps) + "."
