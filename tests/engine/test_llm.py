"""The public API over the stub: generate, chat, stream, score, abort, several threads, batch files."""

from __future__ import annotations

import gc
import importlib
import inspect
import io
import json
import threading

import numpy as np
import pytest
from stub_executor import StubExecutor, assert_idle, expected_tokens, make_engine

import deepinfer
from deepinfer.engine.request import ModelInfo
from deepinfer.entrypoints.batch import run_batch
from deepinfer.entrypoints.driver import FairLock
from deepinfer.entrypoints.llm import LLM
from deepinfer.errors import ConfigError, EngineError, RequestError, UnsupportedError
from deepinfer.hub.chat import render_chat
from deepinfer.hub.tokenizer import Tokenizer
from deepinfer.sampling_params import SamplingParams

TOKENIZER = Tokenizer.byte_level(512)
EOS = tuple(TOKENIZER.eos_ids)
MODEL = ModelInfo(vocab_size=512, eos_ids=EOS)
BOS_TEXT = TOKENIZER.decode([TOKENIZER.bos_id])
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def make_llm():
    """make_llm(engine arguments) -> LLM over a stub with a byte tokenizer; its engine is `llm._driver._engine`."""
    opened = []

    def make(executor=None, **arguments) -> LLM:
        executor = executor or StubExecutor(vocab=512, eos=EOS, num_blocks=200)
        opened.append(LLM.from_engine(make_engine(executor, TOKENIZER, MODEL, **arguments)))
        return opened[-1]

    yield make
    for llm in opened:
        assert_idle(llm._driver._engine)
        assert not llm._driver._finished, "results nobody asked for are kept"
        llm.close()


def solo(prompt: str, params: SamplingParams = GREEDY) -> list[int]:
    history, output = TOKENIZER.encode(prompt), []
    output, _ = expected_tokens(history, params, vocab=512)
    return output


# --- generate ---


def test_results_are_in_order_one_a_prompt(make_llm):
    """SC01: the too long prompt has an error that names the lengths, its neighbours equal their solo runs."""
    llm = make_llm(max_model_len=64)
    outputs = llm.generate(["short", "long " * 2000, "short2"], GREEDY, use_tqdm=False)
    assert [output.index for output in outputs] == [0, 1, 2]
    assert [output.prompt for output in outputs] == ["short", "long " * 2000, "short2"]
    assert "10001" in str(outputs[1].error)
    assert "max_model_len=64" in str(outputs[1].error)
    assert outputs[1].token_ids == []
    assert [t.token_id for t in outputs[0]] == solo("short")
    assert [t.token_id for t in outputs[2]] == solo("short2")
    assert outputs[0].text == TOKENIZER.decode(outputs[0].token_ids)


def test_default_params_and_single_prompt(make_llm):
    llm = make_llm()
    (output,) = llm.generate("hello", use_tqdm=False)
    assert 1 <= len(output) <= 16
    assert output.finish_reason in ("stop", "length")


@pytest.mark.parametrize("prompts", ["", [""]])
def test_empty_prompt_runs_on_bos_alone(make_llm, prompts):
    """SC05 with automatic BOS."""
    (output,) = make_llm().generate(prompts, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [TOKENIZER.bos_id]
    assert output.token_ids == solo("")


def test_empty_prompt_without_bos_is_an_error_for_that_prompt_only(make_llm, monkeypatch):
    """SC05 without automatic BOS, and an empty list of ids."""
    llm = make_llm()
    monkeypatch.setattr(TOKENIZER, "adds_bos", False)
    outputs = llm.generate(["ok", ""], GREEDY, use_tqdm=False)
    assert outputs[0].error is None
    assert len(outputs[0]) == 6
    assert "empty" in str(outputs[1].error)
    (output,) = llm.generate(prompt_token_ids=[[]], sampling_params=GREEDY, use_tqdm=False)
    assert "empty" in str(output.error)


def test_no_prompts_give_no_results_at_once(make_llm):
    llm = make_llm()
    assert llm.generate([]) == llm.generate(prompt_token_ids=[]) == llm.chat([]) == llm.score([]) == []
    assert list(llm.stream([])) == []
    assert llm._driver.stats.steps == 0


def test_exactly_one_bos(make_llm):
    """TK02: text with and without BOS, chat; ids given by the caller are never changed."""
    llm = make_llm()
    outputs = llm.generate([BOS_TEXT + "hi", "hi"], GREEDY, use_tqdm=False)
    outputs += llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    for output in outputs:
        assert output.prompt_token_ids[0] == TOKENIZER.bos_id
        assert output.prompt_token_ids.count(TOKENIZER.bos_id) == 1
    own = [[7, 8], [TOKENIZER.bos_id, TOKENIZER.bos_id, 7]]
    outputs = llm.generate(prompt_token_ids=own, sampling_params=GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == own


def test_token_ids_win_over_text_and_text_fills_the_gaps(make_llm):
    outputs = make_llm().generate(["a", "b"], GREEDY, prompt_token_ids=[[7, 8], None], use_tqdm=False)
    assert (outputs[0].prompt_token_ids, outputs[0].prompt) == ([7, 8], "a")
    assert outputs[1].prompt_token_ids == TOKENIZER.encode("b")


def test_ids_may_be_arrays(make_llm):
    torch = pytest.importorskip("torch")
    ids = [np.array([7, 8], dtype=np.int32), torch.tensor([7, 8]), (7, 8)]
    outputs = make_llm().generate(prompt_token_ids=ids, sampling_params=GREEDY, use_tqdm=False)
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert all(output.error is None for output in outputs)


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({}, ValueError, "prompts or prompt_token_ids"),
        ({"prompts": ["a", "b"], "prompt_token_ids": [[7]]}, ValueError, "1 entries for 2 prompts"),
        ({"prompts": ["a", "b"], "sampling_params": [GREEDY]}, ValueError, "1 entries for 2 prompts"),
        ({"prompts": ["a"], "multi_modal_data": [None, None]}, ValueError, "2 entries for 1 prompts"),
        ({"prompts": ["a", 3]}, TypeError, r"prompts\[1\] is int"),
        ({"prompts": [[7, 8]]}, TypeError, "prompt_token_ids"),
        ({"prompts": 3}, TypeError, "prompts is int"),
        ({"prompt_token_ids": [7, 8]}, TypeError, "one list of ids a prompt"),
        ({"prompts": ["a"], "sampling_params": [3]}, TypeError, r"sampling_params\[0\] is int"),
        ({"prompts": ["a"], "multi_modal_data": {"image_bytes": []}}, TypeError, "multi_modal_data is dict"),
    ],
)
def test_wrong_calls_raise_before_anything_is_queued(make_llm, arguments, error, names):
    llm = make_llm()
    with pytest.raises(error, match=names):
        llm.generate(**arguments, use_tqdm=False)
    with pytest.raises(error, match=names):
        llm.stream(**arguments)
    assert llm._driver._engine._num_requests == 0


def test_parameters_per_prompt_and_as_mappings(make_llm):
    params = [
        {"temperature": 0, "max_tokens": 2, "ignore_eos": True},
        None,
        SamplingParams(max_tokens=3, ignore_eos=True),
        {"maxtokens": 3},
    ]
    outputs = make_llm().generate(["a", "b", "c", "d"], params, use_tqdm=False)
    assert [len(output) for output in (outputs[0], outputs[2])] == [2, 3]
    assert "maxtokens" in str(outputs[3].error)
    assert "max_tokens" in str(outputs[3].error)


def test_images_are_a_clear_error_for_their_prompt(make_llm):
    images = [None, {"image_bytes": [b"x"], "image_sizes": [(2, 2)]}]
    outputs = make_llm().generate(["a", "b"], GREEDY, multi_modal_data=images, use_tqdm=False)
    assert outputs[0].error is None
    assert "vision" in str(outputs[1].error)


def test_text_that_is_no_unicode_is_an_error_for_its_prompt(make_llm):
    outputs = make_llm().generate(["a", "b\ud800"], GREEDY, use_tqdm=False)
    assert outputs[0].error is None
    assert "surrogate" in str(outputs[1].error)


def test_plain_strings_as_a_compatibility_mode(make_llm, caplog):
    outputs = make_llm(decode_sequence=True).generate(["a", "x" * 5000, "b"], GREEDY, use_tqdm=False)
    assert outputs == [TOKENIZER.decode(solo("a")), "", TOKENIZER.decode(solo("b"))]
    assert "prompt 1: " in caplog.text
    assert "5001" in caplog.text


def test_progress_bar_counts_requests(make_llm, capsys):
    make_llm().generate(["a", "b", "c"], GREEDY, use_tqdm=True)
    assert "3/3" in capsys.readouterr().err
    make_llm().generate(["a"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_runs_repeat_with_the_engine_seed(make_llm):
    params = SamplingParams(temperature=1.0, max_tokens=8)
    first = [output.token_ids for output in make_llm(seed=3).generate(["a"] * 3, params, use_tqdm=False)]
    again = make_llm(seed=3)
    second = [again.generate("a", params, use_tqdm=False)[0].token_ids for _ in range(3)]
    assert first == second
    assert len(set(map(tuple, first))) == 3


# --- chat, stream, score ---


def test_chat_takes_one_conversation_or_several(make_llm):
    llm = make_llm()
    talk = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(talk, GREEDY, use_tqdm=False)
    assert one.prompt == render_chat(talk)
    wrong = [{"role": "nobody", "content": "hi"}]
    several = llm.chat([talk, wrong, talk], [GREEDY] * 3, use_tqdm=False)
    assert [output.token_ids for output in several] == [one.token_ids, [], one.token_ids]
    assert "nobody" in str(several[1].error)
    thinking = llm.chat(talk, GREEDY, use_tqdm=False, thinking=True, effort="low")
    assert thinking[0].prompt == render_chat(talk, thinking=True, effort="low")
    with pytest.raises(TypeError, match="messages"):
        llm.chat("hi")
    with pytest.raises(ValueError, match="2 entries for 1"):
        llm.chat(talk, [GREEDY] * 2)


def test_stream_yields_in_order_of_completion(make_llm):
    lengths = [30, 3, 12]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = list(make_llm().stream(["a", "b", "c"], params))
    assert [(output.index, len(output)) for output in outputs] == [(1, 3), (2, 12), (0, 30)]


def test_leaving_a_stream_early_ends_what_is_left(make_llm):
    llm = make_llm()
    stream = llm.stream(["a", "b"], [GREEDY, SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)])
    assert next(stream).index == 0
    stream.close()
    assert_idle(llm._driver._engine)
    untouched = llm.stream(["a"], GREEDY)
    assert llm._driver._engine.num_unfinished == 0  # nothing runs before the first result is asked for
    del untouched


def test_abandoned_stream_in_a_cycle_is_cleaned_up_by_the_collector(make_llm):
    """The collector may run in the middle of a step, where the engine must not be entered again."""
    llm = make_llm()

    class Holder:
        pass

    holder = Holder()
    holder.stream = llm.stream(["a", "b"], [GREEDY, SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)])
    holder.me = holder
    next(holder.stream)
    engine = llm._driver._engine
    step = engine.step

    def step_with_collection():
        gc.collect()
        return step()

    engine.step = step_with_collection
    del holder
    (output,) = llm.generate("c", GREEDY, use_tqdm=False)
    assert output.token_ids == solo("c")
    assert_idle(engine)


def test_generate_between_two_results_of_a_stream(make_llm):
    llm = make_llm()
    texts = []
    for output in llm.stream(["a", "b"], GREEDY):
        (inner,) = llm.generate(f"inner {output.index}", GREEDY, use_tqdm=False)
        assert inner.token_ids == solo(f"inner {output.index}")
        texts.append(output.token_ids)
    assert texts == [solo("a"), solo("b")]


def test_abort_between_two_results_of_a_stream(make_llm):
    llm = make_llm()
    stream = llm.stream(["a", "b"], [GREEDY, SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)])
    assert next(stream).index == 0
    assert llm.abort(["0", "1", "unknown"]) == ["1"]
    last = next(stream)
    assert (last.index, last.finish_reason) == (1, "abort")
    assert list(stream) == []


def test_score_sums_the_logprobs_of_the_prompt(make_llm):
    llm = make_llm()
    (direct,) = llm.generate("hello", SamplingParams(prompt_logprobs=True, max_tokens=1), use_tqdm=False)
    score, failed = llm.score(["hello", "x" * 5000], use_tqdm=False)
    assert score.token_logprobs == direct.prompt_logprobs
    assert score.sum_logprob == pytest.approx(sum(direct.prompt_logprobs[1:]))
    assert score.mean_logprob == pytest.approx(score.sum_logprob / 5)
    assert score.token_ids == TOKENIZER.encode("hello")
    assert (failed.index, failed.token_logprobs) == (1, [])
    assert "5001" in str(failed.error)


# --- life of an LLM ---


def test_close_is_idempotent_and_says_so_afterwards():
    executor = StubExecutor(vocab=512, eos=EOS)
    with LLM.from_engine(make_engine(executor, TOKENIZER, MODEL)) as llm:
        assert llm.get_tokenizer() is TOKENIZER
    llm.close()
    assert executor.closed == 1
    for call in (lambda: llm.generate("a"), lambda: next(llm.stream(["a"])), lambda: llm.score("a")):
        with pytest.raises(EngineError, match="closed"):
            call()
    assert llm.abort("0") == []


def test_failure_of_the_engine_reaches_the_caller_with_all_results(make_llm):
    executor = StubExecutor(vocab=512, eos=EOS)
    llm = make_llm(executor)
    executor.fail_at = {4}
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 9, 9)]
    with pytest.raises(EngineError, match="injected") as caught:
        llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert [output.index for output in caught.value.outputs] == [0, 1, 2]
    assert [output.finish_reason for output in caught.value.outputs] == ["length", "error", "error"]
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].token_ids == solo("a")


def test_interrupted_generate_leaves_nothing_behind(make_llm):
    executor = StubExecutor(vocab=512, eos=EOS)
    llm = make_llm(executor)
    launch = executor.launch

    def interrupted(batch):
        if len(executor.batches) == 3:
            raise KeyboardInterrupt
        return launch(batch)

    executor.launch = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    executor.launch = launch
    assert_idle(llm._driver._engine)
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].token_ids == solo("a")


def test_threads_share_the_engine(make_llm):
    llm = make_llm(max_num_seqs=4)
    prompts = [[f"thread {t} prompt {i}" for i in range(5)] for t in range(4)]
    found: dict[int, list] = {}

    def work(number):
        found[number] = [o.token_ids for o in llm.generate(prompts[number], GREEDY, use_tqdm=False)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {number: [solo(prompt) for prompt in prompts[number]] for number in range(4)}


def test_abort_from_another_thread(make_llm):
    llm = make_llm()
    outputs: list = []
    endless = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True)
    worker = threading.Thread(target=lambda: outputs.extend(llm.generate("a", endless, use_tqdm=False)))
    llm._driver._engine.config  # noqa: B018 - the engine exists before the thread starts
    worker.start()
    while not llm.abort("0"):
        assert worker.is_alive()
    worker.join(timeout=60)
    assert outputs[0].finish_reason == "abort"


def test_the_lock_is_handed_over_to_those_who_wait():
    lock, order = FairLock(), []
    started = threading.Event()

    def waiter():
        started.set()
        with lock:
            order.append("waiter")

    with lock:
        assert lock.mine
        thread = threading.Thread(target=waiter)
        thread.start()
        started.wait(10)
        while not lock._turnstile.locked():  # until it stands in line
            pass
        order.append("holder")
    with lock:
        order.append("holder again")
    thread.join(timeout=10)
    assert order == ["holder", "waiter", "holder again"]
    assert not lock.mine


# --- construction ---


def test_names_and_paths_of_the_original():
    assert deepinfer.LLM is importlib.import_module("deepinfer.entrypoints.llm").LLM
    assert deepinfer.SamplingParams is importlib.import_module("deepinfer.sampling_params").SamplingParams
    assert {"LLM", "SamplingParams", "RequestOutput", "TokenOutput", "__version__"} <= set(dir(deepinfer))
    for name in deepinfer.__all__:
        assert getattr(deepinfer, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = deepinfer.nothing
    expected = ["model", "tokenizer", "trust_remote_code", "expert_parallel_size", "revision", "tokenizer_revision",
                "seed", "gpu_memory_utilization"]  # fmt: skip
    assert list(inspect.signature(LLM).parameters)[:8] == expected


def test_published_snippet_is_refused_only_for_its_ranks():
    """More ranks than this version can serve, said before anything is looked up."""
    with pytest.raises(UnsupportedError, match="expert_parallel_size=8"):
        LLM(
            model="deepseek-ai/DeepSeek-V4.1-Flash-1017",
            expert_parallel_size=8,
            trust_remote_code=True,
            gpu_memory_utilization=0.85,
            max_model_len=32768,
        )


def test_unknown_engine_argument_names_the_nearest():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(model="x", max_num_seq=3)


# --- batch files ---


def batch(llm, lines, defaults=None):
    out = io.StringIO()
    errors = run_batch(llm, lines, out, defaults)
    return errors, [json.loads(line) for line in out.getvalue().splitlines()]


def test_batch_lines_give_results_in_order(make_llm):
    lines = [
        json.dumps({"prompt": "a", "id": "first", "sampling_params": {"max_tokens": 20}}),
        "",
        json.dumps({"prompt_token_ids": [7, 8, 9], "sampling_params": {"top_logprobs": 2}}),
        json.dumps({"messages": [{"role": "user", "content": "hi"}], "thinking": True, "id": 3}),
    ]
    errors, results = batch(make_llm(), lines, {"temperature": 0, "max_tokens": 3, "ignore_eos": True})
    assert errors == 0
    assert [(r["index"], r["id"], len(r["token_ids"])) for r in results] == [(0, "first", 20), (1, None, 3), (2, 3, 3)]
    assert results[0]["text"] == TOKENIZER.decode(results[0]["token_ids"])
    assert [len(token["top_logprobs"]) for token in results[1]["logprobs"]] == [2, 2, 2]
    thinking = render_chat([{"role": "user", "content": "hi"}], thinking=True)
    assert results[2]["num_prompt_tokens"] == len(TOKENIZER.encode(thinking))


BAD_LINES = [
    ("{not json", "not JSON"),
    ("[1, 2]", "list"),
    ('{"prompt": "a", "promt": 1}', "promt"),
    ("{}", "exactly one"),
    ('{"prompt": "a", "messages": []}', "exactly one"),
    ('{"prompt": 3}', "int"),
    ('{"prompt": "a", "thinking": true}', "messages only"),
    ('{"prompt": "a", "sampling_params": 3}', "sampling_params"),
    ('{"prompt": "a", "sampling_params": {"temperature": NaN}}', "temperature"),
    ('{"prompt": "a", "sampling_params": {"tempreature": 1}}', "temperature"),
    ('{"prompt_token_ids": [1, 100000]}', "100000"),
    ('{"prompt_token_ids": "abc"}', "list of integers"),
    ('{"messages": 3}', "int"),
    ('{"messages": [{"role": "user", "content": "x"}], "effort": []}', "unhashable"),
    ('{"messages": [{"role": "user", "content": "x"}], "effort": "huge"}', "huge"),
]


def test_bad_batch_lines_have_an_error_in_their_place(make_llm):
    good = json.dumps({"prompt": "a", "sampling_params": {"temperature": 0, "max_tokens": 6, "ignore_eos": True}})
    lines = [line for bad, _ in BAD_LINES for line in (bad, good)]
    errors, results = batch(make_llm(), lines)
    assert errors == len(BAD_LINES)
    for number, (_, name) in enumerate(BAD_LINES):
        wrong, right = results[2 * number : 2 * number + 2]
        assert name in wrong["error"], wrong
        assert wrong["finish_reason"] == "error"
        assert right["token_ids"] == solo("a")
        assert right["error"] is None


def test_batch_results_of_a_failing_engine_are_all_written(make_llm):
    executor = StubExecutor(vocab=512, eos=EOS)
    llm = make_llm(executor)
    executor.fail_at = {4}
    lines = [
        json.dumps({"prompt": p, "sampling_params": {"max_tokens": n, "ignore_eos": True}})
        for p, n in (("a", 9), ("b", 2), ("c", 9))
    ]
    out = io.StringIO()
    with pytest.raises(EngineError, match="injected"):
        run_batch(llm, lines, out)
    results = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [r["index"] for r in results] == [0, 1, 2]
    assert [r["finish_reason"] for r in results] == ["error", "length", "error"]


def test_errors_are_of_one_family():
    assert issubclass(RequestError, ValueError)
    assert issubclass(EngineError, deepinfer.DeepInferError)
