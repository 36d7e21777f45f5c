"""What the oracle reads from a checkpoint directory: tensors as float64, the compressed vocabulary, hash constants.

Used by `oracle.py`. It parses the safetensors container itself and decodes every number format by table, so that it
shares no code with the product's loader.
"""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .oracle_numbers import decode_e2m1_pairs, decode_e4m3, decode_e8m0

SCALE_BLOCK = 32


class Tensors:
    """Tensors of a checkpoint by name, dequantized to float64. They are kept as float32, which is lossless."""

    def __init__(self, directory: str | Path) -> None:
        directory = Path(directory)
        index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
        self._entries: dict[str, tuple[Path, int, dict]] = {}
        for file_name in sorted(set(index["weight_map"].values())):
            path = directory / file_name
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            self._entries |= {name: (path, 8 + size, entry) for name, entry in header.items()}
        self._decoded: dict[str, np.ndarray] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._decoded:
            self._decoded[name] = self._decode(name).astype(np.float32)
        return self._decoded[name].astype(np.float64)

    def _bytes(self, name: str) -> tuple[np.ndarray, list[int], str]:
        path, base, entry = self._entries[name]
        begin, end = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(base + begin)
            data = np.frombuffer(file.read(end - begin), dtype=np.uint8)
        return data, entry["shape"], entry["dtype"]

    def _decode(self, name: str) -> np.ndarray:
        data, shape, dtype = self._bytes(name)
        if dtype == "F32":
            return data.view(np.float32).reshape(shape)
        if dtype == "BF16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        codes = data.reshape(shape)
        values = decode_e4m3(codes) if dtype == "F8_E4M3" else decode_e2m1_pairs(codes)
        scale_bytes, scale_shape, _ = self._bytes(name.removesuffix(".weight") + ".scale")
        scale = decode_e8m0(scale_bytes.reshape(scale_shape))
        if scale_shape[0] != shape[0]:  # one scale for 32 x 32 values; otherwise for 32 channels of one row
            scale = scale.repeat(SCALE_BLOCK, axis=0)[: shape[0]]
        return values * scale.repeat(SCALE_BLOCK, axis=1)[:, : values.shape[1]]


def compressed_vocabulary(tokenizer_json: str | Path) -> np.ndarray:
    """Token id -> id of its class, int64 [vocabulary of the tokenizer]; classes are numbered by first occurrence."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    classes: dict[str, int] = {}
    ids = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "�" in text else (normalize(text) or text)
        ids.append(classes.setdefault(key, len(classes)))
    return np.array(ids, dtype=np.int64)


def normalize(text: str) -> str:
    """NFKC, NFD, no combining marks, lower case, white-space runs to one space; a lone space survives stripping."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if not unicodedata.category(c).startswith("M"))
    text = "".join(c.lower() for c in text)  # by character: no context rules
    text = re.sub(r"[ \t\r\n]+", " ", text)
    return " " if text == " " else text.strip()


class EngramConstants:
    """Multipliers, prime moduli and table offsets of every Engram layer.

    multipliers {layer: int64 [max_ngram]}; primes {layer: [orders][heads]}; offsets like primes, exclusive prefix sums.
    """

    def __init__(self, layers: list[int], max_ngram: int, heads: int, vocab_size: int, compressed_size: int) -> None:
        self.bound = max(1, ((2**63 - 1) // compressed_size) // 2)
        self.multipliers, self.primes, self.offsets = {}, {}, {}
        used: set[int] = set()
        for layer in layers:
            rng = np.random.default_rng(10007 * layer)
            self.multipliers[layer] = 2 * rng.integers(0, self.bound, size=max_ngram, dtype=np.int64) + 1
            self.primes[layer] = [_primes_above(vocab_size - 1, heads, used) for _ in range(2, max_ngram + 1)]
            flat = [prime for order in self.primes[layer] for prime in order]
            starts = [sum(flat[:i]) for i in range(len(flat))]
            self.offsets[layer] = [starts[i : i + heads] for i in range(0, len(starts), heads)]

    def rows(self, layer: int, classes: list[int]) -> list[int]:
        """Table rows of a token. `classes`: compressed ids of the token, the one before it, and so on."""
        products = [int(t) * int(m) for t, m in zip(classes, self.multipliers[layer], strict=True)]
        rows = []
        for order, (primes, offsets) in enumerate(zip(self.primes[layer], self.offsets[layer], strict=True), start=2):
            mixed = 0
            for product in products[:order]:
                mixed ^= product
            rows += [mixed % prime + offset for prime, offset in zip(primes, offsets, strict=True)]
        return rows


def _primes_above(start: int, count: int, used: set[int]) -> list[int]:
    found, number = [], start
    while len(found) < count:
        number += 1
        if number not in used and _is_prime(number):
            used.add(number)
            found.append(number)
    return found


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
