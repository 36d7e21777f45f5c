"""`build.sh` where it can be judged without installing anything: usage, advice, and the choice of a backend."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def build(tmp_path):
    """Runs a copy of the script in an empty folder with no environment active; returns (exit code, output)."""
    shutil.copy(ROOT / "build.sh", tmp_path)
    inactive = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    inactive.pop("DEEPINFER_ACCELERATOR", None)

    def run(*arguments: str, **environment: str) -> tuple[int, str]:
        result = subprocess.run(
            ["bash", tmp_path / "build.sh", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=inactive | environment,
        )
        return result.returncode, result.stdout

    return run


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_help_explains_commands_and_variables(build):
    code, text = build("--help")
    assert code == 0
    assert all(word in text for word in ("demo", "test", "DEEPINFER_ACCELERATOR", "DEEPINFER_TORCH_SPEC", ".venv"))


def test_unknown_command(build):
    code, text = build("dmeo")
    assert code == 1
    assert "unknown command: dmeo" in text


def test_no_recent_python(build, tmp_path):
    code, text = build(PYTHON=script(tmp_path / "old", "exit 1"))
    assert code == 1
    assert "no Python 3.11 or newer found" in text
    assert "apt install python3" in text


def test_python_without_venv_module(build, tmp_path):
    python = script(tmp_path / "bare", f'case "$2" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"')
    code, text = build(PYTHON=python)
    assert code == 1
    assert "apt install python3-venv" in text
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"nvidia": "False", "ascend": "False"}, "no accelerator found: using the cpu backend"),
        ({"nvidia": "True", "ascend": "False"}, "found: nvidia"),
        ({"nvidia": "False", "ascend": "True"}, "found: ascend"),
        ({"nvidia": "True", "ascend": "True"}, "devices of several backends found: nvidia ascend. Choose one"),
        ({"nvidia": "1 / 0", "ascend": "False"}, "the probe of deepinfer-nvidia failed"),
    ],
)
def test_probes_choose_the_backend(build, tmp_path, answers, expected):
    for name, answer in answers.items():
        package = tmp_path / f"deepinfer-{name}" / "src" / f"deepinfer_{name}"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "probe.py").write_text(f"def present():\n    return {answer}\n")
    # an interpreter that is no environment and stops where the installation would begin
    (tmp_path / "env" / "bin").mkdir(parents=True)
    script(tmp_path / "env" / "bin" / "python", f'[ "$2" = pip ] && exit 1\nexec {sys.executable} "$@"')
    code, text = build(VIRTUAL_ENV=str(tmp_path / "env"))
    assert code == 1
    assert expected in text


NVIDIA_PYTHON = """
[ "$2" = pip ] && {{ echo "$@" DG_FORCE_BUILD=$DG_FORCE_BUILD >> {log}; exit 0; }}
case "$2" in
  *nccl*) echo {nccl};;
  *version.cuda*) exit {without_cuda};;
  *) exec {python} "$@";;
esac
"""


@pytest.fixture
def nvidia(build, tmp_path):
    """Runs the script for nvidia with a pip that only writes down what it was asked; (exit code, output, requests)."""

    def run(capability: str | None, nccl: str = "2.32.3", without_cuda: int = 0) -> tuple[int, str, list[str]]:
        for name in ("core", "nvidia"):
            (tmp_path / f"deepinfer-{name}").mkdir(exist_ok=True)
        (tmp_path / "env" / "bin").mkdir(parents=True, exist_ok=True)
        log, tools = tmp_path / "pip.log", tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        log.write_text("")
        values = {"log": log, "nccl": nccl, "without_cuda": without_cuda, "python": sys.executable}
        script(tmp_path / "env" / "bin" / "python", NVIDIA_PYTHON.format(**values))
        script(tools / "nvidia-smi", "exit 9" if capability is None else f"echo {capability}")
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        code, text = build(VIRTUAL_ENV=str(tmp_path / "env"), DEEPINFER_ACCELERATOR="nvidia", PATH=path)
        return code, text, log.read_text().splitlines()

    return run


def requests(lines: list[str], word: str) -> list[str]:
    return [line for line in lines if word in line]


def test_nvidia_on_blackwell_builds_the_libraries_and_replaces_nccl(nvidia, tmp_path):
    _, text, asked = nvidia("10.0")
    assert "NCCL 2.32.3" in text
    (build_line,) = requests(asked, "[sm100]")
    assert "--no-build-isolation" in build_line and build_line.endswith("DG_FORCE_BUILD=1")
    before, after = (i for i, line in enumerate(asked) if "--no-deps nvidia-nccl-cu13==2.32.3" in line)
    assert before < asked.index(build_line) < after


def test_nvidia_refuses_another_nccl_with_the_command(nvidia):
    code, text, _ = nvidia("10.3", nccl="2.30.7")
    assert code == 1
    assert "torch loads NCCL 2.30.7, but DeepEP needs 2.32.3" in text
    assert "pip install --no-deps nvidia-nccl-cu13==2.32.3" in text


def test_nvidia_on_hopper_takes_the_tested_set(nvidia):
    _, _, asked = nvidia("9.0")
    assert len(requests(asked, "[sm90]")) == 1
    assert not requests(asked, "sm100") and not requests(asked, "nccl")


@pytest.mark.parametrize(("capability", "said"), [(None, "no GPU to ask"), ("8.9", "no kernel library serves it")])
def test_nvidia_elsewhere_installs_no_kernel_library(nvidia, capability, said):
    _, text, asked = nvidia(capability)
    assert said in text
    assert not requests(asked, "[sm") and len(requests(asked, "tile-kernels")) == 1


def test_nvidia_installs_a_torch_with_cuda_where_there_is_none(nvidia):
    assert requests(nvidia(None, without_cuda=1)[2], "torch>=2.13,<2.15")
    assert not requests(nvidia(None)[2], "torch>=")


def test_the_script_names_no_registry():
    text = (ROOT / "build.sh").read_text()
    assert "://" not in text
    assert "index-url" not in text
