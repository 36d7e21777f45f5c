"""Two installed backends side by side: every op on equal operands, and a whole engine on equal texts.

Ops of each are held to the reference by the tolerance rule, which bounds what lies between them; the difference itself
is reported. Engines are held to each other. Results look like those of the levels they belong to, 1 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from deepinfer.errors import ConfigError
from deepinfer.hooks import LoadedBackend
from deepinfer.testing import compare
from deepinfer.testing.conformance import deviation, runs
from deepinfer.testing.conformance.engine import EngineBench
from deepinfer.testing.conformance.judge import judge, outcome
from deepinfer.testing.conformance.report import Report
from deepinfer.testing.conformance.runner import Options, Show, guarded, quiet_hooks, select_infos, watched
from deepinfer.testing.opinfo import OpInfo, Sample, Trio
from deepinfer.testing.results import Case, CaseResult, Failure, Worst
from deepinfer.testing.subject import Subject, make_subject

OPS, ENGINE = 1, 4
LEVELS = (OPS, ENGINE)


def run_against(
    backend: str | LoadedBackend, other: str | LoadedBackend, options: Options, show: Show = lambda text: None
) -> Report:
    """Compare two backends on the levels 1 and 4, as far as the options choose. ConfigError if they choose neither."""
    if not set(LEVELS) & set(options.chosen_levels):
        raise ConfigError("--against compares ops (level 1) and engines (level 4); --level chooses neither")
    with quiet_hooks():
        first = make_subject(backend, options.config, overrides=options.overrides, seed=options.seed)
        second = make_subject(other, options.config, seed=options.seed)
        report = Report(first.loaded, first.ops, options.config, options.to_json(), second.loaded)
        infos = select_infos(options.op, options.expected)
        show(report.heading())
        for level in (level for level in LEVELS if level in options.chosen_levels):
            results = _level(level, first, second, infos, options)
            report.results += watched(map(options.expected.apply, guarded(level, results)), show)
            show(report.level_line(level))
        show(report.ending())
    return report


def _level(
    level: int, first: Subject, second: Subject, infos: Mapping[str, OpInfo], options: Options
) -> Iterator[CaseResult]:
    if level == OPS:
        return compare_ops(first, second, infos, options.quick)
    return (case.run() for case in engine_cases(first, second, options.quick))


def compare_ops(
    first: Subject, second: Subject, infos: Mapping[str, OpInfo], quick: bool = False
) -> Iterator[CaseResult]:
    """Every sample of every op on both."""
    one, two = Trio.of(first), Trio.of(second)
    for info in infos.values():
        made = (info.samples(ctx, quick) for ctx in (one.found, two.found, one.working, one.ideal))
        for samples in zip(*made, strict=True):
            body = _pair(info, (first.name, one), (second.name, two), samples)
            yield Case(OPS, info.name, samples[0].name, body).run()


def _pair(
    info: OpInfo, one: tuple[str, Trio], two: tuple[str, Trio], samples: tuple[Sample, ...]
) -> Callable[[], Worst | None]:
    """The body of a case: both results against the reference, then against each other."""

    def body() -> Worst | None:
        working, ideal = outcome(info, one[1].working, samples[2]), outcome(info, one[1].ideal, samples[3])
        found = {}
        for (name, trio), sample in zip((one, two), samples[:2], strict=True):
            found[name] = outcome(info, trio.found, sample)
            try:
                judge(info, found[name], working, ideal)
            except Failure as failure:
                raise Failure(f"{name} against the reference: {failure}", failure.worst) from None
        return between(found[one[0]], found[two[0]], working, ideal)

    return body


def between(
    first: Mapping[str, Any], second: Mapping[str, Any], working: Mapping[str, Any], ideal: Mapping[str, Any]
) -> Worst | None:
    """The largest difference between two results that both pass, against what the rule allows both together."""
    worst: dict[str, Any] | None = None
    for name, a in first.items():
        b, w, t = second[name], working[name], ideal[name]
        if not (isinstance(w, torch.Tensor) and w.is_floating_point() and w.numel() and a.shape == b.shape == t.shape):
            continue
        moved = _largest(w.to(a.dtype).double() - t.double())
        allowed = 2 * (compare.FACTOR * moved + compare.TOLERANCES[a.dtype].atol)
        difference = torch.nan_to_num(a.double() - b.double(), 0.0).abs()
        place = int(difference.reshape(-1).argmax())
        error = float(difference.reshape(-1)[place])
        if worst is None or error / allowed > worst["error"] / worst["bound"]:
            values = (float(a.reshape(-1)[place]), float(b.reshape(-1)[place]))
            index = [int(i) for i in torch.unravel_index(torch.tensor(place), a.shape)] if a.dim() else []
            worst = {"part": name, "error": error, "bound": allowed, "index": index,
                     "found": values[0], "expected": values[1]}  # fmt: skip
    return worst


def _largest(difference: torch.Tensor) -> float:
    finite = difference[torch.isfinite(difference)].abs()
    return float(finite.max()) if finite.numel() else 0.0


def engine_cases(first: Subject, second: Subject, quick: bool = False) -> Iterator[Case]:
    """A whole engine on both: log-probabilities of forced texts, and greedy tokens."""
    ours, theirs = EngineBench(first, quick), EngineBench(second, quick)
    theirs.checkpoints = ours.checkpoints

    def logprobs() -> Worst:
        return deviation.hold(ours.plain, theirs.plain, ours.noise)

    def greedy() -> str:
        with theirs.engine() as llm:
            wanted = runs.greedy(llm, theirs.script.prompts, theirs.tokens)
            script = replace(theirs.script, forced=tuple(wanted))
            reference = runs.forced(llm, script, score_prompts=False)
        with ours.engine() as llm:
            chosen = runs.greedy(llm, ours.script.prompts, ours.tokens)
            along = runs.forced(llm, script, score_prompts=False)
        return deviation.hold_tokens(chosen, along, wanted, reference, ours.noise)

    yield Case(ENGINE, None, f"log-probabilities of {first.name} and {second.name}", logprobs)
    yield Case(ENGINE, None, f"greedy tokens of {first.name} and {second.name}", greedy)
