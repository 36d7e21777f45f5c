"""From the arguments of `LLM`'s methods to one `Ask` per prompt.

Mistakes in the *shape* of a call (lists of different lengths, a number where a list belongs) raise here, before
anything is queued. Mistakes in the *content* of one prompt become that prompt's error result later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer.engine.admission import Ask
from deepinfer.engine.request import TokenIds
from deepinfer.errors import RequestError
from deepinfer.sampling_params import SamplingParams

Params = SamplingParams | Mapping[str, Any] | None
Message = Mapping[str, Any]


def asks_of(
    prompts: str | Sequence[str] | None,
    params: Params | Sequence[Params],
    token_ids: Sequence[TokenIds | None] | None,
    multi_modal_data: Any = None,
    score_only: bool = False,
    priority: int | Sequence[int] = 0,
) -> list[Ask]:
    """One Ask a prompt. TypeError for a wrong kind of argument, ValueError for lengths that differ."""
    if isinstance(prompts, str):
        prompts = [prompts]
        multi_modal_data = None if multi_modal_data is None else [multi_modal_data]
    if prompts is None and token_ids is None:
        raise ValueError("nothing to generate from: give prompts or prompt_token_ids")
    texts = _checked_texts(prompts)
    ids = _checked_ids(token_ids)
    count = len(texts) if texts is not None else len(ids or ())
    ids = _matching("prompt_token_ids", ids, count)
    images = _matching("multi_modal_data", _as_list("multi_modal_data", multi_modal_data), count)
    each = params_of(params, count)
    turns = [priority] * count if isinstance(priority, int) else _as_list("priority", priority)
    turns = _matching("priority", turns, count)
    texts = [None] * count if texts is None else texts
    return [
        Ask(text, own_ids, own, image, score_only=score_only, priority=turn)
        for text, own_ids, own, image, turn in zip(texts, ids, each, images, turns, strict=True)
    ]


def params_of(params: Params | Sequence[Params], count: int) -> list[Params]:
    """One entry a prompt: a single object serves all of them."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [params] * count
    each = _as_list("sampling_params", params)
    assert each is not None
    for at, own in enumerate(each):
        if own is not None and not isinstance(own, SamplingParams | Mapping):
            raise TypeError(
                f"sampling_params[{at}] is {type(own).__name__}, expected SamplingParams, a mapping or None"
            )
    return _matching("sampling_params", each, count)


def conversations_of(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """A list of conversations from one conversation or several."""
    given = _as_list("messages", messages)
    if not given:
        return []
    if all(isinstance(entry, Mapping) for entry in given):
        return [given]
    for at, entry in enumerate(given):
        if isinstance(entry, str | Mapping) or not isinstance(entry, Sequence):
            raise TypeError(
                f"messages[{at}] is {type(entry).__name__}: expected one conversation (a list of mappings with role "
                "and content) or a list of conversations"
            )
    return given


def refused(error: Exception, prompt: str | None = None) -> Ask:
    """An Ask that is known to be wrong."""
    cause = error if isinstance(error, RequestError) else RequestError(str(error))
    return Ask(prompt=prompt, error=cause)


def _checked_texts(prompts: Any) -> list[str] | None:
    texts = _as_list("prompts", prompts)
    for at, text in enumerate(texts or ()):
        if not isinstance(text, str):
            hint = "; token ids go to prompt_token_ids" if isinstance(text, int | Sequence) else ""
            raise TypeError(f"prompts[{at}] is {type(text).__name__}, expected str{hint}")
    return texts


def _checked_ids(token_ids: Any) -> list[TokenIds | None] | None:
    entries = _as_list("prompt_token_ids", token_ids)
    for at, entry in enumerate(entries or ()):
        if entry is not None and not _is_list_like(entry):
            raise TypeError(
                f"prompt_token_ids[{at}] is {type(entry).__name__}: expected one list of ids a prompt, [[1, 2, 3]] for "
                "a single one"
            )
    return entries


def _is_list_like(value: Any) -> bool:
    return (isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)) or hasattr(
        value, "__array__"
    )


def _as_list(name: str, value: Any) -> list[Any] | None:
    if value is None:
        return None
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name} is {type(value).__name__}, expected a list with one entry a prompt")
    return list(value)


def _matching(name: str, entries: list[Any] | None, count: int) -> list[Any]:
    """The entries, one a prompt; None stands for nothing given."""
    if entries is None:
        return [None] * count
    if len(entries) != count:
        raise ValueError(f"{name} has {len(entries)} entries for {count} prompts")
    return entries
