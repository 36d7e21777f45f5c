"""Measures what decode steps cost on this worker's device, for the choice of how many drafts to verify.

Called by the executor once, when an engine with variable verification starts. The steps are real ones on the null slot
and the null block, of growing numbers of rows; contexts are short, since the schedule follows longer ones by itself.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.runner.inputs import HISTORY, StepBatch
from deepinfer.sample.rows import AheadRules, SamplingBatch
from deepinfer.speculate.costs import MeasuredCosts, sizes_by_importance

if TYPE_CHECKING:
    from deepinfer.runner.worker import Worker

REPEATS = 2
PATIENCE_SECONDS = 3.0
"""No further size is begun after this time, nor one that would take longer than this alone."""
MOST_ROWS = 512
CONTEXT = 64
"""Position of the measured rows."""


def measure_costs(worker: Worker, max_num_seqs: int, num_drafts: int) -> MeasuredCosts:
    """Points of steps up to `max_num_seqs * (1 + num_drafts)` rows and of draft passes up to `max_num_seqs` sequences,
    the most telling sizes first, as many as there is time for."""
    ends = time.monotonic() + PATIENCE_SECONDS
    step_ms: dict[int, float] = {}
    drafting_ms: dict[int, float] = {}
    width, bound = 1 + num_drafts, MOST_ROWS
    for size in sizes_by_importance(min(max_num_seqs * width, MOST_ROWS), width):
        if size > bound or (len(step_ms) > 1 and time.monotonic() > ends):
            continue
        lens = np.full(-(-size // width), width, dtype=np.int64)
        lens[-1] = size - width * (len(lens) - 1)
        began = time.monotonic()
        step_ms[size] = _quickest(worker, lens, draft=False)
        if len(lens) not in drafting_ms:
            drafting_ms[len(lens)] = max(0.0, _quickest(worker, lens, draft=True) - step_ms[size])
        bound = size if time.monotonic() - began > PATIENCE_SECONDS / 2 else bound
    return MeasuredCosts.of(step_ms, drafting_ms)


def _quickest(worker: Worker, lens: np.ndarray, draft: bool) -> float:
    """Milliseconds of a step: the least of some, after one that nobody times."""
    times = []
    for _ in range(1 + REPEATS):
        worker.runner.feedback.length[0] = CONTEXT + 1
        timing = worker.run(_batch(lens, draft)).result().timing
        assert timing is not None
        times.append(timing.busy)
    return min(times[1:])


def _batch(lens: np.ndarray, draft: bool) -> StepBatch:
    """A greedy decode step of sequences that bring `lens` rows, all of them on the null slot."""
    count, rows = len(lens), int(lens.sum())
    zeros, none = np.zeros(count, dtype=np.int64), np.full(rows, -1, dtype=np.int64)
    sampling = SamplingBatch(
        temperature=np.zeros(rows, dtype=np.float32),
        top_p=np.ones(rows, dtype=np.float32),
        top_k=np.full(rows, -1, dtype=np.int32),
        seed=np.zeros(rows, dtype=np.uint64),
        position=none,
        num_top_logprobs=np.zeros(rows, dtype=np.int32),
        forbid_eos=np.zeros(rows, dtype=np.bool_),
        golden=none.astype(np.int32),
        ahead=AheadRules(lens, zeros),
    )
    return StepBatch(
        step_id=0,
        kind="decode",
        slots=zeros,
        q_starts=zeros + CONTEXT,
        q_lens=lens,
        token_ids=none,
        history=np.full((count, HISTORY), -1, dtype=np.int64),
        block_table=np.zeros((count, 1), dtype=np.int32),
        data_lens=zeros,
        sampled=np.ones(count, dtype=np.bool_),
        sampling=sampling,
        prompt_logprobs=np.zeros(count, dtype=np.bool_),
        prompt_targets=none,
        optimistic=True,
        draft=draft,
    )
