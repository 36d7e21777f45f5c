"""Holds a group object that a factory returned to its contract: every override is a plain method of the right shape.

Called by `bind.py` before anything is chosen. What it finds are mistakes of the plugin's author, so they stop the
start and are all listed at once; whether an implementation covers this model is `refuse()`'s answer, not ours.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator

from deepinfer.errors import BackendError, OpBindingError
from deepinfer.hooks.api import OpGroup, OpSpec, provides_of
from deepinfer.hooks.table import Provider


def check_object(contract: type[OpGroup], provider: Provider, made: object) -> None:
    """Raise unless `made` is an object of a class derived from `contract` whose overrides keep the contract."""
    if not isinstance(made, contract):
        raise BackendError(
            f"{provider}: {contract.factory} returned {_what(made)}, expected an object of a class derived from "
            f"{contract.__name__}, or None"
        )
    problems = list(_problems(contract, made))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise OpBindingError(f"{provider}: {type(made).__qualname__} breaks the contract {contract.__name__}:\n{lines}")


def _what(made: object) -> str:
    if inspect.isclass(made):
        return f"the class {made.__qualname__} (forgot the call?)"
    return f"a {type(made).__qualname__}"


def overrides(contract: type[OpGroup], made: OpGroup, method: str) -> bool:
    """Whether the object's class has its own implementation of an op."""
    return inspect.getattr_static(type(made), method) is not inspect.getattr_static(contract, method)


def _problems(contract: type[OpGroup], made: OpGroup) -> Iterator[str]:
    yield from _unknown_methods(contract, type(made))
    for method, spec in contract.op_specs.items():
        if method in getattr(made, "__dict__", {}):
            yield f"{spec.name}: set as an attribute of the object, so binding does not see it; write a plain method"
        if overrides(contract, made, method):
            yield from _override_problems(contract, type(made), spec)


def _unknown_methods(contract: type[OpGroup], klass: type[OpGroup]) -> Iterator[str]:
    """Public methods the contract lacks: misspelled ops, which would never be called."""
    for owner in klass.__mro__:
        if owner in contract.__mro__:
            continue
        for name, value in vars(owner).items():
            is_method = callable(value) or isinstance(value, (staticmethod, classmethod))
            if name.startswith("_") or inspect.isclass(value) or not is_method or hasattr(contract, name):
                continue
            close = difflib.get_close_matches(name, contract.op_specs, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            yield f"{name} is no op of group {contract.group}.{hint} Helpers start with an underscore."


def _override_problems(contract: type[OpGroup], klass: type[OpGroup], spec: OpSpec) -> Iterator[str]:
    found = inspect.getattr_static(klass, spec.method)
    if not inspect.isfunction(found):
        yield f"{spec.name}: is a {type(found).__name__}; wrap it in a plain method"
        return
    declared = provides_of(found)
    if declared is None:
        yield f"{spec.name}: carries no @provides(version={spec.version})"
        return
    if declared.version != spec.version:
        yield f"{spec.name}: provides version {declared.version}; this core knows version {spec.version}"
    for tag in declared.layouts:
        if tag not in spec.layouts:
            allowed = ", ".join(spec.layouts) or "none"
            yield f"{spec.name}: declares a layout for {tag!r}; layout tags of the op: {allowed}"
    problem = signature_problem(getattr(contract, spec.method), found)
    if problem:
        yield f"{spec.name}: {problem}"


def signature_problem(base: object, override: object) -> str | None:
    """How the parameters of `override` differ from those of `base` in names, order or kinds; None if they don't.

    Annotations may differ; defaults may not, since a caller that leaves an operand out means the contract's value. A
    decorated method is judged by what it wraps, and must then accept as many positional arguments.
    """
    wanted, found = inspect.signature(base), inspect.signature(override)  # type: ignore[arg-type]
    if _shape(wanted) != _shape(found):
        return f"parameters are {_text(found)}, the contract has {_text(wanted)}"
    try:
        inspect.signature(override, follow_wrapped=False).bind(*wanted.parameters)  # type: ignore[arg-type]
    except TypeError as error:
        return f"its decorator does not pass {_text(wanted)} on: {error}"
    return None


def _shape(signature: inspect.Signature) -> list[tuple[str, object, object]]:
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def _text(signature: inspect.Signature) -> str:
    """Parameters without annotations: (self, x, weight, bias=None)."""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))
