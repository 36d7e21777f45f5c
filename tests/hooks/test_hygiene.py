"""What loading may cost and change: imports, purity, the public surface."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types as python_types
from typing import ClassVar

import pytest
import torch

import deepinfer.hooks
from deepinfer.errors import BackendError
from deepinfer.hooks import PLUGIN_API, Backend, OpPack, Requires, open_backend, types
from deepinfer.hooks.purity import changes, snapshot


def test_an_entry_module_needs_neither_torch_nor_pluggy():
    code = (
        "import sys\n"
        "from deepinfer.hooks import Backend, Requires, OpPack, read_visibility\n"
        "import deepinfer.backends.cpu, deepinfer_nvidia, deepinfer_nvidia.probe, deepinfer_ascend.probe\n"
        "from deepinfer.hooks.discover import survey\n"
        "print(sorted({'torch', 'pluggy', 'numpy', 'packaging'} & set(sys.modules)))\n"
    )
    path = [p for p in sys.path if p]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_listing_and_choosing_import_no_torch(site):
    site.backend("acme")
    code = (
        f"import sys; sys.path.insert(0, {str(site.path)!r})\n"
        "from deepinfer.hooks import open_backend, survey\n"
        "survey()\n"
        "open_backend('acme')\n"
        "print('torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "False\n", result.stderr


def test_everything_that_crosses_a_hook_is_public():
    public = {
        name
        for name, value in vars(types).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == types.__name__
    }
    assert public | {"EXACT", "SMOOTH"} <= set(deepinfer.hooks.__all__)
    for name in deepinfer.hooks.__all__:
        assert not isinstance(getattr(deepinfer.hooks, name), python_types.ModuleType), name
    assert deepinfer.hooks.EXACT is types.EXACT
    with pytest.raises(AttributeError, match="no attribute 'Backed'"):
        _ = deepinfer.hooks.Backed


class TestRecords:
    good: ClassVar = {"name": "acme", "api": PLUGIN_API, "device_type": "acme", "plugin": "a.b:C"}

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"api": "0.1"}, "backend 'acme': api='0.1', expected the (major, minor) it was written for, as (0, 1)"),
            ({"name": "Acme"}, "Backend name 'Acme': expected lower-case letters, digits and underscores"),
            ({"name": "reference"}, "Backend name 'reference' is reserved for core's own ops; choose another"),
            ({"device_type": ""}, "Backend acme: device_type is missing"),
            ({"plugin": "a.b"}, "Backend acme: plugin='a.b', expected \"module:name\""),
            ({"probe": "present"}, "Backend acme: probe='present', expected \"module:name\""),
            ({"requires": Requires(sdk=">=9")}, "Backend acme: Requires has no field 'sdk'. Fields of Requires: "
             "torch, python, wheels, check."),
        ],
    )  # fmt: skip
    def test_malformed(self, fields, text):
        with pytest.raises(BackendError) as caught:
            Backend(**self.good | fields)
        assert str(caught.value) == text

    def test_frozen_and_complete(self):
        backend = Backend(**self.good)
        assert (backend.probe, backend.environment, backend.requires) == (None, None, Requires())
        with pytest.raises(AttributeError):
            backend.name = "other"
        with pytest.raises(BackendError, match="OpPack fast: plugin is missing"):
            OpPack("fast", PLUGIN_API)


class TestPurity:
    def test_loading_a_clean_plugin_changes_nothing(self, site):
        site.backend("acme", plugin="import torch.utils.benchmark\nclass Plugin: pass")
        open_backend("cpu")
        before = snapshot()
        open_backend("acme").device()
        torch.zeros(2) + 1
        assert changes(before) == []

    @pytest.fixture
    def victim(self, site, monkeypatch):
        """A package to be tampered with, so that no test has to damage torch."""
        site.install("victim", modules={
            "victim/__init__.py": "from victim.parts import Part\ndef work(): pass\ndef other(): pass\n",
            "victim/parts.py": "class Part:\n    def run(self): pass\n",
        })  # fmt: skip
        monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
        monkeypatch.setenv("ACME", "0")
        return importlib.import_module("victim")

    @pytest.mark.parametrize(
        ("patch", "found"),
        [
            ("victim.work = victim.other", "victim.work was replaced"),
            ("victim.work = len", "victim.work was replaced"),
            ("del victim.work", "victim.work was removed"),
            ("victim.extra = 1", "victim.extra was added"),
            ("victim.parts.Part.run = len", "victim.parts.Part.run was replaced"),
            ("victim.Part.walk = len", "victim.parts.Part.walk was added"),
            ("sys.meta_path.insert(0, type(sys.meta_path[0]))", "sys.meta_path was changed"),
            ("os.environ['ACME'] = '1'", "environment variable ACME was changed"),
            ("import victim.late", None),
        ],
    )
    def test_what_a_plugin_must_not_do_is_found(self, site, victim, patch, found):
        (site.path / "victim/late.py").touch()
        site.backend("acme", plugin=f"import os, sys, victim\n{patch}\nclass Plugin: pass")
        before = snapshot(roots=("victim",))
        open_backend("acme")
        assert changes(before) == ([] if found is None else [found])

    @pytest.mark.parametrize("name", ["torch.zeros_like", "builtins.__import__", "deepinfer.errors.OpError"])
    def test_torch_builtins_and_deepinfer_are_watched(self, name):
        module, _, attribute = name.rpartition(".")
        owner, before = sys.modules[module], snapshot()
        original = getattr(owner, attribute)
        try:
            setattr(owner, attribute, lambda *args, **kwargs: original(*args, **kwargs))
            found = changes(before)
        finally:
            setattr(owner, attribute, original)
        assert found == [f"{name} was replaced"]
        assert changes(before) == []
