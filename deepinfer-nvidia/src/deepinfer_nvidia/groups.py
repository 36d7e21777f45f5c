"""Which class of this package serves an op group on a GPU. Called by the plugin's factories.

Modules are named by convention: `sm100.gemm.Gemm`, `sm90.gemm.Gemm`. On compute capability 10.x both families take
part: adapters to the libraries come first, this package's own kernels serve what they leave.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from deepinfer.hooks import OpContext, OpGroup, OpSpec
from deepinfer_nvidia.machine import Machine

Group = TypeVar("Group", bound=OpGroup)

FAMILIES: dict[int, tuple[str, ...]] = {9: ("sm90",), 10: ("sm100", "sm90")}
"""{major compute capability: families of op groups, most preferred first}"""

CLASSES = {
    "attention": "Attention",
    "gemm": "Gemm",
    "experts": "Experts",
    "cache": "Cache",
    "residual": "Residual",
    "engram": "Engram",
    "sampling": "Sampling",
    "step_inputs": "StepInputs",
    "vision": "Vision",
}
"""{op group: class in `<family>.<group>`}"""


def create(contract: type[Group], context: OpContext, machine: Machine) -> Group | None:
    """The object that serves a group on this machine; None leaves the group to core."""
    parts = [made(context, machine) for made in group_classes(contract.group, machine.chip.major)]
    if not parts:
        return None
    return cast(Group, parts[0] if len(parts) == 1 else combine(contract, context, parts))


def group_classes(group: str, major: int) -> list[Callable[[OpContext, Machine], OpGroup]]:
    """Classes of the families that have a module for the group, most preferred first."""
    found = []
    for family in FAMILIES.get(major, ()):
        name = f"deepinfer_nvidia.{family}.{group}"
        if importlib.util.find_spec(name) is not None:
            found.append(getattr(importlib.import_module(name), CLASSES[group]))
    return found


def combine(contract: type[OpGroup], context: OpContext, parts: Sequence[OpGroup]) -> OpGroup:
    """One object whose every op is that of the first part which implements it and does not refuse.

    Ops that share private data stay together: all ops of a layout tag come from one part, the first that can serve any
    of them. What every part refuses is refused with all their reasons.
    """
    chosen = {spec.method: _choose(contract, spec, parts, context) for spec in contract.op_specs.values()}
    members: dict[str, Any] = {
        method: _delegate(getattr(type(part), method), method, part)
        for method, part in chosen.items()
        if part is not None
    }

    def refuse(self: OpGroup, op: str, traits: Any) -> list[str]:
        method = op.partition(".")[2]
        part = chosen[method]
        if part is None or not part.refuse(op, traits):
            return []
        having = [p for p in parts if _implements(contract, p, contract.op_specs[method])]
        return [reason for p in having for reason in p.refuse(op, traits)]

    joined = type(type(parts[0]).__name__, (_Joined, contract), {**members, "refuse": refuse})
    return joined(context, parts)  # type: ignore[no-any-return]


class _Joined:
    """Hands the op table on to the parts; see `combine`."""

    def __init__(self, context: OpContext, parts: Sequence[OpGroup]) -> None:
        super().__init__(context)  # type: ignore[call-arg]
        self._parts = parts

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "ops":
            for part in self._parts:
                part.ops = value


def _choose(contract: type[OpGroup], spec: OpSpec, parts: Sequence[OpGroup], context: OpContext) -> OpGroup | None:
    having = [part for part in parts if _implements(contract, part, spec)]
    if not having:
        return None
    if not spec.layouts:
        return next((part for part in having if not part.refuse(spec.name, context.traits)), having[0])
    owner = next((part for part in parts if _serves_tag(contract, part, spec.layouts, context)), having[0])
    return owner if owner in having else None


def _serves_tag(contract: type[OpGroup], part: OpGroup, tags: tuple[str, ...], context: OpContext) -> bool:
    """Whether a part can serve any op that touches one of these private data."""
    specs = [spec for spec in contract.op_specs.values() if set(spec.layouts) & set(tags)]
    return any(_implements(contract, part, s) and not part.refuse(s.name, context.traits) for s in specs)


def _implements(contract: type[OpGroup], part: OpGroup, spec: OpSpec) -> bool:
    return getattr(type(part), spec.method) is not getattr(contract, spec.method)


def _delegate(function: Callable[..., Any], method: str, part: OpGroup) -> Callable[..., Any]:
    """A method with the signature and the `@provides` mark of a part's, bound to that part."""
    bound = getattr(part, method)

    @functools.wraps(function)
    def call(self: OpGroup, *operands: Any, **named: Any) -> Any:
        return bound(*operands, **named)

    return call
