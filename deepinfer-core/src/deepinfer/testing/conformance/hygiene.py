"""Level 0: what a backend does besides computing. Import, metadata, versions, declarations, purity, missing devices.

What can be measured only once, or could do harm, runs in a process of its own (`child.py`). A backend that was given as
an object (`subject.load_plugin_object`) has no installation; the cases about it are skipped and say so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from deepinfer.hooks import PLUGIN_API, OpGroup
from deepinfer.hooks.api import provides_of
from deepinfer.hooks.build import contributions
from deepinfer.hooks.load import hook_problems
from deepinfer.hooks.record import api_accepted
from deepinfer.hooks.requirements import CORE
from deepinfer.hooks.verify import overrides
from deepinfer.testing.opinfo.record import OpInfo
from deepinfer.testing.results import Case, CaseResult, Failure, Skip
from deepinfer.testing.subject import IN_PROCESS, Subject

LEVEL = 0

IMPORT_SECONDS = 0.05
"""Time an entry module may take to import, and a probe to answer."""

ATTEMPTS = 3
"""Processes an import is timed in; the quickest counts, since a busy machine only ever adds."""

CHILD_SECONDS = 300

Infos = Mapping[str, OpInfo]


def cases(subject: Subject, infos: Infos, quick: bool = False) -> Iterator[Case]:
    """The cases of level 0; `infos` and `quick` change nothing here."""
    child = _Children(subject)
    bodies = {
        "entry module imports quickly, without torch or a device library": child.entry_imports,
        "probe answers quickly, from files": child.probe_answers,
        "metadata": lambda: _metadata(subject),
        "plugin API version": lambda: _api(subject),
        "declared = registered": lambda: _declared(subject),
        "changes nothing in torch, deepinfer and builtins": child.is_pure,
        "sets only the environment variables it declares": child.environment,
        "a device that is not there is refused": child.missing_device,
    }
    for name, body in bodies.items():
        yield Case(LEVEL, None, name, body)


def run(subject: Subject, infos: Infos, quick: bool = False) -> Iterator[CaseResult]:
    """Run them."""
    return (case.run() for case in cases(subject, infos, quick))


# --- in other processes ----------------------------------------------------------------------------------------------


class _Children:
    """Answers of the child processes, each asked once."""

    def __init__(self, subject: Subject) -> None:
        self._name = subject.name
        self._installed = subject.loaded.entry.distribution != IN_PROCESS
        self._selects = "runtime.select" in subject.native
        self._on_host = subject.context.device.type == "cpu"
        self._ask = lru_cache(ask)

    def _answer(self, task: str, attempt: int = 0) -> dict[str, Any]:
        if not self._installed:
            raise Skip("the backend was given as an object; there is no installation to look at")
        return self._ask(task, self._name, attempt)

    def entry_imports(self) -> str:
        answers = [self._answer("entry", attempt)["import"] for attempt in range(ATTEMPTS)]
        return _quiet(answers, "importing the entry module")

    def probe_answers(self) -> str:
        probes = [self._answer("entry", attempt)["probe"] for attempt in range(ATTEMPTS)]
        if probes[0] is None:
            raise Skip("the backend has no probe: it is used only when asked for")
        for probe in probes:
            if probe["answer"] not in ("True", "False"):
                raise Failure(f"the probe returned {probe['answer']}, expected True or False")
        return _quiet(probes, "asking the probe")

    def is_pure(self) -> str:
        answer = self._opened()
        wrong = [line for line in answer["opened"] if not _is_environment(line)]
        wrong += [line for line in answer["registered"] if not (_is_environment(line) or line.endswith("was added"))]
        wrong += [line for line in answer["bound"] if not _is_environment(line)]
        if wrong:
            raise Failure("opening the backend changed what it does not own:\n" + "\n".join(wrong))
        added = sum(line.endswith("was added") for line in answer["registered"])
        return f"its device library added {added} attributes to torch when it registered the device" if added else ""

    def environment(self) -> str:
        answer = self._opened()
        lines = [*answer["opened"], *answer["registered"], *answer["bound"]]
        changed = {line.split()[2] for line in lines if _is_environment(line)}
        undeclared = sorted(changed - set(answer["declared"]))
        if undeclared:
            names = ", ".join(undeclared)
            raise Failure(f"changed {names}; declare them with Backend(environment=...), then core sets them")
        return f"declared: {', '.join(sorted(answer['declared']))}" if answer["declared"] else ""

    def _opened(self) -> dict[str, Any]:
        answer = self._answer("purity")
        if "absent" in answer:
            raise Failure(f"cannot be opened here: {answer['absent']['type']}: {answer['absent']['text']}")
        return answer

    def missing_device(self) -> str:
        if self._on_host and not self._selects:
            raise Skip("its tensors live on the host, which is always there")
        answer = self._answer("missing")
        error = answer["error"]
        if error is None:
            if self._on_host:
                raise Skip("every number means the host, where its tensors live")
            raise Failure(f"runtime.select(999) returned {answer['device']}, expected a BackendError")
        if error["type"] != "BackendError":
            raise Failure(f"runtime.select(999) raised {error['type']}: {error['text']}; expected a BackendError")
        if "999" not in error["text"]:
            raise Failure(f"the message does not name the device asked for: {error['text']}")
        return error["text"]


def ask(task: str, name: str, attempt: int = 0) -> dict[str, Any]:
    """Answer of a child process; `attempt` tells repeated questions apart."""
    command = [sys.executable, "-m", "deepinfer.testing.conformance.child", task, name]
    path = os.pathsep.join(part for part in sys.path if part)  # the child finds what this process finds
    environment = _initial_environment() | {"PYTHONPATH": path}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=CHILD_SECONDS)
    if finished.returncode != 0:
        last = "\n".join(finished.stderr.strip().splitlines()[-3:])
        raise Failure(f"a process that does it ended with code {finished.returncode}:\n{last}")
    return json.loads(finished.stdout.splitlines()[-1])


def _initial_environment() -> dict[str, str]:
    """Variables this process was started with: the backend is open here already, and may have changed them since."""
    try:
        pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # no such file system
        return dict(os.environ)
    split = [os.fsdecode(pair).partition("=") for pair in pairs if pair]
    return {name: value for name, _, value in split}


def _quiet(answers: list[dict[str, Any]], what: str) -> str:
    """Raise `Failure` unless something that must be quick and without consequences was; returns the time it took."""
    first, seconds = answers[0], min(answer["seconds"] for answer in answers)
    problems = []
    if seconds > IMPORT_SECONDS:
        problems.append(f"took {seconds * 1e3:.0f} ms, allowed {IMPORT_SECONDS * 1e3:.0f} ms")
    if first["torch"]:
        problems.append("imported torch")
    if first["compiled"]:
        problems.append(f"loaded compiled modules: {', '.join(first['compiled'])}")
    if first["environment"]:
        problems.append(f"changed environment variables: {', '.join(first['environment'])}")
    if first["threads"]:
        problems.append(f"left {first['threads']} threads running")
    if problems:
        raise Failure(f"{what}: " + "; ".join(problems))
    return f"{seconds * 1e3:.1f} ms"


def _is_environment(line: str) -> bool:
    return line.startswith("environment variable ")


# --- in this process -------------------------------------------------------------------------------------------------


def _metadata(subject: Subject) -> str:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version

    entry = subject.loaded.entry
    if entry.distribution == IN_PROCESS:
        raise Skip("the backend was given as an object; there is no metadata")
    try:
        Version(entry.version)
    except InvalidVersion:
        raise Failure(f"version {entry.version!r} of {entry.distribution} is no version") from None
    if canonicalize_name(entry.distribution) == CORE:
        return "part of core"
    bounds = [r for r in map(Requirement, entry.requirements) if canonicalize_name(r.name) == CORE and r.marker is None]
    if not bounds:
        raise Failure(f"{entry.distribution} does not require {CORE}; its versions that fit have to be said")
    specifier = bounds[0].specifier
    if not any(s.operator in ("<", "<=", "==", "~=") for s in specifier):
        raise Failure(f"{bounds[0]} has no upper bound; while the plugin API is 0.x, write {CORE}>=X.Y,<X.(Y+1)")
    core = metadata.version(CORE)
    if not specifier.contains(core, prereleases=True):
        raise Failure(f"{entry.distribution} requires {bounds[0]}, installed is {core}")
    _no_import_hooks(entry.distribution)
    return f"{entry.distribution} {entry.version} requires {bounds[0]}"


def _no_import_hooks(distribution: str) -> None:
    """Files that run code at every start of Python are not a backend's to install."""
    files = metadata.files(distribution) or []
    hooks = [str(file) for file in files if str(file).endswith(".pth") and not str(file).startswith("_editable")]
    if hooks and not _is_editable(distribution):
        raise Failure(f"{distribution} installs {', '.join(hooks)}, which runs at every start of Python")


def _is_editable(distribution: str) -> bool:
    """An editable installation consists of such a file."""
    text = metadata.distribution(distribution).read_text("direct_url.json") or "{}"
    return json.loads(text).get("dir_info", {}).get("editable", False)


def _api(subject: Subject) -> str:
    record = subject.loaded.record
    if not api_accepted(record.api):
        raise Failure(f"written for plugin API {record.api}, this core has {PLUGIN_API}")
    if record.name != subject.loaded.entry.name:
        raise Failure(f"the record is named {record.name!r}, the entry point {subject.loaded.entry.name!r}")
    return f"{record.api[0]}.{record.api[1]}, core has {PLUGIN_API[0]}.{PLUGIN_API[1]}"


def _declared(subject: Subject) -> str:
    """Everything that is declared as an op or a hook is one, and is bound or refused with reasons."""
    loaded, problems, count = subject.loaded, [], 0
    context = replace(subject.context, runtime=subject.ops.runtime, communicator=subject.ops.communicator)
    for provider in loaded.providers:
        plugin = loaded.manager.get_plugin(provider.name)
        problems += hook_problems(loaded.manager, plugin)
    for contribution in contributions(loaded):
        for group, factory in contribution.factories.items():
            made = factory(context)
            if made is not None:
                contract = _contract(group)
                count += sum(overrides(contract, made, method) for method in contract.op_specs)
                problems += _orphans(contract, made)
                problems += _unbound(subject, contribution.provider.name, contract, made)
    if problems:
        raise Failure("\n".join(problems))
    return f"{count} ops declared, {len(subject.native)} bound"


def _contract(group: str) -> type[OpGroup]:
    from deepinfer.hooks.ops import contracts

    return next(contract for contract in contracts() if contract.group == group)


def _orphans(contract: type[OpGroup], made: OpGroup) -> Iterator[str]:
    """Methods that carry @provides without being an op: a misspelled or leftover name, never called."""
    for name in dir(type(made)):
        if name not in contract.op_specs and provides_of(getattr(type(made), name, None)) is not None:
            yield f"{type(made).__name__}.{name} carries @provides, but {contract.group} has no such op"


def _unbound(subject: Subject, provider: str, contract: type[OpGroup], made: OpGroup) -> Iterator[str]:
    """Ops that the provider has, that it does not serve here, and of which nothing says why."""
    for method, spec in contract.op_specs.items():
        binding = subject.ops.binding(spec.name)
        if not overrides(contract, made, method) or binding.provider.name == provider:
            continue
        preferred = [p.name for p in subject.loaded.providers]
        outranked = binding.provider.name in preferred[: preferred.index(provider)]
        if not outranked and not any(r.provider.name == provider and r.reasons for r in binding.refused):
            yield f"{spec.name}: {provider} has an implementation that is neither bound nor refused with a reason"
