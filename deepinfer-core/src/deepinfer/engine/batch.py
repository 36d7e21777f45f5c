"""`SlotTable`: what the hot path must know of every live sequence, as numpy arrays indexed by slot, and the
`StepBatch` that is gathered from it.

The scheduler assigns rows and counts tokens in them, the engine builds a step's batch from them, the commit of a step
counts what came out. A decode step of hundreds of sequences costs a handful of gathers and no loop over sequences.
Knows nothing of queues and policies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.engine.sequence import Sequence
from deepinfer.runner.inputs import HISTORY, StepBatch, StepKind
from deepinfer.sample.rows import AheadRules, SamplingBatch

if TYPE_CHECKING:
    from deepinfer.engine.prefix_use import Capture


@dataclass(slots=True)
class StepPlan:
    """A scheduling decision: which sequences run how many rows in one step.

    slots, q_starts, q_lens  int64 [n]; in decode q_lens is 1 + the drafts to verify
    sampled                  bool  [n]  the sequence yields tokens
    fresh_slots              slots that got a new owner and must be zeroed first
    draft                    the step proposes tokens for the next one
    choose                   see `StepBatch.choose`
    optimistic               drafts are verified or in flight, so `q_starts` are upper bounds
    restores                 (snapshot slot, slot): state that new owners go on from instead of zeros
    snapshots                see `StepBatch.snapshots`
    captures                 slots to be copied after the step
    """

    kind: StepKind
    sequences: list[Sequence]
    slots: np.ndarray
    q_starts: np.ndarray
    q_lens: np.ndarray
    sampled: np.ndarray
    fresh_slots: list[int]
    optimistic: bool = False
    draft: bool = False
    choose: Callable[[np.ndarray], np.ndarray] | None = None
    restores: list[tuple[int, int]] = field(default_factory=list)
    snapshots: list[tuple[int, int, int]] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return int(self.q_lens.sum())

    @property
    def num_restored(self) -> int:
        """Tokens that sequences of the step need not compute, because they go on from a snapshot."""
        restored = {slot for _, slot in self.restores}
        starts = zip(self.slots.tolist(), self.q_starts.tolist(), strict=True)
        return sum(start for slot, start in starts if slot in restored) if restored else 0

    @property
    def drafts(self) -> np.ndarray:
        """int64 [n]: drafts of each sequence that the step verifies."""
        return self.q_lens - 1 if self.kind == "decode" else np.zeros_like(self.q_lens)

    def sampled_sequences(self) -> list[Sequence]:
        """Sequences that yield tokens, in order."""
        if self.sampled.all():
            return self.sequences
        return [seq for seq, sampled in zip(self.sequences, self.sampled.tolist(), strict=True) if sampled]


class SlotTable:
    """One row per state slot.

    block_table  int32 [slots, max_blocks]  paged blocks in order of position; unused entries are 0
    num_blocks   int64  blocks in use of that row
    scheduled    int64  tokens for which a step has been launched, if every draft in flight is accepted
    completed    int64  tokens whose step is done; scheduled - completed are in flight
    offered      int64  blocks that the prefix cache has been told of
    in_flight    int64  launched steps that are not committed yet
    pending      int64  those of them that yield at least one token
    surplus      int64  drafts in flight: how far `scheduled` may be ahead of the truth
    length       int64  tokens of prompt and output that are committed
    target       int64  length that the (re)prefill runs to
    max_len      int64  total length that ends the request
    eos_from     int64  first position that may hold an end token
    ignore_eos   bool   end tokens do not end the request
    watched      bool   stop ids or stop strings to look for
    forced       bool   golden tokens to apply
    constrained  bool   the output has a form, whose masks also say when end tokens may come
    drafted      bool   the last launched step proposes drafts
    confidences  float32 [slots, N]  of the latest drafts that are committed, NaN = none
    record       float64 [slots, N]  running share of accepted drafts by position, NaN = none verified yet
    and the sampling parameters temperature, top_p, top_k, seed, num_top
    """

    def __init__(self, num_slots: int, max_blocks: int, block_size: int, num_drafts: int = 0) -> None:
        def column(dtype: type, *shape: int) -> np.ndarray:
            return np.zeros((num_slots, *shape), dtype=dtype)

        self.block_size = block_size
        self.block_table = column(np.int32, max_blocks)
        self.num_blocks = column(np.int64)
        self.scheduled = column(np.int64)
        self.completed = column(np.int64)
        self.offered = column(np.int64)
        self.in_flight = column(np.int64)
        self.pending = column(np.int64)
        self.surplus = column(np.int64)
        self.length = column(np.int64)
        self.target = column(np.int64)
        self.max_len = column(np.int64)
        self.eos_from = column(np.int64)
        self.ignore_eos = column(np.bool_)
        self.watched = column(np.bool_)
        self.forced = column(np.bool_)
        self.constrained = column(np.bool_)
        self.drafted = column(np.bool_)
        self.confidences = column(np.float32, num_drafts)
        self.record = column(np.float64, num_drafts)
        self.temperature = column(np.float32)
        self.top_p = column(np.float32)
        self.top_k = column(np.int32)
        self.seed = column(np.uint64)
        self.num_top = column(np.int32)

    def assign(self, seq: Sequence) -> None:
        """Fill the row of a sequence that has just got its slot, its blocks and its `source`."""
        slot, params = seq.slot, seq.request.params
        assert seq.source is not None
        self.block_table[slot] = 0
        self.block_table[slot, : len(seq.blocks)] = seq.blocks
        self.num_blocks[slot] = len(seq.blocks)
        self.scheduled[slot] = self.completed[slot] = seq.resumed
        self.offered[slot] = seq.resumed // self.block_size
        self.in_flight[slot] = self.pending[slot] = self.surplus[slot] = 0
        self.length[slot] = self.target[slot] = len(seq.source)
        self.drafted[slot] = False
        self.confidences[slot] = self.record[slot] = np.nan
        self.max_len[slot] = seq.max_len
        self.constrained[slot] = seq.constraint is not None
        eos_from = seq.prompt_len + max(params.first_n_token_no_eos, params.min_tokens)
        self.eos_from[slot] = 0 if seq.constraint is not None else eos_from
        self.ignore_eos[slot] = params.ignore_eos
        self.watched[slot] = seq.stops is not None or bool(params.stop_token_ids)
        self.forced[slot] = params.golden_token_ids is not None
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k
        self.seed[slot] = seq.request.seed
        self.num_top[slot] = params.num_top_logprobs

    def width(self, ends: np.ndarray) -> int:
        """Columns of the block table that rows up to these exclusive ends use. Rows that can only belong to a sequence
        that has ended by then may lie behind its last block: they find the null block."""
        return -(-int(ends.max()) // self.block_size)

    def add_block(self, seq: Sequence, block: int) -> None:
        """Append a block to a sequence's table."""
        self.block_table[seq.slot, len(seq.blocks)] = block
        seq.blocks.append(block)
        self.num_blocks[seq.slot] = len(seq.blocks)


def tail(tokens: np.ndarray, count: int) -> np.ndarray:
    """int64 [count]: the last tokens, nearest last, -1 in front if there are fewer."""
    out = np.full(count, -1, dtype=np.int64)
    last = tokens[-count:]
    out[count - len(last) :] = last
    return out


def build_batch(plan: StepPlan, table: SlotTable, step_id: int) -> StepBatch:
    """The batch of a planned step. The plan's tokens have been added to `scheduled` already."""
    rows = _decode_rows if plan.kind == "decode" else _prefill_rows
    token_ids, history, targets = rows(plan)
    slots = plan.slots
    return StepBatch(
        step_id=step_id,
        kind=plan.kind,
        slots=slots,
        q_starts=plan.q_starts,
        q_lens=plan.q_lens,
        token_ids=token_ids,
        history=history,
        block_table=table.block_table[slots, : table.width(plan.q_starts + plan.q_lens)],
        data_lens=table.target[slots],
        sampled=plan.sampled,
        sampling=(_ahead if plan.optimistic else _sampling)(plan, table),
        prompt_logprobs=np.maximum.reduceat(targets, _row_starts(plan)) >= 0,
        prompt_targets=targets,
        optimistic=plan.optimistic,
        draft=plan.draft,
        choose=plan.choose,
        snapshots=plan.snapshots,
        prefixes=_prefixes(plan) if plan.restores else {},
    )


def _prefixes(plan: StepPlan) -> dict[int, np.ndarray]:
    """Tokens before the first row of the sequences that go on from a snapshot."""
    restored = {slot for _, slot in plan.restores}
    return {
        index: seq.source[:start]
        for index, (seq, start) in enumerate(zip(plan.sequences, plan.q_starts.tolist(), strict=True))
        if seq.slot in restored and seq.source is not None
    }


def _row_starts(plan: StepPlan) -> np.ndarray:
    return np.cumsum(plan.q_lens) - plan.q_lens


def _decode_rows(plan: StepPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [Q], history [n, 3] and targets [Q] of a decode step: the device knows the tokens, nothing is scored."""
    unknown = np.full(plan.num_rows, -1, dtype=np.int64)
    return unknown, np.full((len(plan.slots), HISTORY), -1, dtype=np.int64), unknown


def _prefill_rows(plan: StepPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [Q], history [n, 3] and targets [Q] of a step over chunks of prompts."""
    tokens, history, targets = [], [], []
    for seq, start, count in zip(plan.sequences, plan.q_starts.tolist(), plan.q_lens.tolist(), strict=True):
        assert seq.source is not None
        tokens.append(seq.source[start : start + count])
        history.append(tail(seq.source[:start], HISTORY))
        targets.append(_targets(seq, start, count))
    return np.concatenate(tokens), np.stack(history), np.concatenate(targets)


def _targets(seq: Sequence, start: int, count: int) -> np.ndarray:
    """The prompt token behind each row, -1 where there is none, none is wanted or its score is known already."""
    out = np.full(count, -1, dtype=np.int64)
    if seq.prompt_logprobs is not None:
        following = seq.request.prompt_token_ids[start + 1 : start + 1 + count]
        unknown = np.isnan(seq.prompt_logprobs[start + 1 : start + 1 + count])
        out[: len(following)] = np.where(unknown, following, -1)
    return out


def _sampling(plan: StepPlan, table: SlotTable) -> SamplingBatch:
    """Parameters of the sampled rows; the produced token's position is the one behind the last row."""
    slots = plan.slots[plan.sampled]
    position = (plan.q_starts + plan.q_lens)[plan.sampled]
    early = position < table.eos_from[slots]
    golden = np.full(len(slots), -1, dtype=np.int32)
    forbidden: list[tuple[int, int]] = []
    special = np.flatnonzero(table.forced[slots] | (early & table.watched[slots]))
    sampled = plan.sampled_sequences()
    for row in special.tolist():
        params, index = sampled[row].request.params, int(position[row]) - sampled[row].prompt_len
        golden[row] = params.golden_at(index)
        if index < params.min_tokens:
            forbidden += [(row, token) for token in params.stop_token_ids]
    return SamplingBatch(
        temperature=table.temperature[slots],
        top_p=table.top_p[slots],
        top_k=table.top_k[slots],
        seed=table.seed[slots],
        position=position,
        num_top_logprobs=table.num_top[slots],
        forbid_eos=early,
        golden=golden,
        forbidden=np.array(forbidden, dtype=np.int64) if forbidden else None,
    )


def _ahead(plan: StepPlan, table: SlotTable) -> SamplingBatch:
    """Parameters of the rows of a decode step with drafts: what depends on the position is for the device to decide."""
    slots = np.repeat(plan.slots, plan.q_lens)
    none = np.full(len(slots), -1, dtype=np.int32)
    return SamplingBatch(
        temperature=table.temperature[slots],
        top_p=table.top_p[slots],
        top_k=table.top_k[slots],
        seed=table.seed[slots],
        position=none.astype(np.int64),
        num_top_logprobs=table.num_top[slots],
        forbid_eos=np.zeros(len(slots), dtype=np.bool_),
        golden=none,
        ahead=_ahead_rules(plan, table),
    )


def _ahead_rules(plan: StepPlan, table: SlotTable) -> AheadRules:
    """Golden tokens and forbidden ids of every position the step may produce: from the first one that is not committed
    to the last one an optimistic start leads to."""
    slots = plan.slots
    first, last = table.length[slots], plan.q_starts + plan.q_lens
    early = first < table.eos_from[slots]
    rules = AheadRules(plan.q_lens, np.where(early, table.eos_from[slots], 0), golden_from=first)
    forbidden: list[tuple[int, int, int]] = []
    for row in np.flatnonzero(table.forced[slots] | (early & table.watched[slots])).tolist():
        seq, params = plan.sequences[row], plan.sequences[row].request.params
        if table.forced[slots[row]]:
            if rules.golden is None:
                rules.golden = np.full((len(slots), int((last - first).max()) + 1), -1, dtype=np.int32)
            start, count = int(first[row]) - seq.prompt_len, int(last[row] - first[row]) + 1
            rules.golden[row, :count] = [params.golden_at(start + index) for index in range(count)]
        until = seq.prompt_len + params.min_tokens
        if int(first[row]) < until:
            forbidden += [(row, token, until) for token in params.stop_token_ids]
    rules.forbidden = np.array(forbidden, dtype=np.int64) if forbidden else None
    return rules
