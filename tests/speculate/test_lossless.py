"""Speculation changes speed, never output: every width, acceptance pattern and start parity, alone and in batches,
planned ahead and in order, against the same requests without drafts. On the tiny random model, in smooth mode (tokens
equal, logprobs within float32 noise) and in exact mode with batch invariance (bit for bit)."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scripted import install, set_widths

from deepinfer import LLM, SamplingParams

N = 5
MODES = [
    pytest.param(("smooth", False), id="smooth"),
    pytest.param(("exact", True), id="exact", marks=pytest.mark.slow),
]
ARGUMENTS = {"load_format": "dummy", "max_model_len": 384, "max_num_seqs": 3, "num_kv_blocks": 16}
SLOW = pytest.mark.slow


def prompt_of(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [0] + [source.randrange(3, 500) for _ in range(length - 1)]


PROMPTS = [prompt_of(length, length) for length in (6, 7, 125)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=11, ignore_eos=True),
    SamplingParams(temperature=1, seq_seed=5, max_tokens=10, ignore_eos=True, top_logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seq_seed=6, max_tokens=9, ignore_eos=True),
]


def generate(llm: LLM, prompts=PROMPTS, params=PARAMS):
    results = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    assert [result.error for result in results] == [None] * len(results)
    return results


def assert_same(found, wanted, bitwise: bool) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a.token_ids, a.finish_reason, a.stop_reason) == (b.token_ids, b.finish_reason, b.stop_reason)
        if bitwise:
            assert a.logprobs == b.logprobs
        else:
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)
        if b.top_logprobs is not None:
            assert [top.ids.tolist() for top in a.top_logprobs] == [top.ids.tolist() for top in b.top_logprobs]


class Setup:
    """Engines with drafts, made when they are asked for, and the results without drafts."""

    def __init__(self, numerics: str, invariant: bool) -> None:
        self.bitwise = invariant
        self.arguments = ARGUMENTS | {"numerics": numerics, "batch_invariant": invariant}
        with LLM("tiny", **self.arguments, zero_overhead_scheduling=False) as plain:
            self.alone = [generate(plain, [p], [s])[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
        self.texts = [p + r.token_ids for p, r in zip(PROMPTS, self.alone, strict=True)]
        self._engines: dict = {}

    def engine(self, overlap: bool = True, **arguments):
        """(LLM, its scripted proposer), which knows the texts and errs nowhere; all drafts are verified."""
        key = (overlap, *arguments.items())
        if key not in self._engines:
            arguments = {"use_nextn_decode": N, "zero_overhead_scheduling": overlap} | arguments
            llm = LLM("tiny", **(self.arguments | arguments))
            self._engines[key] = llm, install(llm)
        llm, proposer = self._engines[key]
        proposer.texts, proposer.wrong = self.texts, lambda length, index: False
        set_widths(llm, N)
        return llm, proposer

    def close(self) -> None:
        for llm, _ in self._engines.values():
            llm.close()


@pytest.fixture(scope="module", params=MODES)
def setup(request):
    setup = Setup(*request.param)
    yield setup
    setup.close()


def test_batches_and_overlap_change_nothing(setup):
    with LLM("tiny", **setup.arguments) as overlapped:
        assert_same(generate(overlapped), setup.alone, setup.bitwise)
    with LLM("tiny", **setup.arguments, zero_overhead_scheduling=False) as plain:
        assert_same(generate(plain), setup.alone, setup.bitwise)


@pytest.mark.parametrize(
    ("accepted", "overlap"),
    [(2, True), (N, True), *(pytest.param(n, True, marks=SLOW) for n in (0, 4)),
     pytest.param(3, False, marks=SLOW)],
)  # fmt: skip
def test_every_accepted_length(setup, accepted, overlap):
    """The draft at place `accepted` is always the first wrong one."""
    llm, proposer = setup.engine(overlap)
    proposer.wrong = lambda length, index: index == accepted
    results = generate(llm)
    assert_same(results, setup.alone, setup.bitwise)
    for result in results:
        steps = -(-(len(result) - 1) // (accepted + 1))
        assert result.metrics.num_accepted_tokens == len(result) - 1 - steps
        assert result.metrics.num_draft_tokens >= result.metrics.num_accepted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
def test_every_width_of_verification(setup, width):
    """Both parities of the start come with the prompts, and steps of width + 1 tokens meet both again."""
    llm, proposer = setup.engine()
    set_widths(llm, width)
    proposer.wrong = lambda length, index: index == width - 1 and length % 3 == 0
    assert_same(generate(llm), setup.alone, setup.bitwise)


@pytest.mark.parametrize(("seed", "overlap"), [(0, True), pytest.param(1, False, marks=SLOW)])
def test_random_patterns_and_changing_widths(setup, seed, overlap):
    source = random.Random(seed)
    pattern = [source.random() < 0.35 for _ in range(997)]
    widths = [source.randrange(N + 1) for _ in range(101)]
    llm, proposer = setup.engine(overlap)
    proposer.wrong = lambda length, index: pattern[(length * 7 + index * 13) % 997]
    set_widths(llm, lambda step: widths[step % 101])
    assert_same(generate(llm), setup.alone, setup.bitwise)


def test_drafts_that_are_missing_are_harmless(setup):
    """One request has drafts, the others none (-1) in the same steps."""
    llm, proposer = setup.engine()
    proposer.texts = setup.texts[::2]
    assert_same(generate(llm), setup.alone, setup.bitwise)


@pytest.mark.slow
def test_memory_pressure_and_small_chunks(setup):
    """A pool too small for everybody: preempted in the middle of drafts, recomputed in chunks."""
    llm, proposer = setup.engine(num_kv_blocks=3, max_num_batched_tokens=100)
    proposer.wrong = lambda length, index: length % 3 > 0
    prompts = [PROMPTS[2]] * 3
    params = [PARAMS[2], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), PARAMS[2]]
    results = generate(llm, prompts, params)
    assert_same([results[0], results[2]], [setup.alone[2]] * 2, setup.bitwise)
    assert sum(result.metrics.num_preemptions for result in results) > 0


@pytest.mark.slow
def test_the_checkpoints_own_drafts(setup):
    """DSpark drafts of the random model, nearly all wrong, verified as they are worth: nothing shows in the output."""
    arguments = setup.arguments | {"use_nextn_decode": 2, "enable_mtp_varlen": True, "max_num_seqs": 1}
    with LLM("tiny", **arguments) as llm:
        assert_same(generate(llm), setup.alone, setup.bitwise)
        stats = llm.stats.speculation
    assert stats.generated.min() > 0
    assert (stats.verified >= stats.accepted).all()


def test_rules_inside_accepted_blocks(setup):
    """Stop ids, golden tokens, min_tokens and lengths in the middle of accepted drafts cut where they would without."""
    llm, proposer = setup.engine()
    greedy = setup.alone[0].token_ids
    fourth = greedy[3]
    params = [
        SamplingParams(temperature=0, max_tokens=11, stop_token_ids=[fourth], ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=11, stop_token_ids=[fourth], min_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=4, golden_token_ids=[-1, -1, 77], ignore_eos=True),
    ]
    prompts = [PROMPTS[0]] * 3
    with LLM("tiny", **setup.arguments, zero_overhead_scheduling=False) as plain:
        wanted = generate(plain, prompts, params)
    proposer.texts = [prompts[0] + result.token_ids for result in wanted] + [setup.texts[0]]
    results = generate(llm, prompts, params)
    assert_same(results, wanted, setup.bitwise)
    assert results[0].stop_reason == fourth
    assert len(results[0]) == greedy.index(fourth) + 1
    assert (results[2].token_ids[2], len(results[2]), results[2].finish_reason) == (77, 4, "length")


@pytest.mark.slow
def test_the_last_tokens_before_the_limit(setup):
    """SP01: drafts would lie beyond max_model_len, which is also the end of the last cache block the engine has."""
    llm, proposer = setup.engine(num_kv_blocks=3, max_num_batched_tokens=100)
    prompts = [prompt_of(381, 8)]
    params = [SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)]
    with LLM("tiny", **setup.arguments, zero_overhead_scheduling=False) as plain:
        wanted = generate(plain, prompts, params)
    proposer.texts = [prompts[0] + wanted[0].token_ids + [1] * N]  # right as far as there is an output
    assert_same(generate(llm, prompts, params), wanted, setup.bitwise)
    assert (len(wanted[0]), wanted[0].finish_reason) == (3, "length")
    proposer.texts = []
    assert_same(generate(llm, prompts, params), wanted, setup.bitwise)


@pytest.mark.slow
def test_rejection_rule_gives_greedy_and_seeded_requests_their_due(setup):
    """Greedy output is the same under either rule; a seed gives the same output again."""
    llm, _ = setup.engine(verification="rejection")
    results = generate(llm)
    assert_same(results[:1], setup.alone[:1], setup.bitwise)
    assert [len(result) for result in results] == [len(result) for result in setup.alone]
    again = generate(llm)
    assert [result.token_ids for result in again] == [result.token_ids for result in results]
