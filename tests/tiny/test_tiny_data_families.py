"""The generated families: determinism, seeds, loss weights, and answers that are right by an independent account."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import re

import pytest
from families import CI_SHARES, EVALUATION_SEEDS, FAMILIES, TRAIN_SEEDS, VALID_SEEDS, document, random_for, sample_text
from family_arithmetic import HELD_OUT, arithmetic_exam, held_out
from family_chat import ASSISTANT, END_THINK, THINK, USER
from family_formats import date_to_iso, format_item, time_to_24
from family_lexicon import PAIRS, lexicon
from family_recall import recall_item
from family_stories import draw_cast, questions, tell
from family_types import ANSWER, QUESTION, text_of
from words import number_words

MODEL_ANSWERS = ("arithmetic", "records", "formats", "words")
SAMPLE = range(150)


@pytest.mark.parametrize("family", FAMILIES)
def test_document_depends_on_family_and_seed_only(family: str) -> None:
    first = [document(family, seed) for seed in SAMPLE[:20]]
    assert first == [document(family, seed) for seed in SAMPLE[:20]]
    assert len({text_of(pieces) for pieces in first}) > 10


def test_seed_ranges_share_nothing() -> None:
    ranges = sorted((TRAIN_SEEDS, VALID_SEEDS, EVALUATION_SEEDS), key=lambda seeds: seeds.start)
    assert all(before.stop <= after.start for before, after in itertools.pairwise(ranges))


def test_shares_are_whole() -> None:
    assert sum(family.share for family in FAMILIES.values()) == pytest.approx(1)
    assert sum(CI_SHARES.values()) == pytest.approx(1)
    assert set(CI_SHARES) <= set(FAMILIES)


def test_documents_are_those_that_the_shipped_models_were_trained_on() -> None:
    """Whoever changes a family has to make the token files and the models anew."""
    digest = hashlib.sha256()
    for family in FAMILIES:
        for seed in range(50):
            digest.update(repr(document(family, seed)).encode())
    assert digest.hexdigest() == "b25fc6f1d6fa55f08a1053420b9bc541e64a9ee67b90ccc8c47205d1261054b4"


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_tell_questions_from_answers(family: str) -> None:
    weights = {weight for seed in SAMPLE for _, weight in document(family, seed)}
    expected = {QUESTION, ANSWER} if family in (*MODEL_ANSWERS, "chat") else {ANSWER}
    assert weights == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_end_where_a_prompt_may_end(family: str) -> None:
    """A blank at the end of a piece would be glued to the next word in training, but not in a prompt."""
    for seed in SAMPLE:
        pieces = document(family, seed)
        assert all(text and not text.endswith(" ") for text, _ in pieces), pieces


def test_arithmetic_is_right_and_leaves_the_evaluation_out() -> None:
    lines = "\n".join(text_of(document("arithmetic", seed)) for seed in range(3000))
    found = re.findall(r"^(?:Compute )?(\d+) ?([-+*]) ?(\d+)(?::| =|=) ?(-?\d+)$", lines, re.MULTILINE)
    assert len(found) > 3000
    for a, sign, b, result in found:
        assert int(result) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert not held_out(int(a), sign, int(b))


def test_exams_are_the_problems_that_training_never_sees() -> None:
    problems = [arithmetic_exam(random_for("exam", seed), 2, "+").prompt for seed in range(50)]
    assert all(held_out(int(a), "+", int(b)) for a, b in (text.rstrip("=").split("+") for text in problems))
    share = sum(held_out(a, "+", b) for a in range(10, 100) for b in range(10, 100)) / 8100
    assert share == pytest.approx(1 / HELD_OUT, rel=0.2)


def test_records_say_what_their_sentence_says() -> None:
    for seed in range(300):
        for sentence, answer in re.findall(r"Text: (.*)\nJSON: (.*)", text_of(document("records", seed))):
            record = json.loads(answer)
            for key, value in record.items():
                for part in value if isinstance(value, list) else [value]:
                    if key == "date":
                        month, day = map(int, part.split("-"))
                        assert datetime.date(2024, month, day).strftime("%B") in sentence
                        assert re.search(rf"\b{day}\b", sentence)
                    elif not isinstance(part, bool):
                        assert str(part) in sentence


def test_dates_and_times_are_right() -> None:
    for seed in range(200):
        item = format_item(random_for("formats", seed), date_to_iso)
        given, wanted = item.prompt.removeprefix("date ").removesuffix(" ->"), datetime.date.fromisoformat(item.reply)
        forms = (
            "{0:%B} {0.day}, {0.year}",
            "{0.day} {0:%B} {0.year}",
            "{0.day}.{0.month}.{0.year}",
            "{0:%b} {0.day} {0.year}",
        )
        assert given in [form.format(wanted) for form in forms]
        item = format_item(random_for("formats", seed), time_to_24)
        given = item.prompt.removeprefix("time ").removesuffix(" ->")
        assert datetime.datetime.strptime(given.upper(), "%I:%M %p").strftime("%H:%M") == item.reply


def test_numbers_in_words() -> None:
    assert number_words(0) == "zero"
    assert number_words(40) == "forty"
    assert number_words(317) == "three hundred seventeen"
    assert number_words(9099) == "nine thousand ninety-nine"


def test_story_questions_are_settled_by_the_story() -> None:
    asked = set()
    for seed in range(200):
        rng = random_for("stories", seed)
        cast = draw_cast(rng)
        text = tell(rng, cast)
        assert "{" not in text
        assert not re.search(r"\b[Aa] [aeio]\w+|\b[Aa]n [^aeiou]\w+", text), text
        for ask, answer in questions(rng, cast, text):
            assert answer in text
            asked.add(ask.split()[0])
    assert asked == {"What", "Where", "Who", "How"}


@pytest.mark.parametrize("distance", [150, 900])
def test_recall_puts_text_between_fact_and_question(distance: int) -> None:
    item = recall_item(random_for("recall", 7), distance)
    name = re.findall(r"What is the code of (\w+)\?", item.prompt)[-1]
    assert f"The code of {name} is {item.answer.strip(' .')}." in item.prompt.split("\n")[0]
    assert len(item.prompt.split()) == pytest.approx(distance / 1.25, rel=0.4)


def test_lexicon_is_fixed_and_unambiguous() -> None:
    pairs = lexicon()
    assert len(pairs) == PAIRS
    assert len({word for pair in pairs for word in pair}) == 2 * PAIRS
    assert pairs[0] == ("flesoul", "brarabous")


def test_chat_has_the_layout_of_render_chat() -> None:
    from deepinfer.hub.byte_tokenizer import BOS
    from deepinfer.hub.chat import render_chat

    seen = set()
    for seed in SAMPLE:
        text = text_of(document("chat", seed))
        question, _, rest = text.partition(USER)[2].partition(ASSISTANT)
        thinking = rest.startswith(THINK)
        system = text.partition(USER)[0].removeprefix("<｜System｜>")
        if not thinking:
            messages = [
                *([{"role": "system", "content": system}] if system else []),
                {"role": "user", "content": question},
            ]
            assert (BOS + text).startswith(render_chat(messages))
        else:
            assert "Reasoning Effort: " in system and END_THINK in rest
        seen.add((thinking, bool(system)))
    assert len(seen) >= 3


def test_sample_text_keeps_its_size() -> None:
    total = sum(map(len, sample_text(60_000, CI_SHARES)))
    assert 60_000 <= total < 75_000
