"""The pytest plugin: `pytest -p deepinfer.testing.plugin --deepinfer-backend acme` runs the conformance kit as tests.

Not loaded by itself (there is no `pytest11` entry): a pytest run that has nothing to do with DeepInfer stays as it is.
A backend puts `addopts = ["-p", "deepinfer.testing.plugin"]` and `deepinfer_backend = "acme"` into its pytest settings,
and one line into a test file: `from deepinfer.testing import conformance_tests`. Without that line, the option
`--deepinfer-backend` adds the items to whatever else is collected.

Levels 1 and 2 become one item for each op, the others one for each case. Selecting works as always: `-k gemm.linear`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deepinfer.testing.fixtures import (  # noqa: F401  pytest finds fixtures as attributes of a plugin
    deepinfer_checkpoint,
    deepinfer_make_subject,
    deepinfer_reference,
    deepinfer_subject,
)

if TYPE_CHECKING:
    from deepinfer.testing.conformance.runner import Options
    from deepinfer.testing.results import CaseResult

MARKER = "__deepinfer_conformance__"
"""Attribute of the object that stands for the tests in a test file."""

Body = Callable[[], "Iterable[CaseResult]"]


class ConformanceTests:
    """What `from deepinfer.testing import conformance_tests` gives: a name for the plugin to find."""

    __deepinfer_conformance__ = True


conformance_tests = ConformanceTests()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Command-line options, and settings of the same name for the backend's own pytest configuration."""
    group = parser.getgroup("deepinfer", "DeepInfer conformance")
    add = group.addoption
    add("--deepinfer-backend", metavar="NAME", help="backend to test (default: DEEPINFER_ACCELERATOR)")
    add("--deepinfer-level", metavar="LEVELS", help="a level or a range, 0-5 (default: 0-4)")
    add("--deepinfer-op", metavar="PATTERN", help="only these ops")
    add("--deepinfer-quick", action="store_true", help="leave slow samples out")
    add("--deepinfer-seed", type=int, metavar="N", help="seed of all random operands (default: 0)")
    add("--deepinfer-config", metavar="FILE", help="conformance.toml (default: the one beside the pytest settings)")
    parser.addini("deepinfer_backend", "backend to test")
    parser.addini("deepinfer_level", "levels to test")
    parser.addini("deepinfer_config", "conformance.toml, relative to the pytest settings")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker of the items."""
    config.addinivalue_line("markers", "deepinfer_conformance: a case of DeepInfer's conformance kit")


@dataclass(frozen=True)
class Chosen:
    """What to test, and how."""

    backend: str
    options: Options


def settings_of(config: pytest.Config) -> Chosen:
    """Options of the command line, then those of the settings file. UsageError if no backend is named."""
    from deepinfer.errors import ConfigError
    from deepinfer.testing.conformance.expected import read_expectations
    from deepinfer.testing.conformance.runner import Options, op_names, parse_levels

    option = config.getoption
    backend = option("deepinfer_backend") or config.getini("deepinfer_backend")
    backend = backend or os.environ.get("DEEPINFER_ACCELERATOR")
    if not backend:
        raise pytest.UsageError("which backend? Give --deepinfer-backend NAME, or deepinfer_backend in the settings")
    levels = option("deepinfer_level") or config.getini("deepinfer_level")
    try:
        expected = read_expectations(_expectations_file(config), op_names())
        chosen = parse_levels(levels) if levels else None
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from None
    options = Options(
        levels=chosen,
        op=option("deepinfer_op"),
        quick=option("deepinfer_quick"),
        seed=option("deepinfer_seed") or 0,
        expected=expected,
    )
    return Chosen(backend, options)


def _expectations_file(config: pytest.Config) -> Path | None:
    given = config.getoption("deepinfer_config")
    if given:
        return Path(given)
    setting = config.getini("deepinfer_config")
    if setting:
        return config.rootpath / setting
    beside = config.rootpath / "conformance.toml"
    return beside if beside.exists() else None


# --- collection -------------------------------------------------------------------------------------------------------


def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> Any:
    """A test file that imports `conformance_tests` holds all of the kit's items."""
    if getattr(obj, MARKER, False) and not isinstance(obj, type):
        return ConformanceCollector.from_parent(collector, name=name)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the items where a backend is named on the command line and no test file stands for them."""
    if config.getoption("deepinfer_backend") and not any(isinstance(item, ConformanceItem) for item in items):
        collector = ConformanceCollector.from_parent(session, name="conformance", nodeid="conformance")
        items.extend(collector.collect())


class ConformanceCollector(pytest.Collector):
    """Makes the items. Opens the backend, so that one that cannot be opened is an error of collection."""

    def collect(self) -> Iterator[ConformanceItem]:
        for name, body in item_bodies(settings_of(self.config)):
            item = ConformanceItem.from_parent(self, name=name)
            item.body = body
            item.add_marker("deepinfer_conformance")
            yield item


def item_bodies(chosen: Chosen) -> Iterator[tuple[str, Body]]:
    """(name, body) of every item: its body runs one case, or all cases of an op at one level."""
    from deepinfer.testing.conformance.runner import level_parts, select_infos
    from deepinfer.testing.subject import make_subject

    options = chosen.options
    subject = make_subject(chosen.backend, options.config, overrides=options.overrides, seed=options.seed)
    infos = select_infos(options.op, options.expected)
    for level in options.chosen_levels:
        for name, body in level_parts(level, subject, infos, options):
            yield f"level {level}: {name}", body


class ConformanceItem(pytest.Item):
    """One item; passes if none of its cases is bad."""

    body: Body

    def runtest(self) -> None:
        results = list(self.body())
        bad = [result for result in results if result.bad]
        if bad:
            raise ConformanceFailure(bad, len(results))
        self._report_the_rest(results)

    def _report_the_rest(self, results: Sequence[CaseResult]) -> None:
        from deepinfer.testing.results import SKIP, XFAIL

        expected = [result for result in results if result.status == XFAIL]
        if expected:
            pytest.xfail(f"{len(expected)} of {len(results)} cases: {expected[0].case}: {expected[0].detail}")
        if results and all(result.status == SKIP for result in results):
            pytest.skip("; ".join(dict.fromkeys(result.detail for result in results)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """A failed case as the command prints it; anything else as pytest does."""
        if isinstance(excinfo.value, ConformanceFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class ConformanceFailure(Exception):  # noqa: N818  a finding
    """Cases of one item that failed."""

    def __init__(self, bad: Sequence[CaseResult], total: int) -> None:
        from deepinfer.testing.conformance.report import failure_text

        super().__init__("\n".join([f"{len(bad)} of {total} cases failed", *map(failure_text, bad)]))
