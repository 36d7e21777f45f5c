"""DSpark: the draft layers, fed with features of the main forward, and the heads that propose tokens.

Every main forward stores main keys made from its features into the draft layers' rings (`store_features`). A draft
pass (`draft`) runs a block of B slots per sequence once through the draft layers; the Markov and confidence heads
that follow are the op `sampling.draft_block`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.hooks import KVCache, OpTable, StepInputs
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.hyper import Site, Streams
from deepinfer.models.deepseek_v41.moe import Moe


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """One draft layer: window-only attention and its own mixture of experts."""

    attn_site: Site
    attention: Attention
    ffn_site: Site
    moe: Moe

    def __call__(self, ops: OpTable, streams: Streams, ring: int, step: StepInputs, cache: KVCache) -> None:
        out = self.attn_site.enter(ops, streams)
        Site.leave(streams, out, self.attention.draft(ops, out.x, ring, step, cache))
        out = self.ffn_site.enter(ops, streams)
        Site.leave(streams, out, self.moe(ops, out.u, out.x, None))


@dataclass(frozen=True, slots=True)
class DSpark:
    """The draft model.

    targets        backbone layers whose attention input is collected
    main_proj      prepared [H, len(targets) * H];  main_norm [H]
    main_wkv       prepared [draft layers * head_dim, H], the wkv rows of all draft layers
    layers         draft layers; layer d owns window ring `first_ring + d`
    norm           [H] before the vocabulary head
    markov_embed, markov_head  [V, rank] activation dtype;  confidence  [H + rank]: what `sampling.draft_block` reads
    noise_id       input token of draft slots after the first
    """

    targets: tuple[int, ...]
    main_proj: Any
    main_norm: torch.Tensor
    main_wkv: Any
    layers: tuple[DraftLayer, ...]
    first_ring: int
    norm: torch.Tensor
    markov_embed: torch.Tensor
    markov_head: torch.Tensor
    confidence: torch.Tensor
    noise_id: int
    eps: float

    def store_features(self, ops: OpTable, features: torch.Tensor, step: StepInputs, cache: KVCache) -> None:
        """Main keys of features [Q, len(targets) * H] into every draft ring."""
        hidden = ops.gemm.linear(ops.gemm.quantize(features), self.main_proj)
        _, hidden8 = ops.gemm.rms_norm_quantize(hidden, self.main_norm, self.eps)
        keys = ops.gemm.linear(hidden8, self.main_wkv).chunk(len(self.layers), -1)
        for index, (layer, key) in enumerate(zip(self.layers, keys, strict=True)):
            latent = layer.attention.latent
            key = ops.gemm.rms_norm(key, latent.kv_norm, self.eps)
            key = ops.attention.rope(key, step.positions, latent.rope)
            ops.cache.store_window(cache, self.first_ring + index, key, step)

    def block_ids(self, golden: torch.Tensor, block: int) -> torch.Tensor:
        """Input ids [n * block] of a draft pass: the golden token of each sequence [n], then noise."""
        ids = golden.new_full((golden.shape[0], block), self.noise_id)
        ids[:, 0] = golden
        return ids.flatten()

    def draft(
        self, ops: OpTable, embedding: torch.Tensor, step: StepInputs, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over draft blocks.

        embedding [n * B, H] of `block_ids`; step: positions a+1 .. a+B of each sequence, a the last accepted one.
        Returns (hidden [n * B, H] before the norm, normed [n * B, H] for the vocabulary head).
        """
        step.plan = ops.attention.plan(step)
        streams = Streams.start(ops, embedding)
        for index, layer in enumerate(self.layers):
            layer(ops, streams, self.first_ring + index, step, cache)
        hidden = streams.collapse(ops)
        return hidden, ops.gemm.rms_norm(hidden, self.norm, self.eps)
