"""What a user gets back for one request: `RequestOutput`, a sequence of `TokenOutput` records.

The engine makes one `RequestOutput` when a request ends, however it ends. Token records are built when they are looked
at, so a result of thousands of tokens costs nothing until then. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np

from deepinfer.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error", "insufficient_system_resource"]
"""Why a request ended.

stop     an end token, a stop token id or a stop string; `stop_reason` says which
length   max_tokens or max_model_len reached
abort    the caller aborted it
error    the request was wrong or the engine could not serve it; `error` names the cause
insufficient_system_resource   the cache was too small to go on; `error` names the sizes
"""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token.

    logprob           natural logarithm of its probability after temperature, top-p, top-k and masks; floor -9999
    top_logprobs      {token id: logprob} of the most likely tokens, best first; None if not asked for
    sum_smaller_prob  probability of all tokens that are at most as likely, itself included; None if not computed
    """

    token_id: int
    logprob: float
    top_logprobs: dict[int, float] | None = None
    sum_smaller_prob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened, in seconds of the monotonic clock, and how often.

    arrival_time         the request was added
    first_scheduled_time its first step was launched; None if it never ran
    first_token_time     its first token was committed; None if there is none
    finish_time          it ended
    num_cached_tokens    tokens of the prompt that the prefix cache had when it was first scheduled
    num_preemptions      times its cache was given to others and recomputed later
    num_draft_tokens, num_accepted_tokens   speculation: drafts verified, and those that became output
    """

    arrival_time: float
    finish_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds between arrival and the first step."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Seconds between arrival and the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def total_time(self) -> float:
        """Seconds between arrival and end."""
        return self.finish_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most likely tokens at one generated token, best first: ids int [k], logprobs float32 [k]."""

    ids: np.ndarray
    logprobs: np.ndarray

    def as_dict(self) -> dict[int, float]:
        """{token id: logprob} in the same order."""
        return dict(zip(self.ids.tolist(), self.logprobs.tolist(), strict=True))


@dataclass(slots=True, eq=False, repr=False)
class RequestOutput(Sequence[TokenOutput]):
    """The result of one request: a sequence of its generated tokens, with everything known about the request.

    request_id         the engine's name for it
    index              position of its prompt in the call that made it
    prompt             text as given, None if token ids were given
    prompt_token_ids   tokens the model read (empty if the request failed before they were known)
    text               generated text; a stop string is cut off unless asked to stay
    token_ids          generated tokens, the stopping one included
    finish_reason      see `FinishReason`
    stop_reason        the stop string or stop token id that matched; None for the model's own end token
    error              None, or what went wrong; tokens generated before that are kept
    prompt_logprobs    None if not asked for, else one entry a prompt token: entry i is the logprob of prompt token i
                       given the tokens before it, None for the first token and for tokens never computed
    metrics            times and counts
    """

    request_id: str
    finish_reason: FinishReason
    metrics: RequestMetrics
    token_ids: list[int]
    logprobs: list[float]
    text: str = ""
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    stop_reason: str | int | None = None
    error: RequestError | None = None
    prompt_logprobs: list[float | None] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    sum_smaller_probs: list[float] | None = None
    index: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, item: int) -> TokenOutput: ...
    @overload
    def __getitem__(self, item: slice) -> list[TokenOutput]: ...
    def __getitem__(self, item: int | slice) -> TokenOutput | list[TokenOutput]:
        if isinstance(item, slice):
            return [self[i] for i in range(*item.indices(len(self)))]
        top = self.top_logprobs[item].as_dict() if self.top_logprobs is not None else None
        smaller = self.sum_smaller_probs[item] if self.sum_smaller_probs is not None else None
        return TokenOutput(self.token_ids[item], self.logprobs[item], top, smaller)

    @property
    def failed(self) -> bool:
        """True if there is an error."""
        return self.error is not None

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the logprobs of the generated tokens."""
        return float(sum(self.logprobs))

    def __repr__(self) -> str:
        parts = [f"request_id={self.request_id!r}", f"finish_reason={self.finish_reason!r}"]
        if self.stop_reason is not None:
            parts.append(f"stop_reason={self.stop_reason!r}")
        if self.error is not None:
            parts.append(f"error={str(self.error)!r}")
        parts += [f"text={_shortened(self.text)}", f"{len(self)} tokens"]
        return f"RequestOutput({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The log-likelihood of one text.

    token_ids        tokens of the text
    token_logprobs   one entry a token: entry i is the logprob of token i given the tokens before it; None for the first
    error            None, or why the text could not be scored (the lists are then empty)
    """

    request_id: str
    token_ids: list[int]
    token_logprobs: list[float | None]
    error: RequestError | None = None
    index: int = 0

    @property
    def num_scored(self) -> int:
        """Tokens that have a logprob."""
        return sum(value is not None for value in self.token_logprobs)

    @property
    def sum_logprob(self) -> float:
        """Logprob of the whole text after its first token."""
        return float(sum(value for value in self.token_logprobs if value is not None))

    @property
    def mean_logprob(self) -> float:
        """Logprob per scored token; nan if there is none."""
        return self.sum_logprob / self.num_scored if self.num_scored else float("nan")


def _shortened(text: str, limit: int = 60) -> str:
    """repr of a text, cut after `limit` characters."""
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}..."
