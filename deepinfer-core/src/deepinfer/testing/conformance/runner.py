"""Runs the kit on a backend: which levels, which ops, in which order, and what the results count as.

Called by `deepinfer conformance` and by tests. The levels are modules of their own with one shape: `run(subject, infos,
quick)` yields `CaseResult`s. Nothing here knows what a case does.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError
from deepinfer.hooks import LoadedBackend
from deepinfer.hooks.ops import contracts
from deepinfer.testing.conformance.expected import Expectations
from deepinfer.testing.conformance.report import LEVELS, Report
from deepinfer.testing.opinfo import OpInfo, op_infos
from deepinfer.testing.results import FAIL, SKIP, Case, CaseResult
from deepinfer.testing.subject import Subject, make_subject

DEFAULT_LEVELS = (0, 1, 2, 3, 4)

OP_LEVELS = (1, 2)
"""What `--op` runs by default: the levels that are about single ops."""

Show = Callable[[str], None]
"""Takes a piece of the summary as soon as it is known."""


@dataclass(frozen=True)
class Options:
    """What to run. levels None: 0 to 4, or 1 and 2 with an op pattern.

    op           pattern of op names; None: all
    config       built-in model whose sizes ops are bound for
    check_speed  level 5 may fail
    last_report  report.json whose times level 5 compares with
    """

    levels: tuple[int, ...] | None = None
    op: str | None = None
    quick: bool = False
    seed: int = 0
    config: str = "micro"
    overrides: tuple[str, ...] = ()
    check_speed: bool = False
    last_report: Path | None = None
    expected: Expectations = field(default_factory=Expectations)

    @property
    def chosen_levels(self) -> tuple[int, ...]:
        """The levels to run."""
        if self.levels is not None:
            return self.levels
        return OP_LEVELS if self.op is not None else DEFAULT_LEVELS

    @property
    def complete(self) -> bool:
        """Whether every case of the kit that can be expected to fail is run."""
        return self.op is None and not self.quick and set(DEFAULT_LEVELS) <= set(self.chosen_levels)

    def to_json(self) -> dict[str, Any]:
        """What reports say about them."""
        return {"levels": list(self.chosen_levels), "op": self.op, "quick": self.quick, "seed": self.seed,
                "overrides": list(self.overrides)}  # fmt: skip


def parse_levels(text: str) -> tuple[int, ...]:
    """`3`, `0-2` or `0,3-4` as level numbers; ConfigError for anything else."""
    levels: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(end.isdecimal() and int(end) < len(LEVELS) for end in ends) or int(ends[0]) > int(ends[1]):
            names = ", ".join(f"{number} {name}" for number, name in enumerate(LEVELS))
            raise ConfigError(f"--level {text!r}: expected a number or a range of: {names}")
        levels |= set(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(levels))


def op_names() -> list[str]:
    """Names of all ops, in the order of the contracts."""
    return [spec.name for contract in contracts() for spec in contract.op_specs.values()]


def select_infos(pattern: str | None, expected: Expectations) -> dict[str, OpInfo]:
    """Records of the ops that match the pattern and are judged. ConfigError, with suggestions, if none matches."""
    from deepinfer.hooks.overrides import similar_ops

    infos = op_infos()
    if pattern is None:
        return {name: info for name, info in infos.items() if expected.allows(name)}
    matching = {name: info for name, info in infos.items() if fnmatch.fnmatchcase(name, pattern)}
    if not matching:
        raise ConfigError(f"--op {pattern!r}: matches no op.{similar_ops(pattern, list(infos))}")
    return {name: info for name, info in matching.items() if expected.allows(name)}


def run_conformance(backend: str | LoadedBackend, options: Options, show: Show = lambda text: None) -> Report:
    """Run the chosen levels. Raises what opening and binding the backend raise."""
    with quiet_hooks():
        subject = make_subject(backend, options.config, overrides=options.overrides, seed=options.seed)
        infos = select_infos(options.op, options.expected)
        report = Report(subject.loaded, subject.ops, options.config, options.to_json())
        show(report.heading())
        for level in options.chosen_levels:
            report.results += watched(run_level(level, subject, infos, options), show)
            show(report.level_line(level))
        if options.complete:
            report.results += options.expected.unused(report.results)
        show(report.ending())
    return report


def run_level(level: int, subject: Subject, infos: Mapping[str, OpInfo], options: Options) -> Iterator[CaseResult]:
    """Results of one level, expected failures marked."""
    left_out = _left_out(level, options)
    yield from left_out
    if level not in options.expected.excluded:
        results = _results(level, subject, infos, options)
        yield from map(options.expected.apply, guarded(level, results))


def _left_out(level: int, options: Options) -> list[CaseResult]:
    """Skips for what conformance.toml leaves out of a level."""
    expected = options.expected
    if level in expected.excluded:
        reason = f"level {level} is excluded by {expected.source}: {expected.excluded[level]}"
        return [CaseResult(level, None, "the whole level", SKIP, reason)]
    return expected.left_out(op_names()) if level == 1 and options.op is None else []


def _results(level: int, subject: Subject, infos: Mapping[str, OpInfo], options: Options) -> Iterable[CaseResult]:
    module = _module(level)
    if level == 5:
        return module.run(subject, infos, options.quick, options.check_speed, read_timings(options.last_report))
    return module.run(subject, infos, options.quick)


def _module(level: int) -> Any:
    return importlib.import_module(f"deepinfer.testing.conformance.{LEVELS[level]}")


Part = tuple[str, Callable[[], Iterable[CaseResult]]]


def level_parts(level: int, subject: Subject, infos: Mapping[str, OpInfo], options: Options) -> Iterator[Part]:
    """A level in parts that can be run one by one: (name, what runs it). One part for each case, or for each op.

    Together they give what `run_level` gives.
    """
    expected = options.expected
    for skip in _left_out(level, options):
        yield skip.name, partial(_marked, expected, [skip])
    if level in expected.excluded:
        return
    if level in (*OP_LEVELS, 5):
        for name, info in infos.items():
            yield name, partial(_run_op, level, subject, {name: info}, options)
        return
    for case in _module(level).cases(subject, infos, options.quick):
        yield case.name, partial(_run_single, case, expected)


def _run_op(level: int, subject: Subject, infos: Mapping[str, OpInfo], options: Options) -> list[CaseResult]:
    return _marked(options.expected, _results(level, subject, infos, options))


def _run_single(case: Case, expected: Expectations) -> list[CaseResult]:
    return _marked(expected, [case.run()])


def _marked(expected: Expectations, results: Iterable[CaseResult]) -> list[CaseResult]:
    return [expected.apply(result) for result in results]


def guarded(level: int, results: Iterable[CaseResult]) -> Iterator[CaseResult]:
    """The results; an exception between two cases is one more failure, and ends the level, not the run."""
    try:
        yield from results
    except Exception as error:
        detail = f"the level stopped: {type(error).__name__}: {error}"
        yield CaseResult(level, None, "the whole level", FAIL, detail)


def watched(results: Iterable[CaseResult], show: Show, interval: float = 20.0) -> Iterator[CaseResult]:
    """The results; while they come, a line every `interval` seconds says how far the level is."""
    done, failed, last = 0, 0, time.monotonic()
    for result in results:
        done, failed = done + 1, failed + result.bad
        if time.monotonic() - last >= interval:
            show(f"  ... {done} cases, {failed} failed; last: {result.name}")
            last = time.monotonic()
        yield result


def read_timings(path: Path | None) -> dict[str, dict[str, float]]:
    """Times of an earlier report; ConfigError if the file is none."""
    if path is None:
        return {}
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))["timings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: is no report.json of the conformance kit ({why})") from None


@contextmanager
def quiet_hooks() -> Iterator[None]:
    """The kit binds ops many times over; what binding logs each time is in the report once."""
    logger = logging.getLogger("deepinfer.hooks")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
