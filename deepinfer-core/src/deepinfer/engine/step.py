"""`commit_rows`: what a finished step means for its sequences: new tokens, scores, and who ends.

Called by the engine once a step, after the executor's result has arrived. Whole-batch questions (end token? length
reached?) are asked in numpy; only sequences that may end or that watch for stop strings are looked at one by one. Does
not touch queues or memory: the engine passes the sequences that ended on to the scheduler.
"""

from __future__ import annotations

import numpy as np

from deepinfer.engine.batch import SlotTable, StepPlan
from deepinfer.engine.grammars import refused
from deepinfer.engine.output import TopLogprobs
from deepinfer.engine.sequence import Sequence
from deepinfer.errors import RequestError
from deepinfer.runner.inputs import StepResult
from deepinfer.sample.rows import SampledRows


def commit_rows(
    plan: StepPlan, result: StepResult, table: SlotTable, eos_ids: np.ndarray, now: float
) -> list[Sequence]:
    """Apply a step's result; returns the sequences it ended, in the order in which they ended.

    A sequence that ended before (aborted, or by its previous step) is skipped: its rows are dropped. So are the rows
    behind the token that ends a sequence, accepted or not.
    """
    ended = _record_scores(plan, result)
    if plan.kind == "prefill":
        ended += _scored(plan)
    if not plan.sampled.any():
        return ended
    sequences, slots = plan.sampled_sequences(), plan.slots[plan.sampled]
    if result.accepted is None:
        ended += _commit_tokens(sequences, slots, result.rows, table, eos_ids)
    else:
        counts = plan.q_lens if result.counts is None else result.counts
        starts = np.cumsum(counts) - counts
        for offset in range(int(result.accepted.max()) + 1):  # one accepted token after the other
            emitting = np.flatnonzero(result.accepted >= offset)
            rows = result.rows.take(starts[emitting] + offset)
            live = [sequences[index] for index in emitting.tolist()]
            ended += _commit_tokens(live, slots[emitting], rows, table, eos_ids)
    if plan.kind == "prefill":
        _stamp_first_tokens(sequences, now)
    return ended


def _commit_tokens(
    sequences: list[Sequence], slots: np.ndarray, rows: SampledRows, table: SlotTable, eos_ids: np.ndarray
) -> list[Sequence]:
    """One more token for each of these sequences that has not ended; returns those that end with it."""
    ended = []
    tokens = np.asarray(rows.token_ids)
    if (constrained := np.flatnonzero(table.constrained[slots])).size:
        refused(sequences, tokens, rows.error, constrained)
    suspects = _suspects(rows, table, slots, tokens, eos_ids)
    table.length[slots] += 1
    _append(sequences, rows, tokens)
    _append_extras(sequences, rows, table.num_top[slots])
    for row in np.flatnonzero(suspects).tolist():
        seq = sequences[row]
        if not seq.finished and _ends(seq, int(suspects[row]), int(tokens[row]), rows.error[row]):
            ended.append(seq)
    return ended


def _record_scores(plan: StepPlan, result: StepResult) -> list[Sequence]:
    """Keep prompt logprobs; returns the sequences that end because the model scored their prompt with no number."""
    failed = []
    for index, scores in result.prompt_logprobs.items():
        seq, start = plan.sequences[index], int(plan.q_starts[index])
        bad = seq.record_prompt_scores(start, np.asarray(scores))
        if bad is not None and not seq.finished:
            seq.finish("error", error=RequestError(f"non-finite logits behind prompt token {bad}"))
            failed.append(seq)
    return failed


# Why a row is looked at, as bits: an error, an end token, a watcher, the length, a form the output has.
_ERROR, _EOS, _WATCHED, _LENGTH, _FORM = 1, 2, 4, 8, 16


def _suspects(
    rows: SampledRows, table: SlotTable, slots: np.ndarray, tokens: np.ndarray, eos_ids: np.ndarray
) -> np.ndarray:
    """int64 [R]: why each sampled row has to be looked at, 0 = it simply goes on."""
    position = table.length[slots]  # of the new token
    is_eos = np.isin(tokens, eos_ids) & ~table.ignore_eos[slots] & (position >= table.eos_from[slots])
    suspects = is_eos * _EOS + table.watched[slots] * _WATCHED + (position + 1 >= table.max_len[slots]) * _LENGTH
    suspects += table.constrained[slots] * _FORM
    for row, error in enumerate(rows.error):
        if error is not None:
            suspects[row] |= _ERROR
    return suspects


def _ends(seq: Sequence, suspect: int, token: int, error: str | None) -> bool:
    """Finish the sequence if its newest token ends it. An end token or stop rule goes before the length."""
    constraint = seq.constraint if suspect & _FORM else None
    if suspect & _ERROR:
        cause = RequestError(f"no token could be sampled after {seq.length} tokens: {error}")
        seq.finish("error", error=cause if constraint is None or constraint.error is None else constraint.error)
        return True
    complete = constraint is not None and constraint.terminated
    watched = suspect & _WATCHED and not (complete and token not in seq.request.params.stop_token_ids)
    rule = seq.stop_rule(token) if watched else None
    if complete or suspect & _EOS:
        seq.finish("stop", stop_reason=rule if complete else None)
    elif rule is not None:
        seq.finish("stop", stop_reason=rule)
    elif suspect & _LENGTH:
        seq.finish("length")
    return seq.finished


def _scored(plan: StepPlan) -> list[Sequence]:
    """Finish the sequences that were only to be scored and whose whole prompt has now been computed."""
    done = []
    for seq, end in zip(plan.sequences, (plan.q_starts + plan.q_lens).tolist(), strict=True):
        if seq.request.score_only and not seq.finished and end == seq.prompt_len:
            seq.finish("stop")
            done.append(seq)
    return done


def _append(sequences: list[Sequence], rows: SampledRows, tokens: np.ndarray) -> None:
    """Append the new token and its logprob to every sequence that goes on."""
    logprobs = np.asarray(rows.logprobs).tolist()
    for seq, token, logprob, error in zip(sequences, tokens.tolist(), logprobs, rows.error, strict=True):
        if error is None and not seq.finished:
            seq.output_ids.append(token)
            seq.logprobs.append(logprob)


def _append_extras(sequences: list[Sequence], rows: SampledRows, num_top: np.ndarray) -> None:
    """Append what only some requests or settings ask for: the most likely tokens, the cumulative probability."""
    if rows.sum_smaller is not None:
        for seq, value, error in zip(sequences, np.asarray(rows.sum_smaller).tolist(), rows.error, strict=True):
            if error is None and not seq.finished:
                seq.sum_smaller_probs = [] if seq.sum_smaller_probs is None else seq.sum_smaller_probs
                seq.sum_smaller_probs.append(value)
    if rows.top_ids is None or rows.top_logprobs is None:
        return
    ids, logprobs = np.asarray(rows.top_ids), np.asarray(rows.top_logprobs)
    for row in np.flatnonzero(num_top).tolist():
        seq, count = sequences[row], int(num_top[row])
        if rows.error[row] is None and not seq.finished:
            seq.top_logprobs = [] if seq.top_logprobs is None else seq.top_logprobs
            seq.top_logprobs.append(TopLogprobs(ids[row, :count].copy(), logprobs[row, :count].copy()))


def _stamp_first_tokens(sequences: list[Sequence], now: float) -> None:
    for seq in sequences:
        if seq.first_token_time is None and seq.output_ids:
            seq.first_token_time = now
