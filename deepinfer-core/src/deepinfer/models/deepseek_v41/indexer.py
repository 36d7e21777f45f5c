"""The lightning indexer of an index-source layer: which compressed entries it and the layers after it attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.hooks import KVCache, OpTable, QuantTensor, Selection, StepInputs


@dataclass(slots=True)
class Shared:
    """What layers hand to later layers of the same forward.

    selections  {index source: Selection}
    candidates  [Q, C] candidate blocks of the candidate source, None = every block
    latents     [M, head_dim] of the latest compressor, for the entries this step completes
    """

    selections: dict[int, Selection]
    candidates: torch.Tensor | None = None
    latents: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Indexer:
    """wq_b, weights_proj: prepared dense weights; rope: [max_positions, 64] table.

    keys_layer       layer whose index keys are scored
    restricted       scores only entries of the candidate blocks
    makes_candidates chooses the candidate blocks
    """

    wq_b: Any
    weights_proj: Any
    rope: torch.Tensor
    heads: int
    layer: int
    keys_layer: int
    restricted: bool
    makes_candidates: bool

    def select(
        self, ops: OpTable, u: torch.Tensor, qr: QuantTensor, step: StepInputs, cache: KVCache, shared: Shared
    ) -> None:
        """u [Q, H] the attention norm's output, qr [Q, q_lora] the normed low-rank query; fills `shared`."""
        q = ops.gemm.linear(qr, self.wq_b).view(u.shape[0], self.heads, -1)
        q = ops.attention.rope(q, step.positions, self.rope)
        weights = ops.gemm.linear(u, self.weights_proj)
        candidates = shared.candidates if self.restricted else None
        selection, blocks = ops.attention.select(
            q, weights, cache, self.keys_layer, candidates, self.makes_candidates, step
        )
        shared.selections[self.layer] = selection
        if self.makes_candidates:
            shared.candidates = blocks
