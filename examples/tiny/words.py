"""Word lists of the generated families, and words made up from syllables.

Only data and two helpers; everything that uses them is deterministic, so the order of every list is part of the data.
"""

from __future__ import annotations

from random import Random

SHE = "Anna Ella Kate Lily Mia Nora Rosa Sara Tina Vera Zoe Clara Ida".split()
HE = "Ben Carl Dan Finn Hugo Jack Leo Max Owen Paul Sam Tom Will".split()
NAMES = [*SHE, *HE]
MORE_NAMES = [
    *NAMES,
    *"""Alice Amir Bella Boris Chen Dora Elena Emil Farah Felix Greta Hana Henry Iris Ivan Jane John Julia Karl Laura
    Liam Linda Lucas Maria Marco Nina Noah Olga Oscar Peter Priya Ralf Rita Ruth Simon Sofia Tariq Ursula Victor Wendy
    Yara Yuki""".split(),
]
LAST_NAMES = """Adams Baker Brown Carter Clark Cook Cooper Davis Evans Fisher Ford Gray Green Hall Hill Hunt Jones King
    Lane Lee Long Marsh Mason Miller Moore Page Parker Price Reed Ross Shaw Smith Stone Turner Wade Ward Webb West White
    Wood Young""".split()
ANIMALS = "cat dog rabbit duck frog horse goat mouse owl fox bear hen turtle pony squirrel".split()
THINGS = "ball kite cup book hat shell lamp drum key box spoon bell stone basket ribbon".split()
MORE_THINGS = [
    *THINGS,
    *"pen map rope coat ring clock brush knife plate watch chair bag scarf radio guitar camera bottle wallet".split(),
]
PLACES = "park forest river garden lake hill barn beach market school meadow bridge".split()
CITIES = """Berlin Boston Cairo Chicago Dublin Geneva Helsinki Kyoto Lagos Lima Lisbon London Madrid Milan Mumbai Oslo
    Paris Porto Prague Rome Seoul Sydney Tokyo Toronto Vienna Warsaw""".split()
COLORS = "red blue green yellow white black brown pink purple orange".split()
JOBS = "baker teacher doctor pilot farmer painter singer nurse writer cook sailor driver".split()
FOODS = "bread soup apples cake rice cheese pears honey carrots pancakes".split()
WEATHER = "sunny cloudy rainy windy snowy foggy".split()
SEASONS = "spring summer autumn winter".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November December""".split()
COMMON_WORDS = """able above air all apple arm art baby back bank bean bed bird boat body bone bowl boy branch
    bread brick bus cake camp car card cart cave chair child city class cloud coat coin corn cow crow cup dance day
    deer desk dish door dream dress ear earth east egg eye face farm field fire fish flag floor flower food foot
    friend fruit game gate gift girl glass gold grass hand heart home honey house ice iron island jar job juice king
    kitchen knot lake lamp land leaf leg letter light lion lip list luck lunch market meal metal milk mind mirror
    moon morning mouth music nail name neck nest net night north nose nut ocean oil page paint paper path pen people
    piano picture plant plate pocket pond pot queen rain rice ring river road rock roof room root rose sail salt
    sand sea seat seed shadow ship shoe shop silk silver sister sky sleep smile snow soap song soup south spring
    square stage star step stick stone storm story street sugar summer sun table tail tea tent thing tower town
    train tree valley village voice wall water wave week west wheel wind window wing winter wood wool word work
    world year""".split()

_ONSETS = "b br d dr f fl g gl h k kr l m n p pl r s sk st t tr v z".split()
_VOWELS = "a e i o u ai ou".split()
_CODAS = ["", "", "n", "r", "l", "m", "s", "k", "t"]


def invented_word(rng: Random, syllables: int | None = None) -> str:
    """A pronounceable word of two or three syllables that means nothing."""
    count = syllables or rng.choice((2, 2, 3))
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)]
    return "".join(parts) + rng.choice(_CODAS)


def random_string(rng: Random, shortest: int = 3, longest: int = 9) -> str:
    """Letters and digits in any order."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randint(shortest, longest)))


def listed(words: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def article(word: str) -> str:
    """The word with "a" or "an" before it."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def number_words(value: int) -> str:
    """English spelling of 0 to 9,999: "three thousand two hundred seventeen"."""
    if value < 20:
        return _SMALL[value]
    if value < 100:
        return _TENS[value // 10] + (f"-{_SMALL[value % 10]}" if value % 10 else "")
    unit, name = (1000, "thousand") if value >= 1000 else (100, "hundred")
    rest = f" {number_words(value % unit)}" if value % unit else ""
    return f"{number_words(value // unit)} {name}{rest}"


_SMALL = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen""".split()
_TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()
