"""Built distributions and clean environments: what a user who never saw this repository has.

Wheels and sdists are built by hatchling's own hooks, so nothing is fetched. An environment is a virtual environment of
its own into which wheels are installed by pip. What core *declares* to need, and what that needs in turn, it finds
through a folder of links to the environment the tests run in: torch is not installed a dozen times, and a dependency
that core forgets to declare is missing.
"""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deepinfer.cli.new_backend import Spelling, copy_template

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "examples" / "backend-template"
PROJECTS = {
    "deepinfer-core": ROOT / "deepinfer-core",
    "deepinfer-nvidia": ROOT / "deepinfer-nvidia",
    "deepinfer-ascend": ROOT / "deepinfer-ascend",
    "deepinfer-acme": TEMPLATE,
}

_BUILD = """
import hatchling.build, os, sys
os.chdir(sys.argv[1])
print(hatchling.build.build_sdist(sys.argv[2]), hatchling.build.build_wheel(sys.argv[2]))
"""


@dataclass(frozen=True)
class Built:
    """The two files of a distribution."""

    sdist: Path
    wheel: Path

    def files(self) -> dict[str, bytes]:
        """Contents of the wheel by path, without the record of their checksums."""
        with zipfile.ZipFile(self.wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}

    def metadata(self) -> email.message.Message:
        """Metadata of the wheel."""
        (name,) = (name for name in self.files() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(self.files()[name])


def build(project: Path, out: Path) -> Built:
    """Build sdist and wheel of a project folder, as `python -m build --no-isolation` does."""
    out.mkdir(parents=True, exist_ok=True)
    made = subprocess.run([sys.executable, "-c", _BUILD, project, out], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    sdist, wheel = made.stdout.split()[-2:]
    return Built(out / sdist, out / wheel)


@pytest.fixture(scope="session")
def builder() -> Callable[[Path, Path], Built]:
    """`build`."""
    return build


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    """The three distributions and the template, built from the working tree."""
    out = tmp_path_factory.mktemp("builds")
    return {name: build(project, out / name) for name, project in PROJECTS.items()}


# --- what core declares to need -------------------------------------------------------------------------------------


def needed(requirements: Iterable[str], extras: frozenset[str] = frozenset()) -> Iterator[Requirement]:
    """Requirements that apply here, with `extras` asked for."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (extras or {""})):
            yield requirement


def closure(requirements: Iterable[Requirement]) -> dict[str, metadata.Distribution]:
    """Installed distributions that satisfy `requirements` and, in turn, their own; {canonical name: distribution}.

    What a third party asks for without its being installed is left out: it was not needed so far.
    """
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(requirement, True) for requirement in requirements]
    while waiting:
        requirement, ours = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            found[key[0]] = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            if ours:
                raise
            continue
        waiting += [(requirement, False) for requirement in needed(found[key[0]].requires or (), key[1])]
    return found


def link_distributions(distributions: Iterable[metadata.Distribution], folder: Path) -> Path:
    """Link every top-level package, module and metadata folder of `distributions` into `folder`."""
    folder.mkdir()
    for distribution in distributions:
        assert distribution.files, f"{distribution.name} does not list its files"
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder


@pytest.fixture(scope="session")
def third_party(builds: dict[str, Built], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that holds what core's wheel requires, and nothing else."""
    requirements = needed(builds["deepinfer-core"].metadata().get_all("Requires-Dist"))
    return link_distributions(closure(requirements).values(), tmp_path_factory.mktemp("third_party") / "packages")


@pytest.fixture(scope="session")
def test_tools(builds: dict[str, Built], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what `deepinfer-core[test]` requires besides, and pip."""
    requirements = [*needed(builds["deepinfer-core"].metadata().get_all("Requires-Dist"), frozenset({"test"}))]
    tools = closure([*requirements, Requirement("pip")])
    return link_distributions(tools.values(), tmp_path_factory.mktemp("test_tools") / "packages")


# --- environments ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """A virtual environment. `home` is the home folder of the programs that run in it."""

    folder: Path
    home: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        """Its site-packages."""
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.folder)}))

    def install(self, *wheels: Path) -> Environment:
        """Install wheels by pip, without their dependencies."""
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", "--quiet"]
        options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
        made = subprocess.run([*pip, "install", *options, *wheels], capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        return self

    def edit(self, file: str, old: str, new: str) -> Environment:
        """Replace `old` by `new` in an installed file; it must be there."""
        replace_text(self.site / file, old, new)
        return self

    def run(self, *command: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, with these variables and a bare minimum of others."""
        names = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "LANG", "TMPDIR")
        kept = {name: os.environ[name] for name in names if name in os.environ}
        own = {"PATH": f"{self.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin", "HOME": str(self.home)}
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PIP_NO_INDEX": "1"}
        return subprocess.run(
            [str(self.folder / "bin" / command[0]) if (self.folder / "bin" / command[0]).exists() else command[0],
             *map(str, command[1:])],
            cwd=cwd or self.home, env=kept | own | offline | variables, capture_output=True, text=True, timeout=900,
        )  # fmt: skip

    def deepinfer(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the `deepinfer` command."""
        return self.run(self.python, "-m", "deepinfer", *arguments, **variables)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder that all environments share, so that kernels are built once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def environment(tmp_path: Path, home: Path, third_party: Path) -> Callable[..., Environment]:
    """`environment(wheel, ...)`: a new environment with these wheels installed."""
    counter = iter(range(100))

    def make(*wheels: Path, packages: Path = third_party) -> Environment:
        return make_environment(tmp_path / f"environment{next(counter)}", home, packages, wheels)

    return make


def make_environment(folder: Path, home: Path, packages: Path, wheels: Sequence[Path] = ()) -> Environment:
    """A virtual environment at `folder` that sees `packages` besides what is installed into it."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    made = Environment(folder, home)
    (made.site / "packages.pth").write_text(f"{packages}\n")
    for distribution in metadata.distributions(path=[str(packages)]):
        for entry in distribution.entry_points.select(group="console_scripts"):
            write_script(made, entry)
    return made.install(*wheels) if wheels else made


def write_script(environment: Environment, entry: metadata.EntryPoint) -> None:
    """The command that pip would have written for an entry point of a linked distribution."""
    path = environment.folder / "bin" / entry.name
    lines = [f"#!{environment.python}", "import sys", f"from {entry.module} import {entry.attr}"]
    path.write_text("\n".join([*lines, f"sys.exit({entry.attr}())", ""]))
    path.chmod(0o755)


@pytest.fixture(scope="session")
def installed(
    builds: dict[str, Built], home: Path, third_party: Path, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """Core and template from their wheels. Shared: tests must not change it."""
    wheels = (builds["deepinfer-core"].wheel, builds["deepinfer-acme"].wheel)
    return make_environment(tmp_path_factory.mktemp("installed") / "environment", home, third_party, wheels)


@pytest.fixture
def broken(installed: Environment, tmp_path: Path, third_party: Path) -> Environment:
    """A copy of `installed` that a test may spoil."""
    copy = make_environment(tmp_path / "environment", installed.home, third_party)
    shutil.copytree(installed.site, copy.site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="session")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`variant(name, edits, bounds)`: wheel of a copy of the template, renamed and edited.

    edits   {file of the project: (old text, new text)}
    bounds  on deepinfer-core, if other than the template's
    """

    def make(name: str, edits: Mapping[str, tuple[str, str]] | None = None, bounds: str = ">=0.1,<0.2") -> Path:
        folder = tmp_path_factory.mktemp(name)
        copy_template(TEMPLATE, folder / "project", Spelling(name))
        replace_text(folder / "project" / "pyproject.toml", "deepinfer-core>=0.1,<0.2", f"deepinfer-core{bounds}")
        for file, (old, new) in (edits or {}).items():
            replace_text(folder / "project" / file, old, new)
        return build(folder / "project", folder / "built").wheel

    return make


def replace_text(path: Path, old: str, new: str) -> None:
    """Replace a text in a file; it must be there."""
    text = path.read_text()
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new))
