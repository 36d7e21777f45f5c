"""Requests whose grammar is being compiled, in the engine: nobody else waits, and they can end in every way."""

from __future__ import annotations

import pytest
import stub_executor
from forms import FormExecutor, InstantBuilder, form, form_engine, generate

from deepinfer import SamplingParams
from deepinfer.engine.output import RequestOutput

FREE = SamplingParams(max_tokens=6, seq_seed=3, ignore_eos=True)
PROMPT = [0, 20, 30]


@pytest.fixture(params=list(stub_executor.MODES), autouse=True)
def mode(request):
    """In order and ahead, with and without drafts."""
    stub_executor.CURRENT.append(stub_executor.MODES[request.param])
    yield
    stub_executor.CURRENT.pop()


@pytest.fixture
def held():
    builder = InstantBuilder()
    builder.held = True
    return builder


def until(engine, *names: str, steps: int = 60) -> dict[str, RequestOutput]:
    """Step until these requests have their results."""
    results: dict[str, RequestOutput] = {}
    for _ in range(steps):
        results |= {output.request_id: output for output in engine.step()}
        if results.keys() >= set(names):
            return results
    raise AssertionError(f"{names} not among {results.keys()}")


def ask(engine, name, params):
    engine.add_request(request_id=name, token_ids=PROMPT, params=params)


def test_others_go_on_while_a_grammar_is_compiled(held):
    alone = generate(form_engine(), [FREE], [PROMPT])[0].token_ids
    engine = form_engine(builder=held)
    ask(engine, "waits", form("choice", ["ab", "cd"]))
    ask(engine, "goes", FREE)
    results = until(engine, "goes")
    assert results["goes"].token_ids == alone and engine.num_unfinished == 1
    held.release()
    assert until(engine, "waits")["waits"].text in ("ab", "cd")
    engine.close()


def test_aborting_a_request_that_waits_for_its_grammar(held):
    engine = form_engine(builder=held)
    ask(engine, "waits", form("regex", "a+"))
    ask(engine, "goes", FREE)
    engine.step()
    assert engine.abort_request("waits") == ["waits"]
    assert len(held.cancelled) == 1, "its compilation goes on for nobody"
    results = until(engine, "waits", "goes")
    assert results["waits"].finish_reason == "abort" and not results["waits"].token_ids
    assert results["goes"].error is None
    held.release()
    assert not engine.has_unfinished and not engine.scheduler.num_running
    engine.close()


def test_closing_while_a_grammar_is_compiled(held):
    engine = form_engine(builder=held)
    ask(engine, "waits", form("regex", "a+"))
    engine.close()
    (output,) = engine.take_outputs()
    assert output.finish_reason == "abort"


def test_a_failed_step_ends_waiting_requests_as_well(held):
    class Failing(FormExecutor):
        def launch(self, batch):
            raise RuntimeError("the device is gone")

    engine = form_engine(Failing(), builder=held)
    ask(engine, "waits", form("regex", "a+"))
    ask(engine, "fails", FREE)
    with pytest.raises(Exception, match="the device is gone"):
        for _ in range(5):
            engine.step()
    results = {output.request_id: output for output in engine.take_outputs()}
    assert results.keys() == {"waits", "fails"}
    assert all(output.finish_reason == "error" and "device is gone" in str(output.error) for output in results.values())
    assert len(held.cancelled) == 1
    engine.close()


def test_aborting_a_constrained_request_between_steps():
    """Its masks may be promised to a step in flight; others still get theirs."""
    for steps in range(1, 6):
        engine = form_engine()
        ask(engine, "first", form("regex", "[ab]{30}"))
        ask(engine, "second", form("regex", "[cd]{8}"))
        for _ in range(steps):
            engine.step()
        engine.abort_request("first")
        results = until(engine, "first", "second")
        assert results["first"].finish_reason == "abort" and set(results["first"].text) <= set("ab")
        assert results["second"].finish_reason == "stop" and len(results["second"].text) == 8
        assert not engine.scheduler.num_running and engine.scheduler.blocks.num_used == 0
        engine.close()
