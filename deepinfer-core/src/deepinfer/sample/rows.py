"""What crosses the sampler's door: `SamplingBatch` in, `SampledRows` out.

The engine fills the first and reads the last. Plain host data; nothing here imports torch, so that an engine can be
described before a backend has set up the process torch will run in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from deepinfer.sampling_params import SamplingParams


@dataclass(slots=True)
class AheadRules:
    """What of a row depends on its position, for rows whose position only the device knows (drafts in flight).

    Rows come sequence after sequence, `counts` of them; row j of a sequence produces the j-th token behind the first.

    counts       int64 [n]     rows of each sequence, at least one
    eos_from     int64 [n]     first position that may hold an end token, 0 = they all may
    golden       int32 [n, w]  forced tokens of the positions from `golden_from` on, -1 = free; None if nobody has any
    golden_from  int64 [n]
    forbidden    int64 [m, 3]  (sequence, token id, position from which it is possible), or None
    """

    counts: np.ndarray
    eos_from: np.ndarray
    golden: np.ndarray | None = None
    golden_from: np.ndarray | None = None
    forbidden: np.ndarray | None = None


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
    ahead             None, or rules that take the place of position, forbid_eos, golden and forbidden, which are then
                      void
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
    ahead: AheadRules | None = None

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.temperature)

    def narrowed(self, rows: np.ndarray, counts: np.ndarray) -> SamplingBatch:
        """Rows int64 [m] of a batch with `ahead` rules, `counts` of them a sequence."""
        assert self.ahead is not None
        special = {
            "forbidden": None,
            "allowed_mask": None if self.allowed_mask is None else self.allowed_mask[rows],
            "ahead": replace(self.ahead, counts=counts),
        }
        names = (entry.name for entry in fields(self) if entry.name not in special)
        return SamplingBatch(**{name: getattr(self, name)[rows] for name in names}, **special)

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

    def take(self, rows: np.ndarray) -> SampledRows:
        """Some of the rows, int64 [m] indices."""
        parts = (
            None if values is None else values[rows] for values in (self.top_ids, self.top_logprobs, self.sum_smaller)
        )
        error = [self.error[row] for row in rows.tolist()]
        return SampledRows(self.token_ids[rows], self.logprobs[rows], *parts, error)
