"""What crosses the line between engine and runner: a step's batch going down, its result coming back.

The engine builds a `StepBatch` from its scheduling decision, hands it to an `Executor` and later commits the
`StepResult`. Nothing here knows requests, texts or policies; nothing here knows a device.

A *step* is one forward over `n` sequences with `Q` new tokens (rows) in total; a *slot* is the per-sequence state
(window rings, compressor state), a *block* is `block_size` tokens of paged cache. Slot 0 and block 0 are never handed
out: they are the targets of padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deepinfer.sample.rows import SampledRows, SamplingBatch
    from deepinfer.speculate.costs import CostModel

StepKind = Literal["prefill", "decode"]

HISTORY = 3
"""tokens before a step's first new one that n-gram lookups need"""


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """Sizes of the executor's caches. Both counts include id 0, which is never handed out.

    num_blocks   block ids 0 .. num_blocks - 1
    num_slots    slot ids 0 .. num_slots - 1
    block_size   tokens of a block
    num_snapshots   slots behind those that hold copies for the prefix cache: ids num_slots .. num_slots +
                 num_snapshots - 1
    """

    num_blocks: int
    num_slots: int
    block_size: int = 128
    num_snapshots: int = 0


class MaskSource(Protocol):
    """Grammar masks that depend on tokens of the step before, which the host knows only after committing it."""

    def result(self, rows: np.ndarray | None = None) -> np.ndarray | None:
        """int32 [R, ceil(V/32)] as `SamplingBatch.allowed_mask`, None = no restriction. May block until the engine has
        committed the step before.

        rows  int64 [R] the rows that are wanted, where the last ones of some sequences are not; None = all
        """
        ...

    def open(self) -> None:
        """The step before is committed."""
        ...

    def cancel(self) -> None:
        """The step before will never be committed: let `result` return."""
        ...


@dataclass(frozen=True, slots=True)
class SomeMasks:
    """The masks of some rows, int64 [m] indices, of a source for more."""

    source: MaskSource
    kept: np.ndarray

    def result(self, rows: np.ndarray | None = None) -> np.ndarray | None:
        """See `MaskSource`."""
        return self.source.result(self.kept if rows is None else self.kept[rows])

    def open(self) -> None:
        """See `MaskSource`."""
        self.source.open()

    def cancel(self) -> None:
        """See `MaskSource`."""
        self.source.cancel()


@dataclass(slots=True)
class StepBatch:
    """Everything a step needs, flattened over its `n` sequences: `Q = q_lens.sum()` rows. All host arrays.

    A step may be launched before the one before it is committed. What the host does not know then, the device does
    (`StepFeedback`): the tokens of decode rows always, and with drafts also where each sequence really stands.

    step_id          running number of the step
    kind             "prefill" (chunks of prompts) or "decode" (the newest token and drafts behind it); never mixed
    slots            [n]     int64  state slot of each sequence
    q_starts         [n]     int64  tokens already in the sequence's caches = position of its first new row
    q_lens           [n]     int64  new rows, at least one; in decode 1 + the drafts to verify
    token_ids        [Q]     int64  the new tokens, sequence after sequence; -1 = the device knows it (decode)
    history          [n, 3]  int64  raw token ids before `q_starts`, nearest LAST; -1 = before the beginning (prefill)
    block_table      [n, B]  int32  blocks in order of position; unused entries are 0
    data_lens        [n]     int64  length the (re)prefill of the sequence runs to: prompt plus recomputed tokens
    sampled          [n]     bool   True: its rows yield tokens (decode), or its last row does (last chunk of a prompt)
    sampling         parameters of the rows that yield tokens, in order: every row of a decode step, the last row of a
                     sampled prompt chunk
    prompt_logprobs  [n]     bool   True: log-probabilities of `prompt_targets` are wanted for this sequence's rows
    prompt_targets   [Q]     int64  prompt token that follows each row; -1 = none (last prompt row, generated rows)
    optimistic       `q_starts` are upper bounds that hold if every draft in flight is accepted; the device has the
                     true ones
    draft            propose tokens for the next step of the sampled sequences
    choose           None, or asked once by the runner as it begins the step, with the confidences [n, N] of the drafts
                     at hand: int64 [n] drafts that are worth verifying, of the `q_lens - 1` that were planned
    snapshots        (sequence, end, slot): the state as it is behind `end` tokens, which the step reaches or passes,
                     goes to this slot as well (prefill)
    prefixes         {sequence: tokens before its first row} of those that go on from a snapshot (prefill)
    masks            None, or asked once by the runner after the forward and before sampling; its result takes the
                     place of `sampling.allowed_mask`
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
    optimistic: bool = False
    draft: bool = False
    choose: Callable[[np.ndarray], np.ndarray] | None = None
    masks: MaskSource | None = None
    snapshots: Sequence[tuple[int, int, int]] = ()
    prefixes: dict[int, np.ndarray] = field(default_factory=dict)

    def narrowed(self, counts: np.ndarray) -> StepBatch:
        """The decode batch with `counts` [n] rows a sequence, at most those planned: the last drafts are left out."""
        starts = np.cumsum(self.q_lens) - self.q_lens
        places = np.arange(self.num_rows) - np.repeat(starts, self.q_lens)
        rows = np.flatnonzero(places < np.repeat(counts, self.q_lens))
        return replace(
            self,
            q_lens=counts,
            token_ids=self.token_ids[rows],
            prompt_targets=self.prompt_targets[rows],
            sampling=self.sampling.narrowed(rows, counts),
            masks=None if self.masks is None else SomeMasks(self.masks, rows),
        )

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
    """What a step produced, for its `s` sampled sequences in the batch's order.

    rows             the rows that yield tokens, as in `StepBatch.sampling`
    prompt_logprobs  {index of the sequence in the batch: float32 [q_len]}, entry j scores `prompt_targets` of row j;
                     entries without a target are meaningless. Only sequences that asked for them are present.
    accepted         int64 [s] drafts accepted: a sequence emits the tokens of its first `accepted + 1` rows, the others
                     are void; None = one row a sequence
    counts           int64 [s] rows of each sequence; None = one each
    drafts           what is proposed for each sequence's next step; None without a proposer
    timing           when the device worked
    """

    rows: SampledRows
    prompt_logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    accepted: np.ndarray | None = None
    counts: np.ndarray | None = None
    drafts: DraftRows | None = None
    timing: StepTiming | None = None


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Proposed tokens of `s` sequences.

    token_ids    int64   [s, N]  -1 = none
    confidences  float32 [s, N]  predicted chance that the draft is accepted if those before it are, 0 .. 1
    """

    token_ids: np.ndarray
    confidences: np.ndarray


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Milliseconds of a step on its device.

    busy    from the first to the last work of the step
    waited  from the end of the step before to the first work of this one
    """

    busy: float
    waited: float


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
        """Start a step and return without waiting for it; steps run in launch order. A failure is raised here or by the
        handle."""
        ...

    def zero_slots(self, slots: Sequence[int]) -> None:
        """Reset the state of these slots after the steps launched so far and before the next one."""
        ...

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy state slots (from, to), after the steps launched and the copies and resets asked for so far and before
        the next step. Only asked for if there are snapshots."""
        ...

    @property
    def chooses(self) -> bool:
        """Confidences are host data when a step begins, so that `StepBatch.choose` costs no wait."""
        ...

    def costs(self) -> CostModel:
        """What steps cost on this device, measured when first asked for; only with drafts."""
        ...

    def close(self) -> None:
        """Give the device back. Idempotent."""
        ...
