"""`SlotTable`: what the hot path must know of every live sequence, as numpy arrays indexed by slot, and the
`StepBatch` that is gathered from it.

The scheduler assigns rows and counts tokens in them, the engine builds a step's batch from them, the commit of a step
extends them. A decode step of hundreds of sequences costs a handful of gathers and no loop over sequences. Knows
nothing of queues and policies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer.engine.sequence import Sequence
from deepinfer.runner.inputs import HISTORY, StepBatch, StepKind
from deepinfer.sample.rows import SamplingBatch


@dataclass(slots=True)
class StepPlan:
    """A scheduling decision: which sequences run how many rows in one step.

    slots, q_starts, q_lens  int64 [n]
    sampled                  bool  [n]  the sequence's last row yields a token
    fresh_slots              slots that got a new owner and must be zeroed first
    """

    kind: StepKind
    sequences: list[Sequence]
    slots: np.ndarray
    q_starts: np.ndarray
    q_lens: np.ndarray
    sampled: np.ndarray
    fresh_slots: list[int]

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return int(self.q_lens.sum())


class SlotTable:
    """One row per state slot.

    block_table  int32 [slots, max_blocks]  paged blocks in order of position; unused entries are 0
    num_blocks   int64  blocks in use of that row
    scheduled    int64  tokens for which a step has been launched
    completed    int64  tokens whose step is done; scheduled - completed are in flight
    in_flight    int64  launched steps that are not committed yet
    target       int64  length that the (re)prefill runs to
    recent       int64 [slots, 4]  the last four tokens, newest last, -1 = before the beginning
    max_len      int64  total length that ends the request
    eos_from     int64  first position that may hold an end token
    ignore_eos   bool   end tokens do not end the request
    watched      bool   stop ids or stop strings to look for
    forced       bool   golden tokens to apply
    and the sampling parameters temperature, top_p, top_k, seed, num_top
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        def column(dtype: type, *shape: int) -> np.ndarray:
            return np.zeros((num_slots, *shape), dtype=dtype)

        self.block_table = column(np.int32, max_blocks)
        self.num_blocks = column(np.int64)
        self.scheduled = column(np.int64)
        self.completed = column(np.int64)
        self.in_flight = column(np.int64)
        self.target = column(np.int64)
        self.recent = column(np.int64, HISTORY + 1)
        self.max_len = column(np.int64)
        self.eos_from = column(np.int64)
        self.ignore_eos = column(np.bool_)
        self.watched = column(np.bool_)
        self.forced = column(np.bool_)
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
        self.scheduled[slot] = self.completed[slot] = self.in_flight[slot] = 0
        self.target[slot] = len(seq.source)
        self.recent[slot] = tail(seq.source, HISTORY + 1)
        self.max_len[slot] = seq.max_len
        self.eos_from[slot] = seq.prompt_len + max(params.first_n_token_no_eos, params.min_tokens)
        self.ignore_eos[slot] = params.ignore_eos
        self.watched[slot] = seq.stops is not None or bool(params.stop_token_ids)
        self.forced[slot] = params.golden_token_ids is not None
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k
        self.seed[slot] = seq.request.seed
        self.num_top[slot] = params.num_top_logprobs

    def add_block(self, seq: Sequence, block: int) -> None:
        """Append a block to a sequence's table."""
        self.block_table[seq.slot, len(seq.blocks)] = block
        seq.blocks.append(block)
        self.num_blocks[seq.slot] = len(seq.blocks)

    def push(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Append one token to each of these slots."""
        recent = self.recent[slots]
        recent[:, :-1] = recent[:, 1:]
        recent[:, -1] = tokens
        self.recent[slots] = recent


def tail(tokens: np.ndarray, count: int) -> np.ndarray:
    """int64 [count]: the last tokens, nearest last, -1 in front if there are fewer."""
    out = np.full(count, -1, dtype=np.int64)
    last = tokens[-count:]
    out[count - len(last) :] = last
    return out


def build_batch(plan: StepPlan, table: SlotTable, step_id: int) -> StepBatch:
    """The batch of a planned step. The plan's tokens have been added to `scheduled` already."""
    rows = _decode_rows if plan.kind == "decode" else _prefill_rows
    token_ids, history, targets = rows(plan, table)
    slots = plan.slots
    return StepBatch(
        step_id=step_id,
        kind=plan.kind,
        slots=slots,
        q_starts=plan.q_starts,
        q_lens=plan.q_lens,
        token_ids=token_ids,
        history=history,
        block_table=table.block_table[slots, : int(table.num_blocks[slots].max())],
        data_lens=table.target[slots],
        sampled=plan.sampled,
        sampling=_sampling(plan, table),
        prompt_logprobs=np.maximum.reduceat(targets, _row_starts(plan)) >= 0,
        prompt_targets=targets,
    )


def _row_starts(plan: StepPlan) -> np.ndarray:
    return np.cumsum(plan.q_lens) - plan.q_lens


def _decode_rows(plan: StepPlan, table: SlotTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [n], history [n, 3] and targets [n] of a decode step: the newest token of every sequence."""
    recent = table.recent[plan.slots]
    return recent[:, -1], recent[:, :-1], np.full(len(plan.slots), -1, dtype=np.int64)


def _prefill_rows(plan: StepPlan, table: SlotTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
    sampled = [seq for seq, wanted in zip(plan.sequences, plan.sampled.tolist(), strict=True) if wanted]
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
