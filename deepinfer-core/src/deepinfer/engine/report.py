"""Builds the `RequestOutput` of a request that ended. Called by the engine, once a request."""

from __future__ import annotations

import math

from deepinfer.engine.output import RequestMetrics, RequestOutput
from deepinfer.engine.request import EngineTokenizer
from deepinfer.engine.sequence import Sequence
from deepinfer.errors import RequestError


def finished_output(seq: Sequence, tokenizer: EngineTokenizer | None, now: float) -> RequestOutput:
    """The result of a sequence that has finished."""
    assert seq.finish_reason is not None
    request, scores = seq.request, seq.prompt_logprobs
    return RequestOutput(
        request_id=request.request_id,
        finish_reason=seq.finish_reason,
        metrics=RequestMetrics(
            arrival_time=request.arrival_time,
            finish_time=now,
            first_scheduled_time=seq.first_scheduled_time,
            first_token_time=seq.first_token_time,
            num_preemptions=seq.num_preemptions,
            num_cached_tokens=seq.num_cached_tokens or 0,
            num_draft_tokens=seq.num_draft_tokens,
            num_accepted_tokens=seq.num_accepted_tokens,
        ),
        token_ids=seq.output_ids,
        logprobs=seq.logprobs,
        text=_text(seq, tokenizer),
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids.tolist(),
        stop_reason=seq.stop_reason,
        error=seq.error,
        prompt_logprobs=None if scores is None else [None if math.isnan(x) else x for x in scores.tolist()],
        top_logprobs=seq.top_logprobs,
        sum_smaller_probs=seq.sum_smaller_probs,
    )


def refused_output(request_id: str, prompt: str | None, error: RequestError, now: float) -> RequestOutput:
    """The result of a request that never became a sequence."""
    metrics = RequestMetrics(arrival_time=now, finish_time=now)
    return RequestOutput(request_id, "error", metrics, [], [], prompt=prompt, error=error)


def _text(seq: Sequence, tokenizer: EngineTokenizer | None) -> str:
    """The generated text, without the stop string or stop token that ended it unless it was asked to stay."""
    params = seq.request.params
    if seq.stops is not None:
        return seq.stops.text if isinstance(seq.stop_reason, str) else seq.stops.close()
    if tokenizer is None:
        return ""
    ids = seq.output_ids
    completed = seq.constraint is not None and seq.constraint.terminated  # by an end token that is no part of the form
    if completed if seq.stop_reason is None else not params.include_stop_str_in_output:
        ids = ids[:-1]
    return tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
