"""A whole engine on a small random checkpoint, run over fixed texts: what level 4, bisection and `against` compare.

Texts are *forced*: every generated token is given, so that two engines see equal inputs whatever they would have said,
and the log-probabilities of every prompt token and of the whole vocabulary after it can be compared. Two checkpoints:
in `micro` rows select a few entries of many, which amplifies rounding; in `calm` they select all of them, so that
rounding stays small and comparisons are sharp.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.entrypoints.build import build_engine
from deepinfer.entrypoints.llm import LLM
from deepinfer.environ import Settings
from deepinfer.hooks import LoadedBackend
from deepinfer.hooks.trace import Wrapper
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from deepinfer.testing.checkpoint import write_checkpoint
from deepinfer.testing.results import Failure

MICRO, CALM = "micro", "calm"

CALM_OVERRIDES = {"index_topk": 512, "candidate_topk_blocks": 64}
"""What `calm` changes in `micro`: every entry of a context up to 512 is selected."""

MAX_LENGTH = 512
"""Longest text, prompt and generated tokens together."""

SEQUENCES = 4


def configuration(name: str) -> ModelConfig:
    """One of the two configurations."""
    config = ModelConfig.builtin(MICRO)
    if name == MICRO:
        return config
    raw = copy.deepcopy(dict(config.raw))
    raw["text_config"].update(CALM_OVERRIDES)
    return ModelConfig.from_dict(raw)


class Checkpoints:
    """Writes each checkpoint once, into a folder that goes when this object does."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._folder = tempfile.TemporaryDirectory(prefix="deepinfer-conformance-")

    def path(self, name: str) -> Path:
        """Directory of a checkpoint."""
        place = Path(self._folder.name) / name
        return place if place.exists() else write_checkpoint(configuration(name), place, self._seed)


@dataclass(frozen=True)
class Script:
    """Prompts and, for each, the tokens that are forced after it. vocabulary: number of token ids."""

    prompts: tuple[tuple[int, ...], ...]
    forced: tuple[tuple[int, ...], ...]
    vocabulary: int

    @classmethod
    def make(cls, lengths: Sequence[int], tokens: int, vocabulary: int, seed: int) -> Script:
        """Random prompts of these lengths, and random tokens after them."""
        draw = random.Random(seed)

        def text(count: int) -> tuple[int, ...]:
            return tuple(draw.randrange(3, vocabulary - 20) for _ in range(count))

        return cls(tuple((0, *text(n - 1)) for n in lengths), tuple(text(tokens) for _ in lengths), vocabulary)


@dataclass(frozen=True)
class Forced:
    """Log-probabilities of a forced run, one array a prompt.

    prompt   [n - 1]  of prompt token i + 1 after the tokens before it; None where the engine computes none
    decode   [tokens, V]  of every token after the prompt and the forced tokens so far; [tokens, 1] of the forced ones
             alone where the vocabulary is large
    preempted  how often a sequence lost its cache and was computed again
    """

    prompt: list[np.ndarray] | None
    decode: list[np.ndarray]
    preempted: int = field(default=0, compare=False)


@contextmanager
def engine(
    model: str | Path,
    loaded: LoadedBackend,
    settings: Settings | None = None,
    wrappers: Sequence[Wrapper] = (),
    **arguments: Any,
) -> Iterator[LLM]:
    """An engine on an opened backend.

    settings   None: core's defaults, whatever the environment says
    arguments  of `EngineConfig`, fields of `settings` included
    """
    defaults = {"max_num_seqs": SEQUENCES, "max_model_len": MAX_LENGTH, "num_kv_blocks": SEQUENCES * MAX_LENGTH // 128}
    config = EngineConfig.create(settings or Settings(), model=str(model), **defaults | arguments)
    with LLM.from_engine(*build_engine(config, loaded, wrappers)) as llm:
        yield llm


def forced(llm: LLM, script: Script, score_prompts: bool = True) -> Forced:
    """Run a script; Failure if a request fails."""
    everything = script.vocabulary <= MAX_TOP_LOGPROBS
    params = [
        SamplingParams(
            temperature=1.0, max_tokens=len(tokens), ignore_eos=True, golden_token_ids=tokens, seq_seed=1,
            prompt_logprobs=score_prompts, top_logprobs=script.vocabulary if everything else 0,
        )
        for tokens in script.forced
    ]  # fmt: skip
    outputs = _generate(llm, script.prompts, params)
    prompt = [np.array(output.prompt_logprobs[1:]) for output in outputs] if score_prompts else None
    if everything:
        decode = [np.stack([_dense(top, script.vocabulary) for top in output.top_logprobs]) for output in outputs]
    else:
        decode = [np.array(output.logprobs)[:, None] for output in outputs]
    return Forced(prompt, decode, sum(output.metrics.num_preemptions for output in outputs))


def _dense(top: Any, vocabulary: int) -> np.ndarray:
    """Log-probabilities [V] by token id."""
    values = np.full(vocabulary, -np.inf)
    values[top.ids] = top.logprobs
    return values


def _generate(llm: LLM, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
    ids = [list(prompt) for prompt in prompts]
    outputs: list[Any] = llm.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)
    errors = [f"prompt {o.index}: {o.error}" for o in outputs if o.error is not None]
    if errors:
        raise Failure("requests failed: " + "; ".join(errors))
    return outputs


def greedy(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[int, ...]]:
    """Greedy tokens after every prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return [tuple(output.token_ids) for output in _generate(llm, prompts, params)]


def sampled(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[int, ...]]:
    """Tokens drawn with a seed of each prompt's own."""
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, top_k=50, max_tokens=tokens, ignore_eos=True, seq_seed=seed)
        for seed in range(len(prompts))
    ]
    return [tuple(output.token_ids) for output in _generate(llm, prompts, params)]
