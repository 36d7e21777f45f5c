"""`SamplingParams`: how one request wants its tokens chosen. Plain data, checked when it is made.

Users construct it; the engine reads it when a request is admitted and when it fills a `SamplingBatch`. Nothing here
knows a model, a tokenizer or a tensor, and nothing here imports torch.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from deepinfer.errors import RequestError
from deepinfer.so_args import StructuredOutput

GREEDY_TEMPERATURE = 1e-4
"""A temperature up to this value is greedy: the lowest-numbered of the largest logits, no randomness at all."""

MAX_TOP_LOGPROBS = 1000
INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1
FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class SamplingParams:
    """Sampling choices of one request. A wrong type raises `TypeError`, a wrong value `ValueError`, both at once.

    Immutable; use `dataclasses.replace` for a variant. Sequences are stored as tuples. One object may serve any
    number of requests.

    temperature      >= 0. Up to `GREEDY_TEMPERATURE` (0 included) decoding is greedy: arg-max, lowest id on ties.
    top_p            (0, 1]; tokens are kept until the probability before them exceeds top_p. 1 = off.
    top_k            -1 = off, else >= 1; applied to the survivors of top_p.
    ignore_eos       end-of-sequence tokens do not stop the request.
    max_tokens       1 .. 2^31-1 tokens to generate; 0 is taken as 1, as in DeepInfer 0.1.0.
    logprobs         the chosen token's logprob is always returned; an int n also returns the n most likely
                     (the same as top_logprobs=n). True and False add nothing.
    prompt_logprobs  also score the prompt: entry i is the logprob of prompt token i+1.
    top_logprobs     0 .. 1000 most likely tokens to return with each generated token.
    first_n_token_no_eos
                     end-of-sequence tokens are impossible among the first n generated tokens.
    eos_id           accepted for compatibility; the engine uses the tokenizer's own end tokens.
    so_args          structured output: a `StructuredOutput`, or a mapping of its fields, e.g.
                     {"schema_type": "json", "schema": {"type": "object", ...}}.
    golden_token_ids forced output: entry k is emitted as generated token k; -1 leaves it free. Logprobs stay the
                     model's.
    seq_seed         0 .. 2^64-1, the seed of the request's random stream; out of range is an error. None = a seed of
                     its own for every request, derived from the engine's seed (`seed_for`).
    stop             strings that end the text when they appear; a single string is accepted.
    stop_token_ids   token ids that end the request, besides the tokenizer's end tokens.
    min_tokens       no end token, stop id or stop string takes effect before this many tokens (<= max_tokens).
    include_stop_str_in_output
                     keep the stop string in the text.
    skip_special_tokens
                     leave special tokens out of the text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    max_tokens: int = 16
    logprobs: bool | int = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    first_n_token_no_eos: int = 0
    eos_id: int = 0
    so_args: StructuredOutput | Mapping[str, Any] | None = None
    golden_token_ids: Sequence[int] | None = None
    seq_seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = False

    def __post_init__(self) -> None:
        self._store("temperature", _real("temperature", self.temperature, low=0.0, high=FLOAT32_MAX))
        self._store("top_p", _real("top_p", self.top_p, low=0.0, high=1.0, open_low=True))
        self._store("top_k", _top_k(self.top_k))
        for name in ("ignore_eos", "prompt_logprobs", "include_stop_str_in_output", "skip_special_tokens"):
            self._store(name, _flag(name, getattr(self, name)))
        self._store("max_tokens", max(1, _integer("max_tokens", self.max_tokens, 0, INT32_MAX)))
        self._store("logprobs", _logprobs(self.logprobs))
        self._store("top_logprobs", _integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS))
        for name in ("first_n_token_no_eos", "eos_id", "min_tokens"):
            self._store(name, _integer(name, getattr(self, name), 0, INT32_MAX))
        self._store("so_args", StructuredOutput.of(self.so_args))
        if self.golden_token_ids is not None:
            self._store("golden_token_ids", _integers("golden_token_ids", self.golden_token_ids, low=-1))
        if self.seq_seed is not None:
            self._store("seq_seed", _integer("seq_seed", self.seq_seed, 0, UINT64_MAX))
        self._store("stop", _strings("stop", self.stop))
        self._store("stop_token_ids", _integers("stop_token_ids", self.stop_token_ids or (), low=0))
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}")

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters from a mapping, for instance a line of a batch file. An unknown key raises `RequestError`."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise RequestError(f"unknown sampling parameter {key!r}{_nearest(key, known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All fields, `from_dict(to_dict())` gives an equal object."""
        structured = self.structured
        return asdict(self) | {"so_args": None if structured is None else structured.to_dict()}

    @property
    def structured(self) -> StructuredOutput | None:
        """`so_args` as it is stored."""
        assert self.so_args is None or isinstance(self.so_args, StructuredOutput)
        return self.so_args

    @property
    def greedy(self) -> bool:
        """True if no random number is ever drawn for this request."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def num_top_logprobs(self) -> int:
        """How many most likely tokens to return with each generated token."""
        asked = 0 if isinstance(self.logprobs, bool) else self.logprobs
        return max(self.top_logprobs, asked)

    def seed_for(self, engine_seed: int, request_number: int) -> int:
        """The 64-bit seed of a request: `seq_seed` if given, else its own stream of the engine's seed.

        `request_number` counts requests in the order they were added, so a run of an engine can be repeated while
        two requests that share one `SamplingParams` still differ (SplitMix64 of both numbers).
        """
        if self.seq_seed is not None:
            return self.seq_seed
        return _splitmix64(_splitmix64(engine_seed & UINT64_MAX) ^ (request_number & UINT64_MAX))

    def golden_at(self, output_index: int) -> int:
        """Token forced at generated position `output_index` (0 = first), -1 if it is free."""
        forced = self.golden_token_ids
        return forced[output_index] if forced is not None and output_index < len(forced) else -1

    def forbids_eos_at(self, output_index: int) -> bool:
        """True if the generated token `output_index` (0 = first) must not be an end token."""
        return output_index < max(self.first_n_token_no_eos, self.min_tokens)


def _splitmix64(state: int) -> int:
    """One output of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64-bit integers that mixes all bits."""
    z = (state + 0x9E3779B97F4A7C15) & UINT64_MAX
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MAX
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & UINT64_MAX
    return z ^ (z >> 31)


def _nearest(word: object, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(str(word), known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else f"; known: {', '.join(known)}"


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # numpy.bool_ without importing numpy
        return bool(value)
    raise TypeError(f"{name}={value!r} must be True or False, not {type(value).__name__}")


def _integer(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int. True and 1.0 are refused: they are more often a mistake than meant."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer, not {type(value).__name__}") from None
    if not low <= number <= high:
        raise RequestError(f"{name}={number} is out of range, expected {low} .. {high}")
    return number


def _real(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    """`value` as a finite float in [low, high], or (low, high] with `open_low`."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}")
    number = float(value)
    inside = (low < number if open_low else low <= number) and number <= high
    if not math.isfinite(number) or not inside:
        span = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise RequestError(f"{name}={number!r} is out of range, expected a number in {span}")
    return number


def _top_k(value: Any) -> int:
    number = _integer("top_k", value, -INT32_MAX - 1, INT32_MAX)
    if number == 0 or number < -1:
        raise RequestError(f"top_k={number} is out of range, expected -1 (off) or 1 .. {INT32_MAX}")
    return number


def _logprobs(value: Any) -> bool | int:
    return value if isinstance(value, bool) else _integer("logprobs", value, 0, MAX_TOP_LOGPROBS)


def _integers(name: str, values: Any, low: int) -> tuple[int, ...]:
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name}={values!r} must be a list of integers, not {type(values).__name__}")
    return tuple(_integer(f"{name}[{i}]", value, low, INT32_MAX) for i, value in enumerate(values))


def _strings(name: str, values: Any) -> tuple[str, ...]:
    if values is None:
        return ()
    if isinstance(values, str):
        values = (values,)
    if isinstance(values, (bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name}={values!r} must be a string or a list of strings, not {type(values).__name__}")
    strings = tuple(values)
    for i, text in enumerate(strings):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{i}]={text!r} must be a string, not {type(text).__name__}")
        if not text:
            raise RequestError(f"{name}[{i}]='' is empty; it would end every text at once")
    return strings
