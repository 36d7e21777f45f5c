"""RequestOutput and its records; logprobs of output and prompt."""

from __future__ import annotations

import math

import numpy as np
import pytest
from stub_executor import StubExecutor, expected_tokens, make_engine, prompt_score, run_all

from deepinfer.engine.output import RequestMetrics, RequestOutput, ScoreOutput, TokenOutput
from deepinfer.errors import RequestError
from deepinfer.sampling_params import SamplingParams

PROMPT = [6 + (7 * i) % 80 for i in range(30)]


def run_one(engine=None, **params):
    engine = engine or make_engine()
    name = engine.add_request(token_ids=PROMPT, params=SamplingParams(**({"temperature": 0, "max_tokens": 6} | params)))
    return run_all(engine)[name]


def test_a_result_is_a_sequence_of_token_records():
    result = run_one(ignore_eos=True)
    assert [token.token_id for token in result] == result.token_ids
    assert result.token_ids == expected_tokens(PROMPT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0]
    assert len(result) == 6
    assert result[-1] == TokenOutput(result.token_ids[-1], result.logprobs[-1])
    assert result[1:3] == [result[1], result[2]]
    assert result[0] in result
    with pytest.raises(IndexError):
        result[6]
    assert result.cumulative_logprob == pytest.approx(sum(token.logprob for token in result))
    assert (result.prompt_token_ids, result.prompt, result.request_id) == (PROMPT, None, "0")


def test_top_logprobs_are_cut_per_request_and_best_first():
    engine = make_engine()
    for count in (0, 2, 5):
        engine.add_request(token_ids=PROMPT, params=SamplingParams(temperature=0, max_tokens=4, top_logprobs=count))
    results = run_all(engine)
    assert results["0"][0].top_logprobs is None
    for name, count in (("1", 2), ("2", 5)):
        for token in results[name]:
            values = list(token.top_logprobs.values())
            assert len(values) == count
            assert values == sorted(values, reverse=True)
            assert next(iter(token.top_logprobs)) == token.token_id
    assert len(run_one(logprobs=3)[0].top_logprobs) == 3


def test_sum_smaller_is_there_if_the_executor_computes_it():
    assert run_one()[0].sum_smaller_prob is None
    result = run_one(make_engine(StubExecutor(sum_smaller=True)))
    assert [token.sum_smaller_prob for token in result] == [0.25] * len(result)


EXPECTED_SCORES = [None] + [prompt_score(PROMPT[:i], PROMPT[i]) for i in range(1, len(PROMPT))]


@pytest.mark.parametrize("budget", [1, 2, 7, 29, 30, 64])
def test_prompt_logprobs_are_those_of_the_token_itself_for_every_chunking(budget):
    """SA05: entry i belongs to prompt token i, the first has none, one entry a prompt token."""
    result = run_one(make_engine(max_num_batched_tokens=budget, max_num_seqs=1), prompt_logprobs=True)
    assert result.prompt_logprobs == EXPECTED_SCORES
    assert run_one(prompt_logprobs=False).prompt_logprobs is None


def test_prompt_logprobs_survive_preemption_at_any_point():
    executor = StubExecutor(num_blocks=9)
    engine = make_engine(executor, max_num_batched_tokens=8)
    engine.add_request(token_ids=[6] * 7, params=SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    engine.step()
    params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=True, ignore_eos=True)
    name = engine.add_request(token_ids=PROMPT, params=params)
    result = run_all(engine)[name]
    assert result.metrics.num_preemptions >= 1
    assert result.prompt_logprobs == EXPECTED_SCORES
    assert result.token_ids == expected_tokens(PROMPT, params)[0]
    asked = sum(int((batch.prompt_targets >= 0).sum()) for batch in executor.batches)
    assert asked == len(PROMPT) - 1, "scores that are known already are not computed again"


def test_prompt_logprobs_of_a_prompt_of_one_token():
    engine = make_engine()
    engine.add_request(token_ids=[9], params=SamplingParams(prompt_logprobs=True))
    (result,) = run_all(engine).values()
    assert result.prompt_logprobs == [None]


@pytest.mark.parametrize("budget", [4, 64])
def test_scoring_generates_nothing_and_may_use_the_whole_length(budget):
    executor = StubExecutor()
    engine = make_engine(executor, max_model_len=30, max_num_batched_tokens=budget, max_num_seqs=4)
    engine.add_request(token_ids=PROMPT, score_only=True)
    engine.add_request(token_ids=[*PROMPT, 6], score_only=True)
    results = run_all(engine)
    assert (results["0"].prompt_logprobs, len(results["0"])) == (EXPECTED_SCORES, 0)
    assert "31" in str(results["1"].error)
    assert not any(batch.sampled.any() for batch in executor.batches)
    assert all(batch.kind == "prefill" for batch in executor.batches)


def test_repr_tells_what_matters():
    metrics = RequestMetrics(0.0, 1.0)
    output = RequestOutput("7", "stop", metrics, [3, 4], [-1.0, -2.0], text="x" * 100, stop_reason="\n")
    text = repr(output)
    assert len(text) < 160
    assert all(part in text for part in ("'7'", "'stop'", "'\\n'", "2 tokens", "xxx"))
    failed = RequestOutput("8", "error", metrics, [], [], error=RequestError("too long"))
    assert "too long" in repr(failed)
    assert failed.failed
    assert not output.failed


def test_score_output_sums_and_means():
    score = ScoreOutput("0", [1, 2, 3], [None, -1.0, -3.0])
    assert (score.num_scored, score.sum_logprob, score.mean_logprob) == (2, -4.0, -2.0)
    assert math.isnan(ScoreOutput("0", [1], [None]).mean_logprob)


def test_a_prompt_score_that_is_no_number_ends_its_request_only():
    executor = StubExecutor()
    launch = executor.launch

    def poisoned(batch):
        handle = launch(batch)
        result = handle.result()
        for index, scores in result.prompt_logprobs.items():
            if batch.slots[index] == 1:
                scores[2] = np.nan
        return handle

    executor.launch = poisoned
    engine = make_engine(executor)
    for _ in range(2):
        engine.add_request(token_ids=[6, 7, 8, 9, 10], params=SamplingParams(max_tokens=2, prompt_logprobs=True))
    results = run_all(engine)
    first, second = results["0"], results["1"]
    assert first.finish_reason == "error" and "non-finite logits behind prompt token 2" in str(first.error)
    assert second.error is None and len(second) == 2
