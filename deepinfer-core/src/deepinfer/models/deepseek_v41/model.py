"""DeepSeek-V4.1: the one definition of the backbone, calling only bound ops.

Called by the runner (and `deepinfer.testing.forward_logits`) with the rows of one step. An encoder half sees every
row; at the first layer of the decoder half prefill truncation may drop rows. The model knows no device, no kernels
and no scheduler.

Q rows, n sequences, H hidden size, V vocabulary; Qd rows of the decoder half.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from deepinfer.hooks import KVCache, OpTable, StepInputs, StepViews
from deepinfer.hooks.ops.residual import SiteOutput
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.dspark import DSpark
from deepinfer.models.deepseek_v41.engram import Engram
from deepinfer.models.deepseek_v41.hyper import Site, Streams
from deepinfer.models.deepseek_v41.indexer import Shared
from deepinfer.models.deepseek_v41.moe import Moe


@dataclass(slots=True)
class ModelInputs:
    """Rows of one step.

    token_ids   [Q] int64   ids outside the vocabulary (image positions) start as zero rows
    history     [n, g - 1]  int64 token ids before each sequence's first row, nearest last, -1 before the beginning
    steps       integer metadata, both views
    image_mask  [Q] bool or None
    image_rows  (rows [M] int64, embeddings [M, H]) that replace embedding rows, or None
    """

    token_ids: torch.Tensor
    history: torch.Tensor
    steps: StepViews
    image_mask: torch.Tensor | None = None
    image_rows: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(slots=True)
class Layer:
    """One backbone layer: optional engram, attention sub-layer, MoE sub-layer."""

    index: int
    attn_site: Site
    attention: Attention
    ffn_site: Site
    moe: Moe
    engram: Engram | None = None


@dataclass(slots=True)
class _Flow:
    """What travels through the layers of one forward besides the streams."""

    step: StepInputs
    image_mask: torch.Tensor | None
    shared: Shared = field(default_factory=lambda: Shared({}))
    engram_kv: dict[int, torch.Tensor] = field(default_factory=dict)
    features: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Model:
    """The text model. embed [V, H] bf16 (float32 in smooth mode), head: prepared weight [V, H].

    boundary   first layer of the decoder half
    vocab_map  [V] int64 compressed vocabulary for engram;  engram_pad: token id that pads n-grams
    """

    ops: OpTable
    layers: tuple[Layer, ...]
    boundary: int
    embed: torch.Tensor
    norm: torch.Tensor
    head: Any
    eps: float
    vocab_map: torch.Tensor
    engram_pad: int
    dspark: DSpark | None

    def forward(self, inputs: ModelInputs, cache: KVCache) -> torch.Tensor:
        """Run the backbone and fill the caches; returns the collapsed hidden state [Qd, H] before the final norm."""
        ops, steps = self.ops, inputs.steps
        for step in {id(s): s for s in (steps.encoder, steps.decoder)}.values():
            step.plan = ops.attention.plan(step)
        flow = _Flow(steps.encoder, inputs.image_mask)
        flow.engram_kv = self._fetch_engrams(inputs)
        streams = Streams.start(ops, self.embedding(inputs))
        for layer in self.layers:
            streams = self._attention(layer, streams, flow, steps, cache)
            out = layer.ffn_site.enter(ops, streams)
            Site.leave(streams, out, layer.moe(ops, out.u, out.x, flow.image_mask))
        if self.dspark is not None:
            self.dspark.store_features(ops, torch.cat(flow.features, -1), flow.step, cache)
        return streams.collapse(ops)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits [R, V] float32 of hidden states [R, H] before the final norm."""
        normed = self.ops.gemm.rms_norm(hidden, self.norm, self.eps)
        return self.ops.gemm.linear(normed, self.head, torch.float32)

    def draft(
        self, golden: torch.Tensor, block: int, step: StepInputs, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One DSpark pass for n sequences: (base logits [n, block, V] float32, hidden [n, block, H])."""
        assert self.dspark is not None, "the checkpoint has no draft layers"
        embedding = self._embed(self.dspark.block_ids(golden, block))
        hidden, normed = self.dspark.draft(self.ops, embedding, step, cache)
        base = self.ops.gemm.linear(normed, self.head, torch.float32)
        return base.view(-1, block, base.shape[-1]), hidden.view(-1, block, hidden.shape[-1])

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embedding rows [Q, H]; zero rows for ids outside the vocabulary."""
        outside = (token_ids < 0) | (token_ids >= self.embed.shape[0])
        rows = torch.nn.functional.embedding(token_ids.masked_fill(outside, 0), self.embed)
        return rows.masked_fill(outside.unsqueeze(1), 0)

    def embedding(self, inputs: ModelInputs) -> torch.Tensor:
        """Embedding [Q, H] of a step, image rows replaced."""
        embedding = self._embed(inputs.token_ids)
        if inputs.image_rows is not None:
            rows, values = inputs.image_rows
            embedding = embedding.index_copy(0, rows, values.to(embedding.dtype))
        return embedding

    def _fetch_engrams(self, inputs: ModelInputs) -> dict[int, torch.Tensor]:
        """{layer: keys and value [Q, hc_mult + 1, H]}; needs token ids only, so all layers are fetched up front."""
        step = inputs.steps.encoder
        layers = [layer for layer in self.layers if layer.engram is not None]
        if not layers:
            return {}
        ngrams = self.ops.engram.ngrams(
            inputs.token_ids, inputs.history, step.row_starts, step.sequence, step.positions, self.vocab_map,
            self.engram_pad, inputs.image_mask,
        )  # fmt: skip
        return {layer.index: layer.engram.fetch(self.ops, ngrams, inputs.image_mask) for layer in layers}

    def _attention(self, layer: Layer, streams: Streams, flow: _Flow, steps: StepViews, cache: KVCache) -> Streams:
        """Engram, DSpark feature and attention sub-layer; at the boundary, change to the decoder's rows."""
        ops = self.ops
        if layer.engram is not None:
            values = layer.engram.inject(ops, streams.settle(ops), flow.engram_kv.pop(layer.index), flow.image_mask)
            streams.values = values
        if self.dspark is not None and layer.index in self.dspark.targets:
            flow.features.append(ops.residual.stream_mean(streams.settle(ops)))
        out = layer.attn_site.enter(ops, streams)
        layer.attention.store_entries(ops, out.u, flow.step, cache, flow.shared)
        if layer.index == self.boundary:
            streams, out = self._enter_decoder(streams, out, flow, steps)
        Site.leave(streams, out, layer.attention(ops, out.u, out.x, flow.step, cache, flow.shared))
        return streams

    def _enter_decoder(
        self, streams: Streams, out: SiteOutput, flow: _Flow, steps: StepViews
    ) -> tuple[Streams, SiteOutput]:
        """Switch to the decoder's view; entries of all rows are stored, so dropped rows are not needed any more."""
        flow.step = steps.decoder
        rows = steps.kept_rows
        if rows is None:
            return streams, out
        flow.features = [feature[rows] for feature in flow.features]
        flow.image_mask = None if flow.image_mask is None else flow.image_mask[rows]
        flow.engram_kv = {layer: kv[rows] for layer, kv in flow.engram_kv.items()}
        return streams.take(rows), Site.take(out, rows)
