"""Text to token ids and back, for the engine and for users (`LLM.get_tokenizer()`).

A thin layer over the `tokenizers` library that adds the rules of the checkpoint (`tokenizer_files.py`), one BOS rule
and decoding token by token. It knows nothing of chats (`chat.py`) or of the model.

The BOS rule: `encode` puts one BOS before a text unless the text already begins with it. Ids that a caller brings are
never changed.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path

from deepinfer.errors import RequestError
from deepinfer.hub.byte_tokenizer import byte_symbols
from deepinfer.hub.tokenizer_files import TokenizerRules, byte_level_rules, read_rules


class Tokenizer:
    """The tokenizer of a checkpoint.

    vocab_size   ids 0 .. vocab_size - 1 exist (the release's 21 image placeholders behind them are not counted)
    bos_id, pad_id   None where the tokenizer has none        eos_ids   ascending tuple of every id that ends a text
    """

    def __init__(self, source: str | Path | TokenizerRules, compatibility: str | None = None) -> None:
        """Load from a directory, or from rules made before. `compatibility` ("release", "native") overrides the
        directory's config.json. Raises TokenizerError."""
        rules = source if isinstance(source, TokenizerRules) else read_rules(Path(source), compatibility)
        self.vocab_size = rules.vocab_size
        self.bos_id = rules.bos_id
        self.eos_ids = rules.eos_ids
        self.pad_id = rules.pad_id
        self.adds_bos = rules.adds_bos
        self.backend = rules.backend
        added = rules.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._bytes = {symbol: byte for byte, symbol in enumerate(byte_symbols())}

    @classmethod
    def byte_level(cls, vocab_size: int, classes: int | None = None, image_id: int | None = None) -> Tokenizer:
        """A tokenizer without files, for random weights: `byte_tokenizer.build_byte_tokenizer`."""
        return cls(byte_level_rules(vocab_size, classes, image_id))

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of a text. Special tokens spelled out in it become their ids. Raises RequestError for text that is no
        valid Unicode (lone surrogates)."""
        if not isinstance(text, str):
            raise RequestError(f"prompt: found {type(text).__name__}, expected str")
        try:
            ids = self.backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            place = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            raise RequestError(f"prompt: found a lone surrogate at character {place}, expected valid Unicode") from None
        if add_bos and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids. Bytes that form no UTF-8 become U+FFFD; ids without a token give nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def incremental(self, skip_special_tokens: bool = False) -> IncrementalDecoder:
        """A decoder for ids that arrive one after the other."""
        return IncrementalDecoder(self, skip_special_tokens)

    def token_string(self, token_id: int) -> str | None:
        """Raw spelling in the vocabulary (byte-level alphabet), None where the id has no token."""
        return self.backend.id_to_token(token_id) if token_id >= 0 else None

    def token_id(self, token: str) -> int | None:
        """Id of a raw spelling, for instance "<think>"."""
        return self.backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that an id stands for; b"" where it has no token."""
        token = self.token_string(token_id) or ""
        try:
            return bytes(self._bytes[character] for character in token)
        except KeyError:  # a special token outside the byte-level alphabet stands for itself
            return token.encode()


class IncrementalDecoder:
    """Turns ids into text as they come, without ever showing half a character.

    The pieces of `push` and `flush` joined are exactly `decode` of all ids. A character split over several tokens
    comes out with its last token; bytes that can no longer become a character come out as U+FFFD, and `flush` ends
    the text, turning an unfinished character into U+FFFD. Each id costs the same, however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that has become certain with these ids."""
        data = b"".join(self._tokenizer.token_bytes(token_id) for token_id in ids if token_id not in self._skip)
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The rest; the decoder may be used again for a new text."""
        return self._utf8.decode(b"", final=True)
