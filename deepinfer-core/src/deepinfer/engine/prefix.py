"""`PrefixCache`: which computed prefixes could be continued by another request, and where they lie.

The scheduler offers what its steps compute and asks before it admits a sequence. Two things are needed to go on at
position P of a text, and both are kept for it:

    blocks    the paged entries of tokens 0 .. P-1. A block is found by the hash of its tokens and of everything before
              them, so equal texts share it, with one more reference each.
    snapshot  the state slot as it was after token P-1 (window rings of all layers, compressor state, draft rings), a
              copy in a slot of its own. Rings cannot be rebuilt from the blocks; replaying the last window would give
              other keys than the first run, because a window key depends on the windows of all layers before it.

A prefix is therefore continued at a block border for which there is a snapshot, and the result is what computing it
again would give. Nobody's blocks are copied; who goes on writes into blocks of its own. Knows tokens, ids and hashes;
not what the bytes mean, not that a device exists. Costs: one state slot a snapshot, nothing for blocks (those nobody
uses are free memory that is merely reused last).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer.engine.blocks import BlockPool

Hash = bytes
"""128-bit BLAKE2 digest of a block's tokens and its parent's hash."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """A copy of a state slot.

    slot     where it lies
    end      tokens it stands behind
    passing  taken while a text was being written: the writer's next one replaces it unless somebody has used it
    """

    key: Hash
    slot: int
    end: int
    passing: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache knows of a text.

    blocks    blocks of its longest prefix that can be continued; none if there is no snapshot
    snapshot  the state behind them
    branch    tokens of its longest prefix whose blocks are known, continuable or not
    fresh     the step being planned computes more of this prefix: asking again later pays
    """

    blocks: tuple[int, ...] = ()
    snapshot: Snapshot | None = None
    branch: int = 0
    fresh: bool = False

    @property
    def end(self) -> int:
        """Tokens that need not be computed."""
        return 0 if self.snapshot is None else self.snapshot.end


NOTHING = Match()


class PrefixCache:
    """Blocks by hash over a `BlockPool`, and snapshots in the slots given.

    salt  everything besides tokens that changes what a block holds
    """

    def __init__(self, pool: BlockPool, block_size: int, snapshot_slots: Iterable[int], salt: str = "") -> None:
        self.block_size = block_size
        self._pool = pool
        pool.on_reuse = self._lost
        self._root: Hash = hashlib.blake2b(salt.encode(), digest_size=16).digest()
        self._blocks: dict[Hash, int] = {}
        self._hashes: dict[int, Hash] = {}
        self._snapshots: OrderedDict[Hash, Snapshot] = OrderedDict()  # least recently used first
        self._slots = list(snapshot_slots)  # without a snapshot
        self._pending: set[int] = set()  # slots of copies that may turn out to be useless
        self._planned: set[Hash] = set()  # snapshots that the step being planned makes

    # --- hashes -------------------------------------------------------------------------------------------------------

    def extend(self, hashes: list[Hash], tokens: np.ndarray | Sequence[int], count: int) -> None:
        """Bring the hashes of a text's complete blocks up to its first `count` tokens. [in-place hashes]"""
        for index in range(len(hashes), count // self.block_size):
            part = np.asarray(tokens[index * self.block_size : (index + 1) * self.block_size], dtype=np.int64)
            parent = hashes[-1] if hashes else self._root
            hashes.append(hashlib.blake2b(parent + part.tobytes(), digest_size=16).digest())

    # --- asking -------------------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[Hash], limit: int) -> Match:
        """What is known of a text with these block hashes, to be continued at `limit` at the latest."""
        blocks, best, count = [], None, limit // self.block_size
        fresh = False
        for key in hashes[: max(0, count)]:
            block = self._blocks.get(key)
            if block is None:
                break
            blocks.append(block)
            best = self._snapshots.get(key, best)
            fresh = fresh or key in self._planned
        usable = 0 if best is None else best.end // self.block_size
        return Match(tuple(blocks[:usable]), best, len(blocks) * self.block_size, fresh)

    def use(self, match: Match) -> None:
        """A sequence goes on from this match; its snapshot counts as used."""
        if match.snapshot is not None:
            match.snapshot.passing = False
            self._snapshots.move_to_end(match.snapshot.key)

    # --- offering ----------------------------------------------------------------------------------------------------

    def publish(self, hashes: Sequence[Hash], blocks: Sequence[int], start: int, end: int) -> None:
        """Blocks `start` .. `end - 1` of a text hold their tokens, or will before the next step begins."""
        for index in range(start, end):
            key, block = hashes[index], blocks[index]
            if key not in self._blocks and block not in self._hashes:
                self._blocks[key], self._hashes[block] = block, key
                self._pool.keep(block)

    def reserve(self) -> int:
        """A slot for a snapshot, the least recently used one if all are taken; 0 if none can be had now."""
        if not self._slots:
            victim = next((key for key in self._snapshots if key not in self._planned), None)
            if victim is None:
                return 0
            self._drop(victim)
        slot = self._slots.pop()
        self._pending.add(slot)
        return slot

    def confirm(self, slot: int, key: Hash, end: int, passing: bool = False) -> Snapshot | None:
        """The reserved slot holds the state behind the block `key`; None if that is known or useless already."""
        if key in self._snapshots or key not in self._blocks:
            self.cancel(slot)
            return None
        self._pending.discard(slot)
        self._snapshots[key] = snapshot = Snapshot(key, slot, end, passing)
        return snapshot

    def cancel(self, slot: int) -> None:
        """The reserved slot holds nothing of use."""
        self._pending.discard(slot)
        self._slots.append(slot)

    def knows(self, key: Hash) -> bool:
        """Whether a snapshot stands behind this block."""
        return key in self._snapshots

    def replace_passing(self, old: Snapshot | None) -> None:
        """A text's writer has a newer snapshot: give the old one up unless somebody has used it."""
        if old is not None and old.passing and self._snapshots.get(old.key) is old:
            self._drop(old.key)

    def begin_plan(self) -> None:
        """A new step is being planned: what the one before makes can be used from now on."""
        self._planned.clear()

    def plan_snapshot(self, key: Hash, end: int) -> int:
        """A slot that the step being planned fills with the state behind block `key`; 0 if there is none."""
        slot = 0 if key in self._snapshots else self.reserve()
        if slot and self.confirm(slot, key, end) is None:
            return 0
        if slot:
            self._planned.add(key)
        return slot

    def cancel_pending(self) -> None:
        """No step with a reserved slot will be committed."""
        for slot in list(self._pending):
            self.cancel(slot)

    # --- losing ------------------------------------------------------------------------------------------------------

    def withdraw(self, blocks: Iterable[int]) -> None:
        """The content of these blocks cannot be trusted."""
        for block in blocks:
            if block in self._hashes:
                self._lost(block)
                self._pool.forget(block)

    def clear(self) -> None:
        """Nothing that was computed can be trusted."""
        self.withdraw(list(self._hashes))
        for key in list(self._snapshots):
            self._drop(key)
        self.cancel_pending()
        self._planned.clear()

    def _lost(self, block: int) -> None:
        key = self._hashes.pop(block)
        del self._blocks[key]
        if key in self._snapshots:
            self._drop(key)

    def _drop(self, key: Hash) -> None:
        self._slots.append(self._snapshots.pop(key).slot)
        self._planned.discard(key)

    # --- for statistics and tests ------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks whose content can be found."""
        return len(self._blocks)

    @property
    def num_snapshots(self) -> int:
        """Snapshots that can be found."""
        return len(self._snapshots)

    def check(self, num_slots: int) -> None:
        """Assert that every snapshot slot is in exactly one place."""
        held = [snapshot.slot for snapshot in self._snapshots.values()]
        everywhere = [*held, *self._slots, *self._pending]
        assert len(everywhere) == len(set(everywhere)) == num_slots, (held, self._slots, self._pending)
        assert len(self._blocks) == len(self._hashes)
        assert all(self._blocks[key] == block for block, key in self._hashes.items())
        assert all(key in self._blocks for key in self._snapshots)
