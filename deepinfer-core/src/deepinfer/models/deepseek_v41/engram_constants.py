"""Hash constants of the Engram layers. The checkpoint does not store them: they follow from the configuration.

`constraints.py` checks the published table sizes against the primes; the model hands primes, offsets and multipliers
to the hash op. This module knows neither tables nor tokens.

Per layer, n-gram order and head there is one prime, unique over the whole model; per layer and n-gram position one odd
multiplier, small enough that compressed id * multiplier stays below 2^63.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

LAYER_SEED = 10007
"""A layer's multipliers come from a generator seeded with this times the layer number."""


def engram_primes(text: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Table sizes [Engram layer][n-gram order - 2][head], in the order of `engram_layer_ids`.

    The first prime is the smallest one not below `engram_vocab_size`; every further one is the next prime.
    """
    primes = (value for value in count(text.engram_vocab_size) if _is_prime(value))

    def order() -> tuple[int, ...]:
        return tuple(next(primes) for _ in range(text.engram_n_heads))

    def layer() -> tuple[tuple[int, ...], ...]:
        return tuple(order() for _ in text.engram_ngram_orders)

    return tuple(layer() for _ in text.engram_layer_ids)


def engram_offsets(primes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """First table row of each (order, head) of one layer, flat: the exclusive prefix sums of its primes."""
    sizes = [size for order in primes for size in order]
    return tuple(int(end) - size for end, size in zip(np.cumsum(sizes), sizes, strict=True))


def engram_multipliers(text: Any) -> np.ndarray:
    """Odd multipliers int64 [Engram layers, engram_max_ngram_size]; column r belongs to the token r places back."""
    bound = max(1, (2**63 - 1) // text.engram_compressed_vocab_size // 2)
    rows = [_layer_multipliers(layer, bound, text.engram_max_ngram_size) for layer in text.engram_layer_ids]
    return np.array(rows, dtype=np.int64).reshape(len(rows), text.engram_max_ngram_size)


def _layer_multipliers(layer: int, bound: int, size: int) -> np.ndarray:
    generator = np.random.default_rng(LAYER_SEED * layer)
    return 2 * generator.integers(0, bound, size=size, dtype=np.int64) + 1


def _is_prime(value: int) -> bool:
    """Miller-Rabin with bases that decide every value below 3.3e24."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    if value < 2 or any(value % base == 0 for base in bases):
        return value in bases
    odd, twos = value - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return not any(_is_witness(base, odd, twos, value) for base in bases)


def _is_witness(base: int, odd: int, twos: int, value: int) -> bool:
    """Whether `base` proves `value` = odd * 2^twos + 1 composite."""
    power = pow(base, odd, value)
    if power in (1, value - 1):
        return False
    for _ in range(twos - 1):
        power = power * power % value
        if power == value - 1:
            return False
    return True
