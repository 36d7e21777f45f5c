"""`SequenceMemory`: the state slot and the cache blocks of every sequence, taken, grown and given back.

The scheduler decides who gets memory and who loses it; here it changes hands. What a step in flight still uses is given
back when that step is done. Knows no queues, no plans and no policy.
"""

from __future__ import annotations

from deepinfer.engine.batch import SlotTable
from deepinfer.engine.blocks import Availability, BlockPool
from deepinfer.engine.prefix import Match
from deepinfer.engine.sequence import Sequence
from deepinfer.runner.inputs import CacheCapacity


class SequenceMemory:
    """Both pools of one engine. A sequence gets its slot and all blocks of its prompt at once, further blocks one by
    one as it grows.

    deferred  sequences that have ended while a step in flight still uses their memory
    """

    def __init__(self, capacity: CacheCapacity, table: SlotTable) -> None:
        self.blocks, self.slots = BlockPool(capacity.num_blocks), BlockPool(capacity.num_slots)
        self._block_size, self._table = capacity.block_size, table
        self.deferred: list[Sequence] = []

    def take(self, seq: Sequence, match: Match) -> bool:
        """A slot, and the blocks of the match and for what is behind it, if there are so many."""
        total = -(-seq.length // self._block_size)
        assert self.blocks.can_allocate(total) is not Availability.NEVER, (seq.length, self.blocks.num_total)
        self.blocks.pin(match.blocks)
        needed = total - len(match.blocks)
        if any(pool.can_allocate(n) is not Availability.OK for pool, n in ((self.blocks, needed), (self.slots, 1))):
            self.blocks.free(match.blocks)
            return False
        (seq.slot,) = self.slots.allocate(1)
        seq.blocks = [*match.blocks, *self.blocks.allocate(needed)]
        return True

    def grow(self, seq: Sequence, end: int) -> bool:
        """Blocks for `end` tokens if so many are free."""
        needed = -(-end // self._block_size) - len(seq.blocks)
        if self.blocks.can_allocate(max(0, needed)) is not Availability.OK:
            return False
        for block in self.blocks.allocate(max(0, needed)):
            self._table.add_block(seq, block)
        return True

    def release_deferred(self) -> None:
        """Give back what had to wait, as far as the steps it waited for are done."""
        ended, self.deferred = self.deferred, []
        for seq in ended:
            self.release(seq)

    def release(self, seq: Sequence) -> None:
        """Return slot and blocks to their pools, or remember to once no step in flight uses them."""
        if not seq.slot:
            return
        if self._table.in_flight[seq.slot]:
            self.deferred.append(seq)
            return
        self.blocks.free(reversed(seq.blocks))  # the end of a text is forgotten before its beginning
        self.slots.free([seq.slot])
        self._table.num_blocks[seq.slot] = 0
        seq.slot, seq.blocks, seq.source = 0, [], None
