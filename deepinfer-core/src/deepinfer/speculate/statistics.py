"""Counts of speculation over the life of an engine: what was proposed, verified and accepted, by position.

Filled by the engine's commits, read by logs and benchmarks.
"""

from __future__ import annotations

import numpy as np

from deepinfer.speculate.confidence import cumulative


class SpeculationStats:
    """All arrays have one entry a draft position, int64 or float64 [N].

    generated  drafts that were proposed
    verified   of them, those that a step tried
    accepted   of those, the ones that became output
    promised   sum of the verified drafts' predicted chances (cumulative confidences)
    """

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        num_drafts = self._num_drafts
        self.generated = np.zeros(num_drafts, dtype=np.int64)
        self.verified = np.zeros(num_drafts, dtype=np.int64)
        self.accepted = np.zeros(num_drafts, dtype=np.int64)
        self.promised = np.zeros(num_drafts)
        self._judged = np.zeros(num_drafts, dtype=np.int64)
        self._kept = np.zeros(num_drafts, dtype=np.int64)

    def add(self, confidences: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> None:
        """A decode step of n sequences: confidences [n, N] of its drafts (NaN = unknown), verified [n], accepted
        [n]."""
        places = np.arange(len(self.generated))
        tried, kept = places < verified[:, None], places < accepted[:, None]
        self.verified += tried.sum(0)
        self.accepted += kept.sum(0)
        judged = tried & ~np.isnan(confidences)
        self.promised += np.where(judged, cumulative(np.nan_to_num(confidences)), 0.0).sum(0)
        self._judged += judged.sum(0)
        self._kept += (kept & judged).sum(0)

    def add_proposals(self, token_ids: np.ndarray) -> None:
        """Drafts [n, N] were proposed, -1 = none."""
        self.generated += (token_ids >= 0).sum(0)

    @property
    def acceptance(self) -> np.ndarray:
        """Share of the verified drafts that were accepted, by position (0 where none was verified)."""
        return self.accepted / np.maximum(self.verified, 1)

    @property
    def calibration_error(self) -> float:
        """Mean over positions of |predicted - actual share of accepted drafts|, weighted by verified drafts."""
        total = self._judged.sum()
        return float(np.abs(self.promised - self._kept).sum() / total) if total else 0.0

    def line(self) -> str:
        """For the log."""
        shares = " ".join(f"{share:.2f}" for share in self.acceptance)
        verified, accepted = int(self.verified.sum()), int(self.accepted.sum())
        return (
            f"drafts: {int(self.generated.sum())} generated, {verified} verified, {accepted} accepted "
            f"(by position {shares}), calibration error {self.calibration_error:.3f}"
        )
