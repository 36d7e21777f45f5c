"""Engram ops: n-grams, hashes, table look-up and the gated injection into the streams.

The model calls `ngrams` once per step, the others once per Engram layer. Prepared tables are opaque to everyone else
and may be memory-mapped. Mathematics: `deepinfer.reference.engram`. Q rows of n sequences, g = longest n-gram,
T = (g - 1) * heads table rows per token, C = engram_head_dim channels per table row.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer.hooks.api import OpGroup, op
from deepinfer.hooks.types import QuantTensor, Weight
from deepinfer.reference import engram as reference
from deepinfer.reference.engram import EngramConstants

__all__ = ["EngramConstants", "EngramOps"]


class EngramOps(OpGroup):
    """Hashed n-gram memory."""

    group = "engram"

    @op(version=1, level="optional", status="beta", grain="kernel")
    def ngrams(
        self,
        token_ids: torch.Tensor,
        history: torch.Tensor,
        row_starts: torch.Tensor,
        sequence: torch.Tensor,
        positions: torch.Tensor,
        vocab_map: torch.Tensor,
        pad: int,
        image_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compressed ids of every token and the g - 1 before it in its sequence.

        token_ids   [Q] int64         the step's new tokens
        history     [n, g - 1] int64  tokens before each sequence's first new one, nearest last; -1 = before the text
        row_starts  [n] int64         first row of each sequence
        sequence    [Q] int64         sequence of each row
        positions   [Q] int64         absolute position of each row
        vocab_map   [V] int           compressed id of every token id
        pad         token id whose compressed id marks "nothing here"
        image_mask  [Q] bool or None  rows of image tokens
        returns     [Q, g] int64, column r = the token r places back

        An image token, an id outside [0, V) and everything further back than one count as nothing.
        """
        return reference.ngrams(token_ids, history, row_starts, sequence, positions, vocab_map, pad, image_mask)

    @op(version=1, level="optional", status="beta", grain="kernel")
    def hash(
        self, ngrams: torch.Tensor, constants: EngramConstants, image_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Table rows of every token in one layer.

        ngrams      [Q, g] int64
        image_mask  [Q] bool or None, rows of image placeholders
        returns     [Q, T] int64, -1 in image rows
        """
        return reference.hash_rows(ngrams, constants, image_mask)

    @op(version=1, level="optional", status="beta", grain="kernel", layout="engram_table")
    def prepare_table(self, weight: Weight) -> object:
        """Bring a table into the form `fetch` reads. Called once per table after loading.

        weight   [rows, C] in format fp8_row32 (bf16 and f32 too, where rows are trained); possibly memory-mapped, so
                 nothing may be read beyond what `fetch` asks for
        returns  opaque to the caller; core: the weight itself
        """
        return weight

    @op(version=1, level="recommended", status="beta", grain="kernel", layout="engram_table")
    def fetch(self, table: Any, rows: torch.Tensor) -> QuantTensor:
        """Concatenated table rows; stored e4m3 values serve as activations without another quantization.

        table    prepared [N, C]
        rows     [Q, T] int64, -1 = zeros
        returns  QuantTensor [Q, T * C]
        """
        dtype = self.numerics.activation_dtype
        return QuantTensor(reference.fetch(table.values, table.scales, rows, dtype))

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def inject(
        self,
        streams: torch.Tensor,
        kv: torch.Tensor,
        weight: torch.Tensor,
        image_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add the fetched value to every stream, gated by the match of the normalised stream and its key.

        streams     [Q, m, H] activation dtype
        kv          [Q, m + 1, H] activation dtype: m keys, then the value
        weight      [m, H] float32, product of the query's and the key's norm weights
        image_mask  [Q] bool or None, rows that stay as they are
        returns     [Q, m, H] activation dtype
        """
        eps, accumulate = self.traits.rms_norm_eps, self.numerics.accumulate_dtype
        return reference.inject(streams, kv, weight, eps, image_mask, accumulate)
