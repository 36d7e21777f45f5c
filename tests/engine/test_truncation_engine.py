"""Truncated prefill through the engine: mask = compact, in one piece, in chunks, after a prefix hit, after preemption;
and the example that says so exits accordingly."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

from deepinfer import LLM, SamplingParams

KEEP = 20
PARAMS = SamplingParams(temperature=0.7, seq_seed=2, max_tokens=4, ignore_eos=True)


def text(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [0] + [generator.randrange(3, 400) for _ in range(length - 1)]


def serve(directory, mode: str, prompts, **arguments):
    with LLM(
        str(directory), batch_invariant=True, max_model_len=200, max_num_seqs=3, yoco_prefill_truncation_mode=mode,
        yoco_prefill_keep_tokens=KEEP if mode != "off" else 0, **arguments,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS, use_tqdm=False)
    assert not any(output.failed for output in outputs)
    return [(output.token_ids, output.logprobs) for output in outputs]


def test_mask_equals_compact_whole_and_in_chunks(checkpoints):
    prompts = [text(70, 1), text(20, 2), text(33, 3)]
    reference = serve(checkpoints("micro"), "mask", prompts)
    assert serve(checkpoints("micro"), "compact", prompts) == reference
    assert serve(checkpoints("micro"), "compact", prompts, max_num_batched_tokens=17) == reference
    off = serve(checkpoints("micro"), "off", prompts)
    assert off[1] == reference[1], "a prompt that is kept whole is not truncated"
    assert off[0][1] != reference[0][1], "a longer one is"


def test_a_scored_prompt_is_refused_and_harms_nobody(checkpoints):
    with LLM(
        str(checkpoints("micro")), max_model_len=100, max_num_seqs=2, yoco_prefill_truncation_mode="compact",
        yoco_prefill_keep_tokens=KEEP,
    ) as llm:  # fmt: skip
        params = [SamplingParams(max_tokens=2, prompt_logprobs=True), SamplingParams(max_tokens=2, ignore_eos=True)]
        bad, good = llm.generate(prompt_token_ids=[text(30, 1)] * 2, sampling_params=params, use_tqdm=False)
    assert "YOCO" in str(bad.error)
    assert len(good) == 2


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parents[2] / "examples" / "yoco" / "yoco_equiv.py"
    spec = importlib.util.spec_from_file_location("yoco_equiv", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_example_finds_mask_and_compact_equal(example, checkpoints, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("the quick brown fox " * 12 + "\nshort\n")
    arguments = ["--model", str(checkpoints("micro")), "--keep", str(KEEP), "--max-tokens", "3"]
    assert example.main([*arguments, "--prompts", str(tmp_path / "prompts.txt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all("2 of 2 prompts equal to mask, whole" in line for line in lines)


def test_the_example_exits_with_1_where_there_is_a_difference(example, checkpoints, tmp_path, capsys, monkeypatch):
    """A decoder half that sees everything and one that does not."""
    (tmp_path / "prompts.txt").write_text("the quick brown fox " * 5)
    arguments = ["--model", str(checkpoints("micro")), "--keep", str(KEEP), "--max-tokens", "2", "--modes", "off"]
    whole = example.runs
    monkeypatch.setattr(example, "runs", lambda modes, chunk: [whole(["off"], chunk)[0], whole(["compact"], chunk)[0]])
    assert example.main([*arguments, "--prompts", str(tmp_path / "prompts.txt")]) == 1
    assert "prompt 0, token 0" in capsys.readouterr().out


def test_a_difference_in_the_last_bit_counts(example):
    assert example.difference(([5, 6], [-1.0, -2.0]), ([5, 6], [-1.0, -2.0000002])).startswith("token 1: 6")
    assert example.difference(([5, 6], [-1.0, -2.0]), ([5, 7], [-1.0, -2.0])).startswith("token 1: 7")
    assert example.difference(([5, 6], [-1.0, -2.0]), ([5, 6], [-1.0, -2.0])) is None
