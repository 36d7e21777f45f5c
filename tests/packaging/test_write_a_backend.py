"""`docs/write-a-backend.md`, done as it says in an environment that holds core's wheel and its test tools.

Commands are the `sh` blocks; a `text` block after one holds lines of what it prints, in order; `...` is anything. A
comment before a block says what happens to a file, or how the command ends:

    file: PATH      the block is the whole file          append: PATH   the block goes to its end
    method: PATH    the block replaces the method        undo           the last change is taken back
    fails           the command ends with an error
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "write-a-backend.md"
PIECE = re.compile(r"^<!-- (?P<what>\w+)(: (?P<path>\S+))? -->$|^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.M | re.S)


@dataclass
class Piece:
    """A directive or a block, and the line it is on."""

    line: int
    what: str | None
    path: str | None
    kind: str | None
    body: str | None


def pieces(text: str) -> Iterator[Piece]:
    for found in PIECE.finditer(text):
        yield Piece(text[: found.start()].count("\n") + 1, *found.group("what", "path", "kind", "body"))


def append(text: str, body: str) -> str:
    """Methods are set off by one line, functions by two."""
    return text.rstrip("\n") + ("\n\n" if body.startswith(" ") else "\n\n\n") + body


def method(text: str, body: str) -> str:
    """`text` with its method of the same name replaced."""
    name = re.match(r" +def (\w+)\(", body).group(1)
    found = re.search(rf"^    def {name}\(.*?(?=^    (def|@)|^\S|\Z)", text, re.M | re.S)
    rest = text[found.end() :]
    return text[: found.start()] + body + ("\n" if rest else "") + rest


EDITS = {"file": lambda text, body: body, "append": append, "method": method}


@dataclass
class Session:
    """The reader's folder while the page is worked through."""

    environment: object
    folder: Path
    variables: dict[str, str]
    output: str = ""
    before: tuple[Path, str] | None = None
    ran: list[str] = field(default_factory=list)

    def edit(self, how: str, name: str, body: str) -> None:
        path = self.folder / name
        old = path.read_text() if path.exists() else ""
        self.before = (path, old)
        path.write_text(EDITS[how](old, body))

    def undo(self) -> None:
        path, old = self.before
        path.write_text(old)

    def command(self, body: str, fails: bool) -> None:
        result = self.environment.run("bash", "-euo", "pipefail", "-c", body, cwd=self.folder, **self.variables)
        self.output = result.stdout + result.stderr
        assert (result.returncode != 0) == fails, self.output
        self.ran.append(body)

    def prints(self, body: str) -> None:
        lines, start = [" ".join(line.split()) for line in self.output.splitlines()], 0
        for wanted in body.splitlines():
            found = next((i for i in range(start, len(lines)) if pattern(wanted).fullmatch(lines[i])), None)
            assert found is not None, f"no line like {wanted!r} after line {start} of:\n{self.output}"
            start = found + 1


def pattern(line: str) -> re.Pattern[str]:
    """What matches a line of a `text` block: any width of spaces, anything for "..."."""
    return re.compile(re.sub(r"(\\ )?(\\\.){3}(\\ )?", ".*", re.escape(" ".join(line.split()))))


def test_every_block_is_understood():
    """No block of the page is left out by a typo in its fence or its comment."""
    text = PAGE.read_text()
    known = list(pieces(text))
    assert {piece.kind for piece in known if piece.kind} == {"sh", "text", "python"}
    assert {piece.what for piece in known if piece.what} <= {"file", "append", "method", "undo", "fails"}
    assert 2 * sum(bool(piece.kind) for piece in known) == len(re.findall("^```", text, re.M))
    assert sum(bool(piece.what) for piece in known) == text.count("<!--")
    for piece, before in zip(known[1:], known, strict=False):
        if piece.kind == "python":
            assert before.path, f"line {piece.line}: python without the file it belongs to"


@pytest.mark.slow
def test_the_page_works_as_written(builds, environment, test_tools, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / builds["deepinfer-core"].wheel.name).write_bytes(builds["deepinfer-core"].wheel.read_bytes())
    variables = {"PIP_FIND_LINKS": str(wheels), "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    session = Session(environment(packages=test_tools), tmp_path / "work", variables)
    session.folder.mkdir()
    pending: Piece | None = None
    for piece in pieces(PAGE.read_text()):
        try:
            if piece.what == "undo":
                session.undo()
            elif piece.what:
                pending = piece
            elif piece.kind == "python":
                session.edit(pending.what, pending.path, piece.body)
                pending = None
            elif piece.kind == "sh":
                session.command(piece.body, fails=pending is not None and pending.what == "fails")
                pending = None
            else:
                session.prints(piece.body)
        except AssertionError as error:
            raise AssertionError(f"{PAGE.name}, line {piece.line}: {error}") from error
    assert len(session.ran) == PAGE.read_text().count("```sh")
