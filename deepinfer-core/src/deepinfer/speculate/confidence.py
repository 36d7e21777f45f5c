"""What confidences are worth: chances that drafts are accepted, corrected by what happened to earlier ones.

Used by the schedule, fed by the engine's commits. Rates are *cumulative*: the chance that a draft and all before it are
accepted.
"""

from __future__ import annotations

import numpy as np

DECAY = 0.99
"""Weight that an observation keeps after the next one of its position."""
PRIOR = 2.0
"""Verified drafts that the prior belief in the confidences counts for."""


def cumulative(confidences: np.ndarray) -> np.ndarray:
    """Chance [n, N] float64 that a draft and all before it are accepted, from single chances [n, N]."""
    return np.cumprod(np.clip(confidences, 0.0, 1.0).astype(np.float64), axis=1)


class Calibration:
    """Factor per position by which confidences were too low or too high, over recent steps of all requests."""

    def __init__(self, num_drafts: int) -> None:
        self._predicted = np.full(num_drafts, PRIOR)
        self._accepted = np.full(num_drafts, PRIOR)

    @property
    def factors(self) -> np.ndarray:
        """[N] accepted per predicted acceptance."""
        return self._accepted / np.maximum(self._predicted, 1e-3)

    def observe(self, rates: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> None:
        """rates [n, N] predicted, of n sequences whose first `verified` [n] drafts were tried and `accepted` [n]
        kept."""
        places = np.arange(rates.shape[1])
        tried = places < verified[:, None]
        decay = DECAY ** tried.sum(0)
        self._predicted = self._predicted * decay + (rates * tried).sum(0)
        self._accepted = self._accepted * decay + (places < accepted[:, None]).sum(0)

    def apply(self, rates: np.ndarray) -> np.ndarray:
        """Corrected rates [n, N], at most 1 and never rising with the position."""
        return np.minimum.accumulate(np.clip(rates * self.factors, 0.0, 1.0), axis=1)
