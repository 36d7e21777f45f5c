"""Whole engine on a real checkpoint: what `LLM` returns equals the model run directly, whatever the batch does.

Everything runs with order-free sums, so equality is bitwise.
"""

from __future__ import annotations

import random

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError, EngineError, UnsupportedError
from deepinfer.testing.logits import Harness

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def text(length, seed=0):
    generator = random.Random(seed * 1000 + length)
    return [0] + [generator.randrange(3, 500) for _ in range(length - 1)]


@pytest.fixture(scope="module")
def micro(checkpoints):
    return str(checkpoints("micro"))


@pytest.fixture(scope="module")
def make(micro):
    """LLM of the micro model with order-free sums."""

    def build(**arguments):
        defaults = {"max_model_len": 512, "max_num_seqs": 8, "batch_invariant": True}
        return LLM(micro, **(defaults | arguments))

    return build


@pytest.fixture(scope="module")
def llm(make):
    with make() as made:
        yield made


def run(llm, prompts, params):
    return llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)


def tokens_of(outputs):
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


def scores_of(outputs):
    return [[record.logprob for record in output] for output in outputs]


@pytest.fixture(scope="module")
def by_hand(micro):
    """Greedy continuation without engine and without paging: a whole forward per token."""
    harness = Harness(micro, "exact", max_len=512, batch_invariant=True)

    def greedy(ids, count):
        ids, harness.cache = list(ids), harness.new_cache()
        start = 0
        with torch.inference_mode():
            for _ in range(count):
                logits = harness.logits(harness.inputs([(0, ids, start, len(ids))]))
                start = len(ids)
                ids.append(int(logits[-1].argmax()))
        return ids[-count:]

    return greedy


def test_greedy_tokens_and_logprobs_are_the_models(llm, micro, by_hand):
    ids = text(40)
    (output,) = run(llm, [ids], GREEDY)
    assert output.token_ids == by_hand(ids, 8)
    with torch.inference_mode():
        harness = Harness(micro, "exact", max_len=64, batch_invariant=True)
        everything = ids + output.token_ids[:-1]
        logits = harness.logits(harness.inputs([(0, everything, 0, len(everything))]))
    expected = logits[len(ids) - 1 :].double().log_softmax(-1)
    for row, record in enumerate(output):
        assert record.logprob == pytest.approx(float(expected[row, record.token_id]), abs=1e-6)


@pytest.mark.parametrize("length", [120, 127, 128, 129, 135, 136, 255, 256, 257])
def test_block_edges(llm, by_hand, length):
    """Prompts around multiples of the block size, and decoding across them."""
    ids = text(length)
    (output,) = run(llm, [ids], GREEDY)
    assert output.token_ids == by_hand(ids, 8)


def test_sixteen_equal_prompts(llm, by_hand):
    ids = text(128, 1)
    assert tokens_of(run(llm, [ids] * 16, GREEDY)) == [by_hand(ids, 8)] * 16


def mixed(count, seed):
    """Prompts of mixed length and their parameters: greedy and seeded."""
    generator = random.Random(seed)
    prompts = [text(generator.choice([1, 3, 17, 60, 130, 200]), seed + index) for index in range(count)]
    params = [
        SamplingParams(
            temperature=generator.choice([0, 0.7, 1.3]), top_p=generator.choice([1.0, 0.8]), seq_seed=index,
            max_tokens=generator.choice([1, 5, 14]), ignore_eos=True, top_logprobs=2,
        )
        for index in range(count)
    ]  # fmt: skip
    return prompts, params


@pytest.fixture(scope="module")
def alone(llm):
    prompts, params = mixed(9, 5)
    outputs = [run(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    return tokens_of(outputs), scores_of(outputs)


def test_batch_equals_alone(llm, alone):
    prompts, params = mixed(9, 5)
    outputs = run(llm, prompts, params)
    assert (tokens_of(outputs), scores_of(outputs)) == alone


def test_order_of_prompts_changes_nothing(llm, alone):
    prompts, params = mixed(9, 5)
    outputs = run(llm, prompts[::-1], params[::-1])[::-1]
    assert (tokens_of(outputs), scores_of(outputs)) == alone


@pytest.mark.parametrize("budget", [16, 50, 200])
def test_chunked_prefill_equals_alone(make, alone, budget):
    prompts, params = mixed(9, 5)
    with make(max_num_batched_tokens=budget) as llm:
        outputs = run(llm, prompts, params)
    assert (tokens_of(outputs), scores_of(outputs)) == alone


def test_preemption_equals_alone(make, alone):
    """Too few blocks for all: some requests are thrown out and recomputed, at least one twice."""
    prompts, params = mixed(9, 5)
    prompts = [*prompts, *(text(123 + n, 40 + n) for n in range(3))]
    params = [*params, *[SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)] * 3]
    with make() as llm:
        expected = [run(llm, [p], [one])[0] for p, one in zip(prompts[9:], params[9:], strict=True)]
    with make(num_kv_blocks=5, max_num_batched_tokens=200) as llm:
        outputs = run(llm, prompts, params)
    assert sum(output.metrics.num_preemptions for output in outputs) >= 2
    assert (tokens_of(outputs[:9]), scores_of(outputs[:9])) == alone
    assert tokens_of(outputs[9:]) == tokens_of(expected)
    assert scores_of(outputs[9:]) == scores_of(expected)


def test_bad_requests_harm_nobody(llm, alone):
    prompts, params = mixed(9, 5)
    bad = [[], [0, 512], [-1, 3], text(512), [0, 2**40], [0, 500]]
    mixed_prompts, mixed_params = [], []
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        mixed_prompts += [prompt, *bad[index : index + 1]]
        mixed_params += [one] + [GREEDY] * len(bad[index : index + 1])
    outputs = run(llm, mixed_prompts, mixed_params)
    assert len(outputs) == len(mixed_prompts)
    good = [output for output in outputs if output.error is None]
    assert (tokens_of(good), scores_of(good)) == alone
    errors = [str(output.error) for output in outputs if output.error is not None]
    assert len(errors) == len(bad)
    for message, named in zip(errors, ["empty", "512", "-1", "512", str(2**40), "500"], strict=True):
        assert named in message, (message, named)


def test_length_limits(make):
    with make(max_model_len=40) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = run(llm, [text(39), text(40), text(41), text(30)], params)
    assert [len(output) for output in outputs] == [1, 0, 0, 8]
    assert outputs[0].finish_reason == "length"
    assert "40" in str(outputs[1].error) and "41" in str(outputs[2].error)


def test_scores_are_the_log_probabilities_of_the_text(llm, micro):
    ids = text(150, 3)
    (score,) = llm.score(prompt_token_ids=[ids], use_tqdm=False)
    harness = Harness(micro, "exact", max_len=160, batch_invariant=True)
    with torch.inference_mode():
        expected = harness.logits(harness.inputs([(0, ids, 0, len(ids))])).double().log_softmax(-1)
    assert score.token_logprobs[0] is None and len(score.token_logprobs) == len(ids)
    for index in range(1, len(ids)):
        assert score.token_logprobs[index] == pytest.approx(float(expected[index - 1, ids[index]]), abs=1e-6)
    (output,) = run(llm, [ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=True))
    assert output.prompt_logprobs == score.token_logprobs


def test_scores_survive_chunking(make, llm):
    ids = text(150, 3)
    (whole,) = llm.score(prompt_token_ids=[ids], use_tqdm=False)
    with make(max_num_batched_tokens=37) as chunked:
        (parts,) = chunked.score(prompt_token_ids=[ids], use_tqdm=False)
    assert parts.token_logprobs == whole.token_logprobs


def test_text_and_stop_strings(llm):
    (free,) = llm.generate("The the and", GREEDY, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert free.text == tokenizer.decode(free.token_ids)
    assert free.prompt_token_ids == tokenizer.encode("The the and")
    stop = free.text[len(free.text) // 2 :][:2]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=[stop])
    (stopped,) = llm.generate("The the and", params, use_tqdm=False)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_chat_stream_and_strings(make, micro):
    with make(decode_sequence=True) as llm:
        (answer,) = llm.chat([{"role": "user", "content": "the"}], GREEDY, use_tqdm=False)
        assert isinstance(answer, str)
        streamed = {output.index: output.token_ids for output in llm.stream(["a", "the and", "in"], GREEDY)}
    with LLM(micro, max_model_len=64, max_num_seqs=8, batch_invariant=True) as llm:
        outputs = llm.generate(["a", "the and", "in"], GREEDY, use_tqdm=False)
    assert streamed == {index: output.token_ids for index, output in enumerate(outputs)}


def test_dummy_weights_need_no_file():
    with LLM("tiny", load_format="dummy", max_model_len=64, max_num_seqs=2) as llm:
        (output,) = llm.generate("the", GREEDY, use_tqdm=False)
    assert len(output) == 8


def test_seeds_snippet_is_refused_only_for_its_ranks(micro):
    """The published library snippet: known arguments, and a clear word about what one process cannot serve."""
    arguments = {"trust_remote_code": True, "gpu_memory_utilization": 0.85, "max_model_len": 256}
    with pytest.raises(UnsupportedError, match="expert_parallel_size=8"):
        LLM(model=micro, expert_parallel_size=8, **arguments)
    from deepinfer.entrypoints.llm import LLM as OriginalLLM  # noqa: N811
    from deepinfer.sampling_params import SamplingParams as ParamsByOriginalPath

    with OriginalLLM(model=micro, expert_parallel_size=1, **arguments) as llm:
        params = ParamsByOriginalPath(temperature=0.6, max_tokens=4)
        outputs = llm.generate(prompts=["Hello"], sampling_params=params, use_tqdm=False)
        assert len([t.token_id for t in outputs[0]]) in range(1, 5)


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_truncated_prefill_through_the_engine(make, mode):
    """Chunking does not move the cut, short prompts are not cut, and prompt scores are refused."""
    setting = {"yoco_prefill_truncation_mode": mode, "yoco_prefill_keep_tokens": 20}
    prompts = [text(15), text(100), text(220)]
    with make(**setting) as llm:
        whole = run(llm, prompts, GREEDY)
        (refused,) = run(llm, [text(9)], SamplingParams(max_tokens=1, prompt_logprobs=True))
    with make(max_num_batched_tokens=33, **setting) as llm:
        chunked = run(llm, prompts, GREEDY)
    with make() as llm:
        off = run(llm, prompts, GREEDY)
    assert tokens_of(whole) == tokens_of(chunked)
    assert whole[0].token_ids == off[0].token_ids
    assert refused.error is not None and "truncat" in str(refused.error).lower()


def test_too_small_keep_is_refused(make):
    with pytest.raises(ConfigError, match="KEEP_TOKENS=13"):
        make(yoco_prefill_truncation_mode="mask", yoco_prefill_keep_tokens=13)


def test_a_failing_op_is_named_and_the_engine_goes_on(make, monkeypatch):
    with make() as llm:
        before = tokens_of(run(llm, [text(20)], GREEDY))
        from deepinfer.hooks.ops.gemm import activation

        def broken(*_):
            raise RuntimeError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(activation, "swiglu", broken)
            with pytest.raises(EngineError, match=r"gemm\.swiglu") as caught:
                run(llm, [text(20), text(5)], GREEDY)
        assert len(caught.value.outputs) == 2 and all(output.error is not None for output in caught.value.outputs)
        assert tokens_of(run(llm, [text(20)], GREEDY)) == before
