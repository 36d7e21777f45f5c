"""What crosses the sampler's door: `SamplingBatch` in, `PendingRows` on the device, `SampledRows` back on the host.

The engine fills the first and reads the last; the runner may hand `PendingRows.token_ids` to the next step before
anybody waits. Plain data, no choices made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.reference.sampling import (
    LOGPROB_FLOOR,
    STATUS_EMPTY,
    STATUS_INF,
    STATUS_MASKED,
    STATUS_NAN,
    STATUS_OK,
)
from deepinfer.sampling_params import SamplingParams

_STATUS_TEXT = {
    STATUS_NAN: "non-finite logits: NaN",
    STATUS_INF: "non-finite logits: +inf",
    STATUS_EMPTY: "non-finite logits: no finite value",
    STATUS_MASKED: "no token is allowed by the masks",
}


@dataclass(slots=True)
class SamplingBatch:
    """What the R sampled rows of a step want, as numpy arrays with one entry a row.

    temperature       float32  0 (or up to `GREEDY_TEMPERATURE`) = greedy
    top_p             float32  (0, 1], 1 = off
    top_k             int32    -1 = off
    seed              uint64   the request's stream (`SamplingParams.seed_for`)
    position          int64    absolute index, prompt included, of the token this row produces
    num_top_logprobs  int32    most likely tokens to report
    forbid_eos        bool     end tokens are impossible in this row
    golden            int32    forced token, -1 = free
    forbidden         int64 [m, 2] or None   further (row, token id) pairs that are impossible, e.g. stop ids before
                               `min_tokens`
    allowed_mask      int32 [R, ceil(V/32)] or None   grammar: bit `id % 32` of word `id // 32` set = allowed
    """

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    seed: np.ndarray
    position: np.ndarray
    num_top_logprobs: np.ndarray
    forbid_eos: np.ndarray
    golden: np.ndarray
    forbidden: np.ndarray | None = None
    allowed_mask: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.temperature)

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        output_indices: Sequence[int],
    ) -> SamplingBatch:
        """A batch of rows that produce generated token `output_indices[r]` (0 = first) of a request with `params[r]`.

        Stop token ids are impossible before `min_tokens`, as end tokens are.
        """
        early = [(row, token) for row, (p, o) in enumerate(zip(params, output_indices, strict=True))
                 if o < p.min_tokens for token in p.stop_token_ids]  # fmt: skip
        return cls(
            temperature=np.array([p.temperature for p in params], np.float32),
            top_p=np.array([p.top_p for p in params], np.float32),
            top_k=np.array([p.top_k for p in params], np.int32),
            seed=np.array(seeds, np.uint64),
            position=np.array(positions, np.int64),
            num_top_logprobs=np.array([p.num_top_logprobs for p in params], np.int32),
            forbid_eos=np.array([p.forbids_eos_at(o) for p, o in zip(params, output_indices, strict=True)], bool),
            golden=np.array([p.golden_at(o) for p, o in zip(params, output_indices, strict=True)], np.int32),
            forbidden=np.array(early, np.int64) if early else None,
        )


@dataclass(slots=True)
class SampledRows:
    """Result of sampling R rows, on the host.

    token_ids     int64   [R]     -1 where `error` is set
    logprobs      float32 [R]     logprob of the token under the processed distribution, floor -9999
    top_ids       int64   [R, k]  most likely tokens, best first, ties to the lower id; k = the batch's maximum, row r
                                  uses its first num_top_logprobs[r]; None if nobody asked
    top_logprobs  float32 [R, k]
    sum_smaller   float32 [R]     inclusive ascending CDF at the token; None if not computed
    error         one entry a row: None, or why no token could be chosen
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None
    sum_smaller: np.ndarray | None
    error: list[str | None]


@dataclass(slots=True)
class PendingRows:
    """Rows whose sampling has been issued on the device; `result` waits for it.

    token_ids  [R] int64 on the device, forced tokens already in place: the feedback of the next step
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    status: torch.Tensor
    top: tuple[torch.Tensor, torch.Tensor] | None
    sum_smaller: torch.Tensor | None
    batch: SamplingBatch
    vocab_size: int

    def result(self) -> SampledRows:
        """Copy to the host and put errors into words."""
        error = self._errors(self.status.cpu().numpy())
        failed = np.array([text is not None for text in error], bool)
        top_ids, top_logprobs = (None, None) if self.top is None else (t.cpu().numpy() for t in self.top)
        return SampledRows(
            token_ids=np.where(failed, -1, self.token_ids.cpu().numpy()),
            logprobs=np.where(failed, np.float32(LOGPROB_FLOOR), self.logprobs.cpu().numpy()),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            sum_smaller=None if self.sum_smaller is None else self.sum_smaller.cpu().numpy(),
            error=error,
        )

    def _errors(self, status: np.ndarray) -> list[str | None]:
        """One entry a row from its status code and its golden token."""
        error: list[str | None] = [None] * len(status)
        for row in np.flatnonzero(self.batch.golden >= self.vocab_size):
            token, last = self.batch.golden[row], self.vocab_size - 1
            error[row] = f"golden_token_ids: {token} is outside the vocabulary, ids are 0 .. {last}"
        for row in np.flatnonzero(status != STATUS_OK):
            error[row] = f"{_STATUS_TEXT[int(status[row])]}; no token for position {self.batch.position[row]}"
        return error
