"""`BlockPool`: which ids of a fixed set are in use, and by how many owners.

The scheduler keeps two of them, one for blocks of the paged cache and one for state slots. The pool knows ids and
reference counts only: not what a block holds, not who owns it, not that a device exists. Ids whose content is worth
keeping beyond their last owner (`keep`) are free like all others, but handed out only when no plain free id is left,
the one that was freed first before the others.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable


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

    __slots__ = ("_free", "_idle", "_kept", "_references", "on_reuse")

    def __init__(self, num_ids: int) -> None:
        assert num_ids >= 1, num_ids
        self._free = deque(range(1, num_ids))
        self._references = [0] * num_ids
        self._kept: set[int] = set()
        self._idle: dict[int, None] = {}  # kept ids without owners, first freed first
        self.on_reuse: Callable[[int], None] | None = None  # told which kept id gets another owner's content

    @property
    def num_total(self) -> int:
        """Ids that can be handed out (the null id is not one of them)."""
        return len(self._references) - 1

    @property
    def num_free(self) -> int:
        """Ids nobody owns, kept ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Ids with at least one owner."""
        return self.num_total - self.num_free

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 .. 1; an empty pool counts as full."""
        return self.num_used / self.num_total if self.num_total else 1.0

    def references(self, block: int) -> int:
        """Number of owners of an id."""
        return self._references[block]

    def can_allocate(self, count: int) -> Availability:
        """Whether `count` ids could be had now, later or never."""
        if count <= self.num_free:
            return Availability.OK
        return Availability.LATER if count <= self.num_total else Availability.NEVER

    def allocate(self, count: int) -> list[int]:
        """`count` ids with one owner each. The caller has asked `can_allocate`."""
        assert 0 <= count <= self.num_free, (count, self.num_free)
        taken = [self._free.popleft() if self._free else self._reuse() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def pin(self, blocks: Iterable[int]) -> None:
        """One more owner for each of these ids, which are in use or kept."""
        for block in blocks:
            assert self._references[block] > 0 or block in self._idle, f"id {block} is free and cannot be pinned"
            self._idle.pop(block, None)
            self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One owner less for each of these ids; ids without owners become free."""
        for block in blocks:
            assert self._references[block] > 0, f"id {block} is freed more often than it was taken"
            self._references[block] -= 1
            if not self._references[block]:
                self._park(block)

    def keep(self, block: int) -> None:
        """The content of this id, which is in use, is worth keeping when its last owner leaves."""
        assert self._references[block] > 0, f"id {block} is free and cannot be kept"
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """The content of a kept id is worth nothing any more."""
        self._kept.discard(block)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def _park(self, block: int) -> None:
        if block in self._kept:
            self._idle[block] = None
        else:
            self._free.append(block)

    def _reuse(self) -> int:
        """The kept id that has been free for the longest time, its content given up."""
        block = next(iter(self._idle))
        del self._idle[block]
        self._kept.discard(block)
        if self.on_reuse is not None:
            self.on_reuse(block)
        return block
