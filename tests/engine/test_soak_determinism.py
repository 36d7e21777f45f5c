"""Determinism of the whole engine on a model: however a request is served, it gets the same tokens and logprobs, bit
for bit, with order-free sums; and so it does in another process."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer import LLM, SamplingParams


def text(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [0] + [generator.randrange(3, 400) for _ in range(length - 1)]


PROMPT, OTHERS = text(124, 1), [text(124, 2), text(9, 3)]
PARAMS = SamplingParams(temperature=0.8, top_p=0.95, seq_seed=7, max_tokens=8, ignore_eos=True, top_logprobs=2)


def serve(directory, prompts, **arguments):
    """[(tokens, logprobs, top logprobs)] and the number of preemptions."""
    arguments = {"max_num_seqs": 3, "max_model_len": 200, "batch_invariant": True} | arguments
    with LLM(str(directory), **arguments) as llm:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS, use_tqdm=False)
        preemptions = llm.stats.preemptions
    assert not any(output.failed for output in outputs), outputs
    tops = [[record.top_logprobs for record in output] for output in outputs]
    return [(o.token_ids, o.logprobs, top) for o, top in zip(outputs, tops, strict=True)], preemptions


@pytest.fixture(scope="module")
def alone(checkpoints):
    """What the prompt gets alone, in one piece, step after step."""
    return serve(checkpoints("micro"), [PROMPT], zero_overhead_scheduling=False)[0][0]


def test_in_a_batch(checkpoints, alone):
    assert serve(checkpoints("micro"), [OTHERS[1], PROMPT, OTHERS[0]])[0][1] == alone


@pytest.mark.parametrize("chunk", [5, 64])
def test_in_chunks(checkpoints, alone, chunk):
    assert serve(checkpoints("micro"), [PROMPT], max_num_batched_tokens=chunk)[0][0] == alone


def test_preempted_and_recomputed(checkpoints, alone):
    """Three blocks for two requests that end with two each: the second loses its memory when the first needs more."""
    results, preemptions = serve(checkpoints("micro"), [OTHERS[0], PROMPT], num_kv_blocks=3)
    assert preemptions > 0
    assert results[1] == alone


@pytest.mark.slow
def test_in_another_process(checkpoints, alone, tmp_path):
    """A fixed seed gives the same there; hash randomization and thread start-up differ."""
    script = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_soak_determinism import PROMPT, serve
print(json.dumps(serve({str(checkpoints("micro"))!r}, [PROMPT])[0][0][:2]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [alone[0], alone[1]]
