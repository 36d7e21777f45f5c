"""`BlockPool`: which ids of a fixed set are in use, and by how many owners.

The scheduler keeps two of them, one for blocks of the paged cache and one for state slots. The pool knows ids and
reference counts only: not what a block holds, not who owns it, not that a device exists.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable


class Availability(enum.Enum):
    """Answer to "could I have k ids?"."""

    OK = "ok"
    """now"""
    LATER = "later"
    """once others are freed"""
    NEVER = "never"
    """not even if the pool were empty"""


class BlockPool:
    """Ids 1 .. num_ids - 1 with reference counts. Id 0 is the null id: target of padding, never handed out.

    Freed ids go to the back of the free list and allocation takes from the front, so an id rests as long as possible
    before its next owner (first freed, first reused).
    """

    __slots__ = ("_free", "_references")

    def __init__(self, num_ids: int) -> None:
        assert num_ids >= 1, num_ids
        self._free = deque(range(1, num_ids))
        self._references = [0] * num_ids

    @property
    def num_total(self) -> int:
        """Ids that can be handed out (the null id is not one of them)."""
        return len(self._references) - 1

    @property
    def num_free(self) -> int:
        """Ids nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Ids with at least one owner."""
        return self.num_total - len(self._free)

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 .. 1; an empty pool counts as full."""
        return self.num_used / self.num_total if self.num_total else 1.0

    def references(self, block: int) -> int:
        """Number of owners of an id."""
        return self._references[block]

    def can_allocate(self, count: int) -> Availability:
        """Whether `count` ids could be had now, later or never."""
        if count <= len(self._free):
            return Availability.OK
        return Availability.LATER if count <= self.num_total else Availability.NEVER

    def allocate(self, count: int) -> list[int]:
        """`count` ids with one owner each. The caller has asked `can_allocate`."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def pin(self, blocks: Iterable[int]) -> None:
        """One more owner for each of these ids, which are in use already."""
        for block in blocks:
            assert self._references[block] > 0, f"id {block} is free and cannot be pinned"
            self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One owner less for each of these ids; ids without owners become free."""
        for block in blocks:
            assert self._references[block] > 0, f"id {block} is freed more often than it was taken"
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)
