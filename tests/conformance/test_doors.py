"""The doors of the kit: the command and its program, the pytest plugin, the fixtures, the public names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

from deepinfer.cli.conformance import main as program
from deepinfer.cli.main import main
from deepinfer.testing.conformance.runs import MICRO, Checkpoints

WRONG = """
from deepinfer.hooks import hookimpl, provides
from deepinfer.hooks.ops import GemmOps

class Gemm(GemmOps):
    @provides()
    def rms_norm(self, x, weight, eps):
        y = super().rms_norm(x, weight, eps)
        y[..., 3] += {offset}
        return y

    @provides()
    def swiglu(self, gate_up, limit, row_weight=None):
        return super().swiglu(gate_up, limit, row_weight)

class Plugin:
    @hookimpl
    def deepinfer_create_gemm(self, context):
        return Gemm(context)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """`installed(name, offset)`: a backend with two native ops, one of them off by `offset`; returns its folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def make(name, offset=0):
        package, info = tmp_path / f"deepinfer_{name}", tmp_path / f"deepinfer_{name}-0.2.0.dist-info"
        package.mkdir()
        info.mkdir()
        (package / "__init__.py").write_text(
            f"from deepinfer.hooks import Backend\nplugin = 'deepinfer_{name}.plugin:Plugin'\n"
            f"backend = Backend(name={name!r}, api=(0, 1), device_type='cpu', plugin=plugin)\n"
        )
        (package / "plugin.py").write_text(WRONG.format(offset=offset))
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: deepinfer-{name}\nVersion: 0.2.0\nRequires-Dist: deepinfer-core>=0.1,<0.2\n"
        )
        (info / "entry_points.txt").write_text(f"[deepinfer.backends]\n{name} = deepinfer_{name}:backend\n")
        return tmp_path

    return make


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_succeeds_for_a_right_backend_and_writes_reports(installed, capsys):
    folder = installed("doorsright")
    code = main(["conformance", "--backend", "doorsright", "--op", "gemm.rms_norm", "--quick", "--report", "out"])
    out = capsys.readouterr().out
    assert code == 0 and "doorsright 0.2.0 (deepinfer-doorsright) on cpu" in out and "doorsright passes: " in out
    assert json.loads((folder / "out" / "report.json").read_text())["backend"]["distribution"] == "deepinfer-doorsright"
    assert (folder / "out" / "report.md").exists()


def test_it_fails_for_a_wrong_one_and_names_op_case_and_place(installed, capsys):
    installed("doorswrong", offset=1)
    assert main(["conformance", "--backend", "doorswrong", "--op", "gemm.rms_norm", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "1 gemm.rms_norm: norm, " in out and re.search(r"worst at \[\d+, 3\]", out)
    assert "doorswrong FAILS" in out


def test_the_program_is_the_command(installed, capsys):
    installed("doorsprogram")
    assert program(["--backend", "doorsprogram", "--op", "gemm.swiglu", "--quick", "--level", "1"]) == 0
    assert "doorsprogram passes" in capsys.readouterr().out
    pyproject = (Path(__file__).parents[2] / "deepinfer-core" / "pyproject.toml").read_text()
    assert 'deepinfer-conformance = "deepinfer.cli.conformance:main"' in pyproject


def test_conformance_toml_of_the_working_directory_is_read(installed, capsys):
    folder = installed("doorstoml", offset=1)
    entry = "\n".join(
        f'[[xfail]]\nop = "gemm.rms_norm"\ncase = "{case}"\nreason = "r"\nissue = "i"\nuntil = "99"'
        for case in ("norm, [1-9]*", "heads*")
    )
    (folder / "conformance.toml").write_text(entry)
    arguments = ["conformance", "--backend", "doorstoml", "--op", "gemm.rms_norm", "--level", "1", "--quick"]
    assert main(arguments) == 0
    assert "failed as expected: " in capsys.readouterr().out
    (folder / "other.toml").write_text("op_allowlist = ['nope.*']")
    assert main([*arguments, "--config", "other.toml"]) == 2
    assert "unknown op 'nope.*'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "cpuu"], "accelerator=cpuu: no such backend"),
        (["--backend", "cpu", "--level", "9"], "expected a number or a range"),
        (["--backend", "cpu", "--op", "nothing.*"], "matches no op"),
        (["--backend", "cpu", "--check-speed"], "--check-speed goes with --level 5"),
        (["--backend", "cpu", "--against", "cpu"], "expected another backend"),
        (["--backend", "cpu", "--against", "nobody"], "no such backend"),
        (["--backend", "cpu", "--bind", "gemm.*=nobody"], "no provider 'nobody' is loaded"),
        (["--backend", "cpu", "--level", "5", "--op", "gemm.swiglu", "--last-report", "x.json"], "is no report.json"),
    ],
)
def test_wrong_use_is_one_message_and_code_2(arguments, message, capsys):
    code = main(["conformance", *arguments])
    assert code == 2 and message in capsys.readouterr().err


def test_against_compares_two_installed_backends(installed, capsys):
    installed("doorsone")
    installed("doorstwo", offset=1)
    arguments = "conformance --backend doorsone --op gemm.rms_norm --level 1 --quick --against".split()
    assert main([*arguments, "cpu"]) == 0
    assert "on cpu against cpu" in capsys.readouterr().out
    assert main([*arguments, "doorstwo"]) == 1
    assert "doorstwo against the reference: " in capsys.readouterr().out
    assert main(["conformance", "--backend", "doorsone", "--against", "cpu", "--level", "2-3"]) == 2
    assert "compares ops (level 1) and engines (level 4)" in capsys.readouterr().err


def test_dump_and_replay(installed, capsys):
    folder, checkpoints = installed("doorsdump", offset=1), Checkpoints()
    model = str(checkpoints.path(MICRO))
    generate = ["generate", "--model", model, "--accelerator", "doorsdump", "--max-tokens", "2", "--max-num-seqs", "1"]
    assert main([*generate, "--dump-op", "gemm.rms_norm:2", "--dump-dir", str(folder), "one two"]) == 0
    assert "stored in" in capsys.readouterr().err
    file = str(folder / "gemm.rms_norm-call2.json")
    assert main(["replay", file]) == 1
    assert "doorsdump DIFFERS from the reference" in capsys.readouterr().out
    assert main(["replay", file, "--op", "cpu"]) == 2, "core has no ops of its own to bind the call to"
    assert "cpu" in capsys.readouterr().err
    assert main(["replay", file, "--op", "reference"]) == 1
    assert main([*generate, "--dump-op", "gemm.rms_nrom", "x"]) == 2
    assert "Did you mean gemm.rms_norm?" in capsys.readouterr().err
    assert main(["replay", "nothing.json"]) == 2


@pytest.mark.slow
def test_bisect_as_a_command(installed, capsys):
    folder, checkpoints = installed("doorsbisect", offset=1), Checkpoints()
    model = str(checkpoints.path(MICRO))
    assert main(["bisect", "--backend", "doorsbisect", "--dump-dir", str(folder)]) == 1
    assert "culprit: gemm.rms_norm\n" in capsys.readouterr().out
    own = ["bisect", "--backend", "doorsbisect", "--model", model, "--prompt", "One two three four five six seven"]
    assert main([*own, "--bind", "gemm.rms_norm=reference"]) == 0
    assert "follows the reference" in capsys.readouterr().out
    assert main(own[:5]) == 2 and "go together" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["conformance", "bisect", "replay"])
def test_help_imports_no_torch(command):
    code = f"from deepinfer.cli.main import main\ntry: main([{command!r}, '--help'])\nexcept SystemExit: pass"
    found = python(f"{code}\nimport sys; print('torch' in sys.modules, 'pluggy' in sys.modules)")
    assert found.stdout.splitlines()[-1] == "False False"


def python(code, **options):
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **options)
    assert found.returncode == 0, found.stderr
    return found


# --- the public names -------------------------------------------------------------------------------------------------


def test_the_public_names_are_found_without_importing_torch():
    python("import deepinfer.testing, sys; dir(deepinfer.testing); assert 'torch' not in sys.modules")
    import deepinfer.testing as testing

    for name in testing.__all__:
        if name != "conformance_tests":
            assert getattr(testing, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        testing.nothing  # noqa: B018


def test_conformance_tests_without_the_plugin_is_an_error_instead_of_no_tests():
    code = "try: from deepinfer.testing import conformance_tests\nexcept ImportError as error: print(error)"
    assert "run pytest -p deepinfer.testing.plugin" in python(code).stdout


# --- the pytest plugin ------------------------------------------------------------------------------------------------


def run_pytest(folder, *arguments, settings="", tests=""):
    """pytest on a folder of its own, in a process of its own."""
    (folder / "pytest.ini").write_text(f"[pytest]\n{settings}\n")
    if tests:
        (folder / "test_backend.py").write_text(textwrap.dedent(tests))
    environment = os.environ | {"PYTHONPATH": str(folder)}
    environment.pop("DEEPINFER_ACCELERATOR", None)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rsfxX", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip


def test_the_plugin_makes_items_of_the_backend_named_on_the_command_line(installed):
    folder = installed("doorsplugin", offset=1)
    arguments = ("-p", "deepinfer.testing.plugin", "--deepinfer-backend", "doorsplugin", "--deepinfer-quick",
                 "--deepinfer-level", "1", "--deepinfer-op", "gemm.*norm*", "-k", "not quantize")  # fmt: skip
    found = run_pytest(folder, *arguments)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "level 1: gemm.rms_norm" in found.stdout and re.search(r"\d of \d+ cases failed", found.stdout)
    assert re.search(r"worst at \[\d+, 3\]", found.stdout) and "1 failed, 1 deselected" in found.stdout


@pytest.mark.slow
def test_one_line_and_the_settings_are_a_backends_own_test(installed):
    folder = installed("doorsline")
    settings = (
        "addopts = -p deepinfer.testing.plugin\ndeepinfer_backend = doorsline\ndeepinfer_level = 0-1\n"
        "deepinfer_config = expected.toml"
    )
    (folder / "expected.toml").write_text("op_allowlist = ['gemm.swiglu']")
    tests = """
        from deepinfer.testing import conformance_tests

        def test_fixtures(deepinfer_subject, deepinfer_reference, deepinfer_make_subject):
            assert deepinfer_subject.native == ("gemm.rms_norm", "gemm.swiglu")
            assert not [b for b in deepinfer_reference.bindings if b.kind == "native"]
            assert deepinfer_make_subject(config="tiny").config.text.sliding_window == 32
    """
    found = run_pytest(folder, "-k", "fixtures or metadata or swiglu or declared", settings=settings, tests=tests)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "5 passed" in found.stdout or "4 passed" in found.stdout
    assert "not on the op_allowlist of expected.toml" in found.stdout


@pytest.mark.slow
def test_a_missing_backend_is_said_at_once(installed):
    folder = installed("doorsnone")
    tests = "from deepinfer.testing import conformance_tests"
    found = run_pytest(folder, settings="addopts = -p deepinfer.testing.plugin", tests=tests)
    assert found.returncode != 0 and "which backend? Give --deepinfer-backend NAME" in found.stdout + found.stderr
    wrong = run_pytest(folder, "--deepinfer-backend", "acmee", settings="addopts = -p deepinfer.testing.plugin")
    assert wrong.returncode != 0 and "no such backend" in wrong.stdout + wrong.stderr


def test_core_registers_no_pytest_plugin_by_itself():
    assert not [e for e in metadata.distribution("deepinfer-core").entry_points if e.group == "pytest11"]
