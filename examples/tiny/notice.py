"""Writes NOTICE texts: for a checkpoint, and for the pieces of validation text in `evaluation/held_out.jsonl`.

    python notice.py --data data.json --checkpoint FOLDER       writes FOLDER/NOTICE and FOLDER/LICENSE
    python notice.py --data data.json --held-out                writes evaluation/NOTICE

`data.json` is the description of the token files (`tokens.py`): it names packages, versions and licences. Copyright
lines come from `sources.py`, licence texts from `licenses/`; both were taken from the packages' own copyright files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from evaluation_sets import FOLDER
from sources import SOURCES

HERE = Path(__file__).parent
REPOSITORY_LICENSE = HERE.parents[1] / "LICENSE"
LICENSE_TEXTS = {
    "PSF-2.0": "PSF-2.0.txt",
    "WordNet 3.0": "WordNet-3.0.txt",
    "PostgreSQL": "PostgreSQL.txt",
    "MIT or Apache-2.0": "MIT-Rust.txt",
    "BSD-3-Clause": "BSD-3-Clause-Django.txt",
}
WITHOUT_TEXT = frozenset(("public domain", "public domain (texts)", "copyright expired"))
TRAINED = """{name}
Copyright {year} The DeepInfer authors

The weights and the tokenizer were trained from scratch and are licensed under the Apache License, Version 2.0
(see LICENSE). Besides text that a program of this project generates they were trained on the texts below, which are
not part of this checkpoint. Names of authors and institutions are given for attribution only; none of them endorses
this work.
"""
HELD_OUT = """Pieces of text in held_out.jsonl

At most 24 kB of every source below, for measuring the loss of a language model. White space was normalised and
repeated lines were removed; the words were not changed.
"""


def notice(data: dict[str, Any], head: str) -> str:
    """Head, one paragraph a source, then every licence text that a source needs. Raises ValueError for a licence
    without a text."""
    known = {source.name: source for source in SOURCES}
    parts, texts = [head], {}
    for name, entry in data["sources"].items():
        source = known[name]
        if source.license not in WITHOUT_TEXT and source.license not in LICENSE_TEXTS:
            raise ValueError(f"{name}: found licence {source.license!r}, expected one of {sorted(LICENSE_TEXTS)}")
        lines = [name, f"  package {entry['package']} {entry['version']}, licence: {source.license}"]
        parts.append("\n".join((*lines, *(f"  {holder}" for holder in source.holders))) + "\n")
        if source.license in LICENSE_TEXTS:
            texts[source.license] = (HERE / "licenses" / LICENSE_TEXTS[source.license]).read_text(encoding="utf-8")
    parts += [f"{'=' * 100}\n{license}\n\n{text}" for license, text in texts.items()]
    return "\n".join(parts)


def write_checkpoint_notice(data: dict[str, Any], folder: Path, name: str, year: str) -> None:
    """NOTICE and LICENSE beside the weights."""
    (folder / "NOTICE").write_text(notice(data, TRAINED.format(name=name, year=year)), encoding="utf-8")
    shutil.copyfile(REPOSITORY_LICENSE, folder / "LICENSE")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="data.json of the token files")
    parser.add_argument("--checkpoint", type=Path, help="folder of the checkpoint")
    parser.add_argument("--name", default="v41-tiny-text")
    parser.add_argument("--year", default="2026")
    parser.add_argument("--held-out", action="store_true", help="write the notice of the validation text")
    options = parser.parse_args(arguments)
    data = json.loads(options.data.read_text(encoding="utf-8"))
    if options.checkpoint:
        write_checkpoint_notice(data, options.checkpoint, options.name, options.year)
    if options.held_out:
        (FOLDER / "NOTICE").write_text(notice(data, HELD_OUT), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
