"""How long the engine itself takes for a step: everything but the model.

Used by the benchmark. `InstantExecutor` answers every step at once, so that the time of `Engine.step` is that of
planning, building the batch, committing and reporting. Also `python -m deepinfer.testing.overhead`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import ModelInfo
from deepinfer.environ import Settings
from deepinfer.runner.inputs import CacheCapacity, StepBatch, StepResult
from deepinfer.sample.rows import SampledRows
from deepinfer.sampling_params import SamplingParams

_VOCAB = 1000
_TOKEN = 7


@dataclass(slots=True)
class _Done:
    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


class InstantExecutor:
    """An executor without a model: every sampled row yields the same token, at once."""

    def __init__(self, capacity: CacheCapacity) -> None:
        self.capacity = capacity

    def launch(self, batch: StepBatch) -> _Done:
        """The result of the step, made of constants."""
        count = batch.sampling.num_rows
        tokens = np.full(count, _TOKEN, dtype=np.int64)
        rows = SampledRows(tokens, np.zeros(count, dtype=np.float32), None, None, None, [None] * count)
        return _Done(StepResult(rows))

    def zero_slots(self, slots: Sequence[int]) -> None:
        """Nothing to reset."""

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True, slots=True)
class _Limits:
    max_position_embeddings: int = 1 << 20
    sliding_window: int = 128


@dataclass(frozen=True, slots=True)
class _Model:
    text: _Limits = _Limits()


def instant_engine(running: int, max_model_len: int) -> Engine:
    """An engine over an InstantExecutor with room for `running` sequences of `max_model_len` tokens."""
    config = EngineConfig.create(
        Settings(gc_interval_step=0, logging_interval_step=0),
        model="none",
        max_model_len=max_model_len,
        max_num_seqs=running,
    ).resolve(_Model())
    blocks = running * -(-max_model_len // 128) + 1
    executor = InstantExecutor(CacheCapacity(blocks, config.num_state_slots))
    return Engine(config, executor, None, ModelInfo(_VOCAB, eos_ids=(1,)))


def decode_step_seconds(running: int = 256, steps: int = 500, prompt_len: int = 300) -> list[float]:
    """Seconds of each of `steps` decode steps with `running` sequences, block borders included."""
    engine = instant_engine(running, prompt_len + steps + 64)
    params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=steps + 32, ignore_eos=True)
    for number in range(running):
        engine.add_request(token_ids=[_TOKEN] * (prompt_len + number % 7), params=params)
    while engine.scheduler.num_waiting or engine.stats.decode_steps < 10:
        engine.step()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    assert engine.scheduler.num_running == running
    engine.close()
    return seconds


if __name__ == "__main__":
    for count in (1, 32, 256):
        times = np.array(decode_step_seconds(count)) * 1000
        middle, mean, most = np.median(times), times.mean(), times.max()
        print(f"{count:4d} running: median {middle:.3f} ms, mean {mean:.3f} ms, max {most:.3f} ms a step")
