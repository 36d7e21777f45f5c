"""The op table: what every op is bound to, frozen, two slotted levels: `ops.gemm.linear(x, weight)`.

Made by `bind.py` once per engine and worker; the model and composed op bodies call it, reports read it. Looking an op
up is two slot reads, so a bound call costs about what a direct method call costs. It knows nothing about choosing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepinfer.hooks.api import OpSpec

if TYPE_CHECKING:
    from deepinfer.hooks import ops
    from deepinfer.hooks.trace import Tracer, Wrapper

REFERENCE = "reference"
"""Provider name of core's own op bodies, in overrides and in reports."""


@dataclass(frozen=True, slots=True)
class Provider:
    """Who implements ops: a backend, an op pack, or core itself.

    name          as in `--op PATTERN=NAME`
    distribution  installed distribution it comes from, `version` its version
    """

    name: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.distribution})"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a more preferred provider does not serve an op.

    implements  it has an implementation (and refuses, or is filtered); False: it has none
    """

    provider: Provider
    reasons: tuple[str, ...]
    implements: bool

    def __str__(self) -> str:
        return f"{self.provider}: {'; '.join(self.reasons)}"


@dataclass(frozen=True, slots=True)
class Binding:
    """One op and the implementation that serves it.

    implementation  qualified name of the bound function, "package.module.Class.method"
    layout          name of the private data's layout (several joined by +), None for an op that touches none
    refused         more preferred providers that were passed over, most preferred first
    function        the bound method itself, without trace wrappers
    """

    spec: OpSpec
    provider: Provider
    implementation: str
    layout: str | None
    refused: tuple[Refusal, ...]
    function: Callable[..., Any] = field(repr=False, compare=False)

    @property
    def kind(self) -> str:
        """native, decomposed (core's body of finer ops) or reference (core's own computation).

        What a provider of a whole group inherits is core's body, too.
        """
        if getattr(self.function, "__func__", None) is not self.spec.function:
            return "native"
        return "decomposed" if self.spec.composed else "reference"

    @property
    def served_by(self) -> str:
        """Provider in words: "acme 0.4.1 (deepinfer-acme)", "core reference" or "core decomposition"."""
        return in_words(self.provider, self.spec)

    def explain(self) -> str:
        """One op with every reason why it is not served by a more preferred provider."""
        head = f"{self.spec.name} v{self.spec.version} -> {self.served_by}"
        return "\n".join([head, *(f"  {refusal}" for refusal in self.refused)])


def in_words(provider: Provider, spec: OpSpec) -> str:
    """A provider as messages name it: core by what its body is."""
    if provider.name != REFERENCE:
        return str(provider)
    return "core decomposition" if spec.composed else "core reference"


class OpTable:
    """Bound ops by group. Frozen; one slot a group, added by `make_table`.

    bindings  every op in the order of the contracts
    wrappers  what bound calls are wrapped in (tracer, dumper), innermost first
    """

    __slots__ = ("bindings", "wrappers")

    bindings: tuple[Binding, ...]
    wrappers: tuple[Wrapper, ...]

    if TYPE_CHECKING:
        runtime: ops.RuntimeOps
        communicator: ops.CommunicatorOps
        attention: ops.AttentionOps
        gemm: ops.GemmOps
        experts: ops.ExpertOps
        cache: ops.CacheOps
        residual: ops.ResidualOps
        engram: ops.EngramOps
        sampling: ops.SamplingOps
        step_inputs: ops.StepInputOps
        vision: ops.VisionOps

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the op table is frozen; bind again to change {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"the op table is frozen; {name!r} cannot be removed")

    def __repr__(self) -> str:
        return f"<OpTable {len(self.bindings)} ops, digest {self.digest[:12]}>"

    def binding(self, op: str) -> Binding:
        """What op "<group>.<method>" is bound to; KeyError if there is no such op."""
        for binding in self.bindings:
            if binding.spec.name == op:
                return binding
        raise KeyError(op)

    @property
    def digest(self) -> str:
        """sha256 over what decides results; equal on all ranks of a run and on every start of the same installation."""
        return digest_of(self.bindings)

    @property
    def tracer(self) -> Tracer | None:
        """The tracer its calls go through, None with tracing off."""
        from deepinfer.hooks.trace import Tracer

        return next((wrapper for wrapper in self.wrappers if isinstance(wrapper, Tracer)), None)


class GroupTable:
    """Bound ops of one group. Frozen; one slot an op, added by `make_group_table`."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the op table is frozen; bind again to change {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"the op table is frozen; {name!r} cannot be removed")


def digest_of(bindings: Iterable[Binding]) -> str:
    """Hash of op, version, provider, distribution version, implementation and layout of every binding, sorted."""
    rows = sorted(
        [b.spec.name, b.spec.version, b.provider.name, b.provider.version, b.implementation, b.layout or ""]
        for b in bindings
    )
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def make_group_table(group: str, functions: Mapping[str, Callable[..., Any]]) -> GroupTable:
    """The frozen table of one group: {method: callable}."""
    return _slotted(GroupTable, f"{group}_ops", dict(functions))


def make_table(
    groups: Mapping[str, GroupTable], bindings: Iterable[Binding], wrappers: Iterable[Wrapper] = ()
) -> OpTable:
    """The frozen table of all groups: {group: its table}."""
    table = _slotted(OpTable, "ops", dict(groups))
    object.__setattr__(table, "bindings", tuple(bindings))
    object.__setattr__(table, "wrappers", tuple(wrappers))
    return table


def _slotted(base: type, name: str, values: dict[str, Any]) -> Any:
    """An instance of a subclass of `base` with one slot a value."""
    instance = type(name, (base,), {"__slots__": tuple(values)})()
    for slot, value in values.items():
        object.__setattr__(instance, slot, value)
    return instance
