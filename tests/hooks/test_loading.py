"""Plugins and op packs from entry point to op table: what pluggy would miss, what is registered, what must agree."""

from __future__ import annotations

import inspect
import logging

import pytest

from deepinfer.environ import Settings
from deepinfer.errors import BackendError
from deepinfer.hooks import Manifest, build_ops, open_backend, specs
from deepinfer.hooks.load import new_manager
from deepinfer.hooks.ops import CONTRACTS, contracts

HEAD = "from deepinfer.hooks import hookimpl, provides\nfrom deepinfer.hooks.ops import GemmOps\n"

NATIVE = (
    HEAD
    + """
class Gemm(GemmOps):
    @provides(batch_invariant=True)
    def swiglu(self, gate_up, limit, weights=None): return "native swiglu"

    def refuse(self, op, traits): return REASONS

REASONS = []

class Plugin:
    @hookimpl
    def deepinfer_create_gemm(self, context): return Gemm(context)
"""
)


def native() -> str:
    """A plugin whose swiglu has the parameters of the real contract, whatever they are."""
    parameters = inspect.signature(dict(zip([g for g, _ in CONTRACTS], contracts(), strict=True))["gemm"].swiglu)
    plain = parameters.replace(
        parameters=[p.replace(annotation=p.empty) for p in parameters.parameters.values()],
        return_annotation=parameters.empty,
    )
    return NATIVE.replace("(self, gate_up, limit, weights=None)", str(plain))


def refused(site, body: str) -> str:
    site.backend("acme", plugin=HEAD + body)
    with pytest.raises(BackendError) as caught:
        open_backend("acme")
    return str(caught.value)


def test_misspelled_hook(site):
    body = """
class Plugin:
    @hookimpl
    def deepinfer_create_atention(self, context): return None
"""
    assert refused(site, body) == (
        "backend acme (deepinfer-acme 0.2.0): Plugin.deepinfer_create_atention implements no hook of this core. "
        "Did you mean deepinfer_create_attention?"
    )


def test_hook_argument_that_does_not_exist(site):
    body = """
class Plugin:
    @hookimpl
    def deepinfer_create_gemm(self, contxt): return None
"""
    assert refused(site, body) == (
        "backend acme (deepinfer-acme 0.2.0): Plugin 'acme' for hook 'deepinfer_create_gemm' hookimpl definition: "
        "deepinfer_create_gemm(contxt) Argument(s) {'contxt'} are declared in the hookimpl but can not be found in the "
        "hookspec"
    )


def test_hooks_pluggy_would_not_see_or_not_call_as_written(site):
    body = """
import functools
def make(context, extra): return None

class Plugin:
    deepinfer_create_gemm = functools.partial(make, extra=1)
    def deepinfer_create_cache(self, context): return None
    @hookimpl
    def deepinfer_create_vision(self, context, *, size): return None
    @hookimpl
    def deepinfer_create_engram(self, context, size=3): return None
    @hookimpl(wrapper=True)
    def deepinfer_create_residual(self, context): return (yield)
"""
    assert refused(site, body) == (
        "backend acme (deepinfer-acme 0.2.0): deepinfer_acme.plugin:Plugin has hooks that would not work:\n"
        "  deepinfer_create_cache has no @hookimpl, so it is not seen; write a plain method marked @hookimpl\n"
        "  deepinfer_create_engram: parameter size is never passed; no keyword-only ones, no defaults\n"
        "  deepinfer_create_gemm is a partial, so it is not seen; write a plain method marked @hookimpl\n"
        "  deepinfer_create_residual is a wrapper; a factory belongs to one plugin and cannot be wrapped\n"
        "  deepinfer_create_vision: parameter size is never passed; no keyword-only ones, no defaults"
    )


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("Plugin = 3", "plugin deepinfer_acme.plugin:Plugin is of type int, expected a class"),
        (
            "class Plugin:\n    def __init__(self): raise OSError('no licence')",
            "deepinfer_acme.plugin:Plugin() failed: OSError: no licence",
        ),
    ],
)
def test_plugin_objects_that_cannot_be_made(site, body, text):
    assert refused(site, body) == f"backend acme (deepinfer-acme 0.2.0): {text}"


def test_broken_plugin_module_chains_the_original(site):
    site.backend("acme", plugin="import acme_library_that_nobody_has")
    with pytest.raises(BackendError, match="its plugin cannot be imported: ModuleNotFoundError") as caught:
        open_backend("acme")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_every_plugin_hears_of_every_plugin(site):
    body = """
from deepinfer.hooks import hookimpl
class Plugin:
    def __init__(self): self.heard = []
    @hookimpl
    def deepinfer_plugin_registered(self, plugin_name, version): self.heard.append((plugin_name, version))
"""
    site.backend("acme", plugin=body)
    pack(site, "fast", plugin=body)
    loaded = open_backend("acme", op_packs=["fast"])
    for name in ("acme", "fast"):
        assert sorted(loaded.manager.get_plugin(name).heard) == [("acme", "0.2.0"), ("fast", "1.0")]


def pack(site, name: str, plugin: str, record: str = "") -> None:
    package = f"{name}_pack"
    site.install(
        f"deepinfer-{name}",
        "1.0",
        {"deepinfer.op_packs": {name: f"{package}:pack"}},
        {
            f"{package}/__init__.py": "from deepinfer.hooks import OpPack, Requires\n"
            f"pack = OpPack(name='{name}', api=(0, 1), plugin='{package}.plugin:Plugin', {record})\n",
            f"{package}/plugin.py": plugin,
        },
    )


def context_of(loaded, small, settings=None):
    from deepinfer.models.deepseek_v41.config import ModelConfig

    traits = ModelConfig.builtin("tiny").traits(block_size=128, backtracking=6, max_positions=1024)
    return small.context(device=loaded.device(), traits=traits, settings=settings)


def test_op_packs_load_only_when_named_and_in_order(site, small):
    site.backend("acme", plugin=native())
    pack(site, "fast", plugin=native())
    pack(site, "slow", plugin="raise RuntimeError('touched')")
    assert [p.name for p in open_backend("acme").providers] == ["acme"]
    settings = Settings.load({"DEEPINFER_ACCELERATOR": "acme", "DEEPINFER_OP_PACKS": "fast"})
    loaded = open_backend(settings=settings)
    assert [p.name for p in loaded.providers] == ["fast", "acme"]
    ops = build_ops(loaded, context_of(loaded, small, settings))
    assert str(ops.binding("gemm.swiglu").provider) == "fast 1.0 (deepinfer-fast)"


def test_op_packs_that_cannot_be_loaded(site):
    site.backend("acme")
    pack(site, "fast", plugin="class Plugin: pass", record="requires=Requires(wheels=('acme-none',))")
    for names, text in {
        ("fsat",): "DEEPINFER_OP_PACKS=fsat: no such op pack. Installed: fast. Did you mean fast?\n"
        "  Every op pack is a package of its own: pip install deepinfer-<name>",
        ("fast",): "op pack fast (deepinfer-fast 1.0): 1 requirement is not met:\n"
        "  acme-none: not installed\n  Install with: pip install acme-none",
    }.items():
        with pytest.raises(BackendError) as caught:
            open_backend("acme", op_packs=names)
        assert str(caught.value) == text


def test_an_op_pack_is_named_once(site):
    site.backend("acme")
    pack(site, "fast", plugin="class Plugin: pass")
    with pytest.raises(BackendError, match="the name fast is in use twice"):
        open_backend("acme", op_packs=["fast", "fast"])


def test_settings_reach_the_binding(site, small):
    site.backend("acme", plugin=native())
    loaded = open_backend("acme")
    assert build_ops(loaded, context_of(loaded, small)).binding("gemm.swiglu").kind == "native"

    settings = Settings.load({"DEEPINFER_OPS": "gemm.*=reference", "DEEPINFER_TRACE_OPS": "count"})
    ops = build_ops(loaded, context_of(loaded, small, settings))
    assert ops.binding("gemm.swiglu").kind == "reference"
    assert ops.tracer.mode == "count"
    refined = build_ops(loaded, context_of(loaded, small, settings), overrides=["gemm.swiglu=acme"])
    assert refined.binding("gemm.swiglu").kind == "native"
    assert build_ops(loaded, context_of(loaded, small)).tracer is None

    with pytest.raises(BackendError, match="DEEPINFER_BATCH_INVARIANT=1"):
        build_ops(loaded, context_of(loaded, small, Settings.load({"DEEPINFER_BATCH_INVARIANT": "1"})))


def test_capability_is_asked_before_choosing_and_said_once(site, small, caplog):
    site.backend("acme", plugin=native().replace("REASONS = []", "REASONS = ['arch=7, allowed 9 or 10']"))
    loaded = open_backend("acme")
    with caplog.at_level(logging.WARNING):
        ops = build_ops(loaded, context_of(loaded, small))
    assert [r.getMessage() for r in caplog.records] == [
        "ops that their preferred provider cannot serve here:\n"
        "gemm.swiglu v1 -> core reference\n"
        "  acme 0.2.0 (deepinfer-acme): arch=7, allowed 9 or 10"
    ]
    assert ops.binding("gemm.swiglu").kind == "reference"
    with pytest.raises(BackendError, match="DEEPINFER_STRICT_OPS=1: 1 op would fall back"):
        build_ops(loaded, context_of(loaded, small, Settings.load({"DEEPINFER_STRICT_OPS": "1"})))


def test_the_manifest_agrees_between_starts_and_names_what_differs(site, small):
    site.backend("acme", plugin=native())
    first, second = open_backend("acme"), open_backend("acme")
    tables = [build_ops(loaded, context_of(loaded, small)) for loaded in (first, second)]
    manifests = [Manifest.of(loaded, ops) for loaded, ops in zip((first, second), tables, strict=True)]
    assert Manifest.from_json(manifests[0].to_json()) == manifests[1]
    manifests[1].check(manifests[0])

    other = build_ops(second, context_of(second, small), overrides=["gemm.*=reference"])
    digest, wanted = other.digest[:12], tables[0].digest[:12]
    with pytest.raises(BackendError) as caught:
        Manifest.of(second, other).check(manifests[0], rank=3)
    assert str(caught.value) == (
        "rank 3 resolved its ops differently from the parent:\n"
        f"  op table: digest {digest}, expected {wanted}\n"
        "  Install the same versions for all ranks and give them the same DEEPINFER_* variables."
    )
    cpu = open_backend("cpu")
    with pytest.raises(BackendError) as caught:
        Manifest.of(cpu, build_ops(cpu, context_of(cpu, small))).check(manifests[0])
    text = str(caught.value)
    assert "  backend: cpu, expected acme\n  plugins: cpu 0.1.0 (deepinfer-core), expected acme 0.2.0" in text


def test_hook_specs():
    """One factory for every group, levels and statuses, docstrings, nothing pluggy would drop."""
    names = specs.hook_names()
    assert set(names) == {
        "deepinfer_plugin_registered",
        "deepinfer_findings",
        "deepinfer_register_device",
        *(f"deepinfer_create_{group}" for group, _ in CONTRACTS),
    }
    manager = new_manager()
    for name in names:
        function = getattr(specs, name)
        assert hasattr(manager.hook, name)
        assert specs.hook_level(name).level in ("required", "recommended", "optional")
        assert "When:" in function.__doc__
        assert "Example::" in function.__doc__
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}, name
    assert manager.hook.deepinfer_plugin_registered.is_historic()
