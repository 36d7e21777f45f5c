"""`deepinfer new-backend`: names, refusals, and a copy in which nothing of the template's name is left."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deepinfer.cli import new_backend
from deepinfer.cli.main import main
from deepinfer.cli.new_backend import Spelling, copy_template
from deepinfer.errors import ConfigError

TEMPLATE = Path(__file__).parents[2] / "examples" / "backend-template"


def test_the_copy_has_the_new_name_in_every_place(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new-backend", "my_chip2"]) == 0
    made = tmp_path / "deepinfer-my-chip2"
    files = [path for path in made.rglob("*") if path.is_file()]
    texts = {path.relative_to(made).as_posix(): path.read_text() for path in files}
    assert not [name for name, text in texts.items() if re.search("acme", name + text, re.IGNORECASE)]
    assert f"{len(files)} files of deepinfer-my-chip2, a backend named my_chip2" in capsys.readouterr().out

    project = tomllib.loads(texts["pyproject.toml"])
    assert project["project"]["name"] == "deepinfer-my-chip2"
    assert project["project"]["entry-points"]["deepinfer.backends"] == {"my_chip2": "deepinfer_my_chip2:backend"}
    assert "class MyChip2Plugin:" in texts["src/deepinfer_my_chip2/plugin.py"]
    assert '"MY_CHIP2_ROOT"' in texts["src/deepinfer_my_chip2/probe.py"]
    for name, text in texts.items():
        if name.endswith(".py"):
            compile(text, name, "exec")


def test_it_imports_no_torch(tmp_path):
    code = "import sys; from deepinfer.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "new-backend", "mychip", "--dir", str(tmp_path / "made")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "False", result.stderr


def test_the_name_acme_gives_the_template_itself(tmp_path):
    count = copy_template(TEMPLATE, tmp_path / "copy", Spelling("acme"))
    copied = [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert len(copied) == count
    assert all(path.read_bytes() == (TEMPLATE / path.relative_to(tmp_path / "copy")).read_bytes() for path in copied)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Chip", "single underscores between them. Did you mean my_chip?"),
        ("2chip", "starting with a letter"),
        ("chip_", "Did you mean chip?"),
        ("", "expected lower-case letters and digits"),
        ("reference", "means core's own operations"),
        ("cpu", "is taken by deepinfer-core"),
    ],
)
def test_names_that_are_refused(tmp_path, monkeypatch, capsys, name, message):
    monkeypatch.chdir(tmp_path)
    assert main(["new-backend", name]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["new-backend", "mychip", "--dir", str(tmp_path)]) == 2
    assert f"{tmp_path} is not empty; name another folder with --dir" in capsys.readouterr().err
    assert main(["new-backend", "mychip", "--dir", str(tmp_path / "notes.txt")]) == 2
    assert "notes.txt is a file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert main(["new-backend", "mychip", "--dir", str(tmp_path / "empty")]) == 0


def test_a_missing_template_says_how_to_repair(tmp_path, monkeypatch):
    monkeypatch.setattr(new_backend, "__file__", str(tmp_path / "lib" / "deepinfer" / "cli" / "new_backend.py"))
    with pytest.raises(ConfigError, match="(?s)the backend template is missing; looked in .*force-reinstall"):
        new_backend.find_template()
