"""The compressed vocabulary of Engram: token ids that spell the same word up to case, accents and blanks share a class.

Built once per engine from the tokenizer; the n-gram hash works on classes. The checkpoint does not store the map, so
it must come out exactly as in training: the configuration gives the number of classes to compare with. It knows
spellings only, no hash and no table.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Regex, normalizers

from deepinfer.errors import TokenizerError
from deepinfer.hub.byte_tokenizer import PAD
from deepinfer.hub.tokenizer import Tokenizer

PAD_ID = 2
_BLANK = "\ue000"
"""Stands for a text that is one blank while the ends are stripped; a private-use character."""


def compress_vocabulary(tokenizer: Tokenizer, expected: int | None = None) -> tuple[np.ndarray, int]:
    """Class of every token id, int32 [tokenizer.vocab_size], and the number of classes.

    Classes are numbered by their first id. With `expected` (`engram_compressed_vocab_size`) any other number of classes
    is a TokenizerError, as is a tokenizer without the padding token at id 2.
    """
    found = tokenizer.token_id(PAD)
    if found != PAD_ID:
        raise TokenizerError(f"id of {PAD}: found {found}, expected {PAD_ID}")
    classes: dict[str, int] = {}
    mapping = np.empty(tokenizer.vocab_size, dtype=np.int32)
    for token_id, key in enumerate(_keys(tokenizer)):
        mapping[token_id] = classes.setdefault(key, len(classes))
    if expected is not None and len(classes) != expected:
        raise TokenizerError(
            f"compressed vocabulary: found {len(classes)} classes, expected {expected} (engram_compressed_vocab_size): "
            f"tokenizer.json is not the one this model was trained with"
        )
    return mapping, len(classes)


def _keys(tokenizer: Tokenizer) -> list[str]:
    """What decides the class of each id: its normalized text; the raw spelling of a fragment of a character.

    A raw spelling may coincide with another token's text; they then share a class, as in training.
    """
    singles = [[token_id] for token_id in range(tokenizer.vocab_size)]
    texts = tokenizer.backend.decode_batch(singles, skip_special_tokens=False)
    normalize = _normalizer().normalize_str
    return [
        tokenizer.token_string(token_id) or "" if "\ufffd" in text else normalize(text) or text
        for token_id, text in enumerate(texts)
    ]


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _BLANK),
            normalizers.Strip(),
            normalizers.Replace(_BLANK, " "),
        ]
    )
