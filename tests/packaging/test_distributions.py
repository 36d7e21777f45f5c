"""Wheels and sdists: complete, free of strays, and the same whether built from the tree or from the sdist."""

from __future__ import annotations

import tarfile
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "examples" / "backend-template"
NAMES = ("deepinfer-core", "deepinfer-nvidia", "deepinfer-ascend", "deepinfer-acme")
PACKAGES = dict(zip(NAMES, ("deepinfer", "deepinfer_nvidia", "deepinfer_ascend", "deepinfer_acme"), strict=True))
STRAYS = ("__pycache__", ".pyc", ".mypy_cache", ".pytest_cache", ".egg-info")


def sources(folder: Path) -> set[str]:
    """Files below a folder that git would keep."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {path for path in paths if not any(stray in path for stray in STRAYS)}


def project_folder(name: str) -> Path:
    return TEMPLATE if name == "deepinfer-acme" else ROOT / name


@pytest.mark.parametrize("name", NAMES)
def test_a_wheel_holds_the_whole_package_and_nothing_else(builds, name):
    package = PACKAGES[name]
    found = {path for path in builds[name].files() if ".dist-info/" not in path}
    expected = {f"{package}/{path}" for path in sources(project_folder(name) / "src" / package)}
    if name == "deepinfer-core":
        expected |= {f"deepinfer/templates/backend/{path}" for path in sources(TEMPLATE)}
    assert found == expected
    assert f"{package}/py.typed" in found


@pytest.mark.parametrize("name", NAMES)
def test_the_wheel_of_an_unpacked_sdist_is_the_wheel_of_the_tree(builds, builder, name, tmp_path):
    with tarfile.open(builds[name].sdist) as archive:
        assert not [member.name for member in archive if any(stray in member.name for stray in STRAYS)]
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = tmp_path.iterdir()
    again = builder(unpacked, tmp_path / "built")
    assert again.files() == builds[name].files()


def test_core_carries_the_template_as_it_is(builds):
    files = builds["deepinfer-core"].files()
    for path in sources(TEMPLATE):
        assert files[f"deepinfer/templates/backend/{path}"] == (TEMPLATE / path).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_metadata(builds, name):
    built, project = builds[name], tomllib.loads((project_folder(name) / "pyproject.toml").read_text())["project"]
    found = built.metadata()
    assert (found["Name"], found["Version"], found["Requires-Python"]) == (name, project["version"], ">=3.11")
    assert found["License-Expression"] == "Apache-2.0"
    assert found.get_payload().startswith(f"# {name}")
    entries = ConfigParser()
    (file,) = (path for path in built.files() if path.endswith("entry_points.txt"))
    entries.read_string(built.files()[file].decode())
    backend = "cpu" if name == "deepinfer-core" else name.removeprefix("deepinfer-")
    assert list(entries["deepinfer.backends"]) == [backend]


@pytest.mark.parametrize("name", NAMES[1:])
def test_backends_are_bound_to_this_minor_version_of_core(builds, name):
    core = builds["deepinfer-core"].metadata()["Version"]
    major, minor = core.split(".")[:2]
    texts = builds[name].metadata().get_all("Requires-Dist")
    (bound,) = (r.specifier for r in map(Requirement, texts) if r.name == "deepinfer-core" and r.marker is None)
    assert bound == SpecifierSet(f">={major}.{minor},<{major}.{int(minor) + 1}")
    assert bound.contains(core)
