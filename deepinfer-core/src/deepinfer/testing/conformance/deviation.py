"""How far two forced runs of an engine lie apart, in multiples of the reference's own rounding noise.

Used by level 4, by bisection and by the comparison of two backends. A whole model amplifies rounding, so no fixed
tolerance fits: what counts is how much the working reference deviates from the order-free one on the same texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.testing.conformance.runs import Forced
from deepinfer.testing.results import Failure, Worst

FACTOR = 4.0
"""How many times the reference's own rounding noise a whole model may deviate. A backend that rounds the output of
attention to bfloat16, as it may, makes two to three times the noise."""

FLOOR = 1e-3
"""Deviation in nats that always passes."""

IMPOSSIBLE = -1e3
"""Log-probabilities below are the floor of banned tokens."""


@dataclass(frozen=True)
class Deviation:
    """How far two runs lie apart, in nats.

    mean     root mean square over all log-probabilities
    part     the largest root mean square of one part, a prompt or what was generated after it; where: its name
    largest  the largest single difference, worst: all about it, None if the runs have nothing in common
    """

    mean: float
    part: float
    largest: float
    where: str = ""
    worst: Worst | None = None

    @classmethod
    def between(cls, found: Forced, expected: Forced) -> Deviation:
        """The deviation of one run from another. Where one bans a token that the other does not, it is infinite."""
        sizes = {where: np.abs(difference) for where, difference in _differences(found, expected)}
        roots = {where: float(np.sqrt((size**2).mean())) for where, size in sizes.items()}
        where = max(roots, key=roots.__getitem__)
        everything = np.concatenate([size.ravel() for size in sizes.values()])
        worst = _worst(found, expected, sizes)
        mean = float(np.sqrt((everything**2).mean()))
        return cls(mean, roots[where], worst["error"], where, worst)

    def against(self, noise: Deviation) -> tuple[float, str]:
        """How many times the noise this is, all in all, in its worst part or at its worst place; and that in words."""
        if not math.isfinite(self.mean):
            return math.inf, f"{self.where} has log-probabilities that are no numbers, or bans other tokens"
        place = "" if self.worst is None else f" at {self.worst['index']}"
        sizes = (
            (self.mean, noise.mean, "all in all"),
            (self.part, noise.part, self.where),
            (self.largest, noise.largest, f"at most,{place},"),
        )
        ratio, size, what = max(((size - FLOOR) / max(usual, FLOOR), size, what) for size, usual, what in sizes)
        return max(ratio, 0.0), f"{what} {size:.3g} nats away, {max(ratio, 0.0):.2f} times the reference's own noise"


Noise = Deviation
"""Deviation of the working reference from the order-free one: what rounding alone does to this model."""


def _worst(found: Forced, expected: Forced, sizes: Mapping[str, np.ndarray]) -> dict[str, Any]:
    where = max(sizes, key=lambda where: sizes[where].max())
    place = np.unravel_index(int(sizes[where].argmax()), sizes[where].shape)
    index = [where, *(int(i) for i in place)]
    values = (float(_parts(run)[where][place]) for run in (found, expected))
    return {"error": float(sizes[where][place]), "index": index, "found": next(values), "expected": next(values)}


def hold(found: Forced, expected: Forced, noise: Noise, factor: float = FACTOR) -> Worst:
    """Raise Failure unless two runs deviate by `factor` times the noise at most: all in all, in each part, anywhere.

    Returns the largest deviation.
    """
    deviation = Deviation.between(found, expected)
    worst = dict(deviation.worst or {}) | {"bound": factor * noise.largest + FLOOR}
    ratio, what = deviation.against(noise)
    if ratio > factor:
        raise Failure(f"{what}, allowed {factor:.3g} times", worst)
    return worst


def same(found: Forced, expected: Forced) -> None:
    """Raise Failure unless two runs are equal bit for bit."""
    for where, difference in _differences(found, expected):
        if np.any(difference != 0):
            count = int(np.count_nonzero(difference))
            largest = float(np.abs(difference).max())
            raise Failure(f"{where}: {count} of {difference.size} log-probabilities differ, up to {largest:.3g} nats")


def _parts(run: Forced) -> dict[str, np.ndarray]:
    parts = {f"generated tokens of prompt {i}": values for i, values in enumerate(run.decode)}
    return parts | {f"prompt {i}": values for i, values in enumerate(run.prompt or ())}


def _differences(found: Forced, expected: Forced) -> Iterator[tuple[str, np.ndarray]]:
    """(part, differences) of what both runs have; a token banned in both differs by 0, in one of them by infinity."""
    theirs = _parts(expected)
    for where, values in _parts(found).items():
        if where in theirs:
            a, b = values, theirs[where]
            banned = (a < IMPOSSIBLE).astype(int) + (b < IMPOSSIBLE)
            yield where, np.where(banned == 2, 0.0, np.where(banned == 1, np.inf, a - b))


def hold_tokens(
    chosen: Sequence[Sequence[int]], along: Forced, expected: Sequence[Sequence[int]], reference: Forced, noise: Noise
) -> str:
    """Raise Failure unless the likeliest token is the reference's everywhere, ties of the reference aside.

    chosen             what the engine generated by itself;  along: its log-probabilities, forced along `expected`
    expected           greedy tokens of the reference, `reference` its log-probabilities along them
    Returns how many tokens were equal.
    """
    tie, equal, total = 2 * (FACTOR * noise.mean + FLOOR), 0, 0
    for number, tokens in enumerate(expected):
        best = along.decode[number].argmax(-1)
        _check_own_choice(number, chosen[number], best, tokens)
        for at, token in enumerate(tokens):
            row, ours = reference.decode[number][at], int(best[at])
            gap = float(row[token] - row[ours])
            total, equal = total + 1, equal + (ours == token)
            if gap > tie:
                worst = {"error": gap, "bound": tie, "index": [number, at], "found": ours, "expected": token}
                raise Failure(
                    f"prompt {number}, token {at}: {ours}, expected {token}, which the reference prefers by {gap:.3g} "
                    f"nats; up to {tie:.3g} would be a tie", worst,
                )  # fmt: skip
    return f"{equal} of {total} tokens equal, the others are ties of the reference"


def _check_own_choice(number: int, chosen: Sequence[int], best: np.ndarray, expected: Sequence[int]) -> None:
    """As long as a text is the expected one, an engine generates what it finds likeliest."""
    for at, (own, likeliest, token) in enumerate(zip(chosen, best.tolist(), expected, strict=True)):
        if own not in (likeliest, token):
            raise Failure(f"prompt {number}, token {at}: generated {own}, but {likeliest} is its likeliest token")
        if own != token:
            return
