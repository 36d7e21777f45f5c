"""The prefix cache on a model: on = off, bit for bit, with order-free sums. Drafts, truncation, output that is gone on
from, and chunks that end anywhere."""

from __future__ import annotations

import random

import pytest

from deepinfer import LLM, SamplingParams


def text(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [0] + [generator.randrange(3, 400) for _ in range(length - 1)]


def serve(directory, cached: bool, groups, params, **arguments):
    """[(tokens, logprobs)] and the tokens found cached, of requests submitted group after group. Texts that are
    callables get the results so far."""
    results, hits = [], []
    with LLM(
        str(directory), batch_invariant=True, max_model_len=600, max_num_seqs=3, enable_prefix_caching=cached,
        prefix_snapshot_interval=256, **arguments,
    ) as llm:  # fmt: skip
        for group in groups:
            prompts = [prompt(results) if callable(prompt) else prompt for prompt in group]
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
            assert not any(output.failed for output in outputs), outputs
            results += [(output.token_ids, output.logprobs) for output in outputs]
            hits += [output.metrics.num_cached_tokens for output in outputs]
    return results, hits


A = text(300, 1)
GROUPS = [
    [A[:250]],
    [A[:250]],
    [lambda results: [*A[:250], *results[0][0], *text(20, 2)]],  # the next turn: goes on inside the output
    [A[:200] + text(40, 3), A[:140] + text(30, 4), text(129, 5)],
]


def test_a_hit_changes_nothing(checkpoints):
    groups, params = [[A[:131]], [A[:140]]], SamplingParams(temperature=0.8, seq_seed=3, max_tokens=3, ignore_eos=True)
    off, none = serve(checkpoints("micro"), False, groups, params)
    on, hits = serve(checkpoints("micro"), True, groups, params)
    assert on == off
    assert (none, hits) == ([0, 0], [0, 128])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"use_nextn_decode": 2}, [0, 128, 256, 128, 128, 0]),
        (
            {"yoco_prefill_truncation_mode": "compact", "yoco_prefill_keep_tokens": 20, "max_num_batched_tokens": 125},
            [0, 128, 256, 128, 128, 0],
        ),
    ],
    ids=["drafts", "compact"],
)
def test_on_equals_off_bit_for_bit(checkpoints, arguments, expected):
    params = SamplingParams(temperature=0.8, seq_seed=3, max_tokens=8, ignore_eos=True)
    off, none = serve(checkpoints("micro"), False, GROUPS, params, **arguments)
    on, hits = serve(checkpoints("micro"), True, GROUPS, params, **arguments)
    assert on == off
    assert (set(none), hits) == ({0}, expected)


def test_ngram_drafts_know_what_others_have_computed(checkpoints):
    """The text repeats itself before the snapshot, so the drafts after it are those of a first run."""
    prompt = text(40, 6) * 5
    arguments = {"use_nextn_decode": 3, "proposer": "ngram"}
    golden = (prompt * 2)[len(prompt) : len(prompt) + 12]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, golden_token_ids=golden)
    counts = []
    with LLM(
        str(checkpoints("micro")), batch_invariant=True, max_model_len=600, max_num_seqs=2, enable_prefix_caching=True,
        **arguments,
    ) as llm:  # fmt: skip
        for _ in range(2):
            (output,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
            counts.append((output.metrics.num_cached_tokens, output.metrics.num_accepted_tokens))
    assert [cached for cached, _ in counts] == [0, 128]
    assert counts[0][1] == counts[1][1] > 0
