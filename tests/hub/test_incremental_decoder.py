"""Decoding token by token equals decoding at once, and never shows half a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.hub.tokenizer import Tokenizer

TINY = Tokenizer.byte_level(512)
IDS = st.lists(st.one_of(st.integers(0, 511), st.integers(3 + 128, 258)), max_size=40)
"""any ids, with many bytes that are no characters alone"""

TEXTS = [
    "🙂",
    "🇩🇪🇫🇷",
    "👨‍👩‍👧‍👦",
    "ďábelské ódy",
    "สวัสดีชาวโลก",
    "မင်္ဂလာပါ",
    "𠮷野家で𩸽を食べる",
    "a\u0301 \ufeff \ufffd \x00",
]


def stream(ids: list[int], skip_special_tokens: bool = False) -> list[str]:
    """Text after each id, and the rest."""
    decoder = TINY.incremental(skip_special_tokens)
    return [*(decoder.push([token_id]) for token_id in ids), decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_split_over_tokens(text: str) -> None:
    ids = TINY.encode(text, add_bos=False)
    assert len(ids) >= len(text)
    pieces = stream(ids)
    assert "".join(pieces) == TINY.decode(ids) == text
    assert pieces[-1] == ""
    assert [piece for piece in pieces if piece] == list(text)  # a character comes whole, with its last token


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_no_replacement_character_while_a_character_can_be_completed(text: str) -> None:
    ids = TINY.encode(text, add_bos=False)
    for end in range(len(ids)):
        assert "\ufffd" not in "".join(stream(ids[:end])[:-1])


def test_flush_ends_an_unfinished_character() -> None:
    ids = TINY.encode("a🙂", add_bos=False)[:-1]
    assert stream(ids) == ["a", "", "", "", "\ufffd"]
    assert TINY.decode(ids) == "a\ufffd"


def test_bytes_that_become_no_character() -> None:
    ids = [3 + 0xE2, 3 + 0x28, 3 + 0xFF, 3 + 0x41]
    assert stream(ids) == ["", "\ufffd(", "\ufffd", "A", ""]
    assert TINY.decode(ids) == "\ufffd(\ufffdA"


def test_a_special_token_ends_an_unfinished_character() -> None:
    ids = [3 + 0xF0, 3 + 0x9F, 1]
    assert "".join(stream(ids)) == TINY.decode(ids) == "\ufffd<｜end▁of▁sentence｜>"


@given(IDS)
def test_pieces_join_to_the_whole(ids: list[int]) -> None:
    assert "".join(stream(ids)) == TINY.decode(ids)


@given(IDS)
def test_special_tokens_can_be_skipped(ids: list[int]) -> None:
    assert "".join(stream(ids, skip_special_tokens=True)) == TINY.decode(ids, skip_special_tokens=True)


@given(IDS, st.integers(0, 40))
def test_ids_may_come_in_groups(ids: list[int], cut: int) -> None:
    decoder = TINY.incremental()
    assert decoder.push(ids[:cut]) + decoder.push(ids[cut:]) + decoder.flush() == TINY.decode(ids)


def test_a_decoder_can_be_used_again_after_flush() -> None:
    decoder = TINY.incremental()
    decoder.push([3 + 0xF0])
    assert decoder.flush() == "\ufffd"
    assert decoder.push(TINY.encode("hi", add_bos=False)) == "hi"


def test_cost_of_a_token_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every id is looked at once, and no more than an unfinished character is kept."""
    looked_at: list[int] = []
    real = TINY.token_bytes
    monkeypatch.setattr(TINY, "token_bytes", lambda token_id: looked_at.append(token_id) or real(token_id))
    monkeypatch.setattr(TINY, "decode", lambda *arguments: pytest.fail("decoded again from the beginning"))
    ids = TINY.encode("漢字🙂 text " * 200, add_bos=False)
    decoder = TINY.incremental()
    for token_id in ids:
        decoder.push([token_id])
        assert len(decoder._utf8.getstate()[0]) <= 3
    assert looked_at == ids
