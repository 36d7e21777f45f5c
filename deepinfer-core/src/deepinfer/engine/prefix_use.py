"""`PrefixUse`: how sequences use the prefix cache. What a new one may skip, what each step leaves for others.

Called by the scheduler at admission, when it plans a step and when a step is done. `PrefixCache` knows texts; here is
which positions get a snapshot and when a block may be offered:

    prompt    its tokens are certain, so its blocks and snapshots are offered by the plan of the step that computes them
              and can be used by the next plan. Snapshots stand at its end, where it leaves a known text, and every
              `interval` tokens.
    output    blocks are offered once they are complete and committed. The slot is copied behind every step that may
              cross a block border; with drafts only the commit tells whether it did, and useless copies are dropped.

A prompt whose tokens are to be scored computes every row. With truncated prefill the last `keep` tokens are always
computed: what the decoder half and the draft layers left of a shorter text would not be what they leave of this one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.engine.batch import SlotTable, StepPlan
from deepinfer.engine.blocks import BlockPool
from deepinfer.engine.prefix import NOTHING, Match, PrefixCache
from deepinfer.engine.sequence import Sequence
from deepinfer.runner.inputs import CacheCapacity


class Capture(NamedTuple):
    """The state of `seq` behind `end` tokens is copied to `slot` after the step, which may turn out not to be there."""

    seq: Sequence
    end: int
    slot: int


class PrefixUse:
    """See the module.

    keep      tokens at a prompt's end that are computed in any case (truncation), 0 = only the last one
    interval  tokens between snapshots inside a prompt
    """

    def __init__(self, cache: PrefixCache, num_snapshots: int, keep: int, interval: int) -> None:
        self.cache = cache
        self._size = cache.block_size
        self._keep = keep
        self._interval = max(interval // self._size, 1) * self._size
        self._most = max(num_snapshots // 4, 1)  # snapshots inside one prompt

    def look(self, seq: Sequence) -> Match:
        """What a waiting sequence could skip."""
        if len(seq.hashes) < seq.length // self._size:
            self.cache.extend(seq.hashes, seq.all_tokens(), seq.length)
        scores = seq.prompt_logprobs
        if scores is not None and np.isnan(scores[1:]).any():
            return NOTHING
        return self.cache.match(seq.hashes, self._limit(seq.length))

    def start(self, seq: Sequence, match: Match) -> None:
        """The sequence is admitted and begins behind the match, whose blocks it holds already."""
        self.cache.use(match)
        seq.resumed, seq.passing = match.end, None
        seq.restored_from = 0 if match.snapshot is None else match.snapshot.slot
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = match.end
        seq.snapshot_ends = self._ends(len(seq.hashes), seq.length, match)

    def plan_chunk(self, seq: Sequence, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows `start` .. `stop - 1` of the (re)prefill are planned: offers their blocks; (end, slot) of the snapshots
        the step makes."""
        size = self._size
        self.cache.publish(seq.hashes, seq.blocks, start // size, stop // size)
        wanted = [end for end in seq.snapshot_ends if start < end <= stop]
        made = [(end, self.cache.plan_snapshot(seq.hashes[end // size - 1], end)) for end in wanted]
        return [(end, slot) for end, slot in made if slot]

    def plan_captures(self, plan: StepPlan, table: SlotTable) -> list[Capture]:
        """Copies to be made behind a planned decode step, of the sequences that may cross a block border with it."""
        size, captures = self._size, []
        scheduled = table.scheduled[plan.slots]
        earliest = scheduled - 1 - table.surplus[plan.slots]  # where the step begins if every draft is refused
        crossing = earliest // size < scheduled // size
        crossing &= scheduled // size * size < table.max_len[plan.slots]  # the last token is never fed
        for index in np.flatnonzero(crossing).tolist():
            slot = self.cache.reserve()
            if slot:
                captures.append(Capture(plan.sequences[index], int(scheduled[index]) // size * size, slot))
        return captures

    def complete(self, plan: StepPlan, table: SlotTable, before: np.ndarray) -> None:
        """A decode step is committed: offers the blocks and the states that it has completed.

        before  int64 [n] tokens completed before it
        """
        size, slots = self._size, plan.slots
        done = table.completed[slots]
        for index in np.flatnonzero(done // size > table.offered[slots]).tolist():
            self._offer(plan.sequences[index], table, int(done[index]))
        for capture in plan.captures:
            self._settle(capture, plan, table, before)

    def _offer(self, seq: Sequence, table: SlotTable, done: int) -> None:
        """Offer the blocks of tokens that are in the cache and belong to the text: a step may go beyond its end."""
        known = min(done, seq.length)
        first, last = int(table.offered[seq.slot]), known // self._size
        table.offered[seq.slot] = max(first, last)
        if seq.error is None and last > first:
            self.cache.extend(seq.hashes, seq.all_tokens(), known)
            self.cache.publish(seq.hashes, seq.blocks, first, last)

    def _settle(self, capture: Capture, plan: StepPlan, table: SlotTable, before: np.ndarray) -> None:
        """Offer a copied state if the step went from before its border to it or beyond, and the text does, too."""
        seq, end, slot = capture
        index = plan.sequences.index(seq)
        crossed = before[index] < end <= min(int(table.completed[seq.slot]), seq.length)
        snapshot = None
        if crossed and seq.error is None:
            snapshot = self.cache.confirm(slot, seq.hashes[end // self._size - 1], end, passing=True)
        else:
            self.cache.cancel(slot)
        if snapshot is not None:
            self.cache.replace_passing(seq.passing)
            seq.passing = snapshot

    def _limit(self, length: int) -> int:
        """Where a text of this length may be continued at the latest."""
        return length - max(1, self._keep)

    def _ends(self, blocks: int, length: int, match: Match) -> list[int]:
        """Positions behind the match at which a prompt's steps make snapshots."""
        size = self._size
        stride = max(self._interval, -(-blocks // self._most) * size)
        inside = range(stride, length + 1, stride)
        wanted = {self._limit(length) // size * size, length // size * size, match.branch, *inside}
        return sorted(end for end in wanted if end > match.end)


def make_prefix_use(config: EngineConfig, capacity: CacheCapacity, pool: BlockPool) -> PrefixUse | None:
    """The prefix cache, if it is on and the executor has room for snapshots."""
    if not config.enable_prefix_caching or not capacity.num_snapshots:
        return None
    settings, size = config.settings, capacity.block_size
    mode = settings.yoco_prefill_truncation_mode
    keep = 0 if mode == "off" else settings.yoco_prefill_keep_tokens
    slots = range(capacity.num_slots, capacity.num_slots + capacity.num_snapshots)
    salt = f"{config.model} {config.revision} {config.numerics} {mode} {keep} {size}"
    cache = PrefixCache(pool, size, slots, salt)
    return PrefixUse(cache, capacity.num_snapshots, keep, config.prefix_snapshot_interval)
