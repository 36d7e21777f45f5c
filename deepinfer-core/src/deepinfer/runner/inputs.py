"""What crosses the line between engine and runner: a step's batch going down, its result coming back.

The engine builds a `StepBatch` from its scheduling decision, hands it to an `Executor` and later commits the
`StepResult`. Nothing here knows requests, texts or policies; nothing here knows a device.

A *step* is one forward over `n` sequences with `Q` new tokens (rows) in total; a *slot* is the per-sequence state
(window rings, compressor state), a *block* is `block_size` tokens of paged cache. Slot 0 and block 0 are never handed
out: they are the targets of padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepinfer.sample.sampler import SampledRows, SamplingBatch

StepKind = Literal["prefill", "decode"]

HISTORY = 3
"""tokens before a step's first new one that n-gram lookups need"""


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """Sizes of the executor's caches. Both counts include id 0, which is never handed out.

    num_blocks   block ids 0 .. num_blocks - 1
    num_slots    slot ids 0 .. num_slots - 1
    block_size   tokens of a block
    """

    num_blocks: int
    num_slots: int
    block_size: int = 128


@dataclass(slots=True)
class StepBatch:
    """Everything a step needs, flattened over its `n` sequences: `Q = q_lens.sum()` rows. All host arrays.

    step_id          running number of the step
    kind             "prefill" (chunks of prompts) or "decode" (one row a sequence); never mixed
    slots            [n]     int64  state slot of each sequence
    q_starts         [n]     int64  tokens already in the sequence's caches = position of its first new row
    q_lens           [n]     int64  new rows, at least one
    token_ids        [Q]     int64  the new tokens, sequence after sequence
    history          [n, 3]  int64  raw token ids before `q_starts`, nearest LAST; -1 = before the beginning
    block_table      [n, B]  int32  blocks in order of position; unused entries are 0
    data_lens        [n]     int64  length the (re)prefill of the sequence runs to: prompt plus recomputed tokens
    sampled          [n]     bool   True: the last row yields a token (decode, or the last chunk of a prompt)
    sampling         parameters of the sampled sequences, in order
    prompt_logprobs  [n]     bool   True: log-probabilities of `prompt_targets` are wanted for this sequence's rows
    prompt_targets   [Q]     int64  prompt token that follows each row; -1 = none (last prompt row, generated rows)
    """

    step_id: int
    kind: StepKind
    slots: np.ndarray
    q_starts: np.ndarray
    q_lens: np.ndarray
    token_ids: np.ndarray
    history: np.ndarray
    block_table: np.ndarray
    data_lens: np.ndarray
    sampled: np.ndarray
    sampling: SamplingBatch
    prompt_logprobs: np.ndarray
    prompt_targets: np.ndarray

    @property
    def num_sequences(self) -> int:
        """n."""
        return len(self.slots)

    @property
    def num_rows(self) -> int:
        """Q."""
        return len(self.token_ids)


@dataclass(slots=True)
class StepResult:
    """What a step produced.

    rows             one row per *sampled* sequence, in the batch's order
    prompt_logprobs  {index of the sequence in the batch: float32 [q_len]}, entry j scores `prompt_targets` of row j;
                     entries without a target are meaningless. Only sequences that asked for them are present.
    """

    rows: SampledRows
    prompt_logprobs: dict[int, np.ndarray] = field(default_factory=dict)


class StepHandle(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step and return what it produced; raises what the step raised."""
        ...


class Executor(Protocol):
    """Runs steps. One implementation drives a worker in this process, another several ranks."""

    @property
    def capacity(self) -> CacheCapacity:
        """Sizes of the allocated caches."""
        ...

    def launch(self, batch: StepBatch) -> StepHandle:
        """Start a step and return at once where the device allows it; steps run in launch order."""
        ...

    def zero_slots(self, slots: Sequence[int]) -> None:
        """Reset the state of these slots before their next owner's first step."""
        ...

    def close(self) -> None:
        """Give the device back. Idempotent."""
        ...
