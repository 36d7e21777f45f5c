"""`Admission`: from what a caller hands in to a checked `Sequence`, or a `RequestError` saying what is wrong.

Used by `Engine.add_request`. Brings together model, limits and tokenizer; the single checks are in `request`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.engine.request import (
    EngineTokenizer,
    Limits,
    ModelInfo,
    Request,
    TokenIds,
    check_length,
    check_support,
    checked_params,
    checked_tokens,
)
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.text import StopStrings
from deepinfer.errors import DeepInferError, RequestError
from deepinfer.runner.inputs import CacheCapacity
from deepinfer.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as the caller gave it, unchecked.

    prompt            text, encoded with BOS; ignored as input if token_ids are given
    token_ids         used as they are
    params            SamplingParams, a mapping of its fields, or None for the defaults
    multi_modal_data  must hold no image
    score_only        compute prompt_logprobs and generate nothing
    priority          whole number; requests with a lower one are admitted first and preempted last
    error             the caller knows already that it is wrong
    """

    prompt: str | None = None
    token_ids: TokenIds | None = None
    params: SamplingParams | Mapping[str, Any] | None = None
    multi_modal_data: Any = None
    score_only: bool = False
    priority: int = 0
    error: RequestError | None = None


class Admission:
    """Checks requests of one engine. `clock` gives arrival times."""

    def __init__(
        self,
        config: EngineConfig,
        capacity: CacheCapacity,
        tokenizer: EngineTokenizer | None,
        model: ModelInfo,
        clock: Callable[[], float],
    ) -> None:
        assert config.max_model_len is not None
        assert config.max_num_batched_tokens is not None
        self._seed = config.seed
        self._max_model_len = config.max_model_len
        self._tokenizer = tokenizer
        self._model = model
        self._clock = clock
        self._limits = Limits(
            max_model_len=config.max_model_len,
            max_prompt_tokens=config.max_model_len if config.chunked_prefill else config.max_num_batched_tokens,
            cache_tokens=(capacity.num_blocks - 1) * capacity.block_size,
            truncated_prefill=config.settings.yoco_prefill_truncation_mode != "off",
        )

    def admit(self, ask: Ask, number: int, request_id: str) -> Sequence:
        """The sequence of a request; RequestError if anything about it is wrong.

        number  how many requests came before; picks the random stream of a request without `seq_seed`
        """
        if ask.error is not None:
            raise ask.error
        if isinstance(ask.priority, bool) or not isinstance(ask.priority, int):
            raise RequestError(f"priority={ask.priority!r} is {type(ask.priority).__name__}, expected int")
        params = checked_params(ask.params)
        if ask.score_only:
            params = replace(params, prompt_logprobs=True)
        check_support(params, ask.multi_modal_data, self._model, self._limits)
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")
        ids = checked_tokens(self._encode(ask.prompt) if ask.token_ids is None else ask.token_ids, self._model)
        check_length(len(ids), self._limits, ask.score_only)
        request = Request(
            request_id=request_id,
            prompt=ask.prompt,
            prompt_token_ids=ids,
            params=params,
            seed=params.seed_for(self._seed, number),
            score_only=ask.score_only,
            arrival_time=self._clock(),
            priority=ask.priority,
        )
        return self._sequence(request)

    def _encode(self, prompt: str | None) -> TokenIds:
        if prompt is None:
            raise RequestError("the request has neither a prompt nor token ids")
        if self._tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer, and this engine has none; give token ids")
        try:
            return self._tokenizer.encode(prompt)
        except (DeepInferError, TypeError, ValueError) as error:  # e.g. half of a surrogate pair in the text
            raise RequestError(f"the prompt cannot be encoded: {error}") from error

    def _sequence(self, request: Request) -> Sequence:
        params, length = request.params, len(request.prompt_token_ids)
        return Sequence(
            request=request,
            max_len=min(length + params.max_tokens, self._max_model_len),
            stops=self._watcher(params),
            top_logprobs=[] if params.num_top_logprobs else None,
            prompt_logprobs=np.full(length, np.nan, dtype=np.float32) if params.prompt_logprobs else None,
        )

    def _watcher(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop:
            return None
        assert self._tokenizer is not None
        decoder = self._tokenizer.incremental(skip_special_tokens=params.skip_special_tokens)
        return StopStrings(decoder, tuple(params.stop), params.include_stop_str_in_output)
