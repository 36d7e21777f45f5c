"""`Request`: what a caller asked for, checked. Every reason to refuse a request before it runs is in this file.

`Admission` applies these checks; a `RequestError` raised here becomes that request's result and touches no other. Knows
the model's vocabulary and the engine's limits, not the scheduler.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from deepinfer.errors import RequestError
from deepinfer.sampling_params import SamplingParams

TokenIds = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine needs to know of a model.

    vocab_size      rows of the embedding and the head; a token id is below it
    eos_ids         tokens that end a text
    image_token_id  placeholder that only an image may stand for; None if the model has none
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    image_token_id: int | None = None


class TextDecoder(Protocol):
    """Turns tokens into text as they come, holding back bytes that do not complete a character yet."""

    def push(self, ids: Iterable[int]) -> str:
        """Text that has become certain with these tokens (may be empty)."""
        ...

    def flush(self) -> str:
        """What is still held back, incomplete characters as U+FFFD."""
        ...


class EngineTokenizer(Protocol):
    """The part of a tokenizer the engine uses."""

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of a text; exactly one beginning-of-text token in front with `add_bos`."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        ...

    def incremental(self, skip_special_tokens: bool = False) -> TextDecoder:
        """A decoder for one stream of tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes a request is checked against.

    max_model_len      tokens of prompt and output together
    max_prompt_tokens  tokens of a prompt that one prefill can take (unlimited if prefill is chunked)
    cache_tokens       tokens the whole cache holds
    truncated_prefill  prefill does not compute every prompt row, so prompts cannot be scored
    """

    max_model_len: int
    max_prompt_tokens: int
    cache_tokens: int
    truncated_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request, immutable.

    prompt_token_ids  int64 [prompt length]
    seed              of its random stream
    score_only        score the prompt (`params.prompt_logprobs` is set) and generate nothing
    arrival_time      seconds of the monotonic clock
    priority          lower = sooner
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: np.ndarray
    params: SamplingParams
    seed: int
    score_only: bool
    arrival_time: float
    priority: int = 0


def checked_params(params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Sampling parameters from what a caller may give: an object, a mapping of its fields, or None for the defaults."""
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    if not isinstance(params, Mapping):
        raise RequestError(f"sampling_params is {type(params).__name__}, expected SamplingParams or a mapping")
    try:
        return SamplingParams.from_dict({key: value for key, value in params.items() if value is not None})
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error


def check_support(params: SamplingParams, multi_modal_data: Any, model: ModelInfo, limits: Limits) -> None:
    """Refuse what this model or this build cannot do."""
    if _has_images(multi_modal_data):
        raise RequestError("multi_modal_data: vision input is not available in this version; remove the images")
    if params.prompt_logprobs and limits.truncated_prefill:
        raise RequestError(
            "prompt_logprobs needs every prompt row, but DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE drops or narrows them; "
            "set it to off"
        )
    ids = {name: getattr(params, name) or () for name in ("golden_token_ids", "stop_token_ids")}
    if (wanted := params.structured) is not None:
        ids["so_args['trigger_token_ids']"] = wanted.trigger_token_ids
        ids["so_args['bound_token_id']"] = () if wanted.bound_token_id is None else (wanted.bound_token_id,)
    for name, values in ids.items():
        largest = max(values, default=-1)
        if largest >= model.vocab_size:
            raise RequestError(f"{name}: id {largest} is outside the vocabulary, expected below {model.vocab_size}")


def checked_tokens(token_ids: TokenIds, model: ModelInfo) -> np.ndarray:
    """Token ids of a prompt as int64 [n]; every id must be a text token of the vocabulary."""
    ids = _as_integers(token_ids)
    if not len(ids):
        raise RequestError("the prompt is empty: give at least one token (a text needs a tokenizer that adds BOS)")
    outside = np.flatnonzero((ids < 0) | (ids >= model.vocab_size))
    if len(outside):
        at = int(outside[0])
        raise RequestError(f"prompt token {int(ids[at])} at position {at} is outside [0, {model.vocab_size})")
    if model.image_token_id is not None:
        images = np.flatnonzero(ids == model.image_token_id)
        if len(images):
            raise RequestError(
                f"prompt token {model.image_token_id} at position {int(images[0])} stands for an image, but the "
                "request brings none"
            )
    return ids


def check_length(length: int, limits: Limits, score_only: bool) -> None:
    """Refuse a prompt that can never run.

    A prompt of max_model_len - 1 tokens still yields one token; one of max_model_len leaves no room. A prompt that is
    only scored generates nothing and may have max_model_len tokens.
    """
    longest = limits.max_model_len if score_only else limits.max_model_len - 1
    if length > longest:
        raise RequestError(
            f"the prompt has {length} tokens, max_model_len={limits.max_model_len} allows at most {longest}"
            + ("" if score_only else " (one is left for the output)")
        )
    if length > limits.max_prompt_tokens:
        raise RequestError(
            f"the prompt has {length} tokens, but max_num_batched_tokens={limits.max_prompt_tokens} and "
            "chunked_prefill=False: raise the first or allow chunked prefill"
        )
    if length > limits.cache_tokens:
        raise RequestError(
            f"the prompt has {length} tokens, the whole cache holds {limits.cache_tokens}: raise num_kv_blocks or the "
            "share of memory"
        )


def _has_images(data: Any) -> bool:
    """False for None and for the empty form {"image_bytes": [], "image_sizes": []}."""
    if isinstance(data, Mapping):
        return any(value is None or len(value) > 0 for value in data.values())
    return data is not None


def _as_integers(token_ids: TokenIds) -> np.ndarray:
    """A one-dimensional int64 array; anything that is not a list of whole numbers is refused."""
    try:
        array = np.asarray(token_ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(f"prompt_token_ids is not a list of token ids ({error})") from error
    if array.ndim != 1:
        found = type(token_ids).__name__
        raise RequestError(f"prompt_token_ids is {found} of {array.ndim} dimensions, expected one list of integers")
    if array.dtype.kind == "i":
        return array.astype(np.int64)
    return np.array([_as_integer(at, value) for at, value in enumerate(token_ids)], dtype=np.int64)


def _as_integer(at: int, value: Any) -> int:
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise RequestError(f"prompt token {value!r} at position {at} is {type(value).__name__}, expected int")
    number = operator.index(value)
    if not -(2**63) <= number < 2**63:
        raise RequestError(f"prompt token {number} at position {at} is outside every vocabulary")
    return number
