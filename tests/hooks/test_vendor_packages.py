"""The vendor packages on a machine without their devices, and their probes on imitated ones."""

from __future__ import annotations

import logging
import os
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from deepinfer.environ import Settings
from deepinfer.errors import BackendError
from deepinfer.hooks import build_ops, open_backend, survey

ROOT = Path(__file__).parents[2]
VENDORS = ("nvidia", "ascend")
MASKS = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def _no_masks(monkeypatch):
    for name in (*MASKS, "TORCH_DEVICE_BACKEND_AUTOLOAD", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.setenv(name, "")  # remembered, and restored afterwards whatever the code under test sets
        monkeypatch.delenv(name)


@pytest.fixture
def vendors(site):
    """Both packages as installed: their own metadata, their sources from this repository."""
    for name in VENDORS:
        project = tomllib.loads((ROOT / f"deepinfer-{name}" / "pyproject.toml").read_text())["project"]
        site.install(project["name"], project["version"], project["entry-points"], requires=project["dependencies"])
    return site


@pytest.fixture
def probes():
    from deepinfer_ascend import probe as ascend
    from deepinfer_nvidia import probe as nvidia

    return {"nvidia": nvidia, "ascend": ascend}


@pytest.fixture
def machine(tmp_path):
    """A root folder with device nodes of both vendors."""
    (tmp_path / "dev").mkdir()
    for node in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "davinci0", "davinci_manager", "null"):
        (tmp_path / "dev" / node).touch()
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: gcc 12.2.0\n"
    )
    return tmp_path


@pytest.fixture
def no_devices(probes, monkeypatch):
    """This machine without its accelerators, if it has any."""
    for probe in probes.values():
        monkeypatch.setattr(probe, "device_nodes", lambda root=None: [])


def test_nothing_present_means_cpu(vendors, no_devices, caplog):
    with caplog.at_level(logging.WARNING):
        assert open_backend(settings=Settings.load({})).name == "cpu"
    assert [r.getMessage() for r in caplog.records] == [
        "no accelerator: ascend, nvidia found no device; running on cpu (DEEPINFER_ACCELERATOR is not set)"
    ]
    assert {state.entry.name: state.state for state in survey()} == {
        "ascend": "absent", "cpu": "on request", "nvidia": "absent",
    }  # fmt: skip


@pytest.mark.parametrize("name", VENDORS)
def test_a_backend_without_its_device_refuses_with_advice(vendors, no_devices, small, name):
    loaded = open_backend(name)
    with pytest.raises(BackendError) as caught:
        build_ops(loaded, small.context())
    text = str(caught.value)
    assert text.startswith(f"DEEPINFER_ACCELERATOR={name} needs an ")
    assert "found no device node /dev/" in text
    assert "install the driver and check it with" in text
    assert text.endswith("DEEPINFER_ACCELERATOR=cpu")


def test_ascend_registers_its_device_type_or_says_what_is_missing(vendors, no_devices):
    with pytest.raises(BackendError, match="found no device node /dev/davinci0"):
        open_backend("ascend").device()


def test_nvidia_probe_reads_files(probes, machine, tmp_path_factory):
    probe, empty = probes["nvidia"], tmp_path_factory.mktemp("empty")
    assert probe.device_nodes(machine) == ["nvidia0", "nvidia1", "nvidia10"]
    assert probe.driver_version(machine) == "580.95.05"
    assert (probe.present(machine), probe.present(empty)) == (True, False)
    assert probe.driver_version(empty) is None


def test_ascend_probe_reads_files(probes, machine, tmp_path_factory):
    probe, bus = probes["ascend"], tmp_path_factory.mktemp("bus")
    assert (probe.device_nodes(machine), probe.present(machine)) == (["davinci0"], True)
    for name, units in {"udma0": "2\n", "udma1": "0\n", "udma2": "?"}.items():
        (bus / "sys/class/ubcore" / name / "device").mkdir(parents=True)
        (bus / "sys/class/ubcore" / name / "device/ub_totalues").write_text(units)
    assert (probe.device_nodes(bus), probe.present(bus)) == (["udma0"], True)
    assert probe.present(tmp_path_factory.mktemp("empty")) is False


@pytest.mark.parametrize(
    ("mask", "text"),
    [("0,97", "no device 97"), ("a,b", "holds 'a', 'b'"), ("0,0", "names 0 more than once")],
)
@pytest.mark.parametrize(("name", "variable"), list(zip(VENDORS, MASKS, strict=True)))
def test_a_wrong_mask_is_an_error_of_the_probe(probes, machine, monkeypatch, name, variable, mask, text):
    monkeypatch.setenv(variable, mask)
    with pytest.raises(BackendError, match=f"{variable}={mask} .*{text}"):
        probes[name].present(machine)


@pytest.mark.parametrize(("name", "variable"), list(zip(VENDORS, MASKS, strict=True)))
def test_an_empty_mask_hides_the_devices(probes, machine, monkeypatch, name, variable):
    monkeypatch.setenv(variable, "")
    assert probes[name].present(machine) is False
    assert probes[name].visibility(machine).problems  # asked for by name, it is an error


@pytest.mark.parametrize("name", VENDORS)
def test_masks_that_disagree_are_refused_before_anything_is_opened(vendors, no_devices, monkeypatch, name):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5")
    with pytest.raises(BackendError, match="disagree; set one of them") as caught:
        open_backend(name)
    assert all(variable in str(caught.value) for variable in MASKS)
    assert str(caught.value).startswith(f"backend {name} (deepinfer-{name} 0.1.0): 1 requirement is not met:\n")
    assert open_backend("cpu").name == "cpu"


@pytest.mark.parametrize(("name", "own", "other"), [("nvidia", *MASKS), ("ascend", *reversed(MASKS))])
def test_a_mask_of_the_other_name_is_used_and_said(vendors, no_devices, monkeypatch, caplog, name, own, other):
    monkeypatch.setenv(other, "0")
    with caplog.at_level(logging.WARNING):
        loaded = open_backend(name)
    assert loaded.environment[own] == "0"
    assert os.environ[own] == "0"
    assert f"{own}=0" in caplog.text


def test_nvidia_needs_a_torch_that_knows_cuda(machine, monkeypatch):
    from deepinfer_nvidia.plugin import require_device

    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BackendError, match=r"found nvidia0, nvidia1, nvidia10, but torch .* has no CUDA support"):
        require_device(machine)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match=r"CUDA does not start \(driver 580.95.05\)"):
        require_device(machine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_device(machine)


def test_ascend_names_what_is_missing_one_after_the_other(machine, monkeypatch, tmp_path):
    from deepinfer_ascend.plugin import require_device

    with pytest.raises(BackendError, match="no CANN toolkit"):
        require_device(machine)
    (machine / "usr/local/Ascend/latest/lib64").mkdir(parents=True)
    (machine / "usr/local/Ascend/latest/lib64/libascendcl.so").touch()
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    with pytest.raises(BackendError, match="is a CUDA build"):
        require_device(machine)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.syspath_prepend(str(modules))
    if not any((Path(p) / "torch_npu").exists() for p in sys.path):
        with pytest.raises(BackendError, match="but torch_npu is not installed"):
            require_device(machine)
    (modules / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(modules))  # forgets what the import system remembers of the folder
    with pytest.raises(BackendError, match="torch_npu cannot be loaded: ImportError: libhccl") as caught:
        require_device(machine)
    assert isinstance(caught.value.__cause__, ImportError)


def test_ascend_keeps_torch_from_loading_torch_npu_by_itself(probes):
    assert probes["ascend"].environment() == {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@pytest.mark.parametrize("name", VENDORS)
def test_packaging(name):
    folder = ROOT / f"deepinfer-{name}"
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["build-system"]["build-backend"] == "hatchling.build"
    assert project["project"]["dependencies"][0] == "deepinfer-core>=0.1,<0.2"
    assert project["project"]["entry-points"]["deepinfer.backends"] == {name: f"deepinfer_{name}:backend"}
    assert (folder / "src" / f"deepinfer_{name}" / "py.typed").exists()
    assert (folder / project["project"]["readme"]).exists()
    assert (folder / "LICENSE").exists()
