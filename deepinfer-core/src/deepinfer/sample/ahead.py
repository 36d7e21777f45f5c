"""Rows of decode steps with drafts: who they belong to, where they are, and which rules hold there, all on the device.

The model runner makes `VerifyRows`; the sampler evaluates `AheadRules` with them. Integer arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.sample.rows import AheadRules


@dataclass(slots=True)
class VerifyRows:
    """R rows of n sequences; a sequence's row j scores its draft j, its last row has none.

    counts          int64 [n]  rows of each sequence, host data
    starts          [n] int64  first row of each
    sequence        [R] int64  sequence of each row
    positions       [R] int64  absolute index of the token each row produces
    draft_ids       [R] int64  the draft each row scores, -1 = none
    draft_logprobs  [R, V] float32  the distribution it was drawn from, None unless the rule needs it
    """

    counts: np.ndarray
    starts: torch.Tensor
    sequence: torch.Tensor
    positions: torch.Tensor
    draft_ids: torch.Tensor
    draft_logprobs: torch.Tensor | None = None

    @property
    def verifies(self) -> bool:
        """At least one sequence has more than one row."""
        return len(self.sequence) > len(self.counts)


def forbid_ahead(logits: torch.Tensor, rules: AheadRules, rows: VerifyRows, eos_ids: np.ndarray) -> torch.Tensor:
    """Logits [R, V] with the ids at -inf that may not come yet at their position; `logits` itself without any."""
    cells = _cells(rules, eos_ids, logits.shape[-1])
    if not len(cells):
        return logits
    row, token, until = _tensor(cells, logits).unbind(1)
    out = logits.clone()
    out[row, token] = torch.where(rows.positions[row] < until, -torch.inf, logits[row, token])
    return out


def _cells(rules: AheadRules, eos_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """int64 [m, 3]: (row, token id, position from which it is possible), each pair of row and id once."""
    late = np.flatnonzero(rules.eos_from > 0)
    ends = [np.repeat(late, len(eos_ids)), np.tile(eos_ids, len(late)), np.repeat(rules.eos_from[late], len(eos_ids))]
    found = np.stack(ends, 1).astype(np.int64)
    if rules.forbidden is not None:
        found = np.concatenate((found, rules.forbidden[rules.forbidden[:, 1] < vocab_size]))
    counts = rules.counts[found[:, 0]]
    cells = np.repeat(found, counts, axis=0)
    places = np.arange(len(cells)) - np.repeat(np.cumsum(counts) - counts, counts)
    cells[:, 0] = (np.cumsum(rules.counts) - rules.counts)[cells[:, 0]] + places
    cells = cells[np.argsort(-cells[:, 2], kind="stable")]  # where two rules meet, the stricter one counts
    _, first = np.unique(cells[:, 0] * vocab_size + cells[:, 1], return_index=True)
    return cells[first]


def golden_ahead(rules: AheadRules, rows: VerifyRows) -> torch.Tensor | None:
    """[R] int64: the forced token of each row, -1 = free; None if nobody forces any."""
    if rules.golden is None or rules.golden_from is None:
        return None
    golden = _tensor(rules.golden.astype(np.int64), rows.positions)
    place = rows.positions - _tensor(rules.golden_from, rows.positions)[rows.sequence]
    inside = (place >= 0) & (place < golden.shape[1])
    return torch.where(inside, golden[rows.sequence, place.clamp(0, golden.shape[1] - 1)], -1)


def _tensor(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)
