"""Philox4x32-10 against published vectors and an independent big-integer version of the whole family."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.reference import rng

# Random123 kat_vectors, philox4x32 10: counter, key, result
KNOWN_ANSWERS = [
    ([0x00000000] * 4, [0x00000000] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]

FAMILY = {
    32: (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85),
    64: (0xD2E7470EE14C6C93, 0xCA5A826395121157, 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B),
}


def philox(counter, key, bits=32):
    """Philox4x{bits}-10 in Python integers."""
    m0, m1, w0, w1 = FAMILY[bits]
    mask = (1 << bits) - 1
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = m0 * a, m1 * c
        a, b, c, d = (p1 >> bits) ^ b ^ k0, p1 & mask, (p0 >> bits) ^ d ^ k1, p0 & mask
        k0, k1 = (k0 + w0) & mask, (k1 + w1) & mask
    return [a, b, c, d]


def tensors(words):
    return tuple(torch.tensor([word]) for word in words)


def test_known_answers():
    counters = tuple(torch.tensor(column) for column in zip(*(c for c, _, _ in KNOWN_ANSWERS), strict=True))
    keys = tuple(torch.tensor(column) for column in zip(*(k for _, k, _ in KNOWN_ANSWERS), strict=True))
    found = torch.stack(rng.philox4x32(counters, keys), 1)
    assert found.tolist() == [answer for _, _, answer in KNOWN_ANSWERS]


def test_integer_version_is_numpys_philox_at_64_bits():
    counter, key = [11, 22, 33, 44], [0x0123456789ABCDEF, 2**64 - 5]
    generator = np.random.Philox(counter=np.array(counter, np.uint64), key=np.array(key, np.uint64))
    expected = philox([12, 22, 33, 44], key, bits=64)  # numpy steps the counter before its first block
    assert generator.random_raw(4).tolist() == expected


@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
@settings(max_examples=100, deadline=None)
def test_equals_the_integer_version(words):
    found = rng.philox4x32(tensors(words[:4]), tensors(words[4:]))
    assert [int(word) for word in found] == philox(words[:4], words[4:])


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**62), st.integers(0, 3), st.integers(0, 31))
@settings(max_examples=50, deadline=None)
def test_counter_and_key_layout(seed, position, purpose, draft):
    signed = int(np.uint64(seed).astype(np.int64))
    found = rng.random_words(torch.tensor([signed]), torch.tensor([position]), purpose, draft)
    low = 2**32 - 1
    expected = philox([position & low, position >> 32, purpose, draft], [seed & low, seed >> 32])
    assert [int(word) for word in found] == expected


@given(st.integers(1, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_uniform_below_is_the_exact_widening_product(total, word0, word1):
    found = int(rng.uniform_below(torch.tensor([total]), tensors([word0, word1, 0, 0])))
    assert found == ((word0 >> 1 << 31 | word1 >> 1) * total) >> 62
    assert 0 <= found < total


def test_uniform_spans_the_unit_interval():
    assert float(rng.uniform(tensors([0, 0, 0, 0]))) == 0.0
    assert float(rng.uniform(tensors([2**32 - 1] * 4))) == 1 - 2.0**-53
    many = rng.uniform(rng.random_words(torch.full((20000,), 3), torch.arange(20000)))
    assert abs(float(many.mean()) - 0.5) < 0.01
    assert abs(float(many.var()) - 1 / 12) < 0.005


def test_vectorised_equals_row_by_row_and_needs_no_order():
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 12345])
    positions = torch.tensor([0, 7, 2**32, 2**40 + 3, 2**31])
    purposes = torch.tensor([0, 1, 2, 3, 0])
    together = torch.stack(rng.random_words(seeds, positions, purposes, 2))
    for row in range(5):
        alone = torch.stack(rng.random_words(seeds[row : row + 1], positions[row : row + 1], int(purposes[row]), 2))
        assert torch.equal(alone[:, 0], together[:, row])
    assert len({tuple(column) for column in together.T.tolist()}) == 5
