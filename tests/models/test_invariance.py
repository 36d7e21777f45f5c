"""The invariants of the model: how a text is cut into steps, and who else is in the batch, changes nothing.

Smooth mode: equal within float32 noise. Exact mode: bitwise, with order-free sums (a single rounding that falls the
other way would otherwise be amplified by every quantizer after it).
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from deepinfer.testing.logits import Harness

SMOOTH = pytest.param("smooth", id="smooth")
EXACT = pytest.param("exact", id="exact")


@pytest.fixture(scope="module")
def harnesses(checkpoints):
    """Harness by (config, numerics), made once; room for three sequences."""
    made = {}

    def get(config, numerics, **arguments):
        key = (config, numerics, *sorted(arguments.items()))
        if key not in made:
            order_free = numerics == "exact"
            made[key] = Harness(
                checkpoints(config), numerics, max_len=400, sequences=3, batch_invariant=order_free, **arguments
            )
        made[key].cache = made[key].new_cache()
        return made[key]

    return get


def text(length, seed):
    generator = random.Random(seed)
    return [0] + [generator.randrange(3, 500) for _ in range(length - 1)]


def run(harness, ids, cuts, sequence=0):
    """Logits [n, V] of a text fed in pieces that end at `cuts`."""
    bounds = [0, *cuts, len(ids)]
    with torch.inference_mode():
        parts = [harness.logits(harness.inputs([(sequence, ids, a, b)])) for a, b in pairwise(bounds)]
    return torch.cat(parts)


def agree(numerics, a, b):
    if numerics == "exact":
        assert torch.equal(a, b)
    else:
        assert (a - b).abs().max() < 2e-5 * a.std()


def check(harnesses, config, numerics, length, cuts_list):
    ids = text(length, length)
    harness = harnesses(config, numerics)
    whole = run(harness, ids, [])
    assert torch.isfinite(whole).all() and whole.std() > 0.05
    for cuts in cuts_list:
        agree(numerics, whole, run(harnesses(config, numerics), ids, cuts))


@pytest.mark.parametrize("numerics", [SMOOTH, EXACT])
@pytest.mark.parametrize("config", ["tiny", "micro"])
def test_chunks_at_odd_places(harnesses, config, numerics):
    check(harnesses, config, numerics, 150, [[1], [7, 64, 65, 131], [127, 129], list(range(13, 150, 13))])


@pytest.mark.parametrize("numerics", [SMOOTH, EXACT])
@pytest.mark.parametrize("config", ["tiny", "micro"])
def test_every_split_of_a_short_text(harnesses, config, numerics):
    check(harnesses, config, numerics, 24, [[cut] for cut in range(1, 24)])


@pytest.mark.parametrize("numerics", [SMOOTH, EXACT])
def test_token_by_token(harnesses, numerics):
    check(harnesses, "micro", numerics, 140, [list(range(1, 140))])


@pytest.mark.slow
@pytest.mark.parametrize("numerics", [SMOOTH, EXACT])
@pytest.mark.parametrize(("config", "stride"), [("tiny", 11), ("micro", 5)])
def test_splits_of_a_long_text(harnesses, config, stride, numerics):
    """Strides prime to the ratios, block sizes and rings, so that every phase of them is cut."""
    check(harnesses, config, numerics, 137, [[cut] for cut in range(1, 137, stride)])


@pytest.mark.parametrize("numerics", [SMOOTH, EXACT])
@pytest.mark.parametrize("config", ["tiny", "micro"])
def test_alone_equals_in_a_batch(harnesses, config, numerics):
    texts = [text(91, 1), text(40, 2), text(130, 3)]
    alone = [run(harnesses(config, numerics), ids, []) for ids in texts]
    for order in ([0, 1, 2], [2, 0, 1]):
        harness = harnesses(config, numerics)
        chunks = [(index, texts[index], 0, len(texts[index])) for index in order]
        with torch.inference_mode():
            together = harness.logits(harness.inputs(chunks))
        parts = together.split([len(texts[index]) for index in order])
        for index, part in zip(order, parts, strict=True):
            agree(numerics, alone[index], part)


@pytest.mark.parametrize("numerics", [SMOOTH, EXACT])
def test_decode_batch_equals_alone(harnesses, numerics):
    texts = [text(70, 4), text(33, 5), text(129, 6)]
    alone = [run(harnesses("micro", numerics), ids, []) for ids in texts]
    harness = harnesses("micro", numerics)
    steps = 5
    with torch.inference_mode():
        harness.logits(harness.inputs([(i, ids, 0, len(ids) - steps) for i, ids in enumerate(texts)]))
        for step in range(steps):
            chunks = [(i, ids, len(ids) - steps + step, len(ids) - steps + step + 1) for i, ids in enumerate(texts)]
            rows = harness.logits(harness.inputs(chunks))
            for i, ids in enumerate(texts):
                agree(numerics, alone[i][len(ids) - steps + step], rows[i])


def test_rows_rewritten_after_a_rollback_equal_a_first_run(harnesses):
    """Draft verification writes rows that may be rejected; writing other tokens at those positions repairs all."""
    ids, wrong = text(120, 7), text(120, 8)
    whole = run(harnesses("micro", "exact"), ids, [])
    harness = harnesses("micro", "exact")
    with torch.inference_mode():
        harness.logits(harness.inputs([(0, ids, 0, 60)]))
        for first in range(60, 114, 3):
            mixed = ids[:first] + wrong[first:]
            harness.logits(harness.inputs([(0, mixed, first, first + 6)]))
            again = harness.logits(harness.inputs([(0, ids, first, first + 3)]))
            assert torch.equal(again, whole[first : first + 3])


def test_a_new_owner_of_a_slot_does_not_see_the_old_one(harnesses):
    """Not even without zeroing: what a slot holds of its last owner is invisible, NaN included."""
    ids = text(90, 9)
    whole = run(harnesses("micro", "exact"), ids, [20])
    harness = harnesses("micro", "exact")
    run(harness, text(200, 10), [])
    storage = harness.cache.storage
    for state in storage.state.values():
        state.fill_(float("nan"))
    for table in storage.windows:
        table.memory.fill_(0x7F)  # e4m3 NaN
    assert torch.equal(whole, run(harness, ids, [20]))
