"""Binds every op once: creates the group objects, holds them to their contracts, has `plan.py` choose, makes the table.

Called by `build.py` with the loaded plugins, and by tests with any contributions and contracts. Configuration is
final when this runs and no weight is loaded yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from deepinfer.errors import BackendError, DeepInferError
from deepinfer.hooks.api import CANONICAL, OpContext, OpGroup, OpSpec, provides_of
from deepinfer.hooks.overrides import Override, parse_overrides
from deepinfer.hooks.plan import Candidate, Slot, check_overrides_used, check_plan, plan_groups
from deepinfer.hooks.table import REFERENCE, Binding, GroupTable, OpTable, Provider, make_group_table, make_table
from deepinfer.hooks.verify import check_object, overrides

if TYPE_CHECKING:
    from deepinfer.hooks.trace import Wrapper

Factory = Callable[[OpContext], "OpGroup | None"]


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a provider brings: a factory for each op group it has. A class derived from the contract is a factory."""

    provider: Provider
    factories: Mapping[str, Factory]


def core_provider() -> Provider:
    """Core itself, as the provider of every contract's own body."""
    from importlib import metadata

    try:
        version = metadata.version("deepinfer-core")
    except metadata.PackageNotFoundError:
        version = "uninstalled"
    return Provider(REFERENCE, "deepinfer-core", version)


def bind(
    contributions: Sequence[Contribution],
    context: OpContext,
    overrides: Iterable[str] = (),
    *,
    strict: bool = False,
    batch_invariant: bool = False,
    contracts: Sequence[type[OpGroup]] | None = None,
    wrappers: Sequence[Wrapper] = (),
) -> OpTable:
    """The frozen op table of one engine.

    contributions    most preferred first: op packs in the order named, then the backend
    overrides        "PATTERN=PROVIDER" texts, the last match wins
    strict           an op whose preferred provider refuses is an error instead of a fallback
    batch_invariant  exclude implementations that do not declare it; core's bodies qualify with `numerics.order_free`
    contracts        the op groups; None: all of `deepinfer.hooks.ops`
    wrappers         put around every bound call, innermost first (`trace.Tracer`)

    Raises `OpBindingError` for broken contracts, overrides that cannot be followed and ops without a provider, and
    whatever a factory raises.
    """
    if contracts is None:
        from deepinfer.hooks.ops import contracts as all_contracts

        contracts = all_contracts()
    names = [spec.name for contract in contracts for spec in contract.op_specs.values()]
    rules = parse_overrides(overrides, names, [c.provider.name for c in contributions])
    return _Binder(contributions, context, rules, strict, batch_invariant, tuple(wrappers)).run(contracts)


class _Binder:
    """One run of `bind`: whole groups first, since later groups find them in their context; then all others at once,
    since layout groups cross group boundaries."""

    def __init__(
        self,
        contributions: Sequence[Contribution],
        context: OpContext,
        rules: Sequence[Override],
        strict: bool,
        batch_invariant: bool,
        wrappers: tuple[Wrapper, ...],
    ) -> None:
        self.contributions = contributions
        self.context = context
        self.rules = rules
        self.strict = strict
        self.batch_invariant = batch_invariant
        self.wrappers = wrappers
        self.core = core_provider()
        self.objects: list[OpGroup] = []
        self.slots: list[Slot] = []
        self.bindings: dict[str, Binding] = {}
        self.tables: dict[str, GroupTable] = {}

    def run(self, contracts: Sequence[type[OpGroup]]) -> OpTable:
        for contract in contracts:
            if contract.whole:
                self._bind_groups([contract], whole=True)
                self._add_to_context(contract.group)
        self._bind_groups([contract for contract in contracts if not contract.whole], whole=False)
        check_overrides_used(self.slots, self.rules)
        in_order = [self.bindings[s.name] for contract in contracts for s in contract.op_specs.values()]
        table = make_table({c.group: self.tables[c.group] for c in contracts}, in_order, self.wrappers)
        for made in self.objects:
            made.ops = table
        return table

    def _bind_groups(self, contracts: Sequence[type[OpGroup]], whole: bool) -> None:
        slots = {contract: self._slots(contract) for contract in contracts}
        everything = [slot for group in slots.values() for slot in group]
        plan_groups(everything, self.rules, whole)
        check_plan(everything, self.strict, self.batch_invariant)
        self.slots += everything
        for contract, group in slots.items():
            bound = {slot.spec.method: self._binding(slot) for slot in group}
            self.bindings |= {binding.spec.name: binding for binding in bound.values()}
            self.tables[contract.group] = make_group_table(
                contract.group, {method: self._wrapped(binding) for method, binding in bound.items()}
            )

    def _add_to_context(self, group: str) -> None:
        if group in {f.name for f in fields(OpContext)}:
            bound: dict[str, Any] = {group: self.tables[group]}
            self.context = replace(self.context, **bound)

    def _slots(self, contract: type[OpGroup]) -> list[Slot]:
        """Candidates of every provider for every op of a contract."""
        own = contract(self.context)
        self.objects.append(own)
        made = [(c.provider, self._make(c, contract)) for c in self.contributions if contract.group in c.factories]
        served = [(provider, group) for provider, group in made if group is not None]
        return [
            Slot(spec, [self._candidate(contract, p, group, spec) for p, group in served], self._core(own, spec))
            for spec in contract.op_specs.values()
        ]

    def _make(self, contribution: Contribution, contract: type[OpGroup]) -> OpGroup | None:
        """The provider's group object, held to its contract."""
        provider = contribution.provider
        try:
            made = contribution.factories[contract.group](self.context)
        except DeepInferError as error:
            error.add_note(f"raised by {provider} in {contract.factory}")
            raise
        except Exception as error:
            raise BackendError(f"{provider}: {contract.factory} failed: {type(error).__name__}: {error}") from error
        if made is None:
            return None
        check_object(contract, provider, made)
        self.objects.append(made)
        return made

    def _candidate(self, contract: type[OpGroup], provider: Provider, made: OpGroup, spec: OpSpec) -> Candidate:
        if overrides(contract, made, spec.method):
            return self._native(contract, provider, made, spec)
        if contract.whole:  # the inherited body belongs to this provider's object: device state is not shared
            return Candidate(provider, getattr(made, spec.method), _canonical(spec), self._core_reasons(contract))
        return Candidate(provider, None)

    def _native(self, contract: type[OpGroup], provider: Provider, made: OpGroup, spec: OpSpec) -> Candidate:
        function = getattr(made, spec.method)
        declared = provides_of(function)
        assert declared is not None  # check_object refuses overrides without it
        layouts = {tag: declared.layouts.get(tag, provider.name) for tag in spec.layouts}
        reasons = []
        if self.batch_invariant and contract.numeric and not declared.batch_invariant:
            reasons.append("not declared batch_invariant")
        reasons += self._refusals(provider, made, spec)
        return Candidate(provider, function, layouts, reasons)

    def _refusals(self, provider: Provider, made: OpGroup, spec: OpSpec) -> list[str]:
        """The implementation's own reasons against serving this model here."""
        try:
            reasons = made.refuse(spec.name, self.context.traits)
        except Exception as error:
            raise BackendError(f"{provider}: refuse({spec.name!r}) failed: {type(error).__name__}: {error}") from error
        if not isinstance(reasons, list) or not all(isinstance(reason, str) for reason in reasons):
            raise BackendError(f"{provider}: refuse({spec.name!r}) returned {reasons!r}, expected a list of reasons")
        return list(reasons)

    def _core(self, own: OpGroup, spec: OpSpec) -> Candidate:
        return Candidate(self.core, getattr(own, spec.method), _canonical(spec), self._core_reasons(type(own)))

    def _core_reasons(self, contract: type[OpGroup]) -> list[str]:
        if self.batch_invariant and contract.numeric and not self.context.numerics.order_free:
            return ["its sums depend on the other rows of a batch without numerics.order_free"]
        return []

    def _binding(self, slot: Slot) -> Binding:
        choice = slot.choice
        assert choice is not None  # check_plan has raised otherwise
        method: Any = choice.function
        name = f"{method.__func__.__module__}.{method.__func__.__qualname__}"
        neutral = choice is slot.core and slot.spec.composed
        layout = None if neutral else "+".join(dict.fromkeys(choice.layouts.values())) or None
        return Binding(slot.spec, choice.provider, name, layout, slot.refused, method)

    def _wrapped(self, binding: Binding) -> Callable[..., Any]:
        function = binding.function
        for wrapper in self.wrappers:
            function = wrapper.wrap(binding, function)
        return function


def _canonical(spec: OpSpec) -> dict[str, str]:
    """The layouts core's own body works on."""
    return dict.fromkeys(spec.layouts, CANONICAL)
