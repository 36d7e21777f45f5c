"""Chooses a provider for every op. Pure decisions over candidates: nothing is created, called or bound here.

Called by `bind.py`. The order is: user override, op packs as named, the selected backend, core's own body. Steps:

    flags and refusals   a candidate that is filtered or refuses keeps its reasons
    overrides            set the other providers aside, for one op
    whole groups         a provider serves every op of the group or none
    layout groups        ops that share private data agree on one layout: one provider's, or core's
    choice               the first candidate still open
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer.errors import OpBindingError
from deepinfer.hooks.api import CANONICAL, OpSpec
from deepinfer.hooks.overrides import Override, override_for
from deepinfer.hooks.table import REFERENCE, Provider, Refusal, in_words


@dataclass(slots=True)
class Candidate:
    """What one provider offers for one op.

    function    bound method, None if the provider has no implementation
    layouts     {layout tag of the op: name of the layout it works on}
    reasons     why it cannot serve
    set_aside   the override that prefers another provider, in words
    """

    provider: Provider
    function: Callable[..., Any] | None
    layouts: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    set_aside: str | None = None

    @property
    def open(self) -> bool:
        """May still be chosen."""
        return self.function is not None and not self.reasons and self.set_aside is None

    @property
    def failed(self) -> bool:
        """Has an implementation that cannot serve: choosing another one is a fallback."""
        return self.function is not None and bool(self.reasons) and self.set_aside is None

    def as_refusal(self) -> Refusal:
        reasons = list(self.reasons)
        if self.set_aside is not None:
            reasons.append(self.set_aside)
        if self.function is None:
            reasons.append("does not implement it")
        return Refusal(self.provider, tuple(reasons), self.function is not None)


@dataclass(slots=True)
class Slot:
    """One op on its way to a binding. candidates: most preferred first, without core's own body."""

    spec: OpSpec
    candidates: list[Candidate]
    core: Candidate

    @property
    def choice(self) -> Candidate | None:
        """The most preferred open candidate, core's own body last; None if there is none."""
        return next((c for c in (*self.candidates, self.core) if c.open), None)

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Candidates more preferred than the choice, with their reasons."""
        choice, passed = self.choice, []
        for candidate in (*self.candidates, self.core):
            if candidate is choice:
                break
            passed.append(candidate.as_refusal())
        return tuple(passed)

    def of(self, provider: str) -> Candidate | None:
        """The candidate of a provider."""
        return next((c for c in (*self.candidates, self.core) if c.provider.name == provider), None)


def plan_groups(slots: Sequence[Slot], overrides: Sequence[Override], whole: bool) -> None:
    """Narrow the candidates of `slots` until each slot's `choice` stands. whole: the slots are one whole group."""
    for slot in slots:
        _apply_override(slot, override_for(slot.spec.name, overrides))
    if whole:
        _keep_whole(slots)
    else:
        _agree_on_layouts(slots)
    _check_overrides(slots, overrides)


def _apply_override(slot: Slot, override: Override | None) -> None:
    """Set aside everyone but the provider named. A pattern skips ops which that provider does not implement."""
    if override is None:
        return
    named = slot.of(override.provider)
    if named is None or named.function is None:
        return
    for candidate in (*slot.candidates, slot.core):
        if candidate is not named:
            candidate.set_aside = f"override {override}"


def _keep_whole(slots: Sequence[Slot]) -> None:
    """A provider that cannot serve one op of a whole group serves none of it."""
    for name in _providers(slots):
        mine = [(slot, slot.of(name)) for slot in slots]
        causes = [
            f"{slot.spec.name}: {reason}"
            for slot, candidate in mine
            if candidate is not None and candidate.function is not None
            for reason in (*candidate.reasons, *filter(None, [candidate.set_aside]))
        ]
        if causes:
            for _, candidate in mine:
                if candidate is not None and candidate.open:
                    candidate.reasons.append(f"the group is bound whole; {'; '.join(causes)}")


def _agree_on_layouts(slots: Sequence[Slot]) -> None:
    """Decide whose layout every tag uses, and refuse each candidate that works on another.

    A refusal may take from a provider what it needed to serve another tag, so this repeats until nothing changes;
    reasons are only ever added, so it ends.
    """
    tags = {tag: [slot for slot in slots if tag in slot.spec.layouts] for slot in slots for tag in slot.spec.layouts}
    changed = True
    while changed:
        before = _open_candidates(slots)
        for tag, group in tags.items():
            owner, layout = _layout_owner(tag, group)
            for candidate in (c for slot in group for c in slot.candidates if c.open):
                is_owner = layout == CANONICAL or candidate.provider.name == owner
                if candidate.layouts[tag] != layout or not is_owner:
                    whose = "core's own" if layout == CANONICAL else f"{owner}'s {layout}"
                    candidate.reasons.append(f"works on layout {candidate.layouts[tag]}; {tag} is bound in {whose}")
        changed = _open_candidates(slots) != before


def _open_candidates(slots: Sequence[Slot]) -> int:
    return sum(candidate.open for slot in slots for candidate in slot.candidates)


def _layout_owner(tag: str, slots: Sequence[Slot]) -> tuple[str, str]:
    """(provider, layout) of the most preferred provider that can serve all of `slots` in its private layout, or
    (reference, CANONICAL) if a provider on core's layout comes first or nobody can."""
    for name in _providers(slots):
        mine = [candidate for slot in slots if (candidate := slot.of(name)) is not None and candidate.open]
        layouts = list(dict.fromkeys(candidate.layouts[tag] for candidate in mine))
        for layout in layouts:
            if layout == CANONICAL:
                continue
            lacking = [slot.spec.name for slot in slots if not _covers(slot, name, tag, layout)]
            if not lacking:
                return name, layout
            for candidate in mine:
                if candidate.layouts[tag] == layout:
                    candidate.reasons.append(
                        f"works on {tag} layout {layout}, in which {name} cannot serve {', '.join(lacking)}; "
                        f"ops of one layout come from one provider"
                    )
        if CANONICAL in layouts:
            break
    return REFERENCE, CANONICAL


def _covers(slot: Slot, provider: str, tag: str, layout: str) -> bool:
    """Whether an op can be served in a provider's private layout: by the provider, or by a composed body of core."""
    candidate = slot.of(provider)
    if candidate is not None and candidate.open and candidate.layouts[tag] == layout:
        return True
    return slot.spec.composed and slot.core.open


def _providers(slots: Iterable[Slot]) -> list[str]:
    """Names of the providers that have candidates, most preferred first, core not included."""
    return list(dict.fromkeys(c.provider.name for slot in slots for c in slot.candidates))


def _check_overrides(slots: Sequence[Slot], overrides: Sequence[Override]) -> None:
    """Raise if a provider the user named cannot serve, with its reasons: an explicit wish never falls back."""
    lines = []
    for slot in slots:
        override = override_for(slot.spec.name, overrides)
        if override is None:
            continue
        named = slot.of(override.provider)
        if named is not None and named.failed:
            lines.append(f"  {slot.spec.name} ({override}): {'; '.join(named.reasons)}")
        elif override.exact and (named is None or named.function is None):
            lines.append(f"  {slot.spec.name} ({override}): {override.provider} does not implement it")
    if lines:
        raise OpBindingError("op overrides cannot be followed:\n" + "\n".join(lines))


def check_overrides_used(slots: Sequence[Slot], overrides: Sequence[Override]) -> None:
    """Raise for an override whose provider implements none of the ops its pattern matches. slots: of all groups."""
    for override in overrides:
        named = [slot.of(override.provider) for slot in slots if override.matches(slot.spec.name)]
        if not any(candidate is not None and candidate.function is not None for candidate in named):
            raise OpBindingError(f"op override {override}: {override.provider} implements no op that matches")


def check_plan(slots: Sequence[Slot], strict: bool, batch_invariant: bool) -> None:
    """Raise for ops without a provider, and under `strict` for every op that had to fall back."""
    missing = [slot for slot in slots if slot.choice is None]
    if missing:
        wanted = "DEEPINFER_BATCH_INVARIANT=1" if batch_invariant else "op binding"
        advice = "  Core's own bodies qualify with numerics.order_free." if batch_invariant else ""
        raise OpBindingError(_listing(f"{wanted}: {_count(missing)} without a provider:", missing, advice))
    fallen = [s for s in slots if any(c.failed for c in s.candidates[: _rank(s)])]
    if strict and fallen:
        advice = "  Name the provider you accept with --op, or run without DEEPINFER_STRICT_OPS."
        raise OpBindingError(_listing(f"DEEPINFER_STRICT_OPS=1: {_count(fallen)} would fall back:", fallen, advice))


def _rank(slot: Slot) -> int:
    """How many candidates are more preferred than the choice."""
    return next((i for i, c in enumerate(slot.candidates) if c is slot.choice), len(slot.candidates))


def _count(slots: Sequence[Slot]) -> str:
    return "1 op" if len(slots) == 1 else f"{len(slots)} ops"


def _listing(title: str, slots: Sequence[Slot], advice: str) -> str:
    lines = [title]
    for slot in slots:
        choice = slot.choice
        who = "nobody" if choice is None else in_words(choice.provider, slot.spec)
        lines.append(f"{slot.spec.name} v{slot.spec.version} -> {who}")
        lines += [f"  {refusal}" for refusal in slot.refused]
    return "\n".join(filter(None, [*lines, advice]))
