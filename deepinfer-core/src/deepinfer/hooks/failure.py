"""Turns an exception that left a bound op into an `OpError` naming op and provider. Costs nothing until one does.

Bound calls are not wrapped: the table keeps its speed, and the culprit is found afterwards by walking the traceback
for the innermost frame that runs a bound function. The runner puts `op_failures(ops)` around a whole step. Nothing is
retried elsewhere: a kernel that raises stops the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from deepinfer.errors import DeepInferError, OpError
from deepinfer.hooks.table import REFERENCE, Binding, OpTable


@contextmanager
def op_failures(ops: OpTable) -> Iterator[None]:
    """Raise `OpError`, with the original as its cause, for an exception that a bound op of `ops` let out.

    DeepInfer's own errors and exceptions raised outside any op pass unchanged.
    """
    try:
        yield
    except DeepInferError:
        raise
    except Exception as error:
        found = op_error(ops, error)
        if found is None:
            raise
        raise found from error


def op_error(ops: OpTable, error: BaseException) -> OpError | None:
    """The `OpError` for an exception that passed through bound ops of `ops`; None if it passed through none."""
    chain = _bound_frames(ops, error)
    if not chain:
        return None
    binding, outer = chain[-1], chain[:-1]
    spec = binding.spec
    lines = [
        f"{spec.name} v{spec.version} failed in {_who(binding)}: {type(error).__name__}: {error}",
        f"  implementation {binding.implementation}",
    ]
    if outer:
        lines.append("  called from " + ", ".join(f"{b.spec.name} ({b.served_by})" for b in reversed(outer)))
    if binding.provider.name == REFERENCE:
        lines.append("  Core's own body refuses operands that break the op's contract; its caller passed them.")
    else:
        lines.append(
            f"  Nothing falls back at run time. To run without it: --op '{spec.name}={REFERENCE}'; "
            f"to have it refused before the start, {binding.provider.distribution} should name the case in refuse()."
        )
    return OpError("\n".join(lines))


def _who(binding: Binding) -> str:
    if binding.provider.name == REFERENCE:
        return f"{binding.served_by} ({binding.provider.distribution} {binding.provider.version})"
    return str(binding.provider)


def _bound_frames(ops: OpTable, error: BaseException) -> list[Binding]:
    """Bindings whose functions the traceback passed through, outermost first."""
    by_code = {_code(binding.function): binding for binding in ops.bindings}
    found, step = [], error.__traceback__
    while step is not None:
        binding = by_code.get(step.tb_frame.f_code)
        if binding is not None:
            found.append(binding)
        step = step.tb_next
    return found


def _code(function: Any) -> CodeType:
    """Code object of a bound method; of what it wraps if it is decorated, since decorators share theirs."""
    return inspect.unwrap(function.__func__).__code__
