"""Writes the token files that training reads: ids, loss weights and a description, see `TOKENS.md`.

    python tokens.py --cache FOLDER --tokenizer FOLDER --out FOLDER --mix text|ci

Called once after `corpus.py` and `tokenizer.py`. A document is `BOS text EOS`; its pieces are tokenized one by one, so
a border between question and answer is a border of tokens, as it is when a prompt ends there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from corpus import SPLIT_SEED, read_corpus
from families import CI_SHARES, FAMILIES, TRAIN_SEEDS, VALID_SEEDS, document
from family_types import ANSWER, Document, text_of

from deepinfer.hub.tokenizer import Tokenizer
from deepinfer.hub.vocabulary import compress_vocabulary

BOS, EOS = 0, 1
SHUFFLE_SEED = 4_101
VALID_DOCUMENTS = 200
"""Validation documents of every family."""
BATCH = 512
"""Documents that are generated and tokenized at once."""
XZ_FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 1, "pb": 1, "dict_size": 1 << 27}
]
"""16-bit values: the low bytes are modelled apart from the high bytes, and the window spans the whole file."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What one model is trained on."""

    generated_tokens: int
    shares: dict[str, float]
    real_share: float
    """part of the real training documents of every source that is used"""


MIXES = {
    "text": Mix(28_000_000, {family.name: family.share for family in FAMILIES.values()}, 1.0),
    "ci": Mix(6_500_000, CI_SHARES, 0.06),
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document: ids with BOS and EOS, weights of predicting them (hundredths), UTF-8 bytes of its text."""

    ids: np.ndarray
    weights: np.ndarray
    size: int


@dataclass(slots=True)
class Part:
    """A part of the file under construction: documents behind each other, grouped in segments."""

    ids: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    length: int = 0

    def add_segment(self, name: str, documents: Iterable[Encoded]) -> dict[str, Any]:
        start, number, size = self.length, 0, 0
        for encoded in documents:
            self.ids.append(encoded.ids)
            self.weights.append(encoded.weights)
            self.length += len(encoded.ids)
            number, size = number + 1, size + encoded.size
        kind = name.partition("/")[0]
        segment = {"name": name, "kind": kind, "start": start, "stop": self.length, "documents": number, "bytes": size}
        self.segments.append(segment)
        return segment


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> list[Encoded]:
    """Ids and weights of documents; the special tokens that a chat spells out become their ids."""
    pieces = [text for pieces in documents for text, _ in pieces]
    encodings = iter(tokenizer.backend.encode_batch(pieces, add_special_tokens=False))
    result = []
    for pieces in documents:
        ids, weights = [BOS], [0]
        for _, weight in pieces:
            found = next(encodings).ids
            ids += found
            weights += [round(weight * 100)] * len(found)
        size = len(text_of(pieces).encode())
        result.append(Encoded(np.array([*ids, EOS], dtype="<u2"), np.array([*weights, 100], dtype="u1"), size))
    return result


def encoded(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[Encoded]:
    documents = iter(documents)
    while batch := list(islice(documents, BATCH)):
        yield from encode_documents(tokenizer, batch)


def until(documents: Iterable[Encoded], tokens: int) -> list[Encoded]:
    """The first documents that hold so many tokens together."""
    taken, total = [], 0
    for item in documents:
        if total >= tokens:
            break
        taken.append(item)
        total += len(item.ids)
    return taken


def build(cache: Path, tokenizer_folder: Path, out: Path, mix_name: str) -> dict[str, Any]:
    """Write the four files and `data.json` into `out`; returns the latter."""
    tokenizer, mix = Tokenizer(tokenizer_folder, "native"), MIXES[mix_name]
    manifest = json.loads((cache / "corpus.json").read_text())
    texts: dict[tuple[str, str], list[str]] = {}
    for entry in read_corpus(cache):
        texts.setdefault((entry["part"], entry["source"]), []).append(entry["text"])
    train, valid = Part(), Part()
    sources = {}
    for name, described in manifest["sources"].items():
        kept = texts["train", name]
        kept = kept[: max(1, round(len(kept) * mix.real_share))]
        segment = train.add_segment(f"real/{name}", encoded(tokenizer, ([(text, ANSWER)] for text in kept)))
        valid.add_segment(f"real/{name}", encoded(tokenizer, ([(text, ANSWER)] for text in texts["valid", name])))
        counts = {"documents": segment["documents"], "tokens": segment["stop"] - segment["start"]}
        sources[name] = {
            key: described[key] for key in ("package", "version", "license", "sha256", "packages")
        } | counts
    families = _add_generated(tokenizer, mix, train, valid)
    data = {
        "format": 1, "name": mix_name, "vocab_size": tokenizer.vocab_size,
        "engram_compressed_vocab_size": compress_vocabulary(tokenizer)[1],
        "parts": {name: _write(part, out, name) for name, part in (("train", train), ("valid", valid))},
        "families": families, "sources": sources, "skipped": manifest["skipped"],
        "seeds": {"split": SPLIT_SEED, "shuffle": SHUFFLE_SEED},
        "tokenizer_sha256": hashlib.sha256((tokenizer_folder / "tokenizer.json").read_bytes()).hexdigest(),
    }  # fmt: skip
    (out / "data.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return data


def _add_generated(tokenizer: Tokenizer, mix: Mix, train: Part, valid: Part) -> dict[str, Any]:
    """One shuffled training segment of all families; a validation segment of each."""
    everything: list[Encoded] = []
    records = {}
    for name, share in mix.shares.items():
        stream = encoded(tokenizer, (document(name, seed) for seed in count(TRAIN_SEEDS.start)))
        taken = until(stream, round(mix.generated_tokens * share))
        everything += taken
        tokens = sum(len(item.ids) for item in taken)
        records[name] = {
            "documents": len(taken),
            "tokens": tokens,
            "first_seed": TRAIN_SEEDS.start,
            "seeds": len(taken),
        }
        seeds = VALID_SEEDS[:VALID_DOCUMENTS]
        valid.add_segment(f"generated/{name}", encoded(tokenizer, (document(name, seed) for seed in seeds)))
        print(f"{name}: {len(taken)} documents, {tokens} tokens", file=sys.stderr)
    Random(SHUFFLE_SEED).shuffle(everything)
    train.add_segment("generated", everything)
    return records


def _write(part: Part, out: Path, name: str) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"tokens": part.length}
    for what, arrays in (("tokens", part.ids), ("weights", part.weights)):
        raw = np.concatenate(arrays).tobytes()
        filters = XZ_FILTERS if what == "tokens" else None
        packed = lzma.compress(raw, filters=filters) if filters else lzma.compress(raw, preset=9)
        (out / f"{name}.{what}.xz").write_bytes(packed)
        record[f"sha256_{what}"] = hashlib.sha256(raw).hexdigest()
        print(f"{name}.{what}.xz: {len(raw) / 1e6:.2f} MB, packed {len(packed) / 1e6:.2f} MB", file=sys.stderr)
    return record | {"segments": part.segments}


def read_part(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids uint16, weights uint8) of a part, checked against the sums in `data.json`. Raises ValueError."""
    record = json.loads((folder / "data.json").read_text())["parts"][name]
    arrays = []
    for what, kind in (("tokens", "<u2"), ("weights", "u1")):
        raw = lzma.decompress((folder / f"{name}.{what}.xz").read_bytes())
        found = hashlib.sha256(raw).hexdigest()
        if found != record[f"sha256_{what}"]:
            raise ValueError(f"{folder}/{name}.{what}.xz: found SHA-256 {found}, expected {record[f'sha256_{what}']}")
        arrays.append(np.frombuffer(raw, dtype=kind))
    return arrays[0], arrays[1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="folder with corpus.jsonl and corpus.json")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mix", choices=sorted(MIXES), required=True)
    options = parser.parse_args(arguments)
    build(options.cache, options.tokenizer, options.out, options.mix)
    return 0


if __name__ == "__main__":
    sys.exit(main())
