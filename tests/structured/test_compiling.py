"""Compiling in processes of their own: limits, deaths, cancelling, sharing and keeping. The grammar engine is a
stand-in that takes as long as it is told."""

from __future__ import annotations

import os
import signal
import time

import pytest
from forms import VOCABULARY

from deepinfer.errors import ConfigError, StructuredOutputError
from deepinfer.structured.builder import GrammarBuilder, GrammarCache, Limits
from deepinfer.structured.grammar import GrammarSpec
from deepinfer.structured.process import CompileProcess

ENGINE = "slow_engine:Compiler"


def spec(text):
    return GrammarSpec("ebnf", text)


@pytest.fixture
def build():
    made = []

    def make(**limits):
        values = {"seconds": 20.0, "num_bytes": 100, "depth": 3, "cache_bytes": 1000, "processes": 1} | limits
        made.append(GrammarBuilder(lambda: VOCABULARY, Limits(**values), ENGINE))
        return made[-1]

    yield make
    for builder in made:
        builder.close()
        assert not builder.pids


def settled(builder, *tickets, seconds=30.0):
    """Wait for all of these."""
    until = time.monotonic() + seconds
    while not all(ticket.done for ticket in tickets):
        assert time.monotonic() < until, "no answer"
        builder.wait(0.02)
    return [ticket.grammar.data.decode() if ticket.grammar else str(ticket.error) for ticket in tickets]


def working(builder, seconds=30.0):
    """The process at work."""
    until = time.monotonic() + seconds
    while not builder.pids:
        assert time.monotonic() < until
        time.sleep(0.01)
    return builder.pids[0]


def test_what_takes_too_long_is_killed_and_the_next_ones_go_on(build):
    builder = build(seconds=0.3)
    slow, quick = builder.submit(spec("sleep 60")), builder.submit(spec("quick"))
    told, answer = settled(builder, slow, quick)
    assert "longer than 0.3 s (DEEPINFER_XGRAMMAR_TIMEOUT)" in told and answer.startswith("quick in ")


def test_waiting_in_the_queue_is_not_compiling(build):
    builder = build(seconds=1.0)
    tickets = [builder.submit(spec(f"sleep 0.{n}")) for n in range(4, 8)]  # 2.2 s in all
    assert all(f"sleep 0.{n} in" in answer for n, answer in zip(range(4, 8), settled(builder, *tickets), strict=True))


def test_a_process_that_dies_fails_its_own_request_only(build):
    builder = build()
    died, wrong, fine = settled(builder, *(builder.submit(spec(text)) for text in ("die", "wrong", "fine")))
    assert "died" in died and "exit status 3" in died and "wrong as asked for" in wrong and fine.startswith("fine in ")


def test_a_process_that_died_at_rest_is_replaced(build):
    builder = build(cache_bytes=0)
    settled(builder, builder.submit(spec("one")))
    pid = working(builder)
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    (answer,) = settled(builder, builder.submit(spec("two")))
    assert answer.startswith("two in ") and answer != f"two in {pid}"


def test_cancelling_ends_the_work_and_harms_nobody_else(build):
    builder = build()
    settled(builder, builder.submit(spec("start")))
    runaway, waiting = builder.submit(spec("sleep 60")), builder.submit(spec("next"))
    time.sleep(0.2)
    builder.cancel(runaway)
    began = time.monotonic()
    (answer,) = settled(builder, waiting)
    assert answer.startswith("next in ") and time.monotonic() - began < 20
    assert not runaway.done


def test_cancelling_at_any_moment_harms_nobody_else(build):
    """Also in the moment between an answer and its being noticed."""
    builder = build(cache_bytes=0)
    settled(builder, builder.submit(spec("start")))
    for number in range(12):
        first, second = builder.submit(spec(f"sleep 0.00{number}")), builder.submit(spec(f"after {number}"))
        time.sleep(0.001 * number)
        builder.cancel(first)
        assert settled(builder, second)[0].startswith(f"after {number} in ")


def test_equal_asks_share_one_compilation_and_the_last_to_leave_ends_it(build):
    builder = build(cache_bytes=0)
    first, second = builder.submit(spec("sleep 0.3")), builder.submit(spec("sleep 0.3"))
    builder.cancel(first)
    (answer,) = settled(builder, second)
    assert answer.startswith("sleep 0.3 in ") and not first.done


def test_finished_grammars_are_kept(build):
    builder = build()
    first = builder.submit(spec("kept"))
    settled(builder, first)
    again = builder.submit(spec("kept"))
    assert again.done and again.grammar is first.grammar


def test_closing_answers_everyone(build):
    builder = build()
    ticket = builder.submit(spec("sleep 60"))
    builder.close()
    assert "closed" in str(ticket.error)


@pytest.mark.parametrize(
    ("text", "named"), [("x" * 101, "101 bytes, at most 100"), ("((((", "4 brackets deep, at most 3")]
)
def test_too_long_and_too_deep_are_refused_at_once(build, text, named):
    with pytest.raises(StructuredOutputError, match=named):
        build().submit(spec(text))


def test_the_least_recently_used_grammar_goes_first():
    class Sized:
        num_bytes = 40

    cache = GrammarCache(100)
    cache.put(spec("a"), Sized())
    cache.put(spec("b"), Sized())
    assert cache.get(spec("a")) is not None
    cache.put(spec("c"), Sized())
    assert cache.get(spec("b")) is None and cache.get(spec("a")) and cache.get(spec("c")) and cache.num_bytes == 82
    Sized.num_bytes = 200
    cache.put(spec("d"), Sized())
    assert cache.get(spec("d")) is None and len(cache) == 2


def test_an_unknown_engine_is_named():
    with pytest.raises(ConfigError, match="'nobody' is not known; installed: .*xgrammar"):
        GrammarBuilder(lambda: VOCABULARY, Limits(1, 1, 1, 1, 1), "nobody")


def test_a_closed_process_starts_no_other():
    process = CompileProcess(ENGINE, VOCABULARY)
    process.close()
    with pytest.raises(StructuredOutputError, match="closed"):
        process.compile(spec("a"), 1.0)
