"""`StructuredOutput`: what the output of a request must look like. Plain data, checked when it is made.

`SamplingParams.so_args` holds one; a mapping with the same keys (the form of DeepInfer 0.1.0) becomes one. Whether the
schema itself can be compiled, and whether the ids are tokens of the model, is found out by `deepinfer.structured` and
the engine. Imports neither torch nor numpy.
"""

from __future__ import annotations

import difflib
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from deepinfer.errors import RequestError

KINDS = ("json", "json_object", "regex", "ebnf", "choice")
WHITESPACE = ("bounded", "none", "any")
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class StructuredOutput:
    """The form of an output. A wrong type raises `TypeError`, a wrong value `RequestError`, both at once.

    schema_type        "json"         text that a JSON Schema accepts; objects are closed unless the schema opens them
                       "json_object"  any JSON object
                       "regex"        text that a regular expression (Python's syntax) matches from end to end
                       "ebnf"         text of a grammar in GBNF notation, beginning with the rule `root`
                       "choice"       one of several texts
    schema             the JSON Schema (a mapping, its text, or a bool), the expression, the grammar, the list of texts;
                       None for "json_object". Kept as text, choices as a tuple of texts.
    trigger_token_ids  generation is free until these tokens have been generated in a row; the form holds from the next
                       token on. Empty: from the first token on.
    bound_token_id     once this token is generated before the trigger is complete, the trigger's tokens are forced
                       next; needs a trigger
    whitespace         between the elements of JSON: "bounded" (at most 12 characters in a row), "none" or "any"; None =
                       the engine's setting
    """

    schema_type: str
    schema: Any = None
    trigger_token_ids: Sequence[int] = ()
    bound_token_id: int | None = None
    whitespace: str | None = None

    def __post_init__(self) -> None:
        if self.schema_type not in KINDS:
            raise RequestError(f"so_args['schema_type']={self.schema_type!r}, expected one of {', '.join(KINDS)}")
        self._store("schema", _schema(self.schema_type, self.schema))
        self._store("trigger_token_ids", _trigger(self.trigger_token_ids))
        if self.bound_token_id is not None:
            self._store("bound_token_id", _token("so_args['bound_token_id']", self.bound_token_id))
            if not self.trigger_token_ids:
                raise RequestError("so_args['bound_token_id'] needs so_args['trigger_token_ids']")
        if self.whitespace is not None:
            if self.whitespace not in WHITESPACE:
                raise RequestError(
                    f"so_args['whitespace']={self.whitespace!r}, expected one of {', '.join(WHITESPACE)}"
                )
            if self.schema_type not in ("json", "json_object"):
                raise RequestError(f"so_args['whitespace'] goes with JSON only, not with {self.schema_type!r}")

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: Any) -> StructuredOutput | None:
        """From what a user may give as `so_args`: None, an object of this class, or a mapping of its fields."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(
                f"so_args={value!r} must be a StructuredOutput, a mapping or None, not {type(value).__name__}"
            )
        known = [field.name for field in fields(cls)]
        for key in value:
            if key not in known:
                raise RequestError(f"so_args: unknown key {key!r}{_nearest(key, known)}")
        if "schema_type" not in value:
            raise RequestError(f"so_args['schema_type'] is missing, expected one of {', '.join(KINDS)}")
        trigger = value.get("trigger_token_ids")
        if isinstance(trigger, list | tuple) and not trigger:
            raise RequestError("so_args['trigger_token_ids'] is empty; leave it out to constrain from the first token")
        return cls(**{key: entry for key, entry in value.items() if entry is not None})

    @classmethod
    def json(cls, schema: Any, **options: Any) -> StructuredOutput:
        """Text that a JSON Schema accepts. schema: a mapping, text, or a class with `model_json_schema()`
        (Pydantic)."""
        describe = getattr(schema, "model_json_schema", None)
        return cls("json", describe() if callable(describe) else schema, **options)

    @classmethod
    def json_object(cls, **options: Any) -> StructuredOutput:
        """Any JSON object."""
        return cls("json_object", **options)

    @classmethod
    def regex(cls, pattern: str, **options: Any) -> StructuredOutput:
        """Text that the expression matches from end to end."""
        return cls("regex", pattern, **options)

    @classmethod
    def ebnf(cls, grammar: str, **options: Any) -> StructuredOutput:
        """Text of a grammar, beginning with the rule `root`."""
        return cls("ebnf", grammar, **options)

    @classmethod
    def choice(cls, texts: Iterable[str], **options: Any) -> StructuredOutput:
        """One of these texts."""
        return cls("choice", texts, **options)

    def to_dict(self) -> dict[str, Any]:
        """The mapping form, `of(to_dict())` gives an equal object."""
        return {key: value for key, value in asdict(self).items() if value not in (None, ())}


def _schema(kind: str, schema: Any) -> str | tuple[str, ...] | None:
    if kind == "json_object":
        if schema is not None:
            raise RequestError("so_args['schema'] goes with the other types, 'json_object' takes none")
        return None
    if schema is None:
        raise RequestError("so_args['schema'] is missing")
    if kind == "choice":
        return _choices(schema)
    if kind == "json" and isinstance(schema, Mapping | bool):
        return _as_json(schema)
    if not isinstance(schema, str):
        raise TypeError(f"so_args['schema'] of type {kind!r} must be a string, not {type(schema).__name__}")
    try:
        schema.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"so_args['schema'] is no valid Unicode: {error}") from None
    return schema


def _as_json(schema: Any) -> str:
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"so_args['schema'] cannot be written as JSON: {error}") from None


def _choices(texts: Any) -> tuple[str, ...]:
    if isinstance(texts, str | bytes | Mapping) or not hasattr(texts, "__iter__"):
        raise TypeError(f"so_args['schema'] of type 'choice' must be a list of strings, not {type(texts).__name__}")
    choices = tuple(texts)
    for at, text in enumerate(choices):
        if not isinstance(text, str):
            raise TypeError(f"so_args['schema'][{at}]={text!r} must be a string, not {type(text).__name__}")
        _schema("regex", text)
    if not choices:
        raise RequestError("so_args['schema'] is empty, expected at least one text to choose")
    return choices


def _trigger(ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str | bytes | Mapping) or not hasattr(ids, "__iter__"):
        raise TypeError(f"so_args['trigger_token_ids']={ids!r} must be a list of integers, not {type(ids).__name__}")
    return tuple(_token(f"so_args['trigger_token_ids'][{at}]", value) for at, value in enumerate(ids))


def _token(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} must be an integer, not {type(value).__name__}")
    number = operator.index(value)
    if not 0 <= number <= INT32_MAX:
        raise RequestError(f"{name}={number} is out of range, expected 0 .. {INT32_MAX}")
    return number


def _nearest(word: object, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(str(word), known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else f"; known: {', '.join(known)}"
