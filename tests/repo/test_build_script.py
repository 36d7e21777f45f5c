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


def test_the_script_names_no_registry():
    text = (ROOT / "build.sh").read_text()
    assert "://" not in text
    assert "index-url" not in text
