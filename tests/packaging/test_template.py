"""The backend template, used from its source folder: what it imports, what it refuses, what it must agree with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer.hooks import PLUGIN_API, BackendError, Numerics, build_ops
from deepinfer.hooks.ops import contracts
from deepinfer.reference import quant
from deepinfer.testing import load_plugin_object, make_subject
from deepinfer.testing.conformance.expected import Expectations, read_expectations

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "examples" / "backend-template"
OPS = [spec.name for contract in contracts() for spec in contract.op_specs.values()]
CODECS = {
    "fp8": (quant.encode_q8, quant.decode_q8),
    "fp4": (quant.encode_q4e, quant.decode_q4e),
    "index": (quant.encode_q4u, quant.decode_q4u),
}


@pytest.fixture
def acme(monkeypatch, home):
    """The package's modules, imported from the source folder."""
    monkeypatch.syspath_prepend(str(TEMPLATE / "src"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    monkeypatch.delenv("CXX", raising=False)
    from deepinfer_acme import formats, kernels, plugin, probe

    yield {"formats": formats, "kernels": kernels, "plugin": plugin, "probe": probe}
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepinfer_acme"]:
        del sys.modules[name]


def subject(acme, **arguments):
    return make_subject(load_plugin_object(acme["plugin"].AcmePlugin(), "acme", "acme"), **arguments)


def refusal(ops, name):
    """Reasons why op `name` is not served by the template."""
    binding = ops.binding(name)
    assert binding.kind != "native"
    return [reason for refused in binding.refused for reason in refused.reasons]


def test_the_entry_module_is_the_record_and_imports_no_torch(acme):
    code = "import sys, deepinfer_acme as a; print(a.backend.name, a.backend.api, 'torch' in sys.modules)"
    path = os.pathsep.join([str(TEMPLATE / "src"), str(ROOT / "deepinfer-core" / "src")])
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert result.stdout == f"acme {PLUGIN_API} False\n", result.stderr


def test_it_imports_the_public_surface_only(tmp_path):
    """Its own import contract holds, and would not if it took from anywhere else."""
    shutil.copytree(TEMPLATE, tmp_path / "template", ignore=shutil.ignore_patterns("__pycache__"))
    path = os.pathsep.join(["src", str(ROOT / "deepinfer-core" / "src")])
    program = Path(sys.executable).parent / "lint-imports"

    def lint() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, "--no-cache"], cwd=tmp_path / "template", capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip

    assert lint().returncode == 0, lint().stdout
    with (tmp_path / "template/src/deepinfer_acme/formats.py").open("a") as file:
        file.write("\nfrom deepinfer.reference import quant\n")
    assert "deepinfer_acme is not allowed to import deepinfer.reference" in lint().stdout


def test_probe_reads_device_files(acme, tmp_path, monkeypatch):
    monkeypatch.setenv("ACME_ROOT", str(tmp_path))
    assert acme["probe"].present() is False
    (tmp_path / "dev").mkdir()
    for name in ("acme10", "acme2", "acme-control"):
        (tmp_path / "dev" / name).touch()
    assert acme["probe"].present() is True
    assert acme["probe"].device_nodes() == ["acme2", "acme10"]


def test_native_ops_and_the_device_that_stands_for_it(acme):
    made, compiled = subject(acme), {"gemm.swiglu"}
    if acme["kernels"].problems():  # a machine without a compiler
        assert refusal(made.ops, "gemm.swiglu") == acme["kernels"].problems()
        compiled = set()
    assert made.context.device == torch.device("cpu")
    assert made.loaded.device_type == "acme"
    assert made.ops.runtime.properties().name == "Acme emulator in host memory"
    caches = {binding.spec.name for binding in made.ops.bindings if binding.spec.group == "cache"}
    assert set(made.native) == {"runtime.select", "runtime.properties", "attention.cached"} | compiled | caches
    assert {made.ops.binding(name).layout for name in ("cache.store_window", "attention.cached")} == {"acme_planar_v1"}


def test_the_readme_lists_every_native_op(acme):
    table = (TEMPLATE / "README.md").read_text().partition("## What it serves")[2].partition("\n## ")[0]
    native = [name for name in subject(acme).native if not name.startswith("cache.")]
    assert not [name for name in native if f"`{name}`" not in table]
    assert f"`cache.*` ({sum(name.startswith('cache.') for name in OPS)} ops)" in table


def test_ranks_without_a_device_are_refused(acme):
    runtime = subject(acme).ops.runtime
    assert runtime.select(7) == torch.device("cpu")
    for index in (8, -1):
        with pytest.raises(BackendError, match=f"rank {index} of this host has no Acme device of its own: found 8"):
            runtime.select(index)


def test_head_counts_it_does_not_cover_leave_the_cache_layout_bound(acme):
    made = subject(acme)
    context = replace(made.context, traits=replace(made.traits, num_attention_heads=12))
    ops = build_ops(made.loaded, context)
    assert refusal(ops, "attention.cached") == ["num_attention_heads=12, allowed multiples of 8"]
    assert ops.binding("attention.cached").kind == "decomposed"
    assert ops.binding("cache.load_window").layout == "acme_planar_v1"


def test_smooth_numerics_are_left_to_core(acme):
    ops = subject(acme, numerics=Numerics(quantize=False)).ops
    (reason,) = refusal(ops, "gemm.swiglu")
    assert reason.startswith("activations are float32 (smooth numerics)")
    assert refusal(ops, "cache.allocate") == [
        "numerics.packed_cache=False, allowed True: acme_planar_v1 holds published bytes"
    ]
    assert ops.binding("attention.cached").kind == "decomposed"


def test_without_a_compiler_the_kernel_is_refused_with_advice(acme, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    assert refusal(subject(acme).ops, "gemm.swiglu") == [
        "no C++ compiler 'no-such-compiler' on the path; install one (apt install g++) or set CXX"
    ]


def test_a_torch_without_the_stable_interface_is_refused(acme, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert acme["kernels"].problems() == ["torch 2.9.1+cpu, the kernels need 2.10 or newer"]


def test_a_build_that_fails_stops_the_start_in_the_compilers_words(acme, monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'out of registers' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BackendError, match="the kernels cannot be built: .* ended with 3:\nout of registers"):
        subject(acme)


def test_kernels_are_built_once(acme, monkeypatch):
    if acme["kernels"].problems():
        pytest.skip(f"nothing can be built here: {acme['kernels'].problems()}")
    subject(acme)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("built again"))
    subject(acme)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 3e4])
def test_formats_decode_to_the_same_bits_as_core(acme, name, scale):
    """Random numbers, zeros, and every tie between two codes with both signs."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(2, 64)
    x = torch.cat((torch.randn(200, 512, generator=torch.Generator().manual_seed(1)), ties, -ties)) * scale
    x[0], x[1, :100] = 0, 0
    encode, decode = CODECS[name]
    formats = acme["formats"]
    for vectors in (x, x.bfloat16()):
        found = formats.decode(name, *formats.encode(name, vectors))
        assert torch.equal(found, decode(*encode(vectors)))


def test_the_examples_in_conformance_toml_are_what_the_kit_reads(tmp_path):
    text = (TEMPLATE / "conformance.toml").read_text()
    assert read_expectations(TEMPLATE / "conformance.toml", OPS) == Expectations()
    examples = re.findall(r"^# (\[\[.*|\w+ = .*)$", text, re.M)
    top = [line for line in examples if line.startswith("op_allowlist")]  # a key of no table has to come first
    (tmp_path / "examples.toml").write_text("\n".join(top + [line for line in examples if line not in top]))
    read = read_expectations(tmp_path / "examples.toml", OPS)
    assert read.xfails[0].op == "attention.cached"
    assert read.allows("gemm.linear") and not read.allows("cache.allocate")
    assert list(read.excluded) == [4]


def test_versions_follow_core():
    """A copy of the template starts from the plugin API and the core it was copied with."""
    project = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["project"]
    core = tomllib.loads((ROOT / "deepinfer-core" / "pyproject.toml").read_text())["project"]["version"]
    major, minor, *_ = core.split(".")
    bounds = f">={major}.{minor},<{major}.{int(minor) + 1}"
    assert project["dependencies"] == [f"deepinfer-core{bounds}"]
    assert project["optional-dependencies"]["test"] == [f"deepinfer-core[test]{bounds}"]
