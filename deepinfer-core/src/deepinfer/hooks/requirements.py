"""Checks what a plugin record demands before anything else of the plugin is touched: API version, needs, environment.

Called by `discover.py` and `load.py`. Reads package metadata, never imports torch: a missing or old torch must be a
message, not an import error.
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from deepinfer.errors import BackendError
from deepinfer.hooks.record import PLUGIN_API, Requires, api_accepted

if TYPE_CHECKING:
    from deepinfer.hooks.discover import Installed

logger = logging.getLogger("deepinfer.hooks")

CORE = "deepinfer-core"


def check_api(entry: Installed, api: tuple[int, int]) -> None:
    """Raise unless a plugin written for `api` runs on this core; the message says which versions fit."""
    if api_accepted(api):
        return
    text, core = ".".join(map(str, api)), ".".join(map(str, PLUGIN_API))
    raise BackendError(
        f"{entry} was written for plugin API {text}; this core has {core}.\n  {_versions_that_fit(entry, api)}"
    )


def _versions_that_fit(entry: Installed, api: tuple[int, int]) -> str:
    """What to install, from the plugin's own bounds on core where it states them."""
    bounds = _bounds_on_core(entry.requirements)
    if tuple(api) > PLUGIN_API:
        lower = [bound for bound in bounds if bound.startswith((">", "==", "~="))]
        core = f"{CORE}{lower[0]}" if lower else f"a newer {CORE}"
        return f"Install {core} or {entry.distribution}<{_short(entry.version)}."
    core = f"{CORE}{','.join(bounds)}" if bounds else f"an older {CORE}"
    return f"Install {entry.distribution}>{entry.version} or {core}."


def _bounds_on_core(requirements: tuple[str, ...]) -> list[str]:
    """Version bounds a distribution puts on core, lower ones first."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) == CORE and requirement.marker is None:
            return sorted((str(specifier) for specifier in requirement.specifier), key=lambda s: s[0] != ">")
    return []


def _short(version: str) -> str:
    """A version without trailing zeros: 0.2.0 -> 0.2."""
    while version.endswith(".0"):
        version = version[:-2]
    return version


def check_requirements(entry: Installed, requires: Requires, call: Callable[[Installed, str, str], object]) -> None:
    """Raise one `BackendError` that lists every requirement of the plugin that is not met.

    call(entry, "module:function", purpose) runs the plugin's own check (`discover.call`).
    """
    wanted = [f"torch{requires.torch}"] if requires.torch else []
    wanted += requires.wheels
    failures = [(text, problem) for text in wanted if (problem := _wheel_problem(entry, text))]
    lines = [f"{text}: {problem}" for text, problem in failures]
    if requires.python and (problem := _python_problem(entry, requires.python)):
        lines.insert(0, problem)
    if requires.check:
        lines += _own_check(entry, call(entry, requires.check, "requirement check"))
    if not lines:
        return
    noun = "requirement is" if len(lines) == 1 else "requirements are"
    message = f"{entry}: {len(lines)} {noun} not met:\n" + "\n".join(f"  {line}" for line in lines)
    if failures:
        message += "\n  Install with: pip install " + " ".join(shlex.quote(text) for text, _ in failures)
    raise BackendError(message)


def _wheel_problem(entry: Installed, text: str) -> str | None:
    """Why the distribution that requirement string `text` names does not satisfy it; None if it does."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise BackendError(f"{entry}: requirement {text!r} is not a requirement string: {error}") from error
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "not installed"
    return None if requirement.specifier.contains(version, prereleases=True) else f"found {version}"


def _python_problem(entry: Installed, specifier: str) -> str | None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        allowed = SpecifierSet(specifier)
    except InvalidSpecifier as error:
        raise BackendError(f"{entry}: Requires.python={specifier!r} is not a version specifier: {error}") from error
    found = platform.python_version()
    return None if allowed.contains(found, prereleases=True) else f"python{specifier}: found {found} ({sys.executable})"


def _own_check(entry: Installed, answer: object) -> list[str]:
    if isinstance(answer, (list, tuple)) and all(isinstance(line, str) for line in answer):
        return list(answer)
    raise BackendError(f"{entry}: Requires.check returned {answer!r}, expected a list of failures as text")


def apply_environment(entry: Installed, wanted: object) -> dict[str, str]:
    """Set the variables a backend needs and say so; returns those that were set.

    A variable the user has set to another value keeps the user's value, with a warning. Must run before torch is
    imported; variables that come too late are still set (child processes inherit them) and named in a warning.
    """
    if not isinstance(wanted, Mapping) or not all(isinstance(t, str) for pair in wanted.items() for t in pair):
        raise BackendError(f"{entry}: its environment returned {wanted!r}, expected a dict of strings")
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    for name, value in wanted.items():
        if os.environ.get(name, value) != value:
            logger.warning("%s=%s stays as set; %s asks for %s", name, os.environ[name], entry, value)
    if not missing:
        return {}
    os.environ.update(missing)
    late = ", after torch was imported: it may not see them" if "torch" in sys.modules else ""
    text = " ".join(f"{name}={value}" for name, value in sorted(missing.items()))
    logger.warning("environment for %s: %s%s", entry, text, late)
    return missing
