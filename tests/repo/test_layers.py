"""The structure of the code: import contracts, words core must not know, what a start-up may import."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "deepinfer-core" / "src"
VENDORS = [ROOT / "deepinfer-nvidia" / "src", ROOT / "deepinfer-ascend" / "src"]
DEVICE_WORDS = re.compile(r"(^|[^a-z])(cuda|npu|nvidia|ascend|nccl|hccl)([^a-z]|$)", re.IGNORECASE)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, timeout=120
    )


def test_import_contracts_hold():
    program = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert program, "import-linter is missing: pip install 'deepinfer-core[test]'"
    path = os.pathsep.join(map(str, [CORE, *VENDORS]))
    result = subprocess.run(
        [program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_core_does_not_know_a_device_by_name():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(CORE.rglob("*"))
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(CORE).parts)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if DEVICE_WORDS.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_pattern_finds_what_it_should():
    assert all(map(DEVICE_WORDS.search, ["torch.cuda.x", "NCCL_NUM_SMS", "an NPU", "hccl"]))
    assert not any(map(DEVICE_WORDS.search, ["ascending", "CUDAGRAPH", "input", "descend"]))


@pytest.mark.parametrize(
    "code",
    [
        "import deepinfer",
        "import deepinfer; deepinfer.SamplingParams; dir(deepinfer)",
        "import deepinfer.hooks; deepinfer.hooks.Backend",
        "import deepinfer.backends.cpu",
        "from deepinfer.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from deepinfer.cli.main import main; main([])",
        "from deepinfer.cli.main import main; main(['env'])",
    ],
)
def test_quick_starts_do_not_import_torch(code):
    heavy = "import sys; print([m for m in ('torch', 'numpy', 'tokenizers', 'huggingface_hub') if m in sys.modules])"
    result = python(f"{code}\n{heavy}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["generate", "chat", "ops", "doctor", "env", "make-checkpoint", "new-backend"])
def test_help_of_a_command_does_not_import_torch(command):
    code = f"from deepinfer.cli.main import main\ntry: main([{command!r}, '--help'])\nexcept SystemExit: pass"
    result = python(f"{code}\nimport sys; print('torch' in sys.modules)")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "False"


def test_import_changes_no_environment_variable_and_prints_nothing():
    result = python("import os; before = dict(os.environ); import deepinfer; assert dict(os.environ) == before")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
