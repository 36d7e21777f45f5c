"""Which backend is chosen, and what is said when none can be: discovery, probes, versions, requirements, loading."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys

import pytest

from deepinfer.environ import Settings
from deepinfer.errors import BackendError
from deepinfer.hooks import open_backend, survey
from deepinfer.hooks import record as record_module


def message(*args, **kwargs) -> str:
    """Text of the `BackendError` that opening a backend raises."""
    with pytest.raises(BackendError) as caught:
        open_backend(*args, **kwargs)
    return str(caught.value)


def test_the_variable_chooses_and_nothing_else_is_imported(site, monkeypatch):
    site.backend("acme")
    site.backend("zeta", imports="raise RuntimeError('must not be imported')")
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "acme")
    loaded = open_backend()
    assert (loaded.name, loaded.reason) == ("acme", "chosen by DEEPINFER_ACCELERATOR=acme")
    assert [str(p) for p in loaded.providers] == ["acme 0.2.0 (deepinfer-acme)"]
    assert str(loaded.device()) == "cpu"
    assert "deepinfer_zeta" not in sys.modules


def test_an_argument_wins_over_the_variable(site, monkeypatch):
    site.backend("acme")
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "nowhere")
    assert open_backend("acme").reason == "chosen by accelerator=acme"


def test_typo_in_the_variable(site):
    for name in ("nvidia", "ascend"):
        site.backend(name)
    assert message(settings=Settings.load({"DEEPINFER_ACCELERATOR": "nvidai"})) == (
        "DEEPINFER_ACCELERATOR=nvidai: no such backend. Installed: ascend, cpu, nvidia. Did you mean nvidia?\n"
        "  Every backend is a package of its own: pip install deepinfer-<name>"
    )


def test_a_name_that_resembles_nothing(site):
    assert message("warp") == (
        "accelerator=warp: no such backend. Installed: cpu.\n"
        "  Every backend is a package of its own: pip install deepinfer-warp"
    )


def test_probe_finds_the_one_device(site):
    site.backend("acme", probe="True")
    site.backend("zeta", probe="False")
    site.backend("mute", probe=None)
    loaded = open_backend()
    assert (loaded.name, loaded.reason) == ("acme", "its device is present")


def test_no_device_means_cpu_said_in_one_line(site, caplog):
    site.backend("acme", probe="False")
    with caplog.at_level(logging.WARNING):
        assert open_backend().name == "cpu"
    assert [r.getMessage() for r in caplog.records] == [
        "no accelerator: acme found no device; running on cpu (DEEPINFER_ACCELERATOR is not set)"
    ]


def test_core_alone_means_cpu(site, caplog):
    with caplog.at_level(logging.WARNING):
        assert open_backend().name == "cpu"
    assert [r.getMessage() for r in caplog.records] == [
        "no accelerator: no other backend is installed; running on cpu (DEEPINFER_ACCELERATOR is not set)"
    ]


def test_two_devices_need_a_choice(site):
    site.backend("acme")
    site.backend("zeta", version="1.0")
    assert message() == (
        "2 backends find their device on this machine: acme (deepinfer-acme 0.2.0), zeta (deepinfer-zeta 1.0).\n"
        "  Choose one: DEEPINFER_ACCELERATOR=acme or DEEPINFER_ACCELERATOR=zeta"
    )
    assert open_backend("zeta").name == "zeta"


@pytest.mark.parametrize("name", [None, "acme"])
def test_one_name_from_two_distributions(site, name):
    first = site.backend("acme")
    second = site.install("other-acme", "3.1", {"deepinfer.backends": {"acme": "other:backend"}})
    assert message(name) == (
        "the backend name acme is registered twice:\n"
        f"  deepinfer-acme 0.2.0  {first}  -> deepinfer_acme:backend\n"
        f"  other-acme 3.1  {second}  -> other:backend\n"
        "  Uninstall one of them: pip uninstall deepinfer-acme  or  pip uninstall other-acme"
    )
    assert open_backend("cpu").name == "cpu"  # another name is not in doubt


@pytest.mark.parametrize("name", [None, "acme"])
def test_broken_import_is_an_error_and_never_cpu(site, name):
    file = site.backend("acme", imports="import acme_kernels_that_nobody_has")
    with pytest.raises(BackendError) as caught:
        open_backend(name)
    assert str(caught.value) == (
        "backend acme (deepinfer-acme 0.2.0) cannot be imported: ModuleNotFoundError: No module named "
        "'acme_kernels_that_nobody_has'\n"
        f"  Looked for deepinfer_acme:backend, registered in {file}\n"
        "  Repair or uninstall deepinfer-acme, or choose another backend, e.g. DEEPINFER_ACCELERATOR=cpu; "
        "nothing falls back by itself"
    )
    cause = caught.value.__cause__
    assert isinstance(cause, ModuleNotFoundError)
    assert cause.__traceback__ is not None
    assert caught.traceback  # the original frames stay reachable through the chain


def test_raising_probe_is_an_error_and_never_cpu(site):
    site.backend("acme", probe="1 / 0")
    with pytest.raises(BackendError) as caught:
        open_backend()
    assert str(caught.value) == (
        "backend acme (deepinfer-acme 0.2.0): its probe (deepinfer_acme.probe:present) failed: "
        "ZeroDivisionError: division by zero\n"
        "  Repair or uninstall deepinfer-acme, or choose another backend, e.g. DEEPINFER_ACCELERATOR=cpu; "
        "nothing falls back by itself"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_probe_must_answer_yes_or_no(site):
    site.backend("acme", probe="'perhaps'")
    assert message() == (
        "backend acme (deepinfer-acme 0.2.0): its probe (deepinfer_acme.probe:present) returned 'perhaps', "
        "expected True or False"
    )


@pytest.fixture
def api_1_2(monkeypatch):
    """A core that offers plugin API 1.2."""
    monkeypatch.setattr(record_module, "PLUGIN_API", (1, 2))
    monkeypatch.setattr("deepinfer.hooks.requirements.PLUGIN_API", (1, 2))


def test_plugin_for_a_newer_api(site, api_1_2):
    site.backend(
        "acme",
        api="(1, 4)",
        record="field_of_tomorrow=1",
        requires=["deepinfer-core<0.10,>=0.9"],
        plugin="raise RuntimeError('touched')",
    )
    text = (
        "backend acme (deepinfer-acme 0.2.0) was written for plugin API 1.4; this core has 1.2.\n"
        "  Install deepinfer-core>=0.9 or deepinfer-acme<0.2."
    )
    assert message("acme") == text
    assert message() == text


def test_plugin_for_a_newer_api_without_bounds(site, api_1_2):
    site.backend("acme", api="(2, 0)", version="0.3.1")
    assert message("acme").splitlines()[1] == "  Install a newer deepinfer-core or deepinfer-acme<0.3.1."


def test_plugin_for_an_older_major_api(site, api_1_2):
    site.backend("acme", api="(0, 9)", requires=["torch", "deepinfer_core>=0.3,<0.4"])
    assert message("acme") == (
        "backend acme (deepinfer-acme 0.2.0) was written for plugin API 0.9; this core has 1.2.\n"
        "  Install deepinfer-acme>0.2.0 or deepinfer-core>=0.3,<0.4."
    )


def test_plugin_for_an_older_minor_api_is_accepted(site, api_1_2):
    site.backend("acme", api="(1, 0)")
    assert open_backend("acme").name == "acme"


def test_every_unmet_requirement_is_listed(site):
    site.install("acme-kernels", "1.1")
    site.backend(
        "acme",
        record="requires=Requires(torch='>=99', python='>=4', wheels=('acme-kernels>=1.2', 'acme-none', 'pytest>1'), "
        "check='deepinfer_acme.probe:failures')",
        plugin="raise RuntimeError('touched')",
    )
    with (site.path / "deepinfer_acme/probe.py").open("a") as file:
        file.write("def failures():\n    return ['driver>=5.1: found 4.9']\n")
    python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    assert message("acme") == (
        "backend acme (deepinfer-acme 0.2.0): 5 requirements are not met:\n"
        f"  python>=4: found {python} ({sys.executable})\n"
        f"  torch>=99: found {importlib.metadata.version('torch')}\n"
        "  acme-kernels>=1.2: found 1.1\n"
        "  acme-none: not installed\n"
        "  driver>=5.1: found 4.9\n"
        "  Install with: pip install 'torch>=99' 'acme-kernels>=1.2' acme-none"
    )


def test_unknown_field_of_the_record(site):
    site.backend("acme", record="enviroment='a:b'")
    assert (
        "BackendError: Backend acme has no field 'enviroment'. Fields of Backend: name, api, device_type, plugin, "
        "probe, environment, requires. Did you mean environment?" in message("acme")
    )


def test_entry_that_is_no_record_and_entry_with_another_name(site):
    site.install("deepinfer-odd", "1", {"deepinfer.backends": {"odd": "odd:backend"}}, {"odd.py": "backend = 3"})
    assert message("odd") == (
        "backend odd (deepinfer-odd 1): entry point odd:backend is of type int, expected a deepinfer.hooks.Backend"
    )
    file = site.install("deepinfer-two", "1", {"deepinfer.backends": {"two": "deepinfer_acme:backend"}})
    site.backend("acme")
    assert message("two") == (
        "backend two (deepinfer-two 1): its record is named 'acme', its entry point 'two'; they must be equal.\n"
        f"  Entry points are written in {file}"
    )


def test_environment_is_applied_and_said(site, monkeypatch, caplog):
    monkeypatch.delenv("ACME_FAST", raising=False)
    monkeypatch.setenv("ACME_MODE", "mine")
    site.backend("acme", record="environment='deepinfer_acme.probe:environment'")
    with (site.path / "deepinfer_acme/probe.py").open("a") as file:
        file.write("def environment():\n    return {'ACME_FAST': '1', 'ACME_MODE': 'theirs'}\n")
    with caplog.at_level(logging.WARNING):
        loaded = open_backend("acme")
    assert loaded.environment == {"ACME_FAST": "1"}
    assert (os.environ["ACME_FAST"], os.environ["ACME_MODE"]) == ("1", "mine")
    assert [r.getMessage() for r in caplog.records] == [
        "ACME_MODE=mine stays as set; backend acme (deepinfer-acme 0.2.0) asks for theirs",
        "environment for backend acme (deepinfer-acme 0.2.0): ACME_FAST=1, after torch was imported: "
        "it may not see them",
    ]
    del os.environ["ACME_FAST"]


def test_environment_must_be_text(site):
    site.backend("acme", record="environment='deepinfer_acme.probe:environment'")
    with (site.path / "deepinfer_acme/probe.py").open("a") as file:
        file.write("def environment():\n    return {'ACME_FAST': 1}\n")
    assert message("acme") == (
        "backend acme (deepinfer-acme 0.2.0): its environment returned {'ACME_FAST': 1}, expected a dict of strings"
    )


def test_the_original_distribution_is_refused(site):
    site.install("deepinfer", "0.1.0")
    assert message("cpu") == (
        f"the distribution deepinfer 0.1.0 is installed ({site.path / 'deepinfer'}); it and deepinfer-core both "
        "provide the package 'deepinfer' and overwrite each other's files.\n"
        "  Remove both, then install this one: pip uninstall -y deepinfer deepinfer-core && pip install deepinfer-core"
    )


def test_survey_lists_broken_backends(site):
    site.backend("acme", imports="import acme_kernels_that_nobody_has")
    site.backend("here")
    site.backend("gone", probe="False")
    states = {state.entry.name: state for state in survey()}
    assert {name: state.state for name, state in states.items()} == {
        "acme": "broken", "cpu": "on request", "here": "present", "gone": "absent",
    }  # fmt: skip
    assert "No module named 'acme_kernels_that_nobody_has'" in states["acme"].detail


def test_a_device_type_torch_does_not_know(site):
    site.backend("acme")
    init = site.path / "deepinfer_acme/__init__.py"
    init.write_text(init.read_text().replace("device_type='cpu'", "device_type='warpdrive'"))
    with pytest.raises(BackendError, match="knows no device type 'warpdrive'"):
        open_backend("acme").device()


def test_a_backend_registers_its_device_type_before_the_first_device(site):
    plugin = """
    from deepinfer.hooks import hookimpl
    class Plugin:
        calls = 0
        @hookimpl
        def deepinfer_register_device(self):
            Plugin.calls += 1
    """
    site.backend("acme", plugin=plugin)
    loaded = open_backend("acme")
    plugin_class = type(loaded.manager.get_plugin("acme"))
    assert plugin_class.calls == 0
    loaded.device()
    assert plugin_class.calls == 1


@pytest.mark.parametrize("answer", ["torch.device('cpu')", "'cpu'"])
def test_a_backend_may_name_the_device_that_stands_for_its_own(site, answer):
    plugin = f"""
    import torch
    from deepinfer.hooks import hookimpl
    class Plugin:
        @hookimpl
        def deepinfer_register_device(self):
            return {answer}
    """
    site.backend("acme", plugin=plugin)
    init = site.path / "deepinfer_acme/__init__.py"
    init.write_text(init.read_text().replace("device_type='cpu'", "device_type='warpdrive'"))
    loaded = open_backend("acme")
    assert loaded.device_type == "warpdrive"
    if answer == "'cpu'":
        with pytest.raises(BackendError, match="deepinfer_register_device returned 'cpu', expected a torch"):
            loaded.device()
    else:
        assert loaded.device(3).type == "cpu"
