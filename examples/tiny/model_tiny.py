"""The backbone on batches of equally long texts, from the blocks of `model_blocks.py`; what `train.py` trains.

A text starts at position 0 of its row and nothing precedes it. Weights come from `model_weights.serve`, so the same
forward runs in float32, in bfloat16 and rounded to the checkpoint's formats. Differs from core only in how sums are
grouped; `tests/tiny/test_tiny_training.py` holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import model_blocks as blocks
import torch
from model_sinkhorn import sinkhorn
from model_weights import Numbers
from torch.nn import functional

from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.reference import indexer
from deepinfer.reference.engram import derive_constants, hash_rows
from deepinfer.reference.rope import rope_table

Tensor = torch.Tensor
Served = dict[str, Tensor]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled anew for every combination of shapes and switches."""
    torch._dynamo.config.cache_size_limit = 256
    torch._dynamo.config.accumulated_cache_size_limit = 1024
    return torch.compile(function, dynamic=False, fullgraph=True)


class Kernels:
    """The functions of `model_blocks`, compiled on first use or as they are."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self._made: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        made = self.__dict__["_made"]
        if name not in made:
            plain = getattr(blocks, name)
            made[name] = compiled(plain) if self.compiled else plain
        return made[name]


@dataclass(slots=True)
class Streams:
    """Residual streams of Q rows on their way through the sites; see `models/deepseek_v41/hyper.py`."""

    values: Tensor
    pre: Tensor
    pending: tuple[Tensor, Tensor, Tensor] | None = None


@dataclass(slots=True)
class Flow:
    """What one forward gathers besides the streams."""

    batch: int
    length: int
    positions: Tensor
    numbers: Numbers
    select: bool
    learn_index: bool
    latents: Tensor | None = None
    entries: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    selected: dict[int, Tensor | None] = field(default_factory=dict)
    candidates: Tensor | None = None
    features: list[Tensor] = field(default_factory=list)
    index_losses: list[Tensor] = field(default_factory=list)
    loads: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Result:
    """hidden [Q, H] before the final norm, normed [Q, H], features [Q, targets * H], expert loads {router bias: [e]}"""

    hidden: Tensor
    normed: Tensor
    features: Tensor
    index_loss: Tensor
    loads: dict[str, Tensor]


class TinyModel:
    """Layers, tables and constants of a configuration; holds no weights."""

    def __init__(
        self,
        config: ModelConfig,
        vocab_map: Tensor,
        device: torch.device | str,
        max_positions: int,
        compiled: bool = False,
    ) -> None:
        self.config, self.text, self.topology = config, config.text, config.topology
        self.device, self.kernels = torch.device(device), Kernels(compiled)
        text = self.text
        base = rope_table(max_positions, text.rope_theta, text.qk_rope_head_dim)
        yarn = rope_table(max_positions, text.compress_rope_theta, text.qk_rope_head_dim, text.rope_scaling)
        self.base_rope, self.yarn_rope = base.to(device), yarn.to(device)
        constants = derive_constants(
            text.engram_layer_ids, text.engram_vocab_size, text.engram_max_ngram_size, text.engram_n_heads,
            text.engram_compressed_vocab_size,
        )  # fmt: skip
        self.constants = {layer: value.to(device) for layer, value in constants.items()}
        self.vocab_map = vocab_map.to(device, torch.int64)

    def plain(self) -> TinyModel:
        """The same model without compiled functions, for batches of changing shape."""
        other = copy(self)
        other.kernels = Kernels(False)
        return other

    # Forward

    def forward(self, w: Served, ids: Tensor, numbers: Numbers, select: bool, learn_index: bool = False) -> Result:
        """Run texts ids [B, T] int64.

        select       attend to the indexer's choice; False: to all visible entries
        learn_index  also compute the indexers' loss
        """
        batch, length = ids.shape
        positions = torch.arange(length, device=ids.device).repeat(batch)
        flow = Flow(batch, length, positions, numbers, select, learn_index)
        streams = self.start(functional.embedding(ids.flatten(), w["embed"]))
        ngrams = self.ngrams(ids)
        for layer in range(self.text.num_hidden_layers):
            self._layer(w, layer, streams, flow, ngrams)
        hidden, normed = self.kernels.leave(
            streams.values, streams.pending, streams.pre, w["norm"], self.text.rms_norm_eps
        )
        index_loss = sum(flow.index_losses) if flow.index_losses else hidden.new_zeros((), dtype=torch.float32)
        return Result(hidden, normed, torch.cat(flow.features, -1), index_loss, flow.loads)

    def start(self, embedding: Tensor) -> Streams:
        """Equal streams; the first site reads stream 0."""
        m = self.text.hc_mult
        pre = torch.zeros(embedding.shape[0], m, device=embedding.device)
        pre[:, 0] = 1
        return Streams(embedding.unsqueeze(1).repeat(1, m, 1), pre)

    def ngrams(self, ids: Tensor) -> Tensor:
        """[Q, g] compressed ids of every token and those before it; the padding class before the text."""
        classes = self.vocab_map[ids]
        pad = int(self.text.engram_pad_token_id)
        columns = [
            functional.pad(classes[:, : ids.shape[1] - back], (back, 0), value=0) if back else classes
            for back in range(self.text.engram_max_ngram_size)
        ]
        before = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        nothing = self.vocab_map[pad]
        columns = [torch.where(before < back, nothing, column) for back, column in enumerate(columns)]
        return torch.stack(columns, -1).flatten(0, 1)

    def _layer(self, w: Served, layer: int, streams: Streams, flow: Flow, ngrams: Tensor) -> None:
        prefix = f"layers.{layer}"
        self._before_attention(w, layer, streams, flow, ngrams)
        u, x = self.enter(w, f"{prefix}", "attn", streams, flow.numbers)
        self.leave(streams, self._attention(w, layer, u, x, flow))
        u, x = self.enter(w, prefix, "ffn", streams, flow.numbers)
        y, flow.loads[f"{prefix}.ffn.gate.bias"] = self.moe(
            w, prefix, u, x, flow.numbers, self.text.num_experts_per_tok
        )
        self.leave(streams, y)

    def _before_attention(self, w: Served, layer: int, streams: Streams, flow: Flow, ngrams: Tensor) -> None:
        """Engram and the draft model's feature, both of which need the streams themselves."""
        engram, target = layer in self.topology.engram_layers, layer in self.topology.dspark_targets
        if not (engram or target):
            return
        mean = None
        if streams.pending is not None:
            streams.values, mean = self.kernels.settle(streams.values, streams.pending)
            streams.pending = None
        if engram:
            streams.values, mean = self._engram(w, layer, streams.values, ngrams), None
        if target:
            flow.features.append(streams.values.float().mean(1).to(streams.values.dtype) if mean is None else mean)

    def _engram(self, w: Served, layer: int, values: Tensor, ngrams: Tensor) -> Tensor:
        prefix = f"layers.{layer}.engram"
        rows = functional.embedding(hash_rows(ngrams, self.constants[layer]), w[f"{prefix}.embed"]).flatten(1)
        gate = w[f"{prefix}.q_weight"].float() * w[f"{prefix}.k_weight"].float()
        return self.kernels.inject(values, rows.to(values.dtype), w[f"{prefix}.wkv"], gate, self.text.rms_norm_eps)

    # Sub-layers, shared with the draft layers

    def enter(self, w: Served, prefix: str, which: str, streams: Streams, numbers: Numbers) -> tuple[Tensor, Tensor]:
        """Enter a site; returns its input u [Q, H] and the same quantized. The site's mix waits in `streams`."""
        text, site = self.text, f"{prefix}.hc_{which}"
        streams.values, pre, post, comb, u, x = self.kernels.enter(
            streams.values, streams.pending, streams.pre, w[f"{site}_fn"], w[f"{site}_base"], w[f"{site}_scale"],
            w[f"{prefix}.{which}_norm"], text.rms_norm_eps, text.hc_eps, numbers.quantize,
        )  # fmt: skip
        comb = sinkhorn(comb, text.hc_sinkhorn_iters, text.hc_eps)
        streams.pre, streams.pending = pre, (None, post, comb)
        return u, x

    @staticmethod
    def leave(streams: Streams, y: Tensor) -> None:
        """Hand a sub-layer's output to the next site."""
        _, post, comb = streams.pending
        streams.pending = (y, post, comb)

    def project(
        self, w: Served, prefix: str, x: Tensor, positions: Tensor, rope: Tensor, numbers: Numbers
    ) -> tuple[Tensor, ...]:
        """Query, window key and low-rank query of rows x [Q, H]."""
        attn = f"{prefix}.attn"
        return self.kernels.project(
            x, w[f"{attn}.wqa_wkv"], w[f"{attn}.q_norm"], w[f"{attn}.wq_b"], w[f"{attn}.kv_norm"], positions, rope,
            self.text.num_attention_heads, self.text.rms_norm_eps, numbers.quantize,
        )  # fmt: skip

    def output(self, w: Served, prefix: str, out: Tensor, positions: Tensor, rope: Tensor, numbers: Numbers) -> Tensor:
        attn = f"{prefix}.attn"
        return self.kernels.attention_output(
            out, w[f"{attn}.wo_a"], w[f"{attn}.wo_b"], positions, rope, self.text.o_groups, numbers.quantize
        )

    def moe(self, w: Served, prefix: str, u: Tensor, x: Tensor, numbers: Numbers, top_k: int) -> tuple[Tensor, Tensor]:
        ffn, text = f"{prefix}.ffn", self.text
        return self.kernels.moe(
            u, x, w[f"{ffn}.gate"], w[f"{ffn}.gate.bias"].view(-1), w[f"{ffn}.experts.w13"], w[f"{ffn}.experts.w2"],
            w[f"{ffn}.shared_experts.w13"], w[f"{ffn}.shared_experts.w2"], top_k, text.routed_scaling_factor,
            text.swiglu_limit, numbers.quantize, numbers.logits,
        )  # fmt: skip

    # Attention of the backbone

    def _attention(self, w: Served, layer: int, u: Tensor, x: Tensor, flow: Flow) -> Tensor:
        topology, prefix = self.topology, f"layers.{layer}"
        ratio = topology.ratio(layer)
        rope = self.yarn_rope if ratio else self.base_rope
        q, key, qr = self.project(w, prefix, x, flow.positions, rope, flow.numbers)
        self._store_entries(w, layer, u, flow)
        scores = self._select(w, layer, u, qr, flow) if ratio and layer in topology.index_sources else None
        shape = (flow.batch, flow.length)
        out, mass = self.kernels.attend(
            q.unflatten(0, shape), key.unflatten(0, shape), w[f"{prefix}.attn.attn_sink"].view(-1),
            flow.entries[topology.kv_source[layer]] if ratio else None,
            flow.selected[topology.index_source[layer]] if ratio else None,
            self.text.sliding_window, ratio, flow.numbers.logits, scores is not None and flow.learn_index,
        )  # fmt: skip
        if mass is not None:
            flow.index_losses.append(self._index_loss(layer, scores, mass, flow))
        return self.output(w, prefix, out.flatten(0, 1), flow.positions, rope, flow.numbers)

    def _store_entries(self, w: Served, layer: int, u: Tensor, flow: Flow) -> None:
        """Compressed entries and index keys of the layer, where it is a source."""
        topology, attn, eps = self.topology, f"layers.{layer}.attn", self.text.rms_norm_eps
        ratio, quantize = topology.ratio(layer), flow.numbers.quantize
        if layer not in topology.index_k_sources:
            return
        positions = flow.positions if ratio == 1 else flow.positions.view(-1, ratio)[:, 0]
        if layer in topology.kv_sources:
            flow.latents = self.kernels.compress(
                u, w[f"{attn}.compressor.wkv"], w.get(f"{attn}.compressor.wgate"), w[f"{attn}.compressor.norm"], eps
            )
            keys = self.kernels.entry_keys(flow.latents, positions, self.yarn_rope, quantize)
            flow.entries[layer] = keys.unflatten(0, (flow.batch, -1))
        if flow.select or flow.learn_index:
            keys = self.kernels.index_keys(
                flow.latents.detach(), w[f"{attn}.indexer.wk"], w[f"{attn}.indexer.k_norm"], positions, self.yarn_rope,
                eps, quantize,
            )  # fmt: skip
            flow.index_keys[layer] = keys.unflatten(0, (flow.batch, -1))

    def _select(self, w: Served, layer: int, u: Tensor, qr: Tensor, flow: Flow) -> Tensor | None:
        """Scores [B, T, E] of an index source; its choice, a mask, goes to `flow.selected`."""
        flow.selected[layer] = None
        if not (flow.select or flow.learn_index):
            return None
        attn, shape = f"layers.{layer}.attn.indexer", (flow.batch, flow.length)
        q, weights = self.kernels.index_queries(
            u.detach(), qr.detach(), w[f"{attn}.wq_b"], w[f"{attn}.weights_proj"], flow.positions, self.yarn_rope,
            self.text.index_n_heads, flow.numbers.quantize,
        )  # fmt: skip
        source = max(s for s in self.topology.index_k_sources if s <= layer)
        scores = self.kernels.index_scores(
            q.unflatten(0, shape), weights.unflatten(0, shape), flow.index_keys[source], flow.numbers.logits
        )
        if flow.select:
            with torch.no_grad():
                flow.selected[layer] = self._choose(layer, scores.detach().flatten(0, 1), flow).unflatten(0, shape)
        return scores

    def _choose(self, layer: int, scores: Tensor, flow: Flow) -> Tensor:
        """The entries that rows attend to, bool [Q, E], by core's own selection. scores [Q, E]."""
        text, topology = self.text, self.topology
        lengths = (flow.positions + 1) // topology.ratio(layer)
        candidates = flow.candidates if topology.selects_in_candidates(layer) else None
        if layer == topology.candidate_source:
            flow.candidates = indexer.candidate_blocks(
                scores, lengths, text.candidate_block_size, text.candidate_topk_blocks
            )
        if candidates is not None:
            scores = indexer.restrict(scores, candidates, text.candidate_block_size)
        chosen = indexer.top_entries(scores, lengths, text.index_topk)
        width = scores.shape[1]
        mask = torch.zeros(scores.shape[0], width + 1, dtype=torch.bool, device=scores.device)
        mask.scatter_(1, torch.where(chosen >= 0, chosen, width), True)
        return mask[:, :width]

    def _index_loss(self, layer: int, scores: Tensor, mass: Tensor, flow: Flow) -> Tensor:
        allowed = flow.selected[layer]
        if allowed is None:
            ratio = self.topology.ratio(layer)
            allowed = blocks.visible_entries(flow.length, scores.shape[-1], ratio, scores.device)
        return self.kernels.index_loss(scores, mass, allowed)

    # Convenience

    def logits(self, w: Served, ids: Tensor, numbers: Numbers, select: bool = True) -> Tensor:
        """Logits [B, T, V] float32 of texts of any length."""
        return self.vocabulary(w, self.run(w, ids, numbers, select).normed).unflatten(0, ids.shape)

    def run(self, w: Served, ids: Tensor, numbers: Numbers, select: bool = True) -> Result:
        """`forward` of texts of any length: padded behind, where nothing before can see it."""
        batch, length = ids.shape
        window = self.text.sliding_window
        padded = -(-length // window) * window if length > window else length + length % 2
        result = self.forward(w, functional.pad(ids, (0, padded - length)), numbers, select)

        def cut(rows: Tensor) -> Tensor:
            return rows.unflatten(0, (batch, padded))[:, :length].flatten(0, 1)

        return Result(cut(result.hidden), cut(result.normed), cut(result.features), result.index_loss, result.loads)

    @staticmethod
    def vocabulary(w: Served, normed: Tensor) -> Tensor:
        """Vocabulary logits float32 of normed hidden states."""
        return blocks.linear(normed, w["head"], out_dtype=torch.float32)
