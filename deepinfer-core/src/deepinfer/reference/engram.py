"""Engram: hashed n-gram memory. Constants, n-grams of the compressed vocabulary, row hashes, look-up, gated injection.

Called by `hooks/ops/engram.py`, and by the model for its constants; model specification 3.13. Q rows of n sequences,
g = longest n-gram, orders 2 .. g, `heads` table rows per order, so T = (g - 1) * heads table rows per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.reference.norm import reciprocal_rms
from deepinfer.reference.quant import decode_q8

NO_ROW = -1
"""Table row of tokens without n-grams; it reads as zeros."""

_SEED = 10007
_GATE_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class EngramConstants:
    """Hash constants of one Engram layer. All int64.

    multipliers  [g]             of the token 0 .. g-1 places back; odd
    primes       [g - 1, heads]  table size of every order and head
    offsets      [T]             first table row of every order and head, flat
    """

    multipliers: torch.Tensor
    primes: torch.Tensor
    offsets: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Rows of the layer's table."""
        return int(self.primes.sum())

    def to(self, device: torch.device | str) -> EngramConstants:
        """The same constants on a device."""
        return EngramConstants(self.multipliers.to(device), self.primes.to(device), self.offsets.to(device))


def derive_constants(
    layer_ids: Sequence[int], vocab_start: int, max_ngram: int, heads: int, compressed_vocab_size: int
) -> dict[int, EngramConstants]:
    """Hash constants of every Engram layer, from the config alone.

    layer_ids              config `engram_layer_ids`; their order decides who gets which primes
    vocab_start            config `engram_vocab_size`: table sizes are the primes from here on, each used once
    max_ngram, heads       config `engram_max_ngram_size`, `engram_n_heads`
    compressed_vocab_size  bounds the multipliers so that id * multiplier stays below 2^63
    """
    primes = _primes_from(vocab_start)
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    constants = {}
    for layer in layer_ids:
        sizes = torch.tensor([[next(primes) for _ in range(heads)] for _ in range(max_ngram - 1)])
        draws = np.random.default_rng(_SEED * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
        flat = sizes.flatten()
        constants[layer] = EngramConstants(torch.from_numpy(2 * draws + 1), sizes, flat.cumsum(0) - flat)
    return constants


def ngrams(
    token_ids: torch.Tensor,
    history: torch.Tensor,
    row_starts: torch.Tensor,
    sequence: torch.Tensor,
    positions: torch.Tensor,
    vocab_map: torch.Tensor,
    pad: int,
    image_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compressed ids of every token and the g - 1 before it.

    token_ids   [Q] int64         new tokens of the step, sequence after sequence
    history     [n, g - 1] int64  tokens before each sequence's first new one, nearest last; -1 = before the beginning
    row_starts  [n] int64         first row of each sequence
    sequence    [Q] int64         sequence of each row
    positions   [Q] int64         absolute position of each row
    vocab_map   [V] int64         compressed id of every token id
    pad         token id whose compressed id stands for "nothing here"
    image_mask  [Q] bool          rows of image tokens
    returns     [Q, g] int64      column r belongs to the token r places back

    An image token or an id outside [0, V) counts as nothing, and so does everything further back. Texts are not
    broken at their begin or end tokens.
    """
    raw, is_image = _token_window(token_ids, history, row_starts, sequence, image_mask)
    back = torch.arange(raw.shape[1], device=raw.device)
    absent = (raw < 0) | (raw >= vocab_map.shape[0]) | (positions.unsqueeze(1) < back) | is_image
    absent = absent.cumsum(1) > 0
    compressed = vocab_map.long()[raw.clamp(0, vocab_map.shape[0] - 1)]
    return torch.where(absent, vocab_map[pad].long(), compressed)


def hash_rows(
    ngram_ids: torch.Tensor, constants: EngramConstants, image_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Table rows of every token. ngram_ids [Q, g] int64 -> [Q, T] int64; `NO_ROW` where image_mask [Q] is set."""
    products = ngram_ids * constants.multipliers
    hashed = products[:, 0]
    rows = []
    for products_at, primes in zip(products.unbind(1)[1:], constants.primes, strict=True):
        hashed = hashed ^ products_at
        rows.append(hashed.unsqueeze(1) % primes)
    flat = torch.cat(rows, 1) + constants.offsets
    return flat if image_mask is None else flat.masked_fill(image_mask.unsqueeze(1), NO_ROW)


def fetch(
    values: torch.Tensor, scales: torch.Tensor | None, rows: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Concatenated table rows. Reads only the rows asked for, so a table may be memory-mapped.

    values   [N, C] e4m3, or bfloat16 / float32 without scales
    scales   [N, C / 32] uint8 or None
    rows     [Q, T] int64, `NO_ROW` = zeros
    returns  [Q, T * C] `dtype`
    """
    flat = rows.flatten()
    chosen = flat.clamp(min=0).to(values.device)
    if scales is None:
        found = values.index_select(0, chosen).to(dtype)
    else:
        found = decode_q8(_select_bytes(values, chosen), _select_bytes(scales, chosen), dtype)
    found = found.to(rows.device).masked_fill((flat == NO_ROW).unsqueeze(1), 0)
    return found.view(rows.shape[0], rows.shape[1] * values.shape[1])


def inject(
    streams: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor,
    norm_eps: float,
    image_mask: torch.Tensor | None = None,
    accumulate: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Add the fetched value to every stream, gated by how well the stream matches its key.

    streams     [Q, m, H]
    kv          [Q, m + 1, H]    m keys, then the value
    weight      [m, H] float32   product of the query's and the key's norm weights
    image_mask  [Q] bool         rows that stay as they are
    returns     [Q, m, H] in the streams' dtype
    """
    x = streams.to(accumulate)
    key, value = kv.to(accumulate).split((streams.shape[1], 1), 1)
    dot = torch.einsum("qmh,qmh->qm", x * weight.to(accumulate), key)
    dot = dot * reciprocal_rms(x, norm_eps) * reciprocal_rms(key, norm_eps) * x.shape[-1] ** -0.5
    gate = (dot.abs().clamp_min(_GATE_FLOOR).sqrt() * dot.sign()).sigmoid()
    out = (x + gate.unsqueeze(-1) * value).to(streams.dtype)
    return out if image_mask is None else torch.where(image_mask.view(-1, 1, 1), streams, out)


def _token_window(
    token_ids: torch.Tensor,
    history: torch.Tensor,
    row_starts: torch.Tensor,
    sequence: torch.Tensor,
    image_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw ids [Q, g] of every row and those before it in its sequence, and which of them are images of this step."""
    before = history.shape[1]
    row = torch.arange(token_ids.shape[0], device=token_ids.device).unsqueeze(1)
    back = torch.arange(before + 1, device=token_ids.device)
    within = row - row_starts[sequence].unsqueeze(1) - back  # [Q, g] row of the sequence; negative = history
    in_step = within >= 0
    source = (row - back).clamp(min=0)
    earlier = history[sequence.unsqueeze(1), (within + before).clamp(0, before - 1)]
    raw = torch.where(in_step, token_ids[source], earlier)
    if image_mask is None:
        return raw, torch.zeros_like(in_step)
    return raw, in_step & image_mask[source]


def _select_bytes(stored: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a table of 8-bit elements, as bytes."""
    return stored.view(torch.uint8).index_select(0, rows)


def _primes_from(start: int) -> Iterator[int]:
    """Primes >= start, ascending."""
    value = start
    while True:
        if _is_prime(value):
            yield value
        value += 1


def _is_prime(value: int) -> bool:
    if value < 4:
        return value > 1
    divisors = np.arange(3, int(value**0.5) + 2, 2)
    return value % 2 == 1 and bool((value % divisors != 0).all())
