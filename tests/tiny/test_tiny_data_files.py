"""Corpus cleaning, the tokenizer rules and the token files, on texts small enough to build here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizer as training
import tokens
from corpus import CHUNK, HELD_OUT, chunked, clean, clean_documents, split
from families import FAMILIES, VALID_SEEDS, document, sample_text
from family_types import text_of
from html_text import html_text
from sources import SOURCES, UNWANTED_PAGES

from deepinfer.hub.byte_tokenizer import ASSISTANT, BOS, EOS, PAD, USER
from deepinfer.hub.tokenizer import Tokenizer

ENTRIES = 500
SENTENCE = "The quick brown fox jumps over the lazy dog and looks for something to eat in the garden behind the house."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trained tokenizer."""
    out = tmp_path_factory.mktemp("tokenizer")
    training.save(training.train(sample_text(60_000), ENTRIES), out)
    return out


@pytest.fixture(scope="module")
def small(folder: Path) -> Tokenizer:
    return Tokenizer(folder, "native")


# --- text of pages ---------------------------------------------------------------------------------------------------


def test_html_keeps_text_and_drops_furniture() -> None:
    page = """<html><head><title>no</title></head><body><nav>no</nav><div class="related"><div>no</div>no</div>
    <h1>Head<a class="headerlink" href="#x">¶</a></h1><p>One  <b>two</b>\n three &amp; four.<p>Five</p>
    <pre>  a\n    b</pre><table><tr><td><p>x</p><td>y</tr></table><script>no()</script></body></html>"""
    text = html_text(page)
    assert text.split("\n") == ["Head", "", "One two three & four.", "", "Five", "", "  a", "    b", "", "x y"]


def test_unwanted_pages_are_known_by_their_paths() -> None:
    assert UNWANTED_PAGES.search("/genindex-A.html") and UNWANTED_PAGES.search("/releases/1.8.html")
    assert not UNWANTED_PAGES.search("/ref/settings.html") and not UNWANTED_PAGES.search("/library/allos.html")


def test_cleaning() -> None:
    seen: set[int] = set()
    long = "x" * 70
    assert clean(f"a  \r\nb¶\n\n\n\nc\n{long}\n{long}\nd", seen) == f"a\nb\n\nc\n{long}\nd"
    assert clean(f"new\n{long}", seen) == "new"
    assert list(clean_documents(["short"], seen)) == []


def test_chunks_lose_only_blank_lines_and_stay_small() -> None:
    text = "\n\n".join(f"paragraph {number} " + "word " * 50 for number in range(300))
    chunks = list(chunked(text))
    assert len(chunks) > 1 and all(0 < len(chunk) <= CHUNK for chunk in chunks)
    assert "".join(chunks).replace("\n", "") == text.replace("\n", "")
    assert [len(chunk) for chunk in chunked("y" * (CHUNK + 5))] == [CHUNK, 5]


def test_split_is_fixed_and_holds_one_in_a_hundred_out() -> None:
    texts = [f"{number} " * 100 for number in range(500)]
    first = split(texts, "name")
    assert first == split(texts, "name")
    assert first != split(texts, "other")
    assert sum(part == "valid" for part, _ in first) == 500 // HELD_OUT
    assert sorted(chunk for _, chunk in first) == sorted(texts)


def test_every_source_names_its_rights() -> None:
    assert len({source.name for source in SOURCES}) == len(SOURCES)
    assert all(source.license and source.holders and source.packages for source in SOURCES)


# --- tokenizer -------------------------------------------------------------------------------------------------------


def test_special_tokens_and_bytes_have_their_ids(small: Tokenizer) -> None:
    assert small.vocab_size == ENTRIES
    assert [small.token_id(token) for token in training.special_tokens()] == list(range(64))
    assert (small.bos_id, small.eos_ids, small.pad_id) == (0, (1,), 2)
    assert [small.token_bytes(64 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert small.encode(f"{BOS}{USER}a{ASSISTANT}")[:2] == [0, 3] and small.encode(f"{EOS}{PAD}", add_bos=False) == [
        1,
        2,
    ]


def test_no_token_spans_a_digit_or_a_line_break(small: Tokenizer) -> None:
    for token_id in range(320, ENTRIES):
        text = small.token_bytes(token_id)
        assert not any(48 <= byte <= 57 for byte in text), text
        assert b"\n" not in text
    assert len(small.encode("2021-03-05", add_bos=False)) == 10


@pytest.mark.parametrize("text", ["  def f(x):\n\n    return x  # 12,5 %", "Zoë 🦙 日本 \t½ ٣", "a\r\nb", ""])
def test_every_text_comes_back(small: Tokenizer, text: str) -> None:
    assert small.decode(small.encode(text, add_bos=False)) == text


def test_training_twice_gives_the_same_file(folder: Path, tmp_path: Path) -> None:
    training.save(training.train(sample_text(60_000), ENTRIES), tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="expected 8192"):
        training.train(["abc"], 8192)


def test_class_count_is_what_the_engine_computes(folder: Path, small: Tokenizer) -> None:
    from deepinfer.hub.vocabulary import compress_vocabulary

    written = json.loads((folder / "classes.json").read_text())["engram_compressed_vocab_size"]
    assert compress_vocabulary(small, expected=written)[1] == written < ENTRIES


# --- token files -----------------------------------------------------------------------------------------------------


def test_documents_become_ids_and_weights(small: Tokenizer) -> None:
    (found,) = tokens.encode_documents(small, [[("12+30=", 0.3), ("42", 1.0)]])
    assert found.ids[0] == 0 and found.ids[-1] == 1
    assert small.decode(found.ids[1:-1].tolist()) == "12+30=42"
    assert found.weights.tolist() == [0, *[30] * 6, 100, 100, 100]
    assert found.size == 8


def test_answers_begin_at_the_border_of_the_prompt(small: Tokenizer) -> None:
    """A prompt and the training document agree token for token."""
    for family in ("arithmetic", "records", "formats", "words", "chat"):
        for seed in range(20):
            (prompt, _), *_ = pieces = document(family, seed)
            (found,) = tokens.encode_documents(small, [pieces])
            asked = small.encode(prompt)
            assert found.ids[: len(asked)].tolist() == asked


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A corpus of two sources with three training documents and one validation document each."""
    lines, manifest = [], {"sources": {}, "skipped": {"third": "left out on request (--skip)"}}
    for source in ("first", "second"):
        for number in range(4):
            part = "valid" if number == 0 else "train"
            lines.append({"source": source, "part": part, "text": f"{source} {number}: {SENTENCE}"})
        manifest["sources"][source] = {
            "package": source, "version": "1", "license": "public domain", "sha256": "0", "packages": [],
        }  # fmt: skip
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "corpus.json").write_text(json.dumps(manifest))
    return tmp_path


@pytest.fixture
def built(corpus: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    mix = tokens.Mix(6_000, {"arithmetic": 0.5, "records": 0.5}, 1.0)
    monkeypatch.setitem(tokens.MIXES, "text", mix)
    monkeypatch.setattr(tokens, "VALID_DOCUMENTS", 5)
    tokens.build(corpus, folder, corpus / "out", "text")
    return corpus / "out"


def test_token_files_round_trip(built: Path, small: Tokenizer) -> None:
    data = json.loads((built / "data.json").read_text())
    for name in ("train", "valid"):
        ids, weights = tokens.read_part(built, name)
        part = data["parts"][name]
        assert len(ids) == len(weights) == part["tokens"] == part["segments"][-1]["stop"]
        assert set(weights.tolist()) == {0, 30, 100}
        assert np.array_equal(np.flatnonzero(weights == 0), np.flatnonzero(ids == 0))
        for segment in part["segments"]:
            inside = ids[segment["start"] : segment["stop"]]
            assert inside[0] == 0 and inside[-1] == 1 and np.count_nonzero(inside == 0) == segment["documents"]
            text = small.decode(inside.tolist(), skip_special_tokens=True)
            assert len(text.encode()) == segment["bytes"]
    assert [segment["name"] for segment in data["parts"]["train"]["segments"]] == [
        "real/first",
        "real/second",
        "generated",
    ]
    assert data["skipped"] == {"third": "left out on request (--skip)"}


def test_validation_documents_are_those_of_the_validation_seeds(built: Path, small: Tokenizer) -> None:
    data = json.loads((built / "data.json").read_text())
    ids, _ = tokens.read_part(built, "valid")
    segment = next(s for s in data["parts"]["valid"]["segments"] if s["name"] == "generated/records")
    found = small.decode(ids[segment["start"] : segment["stop"]].tolist(), skip_special_tokens=True)
    assert found == "".join(text_of(document("records", seed)) for seed in VALID_SEEDS[:5])


def test_a_damaged_file_is_noticed(built: Path) -> None:
    import lzma

    (built / "valid.weights.xz").write_bytes(lzma.compress(b"\x00" * 10))
    with pytest.raises(ValueError, match=r"valid\.weights\.xz: found SHA-256"):
        tokens.read_part(built, "valid")


def test_mixes_name_known_families() -> None:
    for mix in tokens.MIXES.values():
        assert set(mix.shares) <= set(FAMILIES)
