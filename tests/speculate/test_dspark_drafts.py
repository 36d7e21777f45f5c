"""The drafts of a running engine are those of the text so far, computed from nothing: whatever was accepted, refused
and overwritten in the rings before, and in whatever batch."""

from __future__ import annotations

import random

import pytest
import torch
from scripted import install

from deepinfer import LLM, SamplingParams
from deepinfer.testing.logits import Harness

N = 3


class Listening:
    """Lets the engine follow a script, and notes what DSpark would have proposed: {(newest tokens, length): drafts}."""

    def __init__(self, dspark, script) -> None:
        self.dspark, self.script, self.num_drafts = dspark, script, N
        self.heard: dict[int, list[tuple[int, list[int], list[float]]]] = {}

    def observe(self, *tokens) -> None:
        self.script.observe(*tokens)

    def propose(self, standing, params):
        found = self.dspark.propose(standing, params)
        rows = zip(standing.slots.tolist(), standing.lengths.tolist(), strict=True)
        for row, (slot, length) in enumerate(rows):
            drafts = found.token_ids[row].tolist(), found.confidences[row].tolist()
            self.heard.setdefault(slot, []).append((length, *drafts))
        return self.script.propose(standing, params)


def from_nothing(harness: Harness, text: list[int]) -> tuple[list[int], list[float]]:
    """Greedy drafts behind a text and their confidences: one forward over all but the last token, one draft pass."""
    harness.cache = harness.new_cache()
    ops, dspark = harness.ops, harness.model.dspark
    newest = torch.tensor([text[-1]])
    with torch.inference_mode():
        harness.logits(harness.inputs([(0, text, 0, len(text) - 1)]))
        base, hidden = harness.model.draft(newest, N, harness.draft_step([(0, len(text) - 2)], N), harness.cache)
        block = ops.sampling.draft_block(
            base, hidden, newest, dspark.markov_embed, dspark.markov_head, dspark.confidence, torch.ones(N),
            torch.zeros(1), None, None, torch.tensor([0]), torch.tensor([len(text)]),
        )  # fmt: skip
    return block.token_ids[0].tolist(), block.confidences[0].tolist()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_drafts_of_the_engine_are_those_of_the_text(checkpoints, seed):
    source = random.Random(seed)
    prompts = [[0] + [source.randrange(3, 500) for _ in range(length)] for length in (7, 30)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    arguments = {"numerics": "smooth", "max_model_len": 64, "max_num_seqs": 2}
    with LLM(str(checkpoints("tiny")), **arguments, use_nextn_decode=N, max_num_batched_tokens=16) as llm:
        runner = llm._driver._engine._executor.worker.runner
        dspark = runner.proposer
        script = install(llm)
        runner.proposer = listening = Listening(dspark, script)
        plain = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        listening.heard.clear()
        script.texts = [prompt + result.token_ids for prompt, result in zip(prompts, plain, strict=True)]
        script.wrong = lambda length, index: (length * 5 + index * 3 + seed) % 4 == 0
        llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    harness = Harness(checkpoints("tiny"), "smooth", max_len=64)
    slots = sorted(listening.heard)
    assert len(slots) == 2
    jumps = set()
    for slot, text in zip(slots, script.texts, strict=True):
        before = 0
        for length, drafts, confidences in listening.heard[slot]:
            if length > len(text):
                continue  # a step in flight when the request ended
            wanted, chances = from_nothing(harness, text[:length])
            assert drafts == wanted
            torch.testing.assert_close(torch.tensor(confidences), torch.tensor(chances), atol=1e-4, rtol=0)
            jumps.add(length - before)
            before = length
    assert jumps >= {2, 4}, "blocks of several lengths were accepted"
