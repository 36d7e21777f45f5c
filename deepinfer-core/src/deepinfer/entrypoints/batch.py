"""The batch runner: JSON lines in, JSON lines out, one result a line, in order.

Behind `deepinfer generate --input FILE`. A line that cannot be read or asks for something wrong gives a result with
`error` in its place; the others are not affected.

An input line is an object with exactly one of
    prompt            text
    prompt_token_ids  list of ids
    messages          a conversation; also thinking (bool), effort (str), tools (list), as in `LLM.chat`
and optionally
    id                any JSON value, copied to the result
    sampling_params   object of `SamplingParams` fields; wins over the runner's defaults

A result line has index (number of the line, blank ones not counted, from 0), id, text, token_ids, finish_reason,
stop_reason, error, num_prompt_tokens and, if the line asked for them, logprobs and prompt_logprobs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from deepinfer.engine.admission import Ask
from deepinfer.engine.output import RequestOutput
from deepinfer.entrypoints.llm import LLM
from deepinfer.entrypoints.prompts import refused
from deepinfer.errors import EngineError, RequestError

_INPUTS = ("prompt", "prompt_token_ids", "messages")
_CHAT_OPTIONS = ("thinking", "effort", "tools")
_KEYS = (*_INPUTS, *_CHAT_OPTIONS, "id", "sampling_params")


def run_batch(llm: LLM, lines: Iterable[str], out: TextIO, defaults: Mapping[str, Any] | None = None) -> int:
    """Run every line of `lines` (blank ones are skipped) and write one result line each; returns the number of errors.

    Results are written in order as soon as all before them are done. `defaults` are sampling parameters for lines that
    do not give them. If the engine fails, the lines it could not finish still get their results, then EngineError goes
    on to the caller.
    """
    parsed = [_parse(llm, line, dict(defaults or {})) for line in lines if line.strip()]
    ids = [line_id for line_id, _ in parsed]
    errors = 0
    for output in _in_order(llm, [ask for _, ask in parsed]):
        errors += output.error is not None
        out.write(json.dumps(_record(output, ids[output.index]), ensure_ascii=False) + "\n")
        out.flush()
    return errors


def _in_order(llm: LLM, asks: list[Ask]) -> Iterator[RequestOutput]:
    """Results in order of the lines, each as early as possible."""
    held: dict[int, RequestOutput] = {}
    due = 0
    failure: EngineError | None = None
    for output in _all_results(llm, asks):
        if isinstance(output, EngineError):
            failure = output
            held.update((late.index, late) for late in output.outputs)
        else:
            held[output.index] = output
        while due in held:
            yield held.pop(due)
            due += 1
    if failure is not None:
        raise failure


def _all_results(llm: LLM, asks: list[Ask]) -> Iterator[RequestOutput | EngineError]:
    """Results in order of completion; a failure of the engine comes last, as a value."""
    try:
        yield from llm.stream_asks(asks)
    except EngineError as error:
        yield error


def _parse(llm: LLM, line: str, defaults: dict[str, Any]) -> tuple[Any, Ask]:
    """(id, request) of a line."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        return None, refused(RequestError(f"the line is not JSON: {error}"))
    if not isinstance(entry, dict):
        return None, refused(RequestError(f"the line is a JSON {type(entry).__name__}, expected an object"))
    try:
        return entry.get("id"), _ask(llm, entry, defaults)
    except RequestError as error:
        return entry.get("id"), refused(error)


def _ask(llm: LLM, entry: Mapping[str, Any], defaults: dict[str, Any]) -> Ask:
    unknown = sorted(set(entry) - set(_KEYS))
    if unknown:
        raise RequestError(f"unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")
    given = [name for name in _INPUTS if entry.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise RequestError(f"expected exactly one of {', '.join(_INPUTS)}, found {found}")
    own = entry.get("sampling_params") or {}
    if not isinstance(own, dict):
        raise RequestError(f"sampling_params is a JSON {type(own).__name__}, expected an object")
    params = {**defaults, **own}
    options = {name: entry[name] for name in _CHAT_OPTIONS if name in entry}
    if given == ["messages"]:
        return llm.chat_ask(entry["messages"], params, options)
    if options:
        raise RequestError(f"{next(iter(options))} goes with messages only")
    if given == ["prompt_token_ids"]:
        return Ask(token_ids=entry["prompt_token_ids"], params=params)
    if not isinstance(entry["prompt"], str):
        raise RequestError(f"prompt is a JSON {type(entry['prompt']).__name__}, expected a string")
    return Ask(prompt=entry["prompt"], params=params)


def _record(output: RequestOutput, line_id: Any) -> dict[str, Any]:
    """JSON-ready form of a result."""
    record: dict[str, Any] = {
        "index": output.index,
        "id": line_id,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "error": None if output.error is None else str(output.error),
        "num_prompt_tokens": len(output.prompt_token_ids or ()),
    }
    if output.top_logprobs is not None:
        record["logprobs"] = [{"logprob": token.logprob, "top_logprobs": token.top_logprobs} for token in output]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = output.prompt_logprobs
    return record
