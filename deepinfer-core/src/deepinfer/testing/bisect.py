"""Finds the op that makes a backend's end-to-end output diverge: halves the set of native ops until one is left.

An engine runs fixed texts with some ops native and the others bound to core's reference. With all of them native it
diverges, with none it does not; in between lies the first op whose own implementation makes the difference. Ops that
share a private layout can only be switched together. Behind `deepinfer bisect`; measured as level 4 measures
(`conformance/runs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.errors import OpBindingError
from deepinfer.hooks import CANONICAL, Binding, LoadedBackend
from deepinfer.hooks.api import provides_of
from deepinfer.hooks.ops import contracts
from deepinfer.hooks.table import REFERENCE
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.testing import replay_text
from deepinfer.testing.capture import CallDumper, Record
from deepinfer.testing.conformance import deviation, runs
from deepinfer.testing.conformance.deviation import Deviation, Noise
from deepinfer.testing.conformance.runner import quiet_hooks
from deepinfer.testing.conformance.runs import Forced, Script
from deepinfer.testing.replay import Replay, StoredCall, judge_recorded
from deepinfer.testing.subject import Subject, load_groups, make_subject

Show = Callable[[str], None]

CHUNK = 48
"""Tokens of a step on the kit's texts, so that ops see a prompt's beginning, its middle, and decode steps."""


@dataclass(frozen=True)
class Unit:
    """Native ops that can only be switched together. why: what ties them, empty for a single op."""

    ops: tuple[str, ...]
    why: str = ""

    def __str__(self) -> str:
        return self.ops[0] if len(self.ops) == 1 else f"{', '.join(self.ops)} ({self.why})"


@dataclass(frozen=True)
class Finding:
    """What a bisection came to.

    culprits  ops to blame, empty if nothing diverges or if it is not the ops
    with_     units that have to be native, too, for the culprit to show
    detail    how the output diverges
    call      the culprit's first wrong call held against the reference, None if no single call is wrong
    """

    diverges: bool
    culprits: tuple[str, ...] = ()
    with_: tuple[Unit, ...] = ()
    detail: str = ""
    call: Replay | None = field(default=None, repr=False)


def switchable(subject: Subject) -> list[Unit]:
    """The native ops in the order of the contracts, those that share a private layout as one unit.

    Ops of groups that are bound whole (runtime, communicator) are the device itself and stay.
    """
    whole = {contract.group for contract in contracts() if contract.whole}
    native = [b for b in subject.ops.bindings if b.kind == "native" and b.spec.group not in whole]
    units: list[tuple[set[str], list[str]]] = []
    for binding in native:
        layouts, ops = set(private_layouts(binding)), [binding.spec.name]
        for unit in [unit for unit in units if unit[0] & layouts]:
            layouts, ops = layouts | unit[0], unit[1] + ops
            units.remove(unit)
        units.append((layouts, ops))
    return [Unit(tuple(ops), f"they share {', '.join(sorted(tags))}" if tags else "") for tags, ops in units]


def private_layouts(binding: Binding) -> Iterator[str]:
    """ "<tag> layout <name>" of the layouts that only the binding's provider knows."""
    declared = provides_of(binding.function)
    for tag in binding.spec.layouts:
        name = declared.layouts.get(tag, binding.provider.name) if declared else CANONICAL
        if name != CANONICAL:
            yield f"the {tag} layout {name}"


class Bench:
    """Engines with some ops native: whether their output follows the reference's."""

    def __init__(
        self, subject: Subject, model: str | Path, script: Script, show: Show, factor: float, **arguments: Any
    ) -> None:
        self.subject, self.model, self.script, self.arguments = subject, model, script, arguments
        self.show, self.factor = show, factor
        self.whole: float | None = None
        self.native = [op for unit in switchable(subject) for op in unit.ops]
        self.expected, self.noise = self._reference()

    def _reference(self) -> tuple[Forced, Noise]:
        made = []
        for order_free in (False, True):
            loaded = load_groups(name="baseline")
            with runs.engine(self.model, loaded, batch_invariant=order_free, **self.arguments) as llm:
                made.append(runs.forced(llm, self.script))
        return made[1], Noise.between(*made)

    def _judged(self, deviation: Deviation) -> str | None:
        """How a run diverges, None if it does not.

        The first run, with all ops native, sets what counts from then on, half of what it deviates: ops that are right
        add up to a deviation of their own, and none of them should be blamed for that.
        """
        ratio, what = deviation.against(self.noise)
        allowed = max(self.factor, 0.0 if self.whole is None else self.whole / 2)
        if self.whole is None and math.isfinite(ratio):
            self.whole = ratio
        return what if ratio > allowed else None

    def overrides(self, keep: Sequence[str]) -> tuple[str, ...]:
        """What binds all native ops but these to the reference. OpBindingError if others would change, too."""
        texts = tuple(f"{op}={REFERENCE}" for op in self.native if op not in keep)
        bound = set(self.subject.rebound((*self.subject.overrides, *texts)).native)
        if bound & set(self.native) != set(keep):
            raise OpBindingError(f"binding {', '.join(keep)} alone also changes {', '.join(bound ^ set(keep))}")
        return texts

    def divergence(self, keep: Sequence[str], label: str, wrappers: Sequence[Any] = ()) -> str | None:
        """Run with only these ops native: how the output diverges, None if it follows the reference.

        Raises OpBindingError where these ops cannot be the only native ones.
        """
        subject, texts = self.subject, (*self.subject.overrides, *self.overrides(keep))
        settings, arguments = subject.context.settings, self.arguments | {"op_overrides": texts}
        try:
            with runs.engine(self.model, subject.loaded, settings, wrappers, **arguments) as llm:
                found = self._judged(Deviation.between(runs.forced(llm, self.script), self.expected))
        except Exception as error:
            found = f"raised {type(error).__name__}: {error}"
        self.show(f"  {label:<44} {'equal' if found is None else found.splitlines()[0]}")
        return found


def bisect(
    backend: str | LoadedBackend,
    model: str | Path | None = None,
    script: Script | None = None,
    directory: str | Path = ".",
    overrides: Sequence[str] = (),
    show: Show = lambda text: None,
    factor: float = deviation.FACTOR,
    **arguments: Any,
) -> Finding:
    """Find the op of a backend that is to blame for its output.

    model, script  what to run: directory of a checkpoint, and its tokens; None: the kit's own
    directory      where the culprit's first wrong call is stored
    factor         how many times the reference's own rounding noise counts as equal
    arguments      of the engines, as for `LLM`
    """
    with quiet_hooks():
        checkpoints = runs.Checkpoints()
        model = model or checkpoints.path(runs.CALM)
        config = ModelConfig.load(model)
        if script is None:
            script = Script.make((5, 37, 140), 6, config.text.vocab_size, seed=0)
            arguments = {"max_num_batched_tokens": CHUNK} | arguments
        subject = make_subject(backend, config, overrides=overrides)
        return _search(Bench(subject, model, script, show, factor, **arguments), Path(directory))


def text_script(model: str | Path, prompts: Sequence[str], tokens: int = 16) -> Script:
    """Texts of a checkpoint's own tokenizer; the same random tokens are forced after each."""
    from deepinfer.hub.tokenizer import Tokenizer

    tokenizer, vocabulary = Tokenizer(Path(model)), ModelConfig.load(model).text.vocab_size
    drawn = Script.make((2,) * len(prompts), tokens, vocabulary, seed=0)
    return Script(tuple(tuple(tokenizer.encode(prompt)) for prompt in prompts), drawn.forced, vocabulary)


def _search(bench: Bench, directory: Path) -> Finding:
    units = switchable(bench.subject)
    every = [op for unit in units for op in unit.ops]
    bench.show(f"{bench.subject.name}: {len(every)} native ops in {len(units)} units that can be switched")
    detail = bench.divergence(every, "all native")
    if detail is None:
        return Finding(False)
    if bench.divergence((), "none native") is not None:
        return Finding(True, detail=f"{detail}\nIt diverges without native ops, too: look at the runtime, or at core")
    chain = _minimal_chain(bench, units)
    culprits = _inside(bench, chain)
    call = _first_wrong_call(bench, chain, culprits, directory)
    if call is not None:
        culprits = (call.call.op,)
    return Finding(True, culprits, tuple(chain[1:]), detail, call)


def _minimal_chain(bench: Bench, units: Sequence[Unit]) -> list[Unit]:
    """The first unit that makes the difference, and those before it without which it does not."""
    chain: list[Unit] = []
    while True:
        good, bad = 0, len(units)  # with units[:good] it is equal, with units[:bad] it diverges
        while bad - good > 1:
            middle = (good + bad) // 2
            chosen = _ops([*units[:middle], *chain])
            label = f"{len(chosen)} native, up to {units[middle - 1].ops[-1]}"
            good, bad = (good, middle) if bench.divergence(chosen, label) else (middle, bad)
        chain.append(units[good])
        units = units[:good]
        if not units or bench.divergence(_ops(chain), f"{_ops(chain)[0]} and nothing before it"):
            return chain


def _ops(units: Sequence[Unit]) -> list[str]:
    return [op for unit in units for op in unit.ops]


def _inside(bench: Bench, chain: Sequence[Unit]) -> tuple[str, ...]:
    """The op of the first unit that is to blame: the one without which the output is right. All, if none can go."""
    unit = chain[0]
    for op in unit.ops if len(unit.ops) > 1 else ():
        rest = [other for other in _ops(chain) if other != op]
        try:
            if bench.divergence(rest, f"all of them but {op}") is None:
                return (op,)
        except OpBindingError:
            continue  # the others cannot do without it
    return _failing_alone(bench, unit) or unit.ops


def _failing_alone(bench: Bench, unit: Unit) -> tuple[str, ...]:
    """Of ops that cannot be separated, those that level 1 finds wrong; ops that only read come first.

    Level 1 looks at what an op writes through the ops that read it, so a wrong read makes writes look wrong, too.
    """
    if len(unit.ops) == 1:
        return unit.ops
    from deepinfer.testing.conformance import ops
    from deepinfer.testing.opinfo import op_infos

    infos = op_infos()
    results = ops.run(bench.subject, {op: infos[op] for op in unit.ops}, quick=True)
    failing = dict.fromkeys(result.op for result in results if result.bad and result.op)
    return tuple(sorted(failing, key=lambda op: bool(infos[op].changes)))


def _first_wrong_call(bench: Bench, chain: Sequence[Unit], culprits: Sequence[str], directory: Path) -> Replay | None:
    """Run once more for each culprit, and store the first call whose result is wrong by itself."""
    for op in culprits:
        found: list[Replay] = []

        def is_wrong(record: Record, result: Any, found: list[Replay] = found) -> bool:
            found[:] = [judge_recorded(StoredCall.of(record), bench.subject.loaded)]
            return not found[0].ok

        dumper = CallDumper(op, directory, wanted=is_wrong)
        bench.divergence(_ops(chain), f"looking at each call of {op}", (dumper,))
        if dumper.written is not None:
            return found[0] if found else judge_recorded(StoredCall.read(dumper.written), bench.subject.loaded)
    return None


def text(finding: Finding, backend: str) -> str:
    """The finding in words, for the terminal."""
    if not finding.diverges:
        return f"{backend} follows the reference: nothing to find"
    if not finding.culprits:
        return f"{backend} diverges, but no op of its own is to blame: {finding.detail}"
    several = len(finding.culprits) > 1
    lines = [f"culprit: {' or '.join(finding.culprits)}", f"  {finding.detail}"]
    if several:
        lines.append("  they share a private layout and cannot be separated; each may be wrong by itself")
    if finding.with_:
        lines.append(f"  it shows only together with {'; '.join(map(str, finding.with_))}")
    if finding.call is not None:
        lines += [f"  its first wrong call is in {finding.call.call.path}:", *_indented(replay_text.text(finding.call))]
    else:
        lines.append("  every single call of it agrees with the reference: look at what it keeps between calls")
    lines.append("Run without it: " + " ".join(f"--op '{op}={REFERENCE}'" for op in finding.culprits))
    return "\n".join(lines)


def _indented(block: str) -> list[str]:
    return [f"    {line}" for line in block.splitlines()]
