"""Tokenizer files: both policies, the one BOS rule, end tokens, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import RequestError, TokenizerError
from deepinfer.hub.byte_tokenizer import BOS, EOS, PAD, build_byte_tokenizer
from deepinfer.hub.tokenizer import Tokenizer
from deepinfer.hub.tokenizer_files import PLACEHOLDERS, RELEASE_VOCAB_SIZE

TINY = Tokenizer.byte_level(512)


@pytest.fixture
def files(checkpoints: Callable[[str], Path], tmp_path: Path) -> Path:
    """Tokenizer files of the tiny checkpoint, free to change."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoints("tiny") / name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module")
def release_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that fit the release: 129,280 ids, its class, its special tokens."""
    directory = tmp_path_factory.mktemp("release")
    build_byte_tokenizer(RELEASE_VOCAB_SIZE, 99_092, 129_264).save(str(directory / "tokenizer.json"))
    write(directory / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizerFast"})
    return directory


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def change(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes a key."""
    value = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    write(path, {key: item for key, item in value.items() if item is not None})


def test_tiny_recipe() -> None:
    assert TINY.encode("The the and\n\n in THE", add_bos=False) == [262, 263, 268, 272, 270, 35, 87, 75, 72]
    assert [TINY.token_id(token) for token in (BOS, EOS, PAD, "<｜deepseek_image｜>", "｜DSML｜")] == [
        0,
        1,
        2,
        500,
        503,
    ]
    assert TINY.token_string(275) == "<｜reserved_000｜>"
    assert [TINY.token_string(259 + place) for place in (0, 4, 12, 13)] == ["th", "Ġthe", "ĠĠ", "ĊĊ"]
    assert TINY.token_string(512) is None
    assert TINY.token_string(-1) is None


def test_native_policy(files: Path) -> None:
    tokenizer = Tokenizer(files)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.vocab_size) == (0, (1,), 2, 512)
    assert tokenizer.encode("hi") == [0, 107, 108]
    assert all(tokenizer.token_id(token) is None for token in PLACEHOLDERS)


def test_release_policy(release_files: Path) -> None:
    tokenizer = Tokenizer(release_files)
    assert tokenizer.encode("hi")[0] == 0
    assert tokenizer.vocab_size == 129_280
    assert [tokenizer.token_id(token) for token in PLACEHOLDERS] == list(range(129_280, 129_301))
    assert set(range(129_280, 129_301)) <= tokenizer.special_ids
    assert tokenizer.pad_id == 2


def test_release_files_with_placeholders_already_in_place(release_files: Path, tmp_path: Path) -> None:
    Tokenizer(release_files).backend.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(release_files / "tokenizer_config.json", tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.token_id(PLACEHOLDERS[-1]) == 129_300
    assert tokenizer.vocab_size == 129_280


@pytest.mark.parametrize(
    ("vocab_size", "settings", "reason"),
    [
        (512, {"tokenizer_class": "LlamaTokenizerFast"}, "size of the vocabulary: found 512, expected 129280"),
        (512, {"tokenizer_class": "GPT2Tokenizer"}, "tokenizer_class: found 'GPT2Tokenizer'"),
        (512, {}, "tokenizer_class: found None"),
    ],
)
def test_release_policy_refuses_other_tokenizers(
    tmp_path: Path, vocab_size: int, settings: dict[str, str], reason: str
) -> None:
    build_byte_tokenizer(vocab_size).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", settings)
    with pytest.raises(TokenizerError, match=reason) as caught:
        Tokenizer(tmp_path)
    assert '"tokenizer_compatibility": "native"' in str(caught.value)


def test_policy_argument_overrides_the_file(files: Path) -> None:
    with pytest.raises(TokenizerError, match="size of the vocabulary"):
        Tokenizer(files, compatibility="release")
    change(files / "config.json", tokenizer_compatibility="automatic")
    with pytest.raises(TokenizerError, match="tokenizer_compatibility: found 'automatic'"):
        Tokenizer(files)
    assert Tokenizer(files, compatibility="native").vocab_size == 512


# TK02: exactly one BOS


@pytest.mark.parametrize("text", ["hi", BOS + "hi", "", BOS, " " + "hi", EOS + "hi"])
def test_exactly_one_bos(text: str) -> None:
    ids = TINY.encode(text)
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert TINY.decode(ids) == (text if text.startswith(BOS) else BOS + text)


def test_bos_that_the_user_spells_twice_is_kept() -> None:
    assert TINY.encode(BOS + BOS + "hi")[:3] == [0, 0, 107]
    assert TINY.encode("hi" + BOS).count(0) == 2


def test_bos_can_be_left_out() -> None:
    assert TINY.encode("hi", add_bos=False) == [107, 108]
    assert TINY.encode(BOS + "hi", add_bos=False) == [0, 107, 108]


def test_native_files_decide_about_bos(files: Path) -> None:
    change(files / "tokenizer_config.json", add_bos_token=False)
    assert Tokenizer(files).encode("hi") == [107, 108]
    change(files / "tokenizer_config.json", add_bos_token=None)
    assert Tokenizer(files).encode("hi") == [107, 108]  # its post-processor adds none


def test_native_post_processor_decides_without_the_key(files: Path) -> None:
    from tokenizers import processors

    backend = build_byte_tokenizer(512)
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    backend.save(str(files / "tokenizer.json"))
    change(files / "tokenizer_config.json", add_bos_token=None)
    assert Tokenizer(files).encode("hi") == [0, 107, 108]
    assert Tokenizer(files).encode(BOS + "hi") == [0, 107, 108]


def test_special_tokens_as_objects(files: Path) -> None:
    change(files / "tokenizer_config.json", bos_token={"__type": "AddedToken", "content": EOS})
    assert Tokenizer(files).encode("hi") == [1, 107, 108]


@pytest.mark.parametrize(("vocab_size", "fits"), [(500, True), (512, True), (513, False)])
def test_tokenizer_must_not_be_larger_than_the_embedding(files: Path, vocab_size: int, fits: bool) -> None:
    build_byte_tokenizer(vocab_size).save(str(files / "tokenizer.json"))
    if fits:
        assert Tokenizer(files).vocab_size == vocab_size
    else:
        with pytest.raises(TokenizerError, match=r"found 513, expected at most text_config\.vocab_size = 512"):
            Tokenizer(files)


def test_truncation_and_padding_of_the_file_are_switched_off(files: Path) -> None:
    backend = build_byte_tokenizer(512)
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=64)
    backend.save(str(files / "tokenizer.json"))
    assert len(Tokenizer(files).encode("hello", add_bos=False)) == 5


# End tokens


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (1, 1, (1,)),
        ([1, 7], 1, (1, 7)),
        ([7], 1, (1, 7)),
        (7, None, (7,)),
        (None, None, (1,)),
        ([9, 7, 9], 8, (7, 8, 9)),
    ],
)
def test_end_tokens_of_all_files(files: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    change(files / "generation_config.json", eos_token_id=generation)
    change(files / "config.json", eos_token_id=config)
    assert Tokenizer(files).eos_ids == expected


def test_generation_config_is_optional(files: Path) -> None:
    (files / "generation_config.json").unlink()
    assert Tokenizer(files).eos_ids == (1,)


@pytest.mark.parametrize("value", [512, -1, "1", [1, None], 1.0, True])
def test_end_tokens_that_are_no_ids(files: Path, value: Any) -> None:
    change(files / "generation_config.json", eos_token_id=value)
    with pytest.raises(TokenizerError, match="eos_token_id: found"):
        Tokenizer(files)


# Missing and damaged files


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_files(files: Path, name: str) -> None:
    (files / name).unlink()
    with pytest.raises(TokenizerError, match=f"{name}: missing"):
        Tokenizer(files)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_damaged_files(files: Path, name: str, content: str) -> None:
    (files / name).write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError, match=name):
        Tokenizer(files)


def test_other_decoders_are_refused(files: Path) -> None:
    from tokenizers import decoders

    backend = build_byte_tokenizer(512)
    backend.decoder = decoders.Metaspace()
    backend.save(str(files / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="found decoder Metaspace, expected ByteLevel"):
        Tokenizer(files)


def test_code_beside_the_files_is_not_run(files: Path) -> None:
    marker = files / "ran"
    for name in ("tokenization_deepseek.py", "tokenizer.py", "__init__.py"):
        (files / name).write_text(f"open({str(marker)!r}, 'w')", encoding="utf-8")
    change(files / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_deepseek.Tokenizer", None]})
    assert Tokenizer(files).encode("hi") == [0, 107, 108]
    assert not marker.exists()


# Text


@pytest.mark.parametrize("prompt", [None, 3, b"hi", ["hi"]])
def test_prompts_that_are_no_text(prompt: Any) -> None:
    with pytest.raises(RequestError, match="expected str"):
        TINY.encode(prompt)


def test_lone_surrogates_are_named() -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        TINY.encode("ab\ud83d")


@given(st.text())
def test_encoding_loses_nothing(text: str) -> None:
    ids = TINY.encode(text, add_bos=False)
    assert TINY.decode(ids) == text
    assert b"".join(TINY.token_bytes(token_id) for token_id in ids) == text.encode()


def test_special_tokens_are_kept_unless_told_otherwise() -> None:
    ids = TINY.encode("<｜User｜>hi<think>")
    assert TINY.decode(ids) == BOS + "<｜User｜>hi<think>"
    assert TINY.decode(ids, skip_special_tokens=True) == "hi"


def test_ids_without_token_give_nothing() -> None:
    assert TINY.decode([107, 999_999, 108]) == "hi"
    assert TINY.token_bytes(999_999) == b""
