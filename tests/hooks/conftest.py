"""Fake installed distributions, made on the fly (metadata, entry points, modules in a folder on the import path), and
small op contracts."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from deepinfer.hooks import Contribution, Numerics, OpContext, OpGroup, Provider, op
from deepinfer.hooks.bind import bind

BACKENDS = "deepinfer.backends"


class Site:
    """A folder that plays site-packages. Only what it holds counts as installed where entry points are concerned."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(
        self,
        distribution: str,
        version: str = "0.1.0",
        entries: Mapping[str, Mapping[str, str]] | None = None,
        modules: Mapping[str, str] | None = None,
        requires: Sequence[str] = (),
    ) -> Path:
        """Write a distribution; returns the path of its entry_points.txt."""
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}")
        lines = []
        for group, points in (entries or {}).items():
            lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for name, source in (modules or {}).items():
            file = self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return info / "entry_points.txt"

    def backend(
        self,
        name: str = "acme",
        version: str = "0.2.0",
        record: str = "",
        api: str = "(0, 1)",
        plugin: str = "class Plugin: pass",
        probe: str | None = "True",
        requires: Sequence[str] = (),
        imports: str = "",
    ) -> Path:
        """Install backend `name` of distribution deepinfer-<name>. record: further fields of its `Backend`.

        probe: expression its probe returns, None for no probe. plugin: source of the module with class `Plugin`.
        """
        package = f"deepinfer_{name}"
        fields = f"name={name!r}, api={api}, device_type='cpu', plugin='{package}.plugin:Plugin'"
        if probe is not None:
            fields += f", probe='{package}.probe:present'"
        return self.install(
            f"deepinfer-{name}",
            version,
            {BACKENDS: {name: f"{package}:backend"}},
            {
                f"{package}/__init__.py": f"from deepinfer.hooks import Backend, Requires\n{imports}\n"
                f"backend = Backend({fields}, {record})\n",
                f"{package}/probe.py": f"def present():\n    return {probe}\n",
                f"{package}/plugin.py": plugin,
            },
            requires,
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An installation that holds deepinfer-core's own `cpu` entry and nothing else yet."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("DEEPINFER_ACCELERATOR", raising=False)
    discover = importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **kwargs: discover(path=[str(folder)], **kwargs))
    before = set(sys.modules)
    made = Site(folder)
    made.install("deepinfer-core", "0.1.0", {BACKENDS: {"cpu": "deepinfer.backends.cpu:backend"}})
    yield made
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(folder)):
            del sys.modules[name]


# Small contracts, so that tests of binding do not depend on the real ones.


class MathOps(OpGroup):
    """Private data: `weight` of prepare and linear. `twice` is composed of `linear`."""

    group = "math"

    @op(level="required", layout="dense_weight")
    def prepare(self, w):
        return ("canonical", w)

    @op(level="required", layout="dense_weight")
    def linear(self, x, weight, bias=0.0):
        return x * weight[1] + bias

    @op(level="optional", grain="block", layout="dense_weight")
    def twice(self, x, weight):
        return self.ops.math.linear(self.ops.math.linear(x, weight), weight)

    @op(level="recommended", status="stable")
    def square(self, x):
        return x * x


class RuntimeGroup(OpGroup):
    """A whole group: one provider or none."""

    group = "runtime"
    whole = True
    numeric = False

    @op()
    def name(self):
        return "core"

    @op()
    def synchronize(self):
        return None


class Small:
    """The contracts, and short ways to make providers and tables of them."""

    math = MathOps
    runtime = RuntimeGroup

    @staticmethod
    def provider(name: str = "acme", version: str = "0.4.1") -> Provider:
        return Provider(name, f"deepinfer-{name}", version)

    def offer(self, *classes: type[OpGroup], name: str = "acme") -> Contribution:
        """A provider that brings these group classes."""
        return Contribution(self.provider(name), {klass.group: klass for klass in classes})

    @staticmethod
    def context(**fields) -> OpContext:
        return OpContext(**({"device": torch.device("cpu"), "numerics": Numerics(), "traits": None} | fields))

    def bind(self, *contributions: Contribution, overrides=(), order_free=False, **options):
        context = self.context(numerics=Numerics(order_free=order_free))
        return bind(contributions, context, overrides, contracts=(RuntimeGroup, MathOps), **options)


@pytest.fixture
def small() -> Small:
    return Small()
