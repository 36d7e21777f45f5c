"""What contracts and plugins are written with: `OpGroup`, `op`, `provides`, `OpContext`, `hookspec`, `hookimpl`.

Imported by every contract in `hooks/ops/` and by every plugin. A contract class is the whole definition of its ops:
docstrings give shapes and dtypes, bodies are the reference or a decomposition into finer ops. A plugin derives from it
and overrides what it has. Binding (which implementation serves an op) is `bind.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pluggy

from deepinfer.hooks.record import PLUGIN_API, Backend, OpPack, Requires

if TYPE_CHECKING:
    import torch

    from deepinfer.hooks.table import OpTable
    from deepinfer.hooks.types import ModelTraits, Numerics

__all__ = [
    "CANONICAL", "PLUGIN_API", "Backend", "OpContext", "OpGroup", "OpPack", "OpSpec", "Provides", "Requires",
    "hookimpl", "hookspec", "op", "provides",
]  # fmt: skip

PROJECT = "deepinfer"

hookspec = pluggy.HookspecMarker(PROJECT)
"""Marks the hook specifications of `specs.py`."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's hook implementations."""

CANONICAL = "canonical"
"""Name of core's own layout of private data. An override that names it shares data with core's bodies."""

LEVELS = ("required", "recommended", "optional")
STATUSES = ("stable", "beta", "experimental", "deprecated")
GRAINS = ("kernel", "block", "layer")
LAYOUTS = ("kv_cache", "dense_weight", "expert_weight", "engram_table")

_OP_MARK = "__deepinfer_op__"
_PROVIDES_MARK = "__deepinfer_provides__"

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One op of a contract, as its `@op` declares it.

    name      "<group>.<method>"
    version   meaning, arguments, dtypes and layout together; any change of them is a new version
    level     how much a backend misses without it: required, recommended, optional
    status    stable (covered by the plugin API version), beta, experimental, deprecated
    grain     kernel, block or layer
    layouts   tags of the private data it reads or writes; ops that share a tag agree on one layout of it
    composed  core's body only calls finer ops through `self.ops`, so it serves any layout and any mix of providers
    """

    name: str
    version: int
    level: str
    status: str
    grain: str
    layouts: tuple[str, ...]
    composed: bool
    function: Callable[..., Any] = field(repr=False, compare=False)

    @property
    def group(self) -> str:
        """Op group, the part of the name before the dot."""
        return self.name.partition(".")[0]

    @property
    def method(self) -> str:
        """Method of the contract class, the part of the name after the dot."""
        return self.name.partition(".")[2]


@dataclass(frozen=True, slots=True)
class Provides:
    """What an override says of itself; every default is the cautious answer, except `deterministic`."""

    version: int
    batch_invariant: bool
    deterministic: bool
    graph_safe: bool
    layouts: Mapping[str, str]


def op(
    version: int = 1,
    level: str = "optional",
    status: str = "beta",
    grain: str = "kernel",
    layout: str | tuple[str, ...] | None = None,
    composed: bool | None = None,
) -> Callable[[_Function], _Function]:
    """Declare a method of a contract class as an op; its name is "<group>.<method>".

    layout    the tag, or tags, of opaque operands: caches, prepared weights, tables
    composed  defaults to whether the body mentions `self.ops`; False for a body that also touches private data, True
              for one that reaches other ops through a helper
    Raises `ValueError` for a level, status, grain or layout that does not exist.
    """
    layouts = (layout,) if isinstance(layout, str) else tuple(layout or ())
    choices = [("level", level, LEVELS), ("status", status, STATUSES), ("grain", grain, GRAINS)]
    for what, value, allowed in (*choices, *(("layout", tag, LAYOUTS) for tag in layouts)):
        if value not in allowed:
            raise ValueError(f"op {what}={value!r}, allowed: {', '.join(map(str, allowed))}")

    def mark(function: _Function) -> _Function:
        is_composed = "ops" in function.__code__.co_names if composed is None else composed
        setattr(function, _OP_MARK, OpSpec("", version, level, status, grain, layouts, is_composed, function))
        return function

    return mark


def provides(
    version: int = 1,
    batch_invariant: bool = False,
    deterministic: bool = True,
    graph_safe: bool = False,
    layouts: Mapping[str, str] | None = None,
) -> Callable[[_Function], _Function]:
    """Declare what an override covers; every override of an op carries it.

    version          of the op it implements
    batch_invariant  a row's result does not depend on the other rows of the batch
    deterministic    the same operands give the same bits
    graph_safe       may be captured in a device graph: no host sync, no allocation that depends on data
    layouts          {tag: layout name} of the private data it touches. A tag left out counts as a layout private to
                     the provider; `CANONICAL` says that it reads and writes core's own layout.
    """
    record = Provides(version, batch_invariant, deterministic, graph_safe, dict(layouts or {}))

    def mark(function: _Function) -> _Function:
        setattr(function, _PROVIDES_MARK, record)
        return function

    return mark


def provides_of(function: object) -> Provides | None:
    """The `@provides` record of an override, None without one."""
    return getattr(function, _PROVIDES_MARK, None)


@dataclass(frozen=True)
class OpContext:
    """What a factory hook is told: everything that is fixed before the first step.

    device        the `torch.device` of this worker
    numerics      rounding rules of this run
    traits        static sizes of the model
    settings      the engine's immutable settings (None in tests of single ops)
    runtime       bound ops of group `runtime`; set by the binder for every later group
    communicator  bound ops of group `communicator`; set by the binder for every later group
    """

    device: torch.device
    numerics: Numerics
    traits: ModelTraits
    settings: Any = None
    runtime: Any = None
    communicator: Any = None


class OpGroup:
    """Base of every contract class: a group of ops that one factory hook creates.

    A contract sets `group` and marks its methods with `@op`. Composed bodies call `self.ops.<group>.<op>`, never
    `self.<op>`: only so do per-op overrides and op packs reach the parts of a coarse op. Parameters are positional:
    no keyword-only ones, and an override repeats names, order and kinds exactly.

    group      name of the group; the op table has one slot of this name
    factory    name of the factory hook, set from `group`
    whole      bound from one provider for all its ops
    numeric    its ops compute numbers, so `DEEPINFER_BATCH_INVARIANT` filters its implementations
    op_specs   {method: OpSpec}, filled in from the `@op` marks
    """

    group: ClassVar[str]
    factory: ClassVar[str]
    whole: ClassVar[bool] = False
    numeric: ClassVar[bool] = True
    op_specs: ClassVar[Mapping[str, OpSpec]]

    ops: OpTable

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "group" in cls.__dict__:
            cls.factory = f"deepinfer_create_{cls.group}"
            cls.op_specs = _collect_specs(cls)

    def __init__(self, context: OpContext) -> None:
        self.context = context
        self.numerics = context.numerics
        self.traits = context.traits

    def refuse(self, op: str, traits: ModelTraits) -> list[str]:
        """Every reason why this object's implementation of `op` ("<group>.<method>") cannot serve this model here.

        Asked once, before the implementation is chosen. Each reason names the value found and the values allowed,
        e.g. "heads=48, allowed 64 or 128". Empty: it can. Operands that break the contract are not refused here;
        they raise in every implementation.
        """
        return []


def _collect_specs(contract: type[OpGroup]) -> dict[str, OpSpec]:
    """{method: spec with its full name} in the order of the class body, inherited ops first."""
    specs: dict[str, OpSpec] = {}
    for klass in reversed(contract.__mro__):
        for name, value in vars(klass).items():
            mark = getattr(value, _OP_MARK, None)
            if mark is not None:
                specs[name] = OpSpec(
                    f"{contract.group}.{name}", mark.version, mark.level, mark.status, mark.grain, mark.layouts,
                    mark.composed, mark.function,
                )  # fmt: skip
    return specs
