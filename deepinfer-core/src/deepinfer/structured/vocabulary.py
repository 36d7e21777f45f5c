"""`Vocabulary`: the tokens of a model as grammar engines see them: bytes, or nothing where a token is no text.

Made once per engine, sent to the processes that compile. Special and added tokens, ids without a token, rows of the
head
beyond the tokenizer and tokens that no valid UTF-8 contains are no text and can never be part of an output that has a
form. Knows no grammar.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from deepinfer.hub.byte_tokenizer import byte_symbols

SECOND_BYTES = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
"""First bytes of UTF-8 after which not every continuation byte is possible (Unicode 16, table 3-7)."""


class TokenSource(Protocol):
    """The part of `hub.tokenizer.Tokenizer` that is needed."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    backend: Any

    def token_string(self, token_id: int) -> str | None:
        """Raw spelling in the byte-level alphabet."""
        ...


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[i]` are the bytes of id i, b"" where it is no text; one entry a row of the head. `eos_ids` end a text."""

    tokens: tuple[bytes, ...]
    eos_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: TokenSource, size: int) -> Vocabulary:
        """The text tokens of a tokenizer, for a head of `size` rows."""
        byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        added = tokenizer.backend.get_added_tokens_decoder()
        tokens = []
        for token_id in range(size):
            spelling = None if token_id in added else tokenizer.token_string(token_id)
            is_text = spelling is not None and all(character in byte_of for character in spelling)
            data = bytes(byte_of[character] for character in spelling or "") if is_text else b""
            tokens.append(data if is_possible(data) else b"")
        return cls(tuple(tokens), tuple(tokenizer.eos_ids))

    @property
    def size(self) -> int:
        """Rows of the head."""
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """Words of a mask: ceil(size / 32)."""
        return -(-len(self.tokens) // 32)

    @cached_property
    def digest(self) -> str:
        """Names the vocabulary, for keys of caches."""
        lengths = np.array([len(token) for token in self.tokens], dtype=np.int64)
        content = b"".join((lengths.tobytes(), *self.tokens, repr(self.eos_ids).encode()))
        return hashlib.sha256(content).hexdigest()

    @cached_property
    def text_mask(self) -> np.ndarray:
        """int32 [words]: tokens that are text."""
        return self.mask([token_id for token_id, token in enumerate(self.tokens) if token])

    @cached_property
    def eos_mask(self) -> np.ndarray:
        """int32 [words]: end tokens."""
        return self.mask(self.eos_ids)

    @cached_property
    def continuation_masks(self) -> dict[int, np.ndarray]:
        """{first byte: int32 [words]}: tokens that may come when the text ends with this byte of `SECOND_BYTES`."""
        masks = {}
        for lead, (low, high) in SECOND_BYTES.items():
            fits = [token_id for token_id, token in enumerate(self.tokens) if token and low <= token[0] <= high]
            masks[lead] = self.mask(fits)
        return masks

    def mask(self, ids: Sequence[int]) -> np.ndarray:
        """int32 [words] with the bits of these ids set: bit `id % 32` of word `id // 32`."""
        bits = np.zeros(self.num_words * 32, dtype=np.uint8)
        bits[list(ids)] = 1
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def is_possible(data: bytes) -> bool:
    """Whether valid UTF-8 can contain these bytes in a row, beginning and ending anywhere."""
    start = next((at for at, byte in enumerate(data) if byte & 0xC0 != 0x80), len(data))
    if start > 3:
        return False
    try:
        data[start:].decode()
    except UnicodeDecodeError as error:
        if "unexpected end of data" not in error.reason:
            return False
    return True
