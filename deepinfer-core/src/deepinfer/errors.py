"""Typed errors. Every error a user can cause derives from `DeepInferError`; asserts are for our own mistakes.

A message says what was found, what was expected and what to do, in that order.
"""

from __future__ import annotations

from typing import Any


class DeepInferError(Exception):
    """Base of every error DeepInfer raises on purpose."""


class ConfigError(DeepInferError, ValueError):
    """A setting, an argument or a key of a model's config cannot be honoured."""


class CheckpointError(DeepInferError):
    """A checkpoint is incomplete, damaged or not in the published format."""


class TokenizerError(DeepInferError):
    """Tokenizer files are missing or do not follow the release's rules."""


class BackendError(DeepInferError):
    """A backend could not be found, selected, loaded or satisfied."""


class OpBindingError(BackendError):
    """An op has no acceptable provider, or an implementation breaks its contract."""


class OpError(DeepInferError):
    """A bound op raised while running; the message names op and provider (never a silent fallback)."""


class UnsupportedError(DeepInferError):
    """The request is legal but this build, backend or device cannot serve it."""


class RequestError(DeepInferError, ValueError):
    """A request is wrong; it ends with this as its `error` and harms no other request."""


class StructuredOutputError(RequestError):
    """The form a request asks for cannot be compiled, or its output could not go on within it."""


class EngineError(DeepInferError):
    """The engine could not go on: a step failed (the cause is chained) or it is closed.

    outputs  the results of the interrupted call, in order: finished requests as they are, the others with an `error`
    """

    def __init__(self, message: str, outputs: list[Any] | None = None) -> None:
        super().__init__(message)
        self.outputs = [] if outputs is None else outputs
