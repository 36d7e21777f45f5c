"""Philox4x32-10 in plain integer tensors: the only source of randomness of the sampler.

A counter-based generator has no state: the words of a draw are a pure function of (seed, position, purpose, draft
index), so a row's randomness cannot depend on its batch mates, on the step that computed it or on the device. Called
by `reference.sampling` and `reference.speculation`; knows nothing of tokens.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123).
"""

from __future__ import annotations

import torch

PURPOSE_TARGET = 0
"""The token the model itself draws at a position (and, under coupled verification, its draft)."""
PURPOSE_RESIDUAL = 1
"""The replacement of a rejected draft."""
PURPOSE_ACCEPT = 2
"""The test whether a draft is accepted."""
PURPOSE_DRAFT = 3
"""A draft token that must be independent of the target's draw."""

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[torch.Tensor, ...]
"""Four tensors of one shape, int64 with values 0 .. 2^32-1."""


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten rounds of Philox4x32.

    counter  4 x [R] int64, values 0 .. 2^32-1 (any shapes that broadcast)
    key      2 x [R] int64, values 0 .. 2^32-1
    returns  4 x [R] int64, values 0 .. 2^32-1
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of an unsigned 32 x 32 product, in halves so that int64 never overflows."""
    low = factor * (word & 0xFFFF)
    high = factor * (word >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def random_words(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: torch.Tensor | int = PURPOSE_TARGET,
    draft_index: torch.Tensor | int = 0,
) -> Words:
    """The four words that belong to a draw: key = seed, counter = (position low, position high, purpose, draft index).

    seeds        [R] int64, the 64 bits of an unsigned seed
    positions    [R] int64 >= 0, absolute index of the token the draw is for
    purpose      [R] int64 or one of the PURPOSE constants
    draft_index  [R] int64 or int >= 0; 0 unless several independent draws share position and purpose
    returns      4 x [R] int64, values 0 .. 2^32-1
    """
    zeros = torch.zeros_like(positions)
    counter = (positions & _MASK, (positions >> 32) & _MASK, zeros + purpose, zeros + draft_index)
    return philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))


def uniform_below(total: torch.Tensor, words: Words) -> torch.Tensor:
    """A uniform integer in 0 .. total-1 by widening multiplication, exact in int64.

    With r = (word0 >> 1) * 2^31 + (word1 >> 1), 62 random bits, the result is floor(r * total / 2^62); each value
    has probability 1/total up to 2^-62.

    total    [R] int64, 1 .. 2^32-1
    returns  [R] int64 (0 where total is 0)
    """
    high, low = words[0] >> 1, words[1] >> 1
    return (high * total + ((low * total) >> 31)) >> 31


def uniform(words: Words) -> torch.Tensor:
    """A uniform number in [0, 1): the 53 bits word0 * 2^21 + (word1 >> 11), divided by 2^53. returns [R] float64."""
    return ((words[0] << 21) | (words[1] >> 11)).double() * 2.0**-53
