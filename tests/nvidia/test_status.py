"""The README's status matrix says what the package and the committed reports say, and no more."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "deepinfer-nvidia"


@pytest.fixture(scope="module")
def status():
    spec = importlib.util.spec_from_file_location("nvidia_status", PACKAGE / "status.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_current(status):
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    assert text == status.updated(text, status.matrix()), "run: python deepinfer-nvidia/status.py"


def test_without_a_report_nothing_has_run(status, tmp_path):
    table = status.matrix(tmp_path)
    assert "| `attention.latent` | composed | native (sm100), not run on hardware |" in table
    assert "| `gemm.linear` | native (sm90), not run on hardware | native (sm100), not run on hardware |" in table
    assert "| `vision.patch_attention`" not in table and "passed on hardware" not in table
    assert "* sm100: nothing has run on hardware." in table


def test_a_report_counts_for_what_was_native_and_passed(status, tmp_path):
    folder = tmp_path / "nvidia-sm100"
    folder.mkdir()
    rows = [
        {"op": "attention.latent", "kind": "native", "state": "native", "cases": {"pass": 7}},
        {"op": "gemm.linear", "kind": "native", "state": "fail", "cases": {"pass": 3, "fail": 1}},
        {"op": "experts.moe", "kind": "decomposed", "state": "decomposed", "cases": {"pass": 4}},
    ]
    report = {"matrix": rows, "ok": False, "model": "micro", "options": {"levels": [1]}}
    (folder / "report.json").write_text(json.dumps(report))
    table = status.matrix(tmp_path)
    assert "| composed | native (sm100), 7 cases passed on hardware |" in table
    assert "native (sm100), **fails on hardware** |" in table
    assert "| `experts.moe` | composed | native (sm100), not run on hardware |" in table
    assert "* sm100: model micro, levels [1], does not pass." in table
