"""How requests stop: end tokens, stop ids, stop strings across token borders, lengths; and the text that is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_executor import EOS, StubExecutor, assert_idle, expected_tokens, make_engine, run_all

from deepinfer.engine.request import ModelInfo
from deepinfer.hub.tokenizer import Tokenizer
from deepinfer.sampling_params import SamplingParams

TOKENIZER = Tokenizer.byte_level(512)
MODEL = ModelInfo(vocab_size=512, eos_ids=tuple(TOKENIZER.eos_ids))


def run_golden(text: str, end: bool = False, **params):
    """The result of a request whose output is forced to spell `text`, byte by byte, with `end` then an end token."""
    golden = [byte + 3 for byte in text.encode()]
    assert TOKENIZER.decode(golden) == text
    golden += [TOKENIZER.eos_ids[0]] if end else []
    executor = StubExecutor(vocab=512, eos=TOKENIZER.eos_ids)
    engine = make_engine(executor, TOKENIZER, MODEL)
    defaults = {"temperature": 0, "max_tokens": len(golden), "golden_token_ids": golden}
    engine.add_request(prompt="go", params=SamplingParams(**(defaults | params)))
    (result,) = run_all(engine).values()
    assert_idle(engine)
    assert result.token_ids == golden[: len(result)]
    return result


@pytest.mark.parametrize("eos", EOS)
def test_every_end_token_of_the_model_stops(eos):
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=9, golden_token_ids=[30, eos])
    engine.add_request(token_ids=[7, 8], params=params)
    (result,) = run_all(engine).values()
    assert (result.token_ids, result.finish_reason, result.stop_reason) == ([30, eos], "stop", None)


def test_ignore_eos_goes_on_to_the_length():
    engine = make_engine()
    engine.add_request(
        token_ids=[7], params=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, golden_token_ids=[1, 5, 1])
    )
    (result,) = run_all(engine).values()
    assert (len(result), result.finish_reason) == (4, "length")


def test_end_token_at_the_last_allowed_place_counts_as_stop():
    result = run_golden("ab", end=True)
    assert (result.finish_reason, result.stop_reason, len(result)) == ("stop", None, 3)


@pytest.mark.parametrize("minimum", [1, 3, 6])
def test_no_end_before_min_tokens(minimum):
    engine = make_engine()
    prompts = [[6, n] for n in range(6, 86)]  # some of them would end at once: 2 of 97 tokens are end tokens
    for prompt in prompts:
        engine.add_request(
            token_ids=prompt,
            params=SamplingParams(temperature=0, max_tokens=12, min_tokens=minimum, stop_token_ids=list(range(30, 60))),
        )
    results = run_all(engine)
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=minimum, stop_token_ids=list(range(30, 60)))
    for number, prompt in enumerate(prompts):
        result = results[str(number)]
        assert (result.token_ids, result.finish_reason) == expected_tokens(prompt, params)
        assert len(result) > minimum or result.finish_reason == "length"
        assert not set(result.token_ids[:minimum]) & {*EOS, *range(30, 60)}
    assert any(result.finish_reason == "stop" for result in results.values())


def test_first_n_tokens_without_end_token_leaves_stop_ids_alone():
    params = SamplingParams(temperature=0, max_tokens=8, first_n_token_no_eos=4, stop_token_ids=list(range(20, 90)))
    engine = make_engine()
    engine.add_request(token_ids=[7, 9], params=params)
    (result,) = run_all(engine).values()
    assert (result.token_ids, result.finish_reason) == expected_tokens([7, 9], params)
    assert len(result) < 4


def test_stop_token_id_is_reported_and_left_out_of_the_text():
    stop = ord("c") + 3
    result = run_golden("abcd", stop_token_ids=[stop, 400])
    assert (result.finish_reason, result.stop_reason, len(result), result.text) == ("stop", stop, 3, "ab")
    assert run_golden("abcd", stop_token_ids=[stop], include_stop_str_in_output=True).text == "abc"
    with_string = run_golden("abcd", stop_token_ids=[stop], stop=["zz"])
    assert (with_string.stop_reason, with_string.text) == (stop, "ab")
    both = run_golden("abcd", stop_token_ids=[stop], stop=["zz"], include_stop_str_in_output=True)
    assert both.text == "abc"


@pytest.mark.parametrize(
    ("text", "stops", "kept", "which", "tokens"),
    [
        ("Hello. World", [". "], "Hello", ". ", 7),
        ("aaab", ["ab", "aab"], "a", "aab", 4),  # the one that begins first wins
        ("xyz", ["yz", "y"], "x", "y", 2),
        ("été là", ["é l"], "ét", "é l", 7),
        ("été là", ["té l"], "é", "té l", 7),
        ("stop", ["stop"], "", "stop", 4),
        ("ab\n\ncd", ["\n\n"], "ab", "\n\n", 4),
        ("日本語", ["本"], "日", "本", 6),  # characters of three tokens each
        ("nothing", ["missing"], None, None, None),
    ],
)
def test_stop_strings_are_found_across_token_borders(text, stops, kept, which, tokens):
    result = run_golden(text, stop=stops)
    if which is None:
        assert (result.finish_reason, result.text, result.stop_reason) == ("length", text, None)
        return
    assert (result.finish_reason, result.stop_reason, result.text, len(result)) == ("stop", which, kept, tokens)
    assert run_golden(text, stop=stops, include_stop_str_in_output=True).text == kept + which


def test_stop_string_within_min_tokens_does_not_count_but_one_that_ends_later_does():
    result = run_golden("ab ab", stop=["ab"], min_tokens=3)
    assert (result.text, len(result)) == ("ab ", 5)
    assert run_golden("ab ab", stop=["ab"], min_tokens=2).text == "ab "
    assert run_golden("ab ab", stop=["ab"], min_tokens=1).text == ""
    assert run_golden("ab ab", stop=["b a"], min_tokens=3).text == "a"


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦🇩🇪", "ďábelské", "กำลัง", "မြန်မာ", "龘", "plain"])
def test_text_is_that_of_the_whole_however_it_is_cut(text):
    """TK01: through the final text and through the step-wise decoder of requests with stop strings."""
    assert run_golden(text).text == text
    assert run_golden(text, stop=["\x00never"]).text == text


def test_unfinished_character_is_flushed_at_the_end():
    whole = "é".encode()
    for stop in ((), ("never",)):
        golden = [whole[0] + 3]
        executor = StubExecutor(vocab=512, eos=TOKENIZER.eos_ids)
        engine = make_engine(executor, TOKENIZER, MODEL)
        engine.add_request(
            prompt="x", params=SamplingParams(temperature=0, max_tokens=1, golden_token_ids=golden, stop=stop)
        )
        (result,) = run_all(engine).values()
        assert result.text == "\ufffd"


def test_special_tokens_stay_in_the_text_unless_skipped():
    eos = TOKENIZER.decode([TOKENIZER.eos_ids[0]])
    assert run_golden("hi", end=True).text == "hi" + eos
    assert run_golden("hi", end=True, skip_special_tokens=True).text == "hi"
    assert run_golden("hi", end=True, skip_special_tokens=True, stop=["never"]).text == "hi"


@given(
    st.text(alphabet="ab\u00e9", min_size=1, max_size=12),
    st.lists(st.text("ab\u00e9", min_size=1, max_size=3), max_size=3),
)
def test_stop_string_rule_against_a_naive_search(text, stops):
    """The request ends at the first token after which the text contains a stop string, cut before the earliest."""
    result = run_golden(text, stop=stops)
    data = text.encode()
    for end in range(1, len(data) + 1):
        sofar = data[:end].decode(errors="ignore")
        hits = [(sofar.find(stop), at) for at, stop in enumerate(stops) if stop in sofar]
        if hits:
            cut, _ = min(hits)
            assert (result.finish_reason, len(result), result.text) == ("stop", end, sofar[:cut])
            return
    assert (result.finish_reason, result.text) == ("length", text)
