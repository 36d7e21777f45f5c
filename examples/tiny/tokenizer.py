"""Trains the byte-level BPE tokenizers of the tiny models and writes their two files.

    python tokenizer.py --cache FOLDER --out FOLDER --entries 8192

Half of the real text (every second document) and 5 MB of generated text decide the merges. Every decimal digit is a
token of its own, line breaks are too; special tokens have fixed ids. Needs `corpus.jsonl` from `corpus.py`. The files
load with `deepinfer.hub.tokenizer.Tokenizer`; the number of Engram classes, which belongs into the model configuration
as `engram_compressed_vocab_size`, is printed and written to `classes.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from corpus import read_corpus
from families import CI_SHARES, sample_text
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from deepinfer.hub.byte_tokenizer import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    IMAGE,
    PAD,
    REMINDER,
    SYSTEM,
    THINK,
    USER,
    byte_symbols,
)
from deepinfer.hub.tokenizer import Tokenizer
from deepinfer.hub.vocabulary import compress_vocabulary

SPECIAL = 64
NOISE = "<｜dspark_noise｜>"
NAMED = (BOS, EOS, PAD, USER, ASSISTANT, SYSTEM, THINK, END_THINK, IMAGE, NOISE, REMINDER, DSML)
"""Ids 0 to 11; the ids up to 63 are reserved, the 256 bytes follow, then the merges."""
WORDS = r"\d|\n| ?\p{L}+| ?[^\s\p{L}\d]+|[^\S\n]+(?!\S)|[^\S\n]+"
"""What a token may lie within: one digit, one line break, blank + letters, blank + other symbols, a run of blanks."""
GENERATED_CHARACTERS = 5_000_000
CI_REAL_SHARE = 40
"""The companion's tokenizer sees one real document in so many."""


def special_tokens() -> list[str]:
    return [*NAMED, *(f"<｜reserved_{number:02d}｜>" for number in range(len(NAMED), SPECIAL))]


def train(texts: Iterable[str], entries: int) -> Backend:
    """A tokenizer of exactly `entries` ids. Raises RuntimeError if the texts do not have enough different pairs."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in special_tokens()]
    trainer = trainers.BpeTrainer(
        vocab_size=entries, special_tokens=special, initial_alphabet=byte_symbols(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return _in_order(backend, entries)


def _in_order(trained: Backend, entries: int) -> Backend:
    """The same merges with fixed ids: special tokens, bytes in byte order, merges in the order they were learned."""
    state = json.loads(trained.to_str())
    learned = sorted(state["model"]["vocab"].items(), key=lambda entry: entry[1])
    fixed = [*special_tokens(), *byte_symbols()]
    known = set(fixed)
    order = [*fixed, *(token for token, _ in learned if token not in known)]
    if len(order) != entries:
        raise RuntimeError(f"tokenizer: found {len(order)} entries, expected {entries}; the text has too few pairs")
    state["model"]["vocab"] = {token: index for index, token in enumerate(order)}
    for added in state["added_tokens"]:
        added["id"] = order.index(added["content"])
    return Backend.from_str(json.dumps(state))


def save(backend: Backend, folder: Path) -> int:
    """Write the files, load them as the engine does, return the number of Engram classes."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
        "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    text = json.dumps(settings, ensure_ascii=False, indent=1) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    _, classes = compress_vocabulary(Tokenizer(folder, "native"))
    (folder / "classes.json").write_text(json.dumps({"engram_compressed_vocab_size": classes}) + "\n")
    return classes


def training_texts(cache: Path, ci: bool) -> Iterator[str]:
    """Every second (companion: every fortieth) real training document, then generated text."""
    step = CI_REAL_SHARE if ci else 2
    real = (entry["text"] for entry in read_corpus(cache) if entry["part"] == "train")
    yield from (text for number, text in enumerate(real) if number % step == 0)
    yield from sample_text(GENERATED_CHARACTERS, CI_SHARES if ci else None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="folder with corpus.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--entries", type=int, required=True)
    parser.add_argument("--ci", action="store_true", help="text of the small companion model")
    options = parser.parse_args(arguments)
    classes = save(train(training_texts(options.cache, options.ci), options.entries), options.out)
    print(f"{options.out}: {options.entries} entries, {classes} Engram classes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
