"""Reads the tokenizer files of a checkpoint and settles its rules: BOS, end tokens, padding, placeholders.

Called by `tokenizer.py`. Only data files are read; code that lies beside them is never run. Two policies exist, named
by the configuration key `tokenizer_compatibility`:

release  the published tokenizer: special ids are pinned, a plain text gets a BOS, 21 placeholders for image spans are
         added behind the vocabulary. A tokenizer that does not fit is an error.
native   the files as they are: a BOS is added where `tokenizer_config.json` says `add_bos_token` (or, without that key,
         where the tokenizer's own post-processor adds one).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend

from deepinfer.errors import TokenizerError
from deepinfer.hub import strict_json
from deepinfer.hub.byte_tokenizer import BOS, EOS, PAD, build_byte_tokenizer

RELEASE_VOCAB_SIZE = 129_280
RELEASE_CLASS = "LlamaTokenizerFast"
PLACEHOLDERS = tuple(f"<|place_holder_mm_span_{number:04d}|>" for number in range(21))


@dataclass(frozen=True, slots=True)
class TokenizerRules:
    """A loaded tokenizer and what the files say about it."""

    backend: Backend
    vocab_size: int
    """ids of the vocabulary: 0 .. vocab_size - 1; placeholders lie behind it"""
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """every id that ends a text, ascending"""
    pad_id: int | None
    adds_bos: bool


def read_rules(directory: Path, compatibility: str | None = None) -> TokenizerRules:
    """Rules of the tokenizer in a directory. `compatibility` overrides the key of its `config.json`.

    Raises TokenizerError naming the file that is missing or the rule that is broken, found and expected.
    """
    settings = _read_json(directory / "tokenizer_config.json")
    config = _read_json(directory / "config.json", optional=True)
    generation = _read_json(directory / "generation_config.json", optional=True)
    backend = _read_backend(directory / "tokenizer.json")
    policy = compatibility or config.get("tokenizer_compatibility", "release")
    if policy not in ("release", "native"):
        raise TokenizerError(f"tokenizer_compatibility: found {policy!r}, expected 'release' or 'native'")
    ids = backend.get_vocab(with_added_tokens=True)
    vocab_size = max(index for token, index in ids.items() if token not in PLACEHOLDERS) + 1
    _require_room(directory, vocab_size, config)
    bos: int | None = 0
    pad: int | None = 2
    adds_bos = True
    if policy == "release":
        _require_release(directory, backend, settings, vocab_size)
    else:
        bos = _named_id(backend, settings, "bos_token", config.get("bos_token_id"))
        pad = _named_id(backend, settings, "pad_token", config.get("pad_token_id"))
        adds_bos = bos is not None and bool(settings.get("add_bos_token", _post_processor_adds(backend, bos)))
    eos = _named_id(backend, settings, "eos_token", None)
    eos_ids = _eos_ids(directory, [config, generation], eos, vocab_size)
    return TokenizerRules(backend, vocab_size, bos, eos_ids, pad, adds_bos)


def byte_level_rules(vocab_size: int, classes: int | None = None, image_id: int | None = None) -> TokenizerRules:
    """Rules of the tokenizer that needs no files (`byte_tokenizer.py`)."""
    backend = build_byte_tokenizer(vocab_size, classes, image_id)
    return TokenizerRules(backend, vocab_size, bos_id=0, eos_ids=(1,), pad_id=2, adds_bos=True)


def _read_json(path: Path, optional: bool = False) -> Mapping[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = strict_json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TokenizerError(f"{path}: missing; tokenizer.json and tokenizer_config.json are needed") from None
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: found a JSON {type(value).__name__}, expected an object")
    return value


def _read_backend(path: Path) -> Backend:
    if not path.exists():
        raise TokenizerError(f"{path}: missing; tokenizer.json and tokenizer_config.json are needed")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path}: cannot be read: {error}") from None
    if not isinstance(backend.decoder, decoders.ByteLevel):
        found = type(backend.decoder).__name__
        raise TokenizerError(f"{path}: found decoder {found}, expected ByteLevel as in the published tokenizer")
    backend.no_truncation()
    backend.no_padding()
    return backend


def _require_release(directory: Path, backend: Backend, settings: Mapping[str, Any], vocab_size: int) -> None:
    """Check the pins of the release and register the placeholders."""
    facts: list[tuple[str, Any, Any]] = [("tokenizer_class", settings.get("tokenizer_class"), RELEASE_CLASS)]
    facts += [(f"id of {token}", backend.token_to_id(token), index) for index, token in enumerate((BOS, EOS, PAD))]
    facts.append(("size of the vocabulary", vocab_size, RELEASE_VOCAB_SIZE))
    _require(directory, facts)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in PLACEHOLDERS])
    expected = enumerate(PLACEHOLDERS, RELEASE_VOCAB_SIZE)
    _require(directory, [(f"id of {token}", backend.token_to_id(token), index) for index, token in expected])


def _require_room(directory: Path, vocab_size: int, config: Mapping[str, Any]) -> None:
    """A tokenizer may be smaller than the embedding, not larger: its last ids would have no row."""
    text = config.get("text_config")
    rows = text.get("vocab_size") if isinstance(text, dict) else None
    if isinstance(rows, int) and vocab_size > rows:
        expected = f"at most text_config.vocab_size = {rows}"
        raise TokenizerError(f"{directory}: size of the vocabulary: found {vocab_size}, expected {expected}")


def _require(directory: Path, facts: list[tuple[str, Any, Any]]) -> None:
    for what, found, expected in facts:
        if found != expected:
            raise TokenizerError(
                f"{directory}: {what}: found {found!r}, expected {expected!r} as in the release's tokenizer; "
                f'a tokenizer of its own needs "tokenizer_compatibility": "native" in config.json'
            )


def _named_id(backend: Backend, settings: Mapping[str, Any], key: str, fallback: int | None) -> int | None:
    """Id of the token that `tokenizer_config.json` names under `key`: a string or an object with "content"."""
    token = settings.get(key)
    token = token.get("content") if isinstance(token, dict) else token
    return fallback if token is None else backend.token_to_id(token)


def _post_processor_adds(backend: Backend, bos: int | None) -> bool:
    return backend.encode("", add_special_tokens=True).ids[:1] == [bos]


def _eos_ids(directory: Path, sources: list[Mapping[str, Any]], named: int | None, vocab_size: int) -> tuple[int, ...]:
    """All end tokens of config.json and generation_config.json; the tokenizer's own where neither names one."""
    ids: list[Any] = []
    for source in sources:
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not ids and named is not None:
        ids = [named]
    wrong = [value for value in ids if type(value) is not int or not 0 <= value < vocab_size]
    if wrong:
        raise TokenizerError(f"{directory}: eos_token_id: found {wrong[0]!r}, expected ids below {vocab_size}")
    return tuple(sorted(set(ids)))
