"""The interface between DeepInfer and a grammar engine, and how one is found by its name.

A `GrammarCompiler` turns a `GrammarSpec` into bytes, in a process of its own; in the engine's process it loads those
bytes as a `Grammar`, which any number of requests use at the same time, each with a `GrammarState`. xgrammar is built
in; another engine is an entry point of the group `deepinfer.grammars` or named as `module:factory`, where the factory
takes a `Vocabulary`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

import numpy as np

from deepinfer.errors import ConfigError
from deepinfer.structured.vocabulary import Vocabulary

GROUP = "deepinfer.grammars"
BUILT_IN = {"xgrammar": "deepinfer.structured.xgrammar_engine:XGrammarCompiler"}


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What to compile; equal specs have equal grammars.

    kind        "json", "json_object", "regex", "ebnf" or "choice", see `so_args.StructuredOutput`
    source      text of the schema, the expression or the grammar; for "choice" a tuple of texts; None for "json_object"
    whitespace  "bounded", "none" or "any"
    """

    kind: str
    source: str | tuple[str, ...] | None
    whitespace: str = "bounded"


class GrammarState(Protocol):
    """Where one text stands in a grammar."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False, and nothing changes, if the grammar does not allow it here. An end token is allowed
        where the text is complete and terminates the state."""
        ...

    def fill_mask(self, row: np.ndarray) -> None:
        """Write the tokens that may come next to int32 [words]: bit `id % 32` of word `id // 32`. All zeros if there
        are none. Not to be asked once the state is terminated."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens, which may be the one that terminated the state."""
        ...

    @property
    def is_complete(self) -> bool:
        """The text so far is one of the grammar."""
        ...

    @property
    def is_terminated(self) -> bool:
        """An end token has been accepted."""
        ...


class Grammar(Protocol):
    """A compiled grammar."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes, about."""
        ...

    def start(self) -> GrammarState:
        """The state of an empty text."""
        ...


class GrammarCompiler(Protocol):
    """A grammar engine, for one vocabulary."""

    def require(self) -> None:
        """StructuredOutputError, with the command to install it, if a library is missing. Costs nothing."""
        ...

    def prepare(self) -> None:
        """Do what takes long the first time. Called in the process that compiles, before its first spec."""
        ...

    def compile(self, spec: GrammarSpec) -> bytes:
        """Compile, in a process that may be killed at any time. Raises StructuredOutputError with the cause."""
        ...

    def load(self, data: bytes) -> Grammar:
        """The grammar of what `compile` returned."""
        ...


def find_compiler(name: str) -> Callable[[Vocabulary], GrammarCompiler]:
    """The factory of a grammar engine: built in, an entry point, or module:factory. Raises ConfigError."""
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    target = BUILT_IN.get(name, name)
    try:
        if ":" in target:
            module, _, attribute = target.partition(":")
            return getattr(importlib.import_module(module), attribute)
        if name in installed:
            return installed[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"grammar engine {name!r} cannot be loaded: {error}") from error
    known = ", ".join(sorted({*BUILT_IN, *installed}))
    raise ConfigError(f"grammar engine {name!r} is not known; installed: {known}; or give module:factory")
