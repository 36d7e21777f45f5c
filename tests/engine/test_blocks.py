"""BlockPool: reference counts, order of reuse, and a random walk against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from deepinfer.engine.blocks import Availability, BlockPool


def test_id_zero_is_never_handed_out_and_ids_are_reused_in_order_of_freeing():
    pool = BlockPool(5)
    assert pool.allocate(4) == [1, 2, 3, 4]
    pool.free([3])
    pool.free([1])
    assert pool.allocate(2) == [3, 1]


def test_availability_tells_later_from_never():
    pool = BlockPool(4)
    pool.allocate(2)
    assert pool.can_allocate(1) is Availability.OK
    assert pool.can_allocate(3) is Availability.LATER
    assert pool.can_allocate(4) is Availability.NEVER


def test_pinned_id_stays_in_use_until_its_last_owner_frees_it():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.pin([block])
    pool.free([block])
    assert (pool.num_used, pool.references(block)) == (1, 1)
    pool.free([block])
    assert (pool.num_used, pool.usage) == (0, 0.0)


@pytest.mark.parametrize(
    "misuse", [lambda p: p.free([2]), lambda p: p.pin([2]), lambda p: p.allocate(3), lambda p: p.free([0])]
)
def test_misuse_is_caught(misuse):
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        misuse(pool)


class PoolWalk(RuleBasedStateMachine):
    """Random allocations, pins and frees, mirrored in a dict of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.owners: dict[int, int] = {}
        self.free_order = list(range(1, 9))

    held = Bundle("held")

    @rule(target=held, count=st.integers(0, 9))
    def allocate(self, count):
        answer = self.pool.can_allocate(count)
        assert (answer is Availability.OK) == (count <= 8 - len(self.owners))
        assert (answer is Availability.NEVER) == (count > 8)
        if answer is not Availability.OK:
            return []
        blocks = self.pool.allocate(count)
        assert blocks == self.free_order[:count]
        del self.free_order[:count]
        for block in blocks:
            self.owners[block] = 1
        return blocks

    @rule(target=held, blocks=held)
    def pin(self, blocks):
        self.pool.pin(blocks)
        for block in blocks:
            self.owners[block] += 1
        return list(blocks)

    @rule(blocks=consumes(held))
    def free(self, blocks):
        self.pool.free(blocks)
        for block in blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]
                self.free_order.append(block)

    @invariant()
    def counts_agree(self):
        assert self.pool.num_used == len(self.owners)
        assert self.pool.num_free + self.pool.num_used == self.pool.num_total == 8
        assert [self.pool.references(block) for block in range(9)] == [self.owners.get(b, 0) for b in range(9)]


PoolWalk.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_random_walk = PoolWalk.TestCase
