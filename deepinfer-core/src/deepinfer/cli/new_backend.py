"""`deepinfer new-backend`: copies the backend template and gives it another name.

The template is `examples/backend-template` of the repository; a wheel of core carries a copy of it.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from deepinfer.errors import ConfigError

HELP = """\
Creates a backend package: installable, with a few native operations of its own, the rest served by core, and already
passing conformance. Replace its operations by yours one after the other; docs/write-a-backend.md leads the way."""
EXAMPLES = """\
example:
  deepinfer new-backend mychip
  pip install -e ./deepinfer-mychip
  deepinfer ops --accelerator mychip
"""

TEMPLATE_NAME = "acme"
"""What the template calls its device, in every file and file name."""

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_NOT_COPIED = {"__pycache__", "build", "dist"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `deepinfer new-backend`."""
    add = parser.add_argument
    add("name", help="name of the device, for DEEPINFER_ACCELERATOR: lower-case letters, digits, underscores")
    add("--dir", type=Path, metavar="DIR", help="folder to create, or an empty one (default: ./deepinfer-NAME)")


def run(args: argparse.Namespace) -> int:
    """Copies the template and says what to do next."""
    spelling = Spelling.of(args.name)
    folder = args.dir or Path(spelling.distribution)
    count = copy_template(find_template(), folder, spelling)
    print(
        f"{folder}: {count} files of {spelling.distribution}, a backend named {spelling.name}\n\n"
        f"next steps:\n"
        f"  pip install -e {folder if folder.is_absolute() else f'./{folder}'}\n"
        f"  deepinfer ops --accelerator {spelling.name}\n"
        f"  deepinfer conformance --backend {spelling.name} --quick"
    )
    return 0


@dataclass(frozen=True, slots=True)
class Spelling:
    """One name in the four ways a package spells it: my_chip, deepinfer-my-chip, MyChip, MY_CHIP."""

    name: str

    @classmethod
    def of(cls, name: str) -> Spelling:
        """The spelling of a name that a new backend may carry. Raises `ConfigError` for any other."""
        if not _NAME.fullmatch(name):
            close = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
            hint = f" Did you mean {close}?" if _NAME.fullmatch(close) else ""
            raise ConfigError(
                f"backend name {name!r}: expected lower-case letters and digits, starting with a letter, with single "
                f"underscores between them.{hint}"
            )
        _refuse_taken(name)
        return cls(name)

    @property
    def distribution(self) -> str:
        """Name of the distribution."""
        return f"deepinfer-{self.name.replace('_', '-')}"

    def apply(self, text: str) -> str:
        """`text` of the template with every spelling of its name replaced by ours."""
        ours = {
            f"deepinfer-{TEMPLATE_NAME}": self.distribution,
            TEMPLATE_NAME: self.name,
            TEMPLATE_NAME.capitalize(): self.name.title().replace("_", ""),
            TEMPLATE_NAME.upper(): self.name.upper(),
        }
        return re.sub("|".join(ours), lambda found: ours[found.group()], text)


def _refuse_taken(name: str) -> None:
    """Raise for names that would be ambiguous where backends and op providers are chosen."""
    from deepinfer.hooks.discover import installed
    from deepinfer.hooks.record import RESERVED_NAMES

    if name in RESERVED_NAMES:
        raise ConfigError(f"backend name {name!r} means core's own operations; choose another")
    for entry in installed(name=name):
        raise ConfigError(
            f"backend name {name!r} is taken by {entry.distribution} {entry.version}, which is installed here; "
            f"choose another, or uninstall it first"
        )


def find_template() -> Path:
    """Folder of the template: inside the installed package, or in the repository of an editable installation."""
    package = Path(__file__).resolve().parents[1]
    places = (package / "templates" / "backend", package.parents[2] / "examples" / "backend-template")
    for place in places:
        if (place / "pyproject.toml").exists():
            return place
    raise ConfigError(
        f"the backend template is missing; looked in {' and '.join(map(str, places))}.\n"
        f"  Repair the installation: pip install --force-reinstall --no-deps deepinfer-core"
    )


def copy_template(source: Path, folder: Path, spelling: Spelling) -> int:
    """Write the template's files into `folder` under the new name. Returns how many.

    Raises `ConfigError` if `folder` holds anything already; nothing is written then.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise ConfigError(f"{folder} {what}; name another folder with --dir, or remove it first")
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and _is_copied(path.relative_to(source))]
    for path in files:
        target = folder / spelling.apply(path.relative_to(source).as_posix())
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(spelling.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
    return len(files)


def _is_copied(inside: Path) -> bool:
    return not any(part in _NOT_COPIED or part.startswith(".") for part in inside.parts)
