"""xgrammar behind the interface of `grammar`.

`compile` runs in a worker process and returns xgrammar's own serialized form; `load` and the states run in the engine's
process. What the library warns about it has left out of the grammar, so a warning is a refusal here. Its masks are
narrowed to text tokens and to bytes that can still become UTF-8, which it does not see to everywhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from deepinfer.errors import StructuredOutputError
from deepinfer.structured.grammar import GrammarSpec
from deepinfer.structured.json_schema import parse_schema, prepared
from deepinfer.structured.regex import plain_regex
from deepinfer.structured.vocabulary import SECOND_BYTES, Vocabulary

INSTALL = 'pip install "deepinfer-core[structured]"'
MOST_WHITESPACE = 12
"""Characters in a row between elements of JSON under the policy "bounded"."""

_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')
"""A literal or a class of characters in the text of a grammar."""
_COUNTED, _COUNTED_RIGHT = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
"""What xgrammar takes for a character of a string with minLength or maxLength, and what JSON has there."""
_OTHER_KEY = re.compile(r"(?m)^\S+_addl_key\S* ::= .*$")
_ESCAPE_IN_KEY = r' | ("\\" basic_escape basic_string_sub)'


class XGrammarCompiler:
    """Implements `GrammarCompiler`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def require(self) -> None:
        """See `GrammarCompiler`."""
        if importlib.util.find_spec("xgrammar") is None:
            raise StructuredOutputError(f"structured output needs xgrammar, which is not installed: {INSTALL}")

    def prepare(self) -> None:
        """See `GrammarCompiler`."""
        self.load(self.compile(GrammarSpec("choice", ("a",))))

    def compile(self, spec: GrammarSpec) -> bytes:
        """See `GrammarCompiler`."""
        source = _source(spec)
        with captured_warnings() as log:
            try:
                compiled = self._compile(spec, source)
            except (RuntimeError, ValueError, TypeError) as error:
                raise StructuredOutputError(f"so_args['schema']: {_cause(str(error))}") from None
        warnings = [_cause(line) for line in log() if "Warning" in line]
        if warnings:
            raise StructuredOutputError(f"so_args['schema'] cannot be enforced: {'; '.join(dict.fromkeys(warnings))}")
        return compiled.serialize_json().encode()

    def load(self, data: bytes) -> XGrammar:
        """See `GrammarCompiler`."""
        return XGrammar(self._library.CompiledGrammar.deserialize_json(data.decode(), self._tokens), self.vocabulary)

    def _compile(self, spec: GrammarSpec, source: str) -> Any:
        compiler = self._library.GrammarCompiler(self._tokens, max_threads=1, cache_enabled=False)
        if spec.kind == "regex":
            return compiler.compile_regex(source)
        if spec.kind in ("ebnf", "choice"):
            return compiler.compile_grammar(source)
        bounded = spec.whitespace == "bounded"
        grammar = self._library.Grammar.from_json_schema(
            source,
            any_whitespace=spec.whitespace != "none",
            separators=(",", ":"),
            strict_mode=True,
            max_whitespace_cnt=MOST_WHITESPACE if bounded else None,
        )
        text = corrected(str(grammar))
        return compiler.compile_grammar(text if spec.whitespace == "none" else with_leading_space(text))

    @cached_property
    def _library(self) -> Any:
        import xgrammar

        return xgrammar

    @cached_property
    def _tokens(self) -> Any:
        """The library's view of the vocabulary."""
        vocabulary = self.vocabulary
        return self._library.TokenizerInfo(
            list(vocabulary.tokens),
            self._library.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_ids),
        )


class XGrammar:
    """Implements `Grammar`."""

    def __init__(self, compiled: Any, vocabulary: Vocabulary) -> None:
        self._compiled, self._vocabulary = compiled, vocabulary

    @property
    def num_bytes(self) -> int:
        """See `Grammar`."""
        return int(self._compiled.memory_size_bytes)

    def start(self) -> XGrammarState:
        """See `Grammar`."""
        import xgrammar

        return XGrammarState(xgrammar.GrammarMatcher(self._compiled), self._vocabulary)


class XGrammarState:
    """Implements `GrammarState`."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._legal = vocabulary.text_mask | vocabulary.eos_mask
        self._ends = [0]  # last byte after each accepted token

    def accept(self, token_id: int) -> bool:
        """See `GrammarState`."""
        vocabulary = self._vocabulary
        if not 0 <= token_id < vocabulary.size or self._matcher.is_terminated():
            return False
        token = vocabulary.tokens[token_id]
        span = SECOND_BYTES.get(self._ends[-1])
        if span is not None and not (token and span[0] <= token[0] <= span[1]):
            return False
        if (not token and token_id not in vocabulary.eos_ids) or not self._matcher.accept_token(token_id):
            return False
        self._ends.append(token[-1] if token else 0)
        return True

    def fill_mask(self, row: np.ndarray) -> None:
        """See `GrammarState`."""
        self._matcher.fill_next_token_bitmask(row.reshape(1, -1))
        row &= self._legal
        if self._ends[-1] in SECOND_BYTES:
            row &= self._vocabulary.continuation_masks[self._ends[-1]]

    def rollback(self, count: int) -> None:
        """See `GrammarState`."""
        if count:
            self._matcher.rollback(count)
            del self._ends[-count:]

    @property
    def is_complete(self) -> bool:
        """See `GrammarState`."""
        return bool(self._matcher.is_completed())

    @property
    def is_terminated(self) -> bool:
        """See `GrammarState`."""
        return bool(self._matcher.is_terminated())


def corrected(grammar: str) -> str:
    """The text of a grammar made from a JSON Schema, without two ways to leave the schema.

    Strings with a length could hold control characters, which JSON must escape; the name of a property beside those
    listed could be a listed one in disguise, spelled with an escape.
    """
    grammar = _PIECE.sub(lambda piece: _COUNTED_RIGHT if piece[0] == _COUNTED else piece[0], grammar)
    return _OTHER_KEY.sub(lambda match: match[0].replace(_ESCAPE_IN_KEY, ""), grammar)


def with_leading_space(grammar: str) -> str:
    """The text of a grammar whose texts may begin with one blank: words of most vocabularies do, and a model that has
    to begin without it continues with less likely text."""
    return re.sub(r"(?m)^root ::= ", 'root ::= ("" | " ") ', grammar)


@contextmanager
def captured_warnings() -> Iterator[Any]:
    """Catches what the library prints to standard error; yields a function that returns its lines."""
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def _source(spec: GrammarSpec) -> str:
    """What the library is given. Raises StructuredOutputError."""
    if spec.kind == "json_object":
        return '{"type": "object"}'
    if spec.kind == "choice":
        assert isinstance(spec.source, tuple)
        return "root ::= " + " | ".join(map(_quoted, dict.fromkeys(spec.source)))
    assert isinstance(spec.source, str)
    if spec.kind == "json":
        return json.dumps(prepared(parse_schema(spec.source)), ensure_ascii=False)
    return plain_regex(spec.source) if spec.kind == "regex" else spec.source


def _quoted(text: str) -> str:
    """A text as a literal of a grammar."""
    escaped = "".join(f"\\u{ord(c):04x}" if c < " " or c == "\x7f" else f"\\{c}" if c in '"\\' else c for c in text)
    return f'"{escaped}"'


def _cause(message: str) -> str:
    """A message of the library without time and place in its own source."""
    return re.sub(r"\[[\d:]+\] \S+?:\d+: (Warning: )?", "", message).strip()
