"""Engram: hashed n-gram memory, looked up by the last tokens and added to the streams behind a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.hooks import OpTable
from deepinfer.hooks.ops.engram import EngramConstants


@dataclass(frozen=True, slots=True)
class Engram:
    """One engram layer.

    constants  hash multipliers, primes and row offsets
    table      prepared table, wkv: prepared projection [(hc_mult + 1) * H, rows * 256]
    gate       [hc_mult, H] float32, q_weight * k_weight
    """

    constants: EngramConstants
    table: Any
    wkv: Any
    gate: torch.Tensor

    def fetch(self, ops: OpTable, ngrams: torch.Tensor, image_mask: torch.Tensor | None) -> torch.Tensor:
        """Keys and value [Q, hc_mult + 1, H] of every row's n-grams [Q, g]."""
        rows = ops.engram.hash(ngrams, self.constants, image_mask)
        kv = ops.gemm.linear(ops.engram.fetch(self.table, rows), self.wkv)
        return kv.view(rows.shape[0], -1, self.gate.shape[1])

    def inject(
        self, ops: OpTable, streams: torch.Tensor, kv: torch.Tensor, image_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Streams [Q, hc_mult, H] plus the gated value."""
        return ops.engram.inject(streams, kv, self.gate, image_mask)
