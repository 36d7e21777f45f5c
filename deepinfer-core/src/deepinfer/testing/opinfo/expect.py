"""How checks of behaviour say what is wrong: by raising `results.Failure`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer.testing.results import Failure


def require(condition: object, message: str) -> None:
    """Raise `Failure` with the message unless the condition holds."""
    if not condition:
        raise Failure(message)


def raises(kinds: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any], what: str) -> Exception:
    """The exception of one of these kinds that `call` raises; `Failure` if it raises none."""
    try:
        call()
    except kinds as error:
        return error
    raise Failure(f"{what} did not raise")
