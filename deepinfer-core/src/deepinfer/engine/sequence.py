"""`Sequence`: a request on its way through the engine, with its tokens and everything it holds.

Created by the engine, moved between queues by the scheduler, extended by the commit of a step. What the hot path needs
of it for every step lies in the `SlotTable` row of its slot instead; here is the record those arrays are filled from.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from deepinfer.engine.output import FinishReason, TopLogprobs
from deepinfer.engine.prefix import Hash, Snapshot
from deepinfer.engine.request import Request
from deepinfer.engine.text import StopStrings
from deepinfer.errors import RequestError
from deepinfer.structured.constraint import Constraint


class Status(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    """in the queue, holds no memory"""
    PREFILLING = "prefilling"
    """holds slot and blocks; some of its prompt has not been scheduled yet"""
    RUNNING = "running"
    """its whole prompt has been scheduled; it takes part in decode steps"""
    FINISHED = "finished"
    """ended; its memory is released, or will be when the steps in flight are done"""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's state.

    request          what was asked for
    max_len          tokens, prompt included, at which it ends with "length"
    stops            watcher of stop strings, None if there are none
    constraint       where it stands in the form it has asked for, None if there is none; kept when it is preempted
    output_ids, logprobs, top_logprobs, sum_smaller_probs   one entry a generated token (None: not asked for)
    prompt_logprobs  float32 [prompt length], nan where not known yet; None if not asked for
    slot, blocks     memory it owns; slot 0 = none
    source           int64 [target]: the tokens its prefill runs over, prompt plus tokens to recompute; None when done
    finish_reason, stop_reason, error   how it ended
    hashes, snapshot_ends, passing   see `prefix_use`: hashes of its complete blocks, positions whose state its prefill
                     keeps for others, the latest state of its output that it has kept
    resumed, restored_from   tokens its prefill has found computed already, and the slot with the state behind them
    num_cached_tokens   the same of its first prefill; None before
    """

    request: Request
    max_len: int
    stops: StopStrings | None = None
    constraint: Constraint | None = None
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] | None = None
    sum_smaller_probs: list[float] | None = None
    prompt_logprobs: np.ndarray | None = None
    slot: int = 0
    blocks: list[int] = field(default_factory=list)
    source: np.ndarray | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: RequestError | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    num_preemptions: int = 0
    hashes: list[Hash] = field(default_factory=list)
    snapshot_ends: list[int] = field(default_factory=list)
    passing: Snapshot | None = None
    resumed: int = 0
    restored_from: int = 0
    num_cached_tokens: int | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def request_id(self) -> str:
        """Name of the request."""
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return self.prompt_len + len(self.output_ids)

    @property
    def finished(self) -> bool:
        """True once it has ended."""
        return self.status is Status.FINISHED

    def all_tokens(self) -> np.ndarray:
        """int64 [length]: prompt and output."""
        return np.concatenate([self.request.prompt_token_ids, np.array(self.output_ids, dtype=np.int64)])

    def finish(
        self, reason: FinishReason, *, stop_reason: str | int | None = None, error: RequestError | None = None
    ) -> None:
        """Record how it ended. Happens once; releasing its memory is the scheduler's part."""
        assert not self.finished, self.request_id
        self.status = Status.FINISHED
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error

    def stop_rule(self, token_id: int) -> str | int | None:
        """The stop id or stop string that this newest token of the output completes, or None.

        Must see every token once, in order. Before `min_tokens` nothing counts.
        """
        params = self.request.params
        armed = len(self.output_ids) > params.min_tokens
        if armed and token_id in params.stop_token_ids:
            if self.stops is not None and params.include_stop_str_in_output:
                self.stops.add(token_id, armed=False)
            return token_id
        return self.stops.add(token_id, armed) if self.stops is not None else None

    def record_prompt_scores(self, start: int, scores: np.ndarray) -> int | None:
        """Keep the logprobs of the prompt tokens behind rows `start`, `start + 1`, ...; known ones stay as they are.

        Returns the first position whose score is NaN (the row's logits were not finite), None if all are numbers.
        """
        assert self.prompt_logprobs is not None
        known = self.prompt_logprobs[start + 1 : start + 1 + len(scores)]
        fresh = np.isnan(known)
        known[fresh] = scores[: len(known)][fresh]
        bad = np.flatnonzero(np.isnan(known))
        return start + int(bad[0]) if len(bad) else None
