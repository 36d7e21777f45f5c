"""Who proposes: n-grams on the device, DSpark's limits, registration by name, and the feedback of a step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError, UnsupportedError
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.runner.feedback import StepFeedback
from deepinfer.speculate.dspark import DSparkProposer
from deepinfer.speculate.ngram import LONGEST, SHORTEST, NgramProposer
from deepinfer.speculate.proposer import Proposal, Standing, check_proposer, find_factory

N, WIDTH = 4, 64


def ngram(slots: int = 4) -> NgramProposer:
    context = SimpleNamespace(
        num_drafts=N, cache=SimpleNamespace(num_slots=slots), max_positions=WIDTH, device=torch.device("cpu")
    )
    return NgramProposer(context)


def tell(proposer, slot: int, tokens: list[int], start: int = 0) -> None:
    count = len(tokens)
    proposer.observe(torch.full((count,), slot), torch.arange(start, start + count), torch.tensor(tokens))


def proposals(proposer, texts: dict[int, list[int]], longest: int | None = None) -> list[list[int]]:
    standing = Standing(
        torch.tensor(list(texts)),
        torch.tensor([text[-1] for text in texts.values()]),
        torch.tensor([len(text) for text in texts.values()]),
        longest or max(len(text) for text in texts.values()),
    )
    found = proposer.propose(standing, None)
    assert ((found.confidences > 0) == (found.token_ids >= 0)).all()
    return found.token_ids.tolist()


def expected(text: list[int]) -> list[int]:
    """The rule, spelled out: longest n-gram first, its latest earlier occurrence, what followed, repeated."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if len(text) > size and text[end - size : end] == text[-size:]:
                following = text[end:]
                return [following[i % len(following)] for i in range(N)]
    return [-1] * N


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=3), st.integers(0, 20))
def test_ngram_against_its_rule(texts, slack):
    """Several sequences of different lengths at once, and a host that believes they are longer."""
    proposer = ngram()
    by_slot = dict(enumerate(texts, 1))
    for slot, text in by_slot.items():
        tell(proposer, slot, text)
    longest = max(map(len, texts)) + slack
    assert proposals(proposer, by_slot, longest) == [expected(text) for text in texts]


def test_ngram_forgets_refused_tokens_and_former_owners():
    proposer, text = ngram(), [5, 6, 7, 5, 6]
    tell(proposer, 1, [5, 6, 9, 9, 5, 6, 9, 9])  # the former owner's, longer
    tell(proposer, 1, [*text, 8, 8])  # two refused drafts behind the text
    assert proposals(proposer, {1: text}) == [[7, 5, 6, 7]]
    tell(proposer, 1, [7], start=5)
    assert proposals(proposer, {1: [*text, 7]}) == [[5, 6, 7, 5]]


def test_dspark_refuses_what_the_checkpoint_cannot_draft():
    config = ModelConfig.builtin("tiny")
    DSparkProposer.check(config.text.dspark_block_size, config)
    with pytest.raises(ConfigError, match=f"dspark_block_size={config.text.dspark_block_size}"):
        DSparkProposer.check(config.text.dspark_block_size + 1, config)
    without = dataclasses.replace(config, text=dataclasses.replace(config.text, num_nextn_predict_layers=0))
    with pytest.raises(UnsupportedError, match="no draft layers"):
        DSparkProposer.check(1, without)


def test_too_many_drafts_are_refused_before_any_weight_is_read():
    with pytest.raises(ConfigError, match="DEEPINFER_USE_NEXTN_DECODE=6: .* blocks of dspark_block_size=5"):
        LLM("tiny", load_format="dummy", use_nextn_decode=6)


def test_proposers_are_found_by_name_or_by_place():
    assert find_factory("dspark") is DSparkProposer
    assert find_factory("ngram") is NgramProposer
    assert find_factory("deepinfer.speculate.ngram:NgramProposer") is NgramProposer
    check_proposer("ngram", 16, ModelConfig.builtin("tiny"))
    with pytest.raises(ConfigError, match="expected one of none, dspark, ngram.* Did you mean ngram"):
        find_factory("ngrams")
    for wrong in ("deepinfer.nowhere:Thing", "deepinfer.speculate.ngram:Thing"):
        with pytest.raises(ConfigError, match="cannot be loaded"):
            find_factory(wrong)


def test_an_installed_package_may_bring_a_proposer(monkeypatch):
    entry = SimpleNamespace(name="mine", value="deepinfer.speculate.ngram:NgramProposer")
    monkeypatch.setattr("deepinfer.speculate.proposer.entry_points", lambda group: [entry])
    assert find_factory("mine") is NgramProposer


def test_ngram_speeds_repetition_up_and_none_switches_speculation_off():
    """A random model repeats itself soon when it is greedy; steps are counted, not seconds."""
    prompt, params = [0, 5, 6, 7, 8] * 3, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    arguments = {"load_format": "dummy", "max_model_len": 128, "max_num_seqs": 1, "numerics": "smooth"}
    outputs, steps = {}, {}
    for name in ("none", "ngram"):
        with LLM("tiny", **arguments, use_nextn_decode=5, proposer=name) as llm:
            (result,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
            outputs[name], steps[name] = result.token_ids, llm.stats.decode_steps
            assert (llm.stats.speculation is None) == (name == "none")
    assert outputs["none"] == outputs["ngram"]
    assert (steps["none"], steps["ngram"] < 15) == (19, True)
    assert result.metrics.num_accepted_tokens == 19 - steps["ngram"]


# --- feedback ---


def test_feedback_keeps_the_last_tokens_whatever_was_accepted():
    feedback = StepFeedback.allocate(4, 3, torch.device("cpu"))
    slots = torch.tensor([3, 1])
    feedback.begin(slots, torch.tensor([[1, 2, 3], [-1, -1, 7]]), torch.tensor([3, 1]), torch.tensor([4, 8]))
    assert feedback.recent[slots].tolist() == [[1, 2, 3, 4], [-1, -1, 7, 8]]
    tokens = torch.tensor([5, 6, 90, 91, 9, 92])  # four rows, one refused; two rows, one refused
    feedback.advance(slots, tokens, torch.tensor([0, 4]), torch.tensor([1, 0]), 3)
    assert feedback.recent[slots].tolist() == [[3, 4, 5, 6], [-1, 7, 8, 9]]
    assert feedback.length[slots].tolist() == [6, 3]
    feedback.advance(slots, torch.tensor([10, 11, 12, 13, 14]), torch.tensor([0, 4]), torch.tensor([3, 0]), 3)
    assert feedback.recent[slots].tolist() == [[10, 11, 12, 13], [7, 8, 9, 14]]


def test_certain_drafts_get_a_distribution_where_the_rule_needs_one():
    feedback = StepFeedback.allocate(3, 2, torch.device("cpu"), 5)
    feedback.propose(torch.tensor([2]), Proposal(torch.tensor([[4, -1]]), torch.ones(1, 2)))
    assert feedback.draft_logprobs[2, 0].exp().tolist() == [0, 0, 0, 0, 1]
    assert feedback.drafts[2].tolist() == [4, -1]
