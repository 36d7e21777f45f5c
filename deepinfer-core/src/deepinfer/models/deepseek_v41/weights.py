"""From checkpoint tensors to the model: names, row fusions and preparation by the bound ops.

Called once per worker, after the checkpoint's headers were validated against the manifest. Every weight passes
through the `prepare_*` op of whoever will use it; what they return is opaque here. Tensors are read one at a time, so
that loading needs little more memory than the checkpoint itself.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer.hooks import OpContext, OpTable, Weight
from deepinfer.hooks.ops.attention import LatentWeights
from deepinfer.hooks.ops.experts import MoeWeights
from deepinfer.hooks.ops.residual import SiteWeights
from deepinfer.hub.safetensors import TensorSource
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.compressor import Compressor, IndexKey
from deepinfer.models.deepseek_v41.config import ModelConfig, TextConfig
from deepinfer.models.deepseek_v41.dspark import DraftLayer, DSpark
from deepinfer.models.deepseek_v41.engram import Engram
from deepinfer.models.deepseek_v41.hyper import Site
from deepinfer.models.deepseek_v41.indexer import Indexer
from deepinfer.models.deepseek_v41.model import Layer, Model
from deepinfer.models.deepseek_v41.moe import Moe
from deepinfer.reference.engram import derive_constants
from deepinfer.reference.rope import rope_table


def build_model(
    config: ModelConfig, source: TensorSource, ops: OpTable, context: OpContext, vocab_map: torch.Tensor
) -> Model:
    """Load all text and draft weights onto the context's device.

    source     a checkpoint, random tensors of the same names, or, in training, float32 parameters without scales

    vocab_map  [vocab] int, the compressed vocabulary of the checkpoint's tokenizer
    The rope tables cover `context.traits.max_positions` positions.
    """
    return _Builder(config, source, ops, context).model(vocab_map)


class _Builder:
    """Reads, fuses and prepares; holds nothing after the model is built."""

    def __init__(self, config: ModelConfig, source: TensorSource, ops: OpTable, context: OpContext) -> None:
        self.text, self.topology = config.text, config.topology
        self.source, self.ops, self.device = source, ops, context.device
        self.smooth = not context.numerics.quantize
        self.base_rope, self.yarn_rope = self._rope_tables(context.traits.max_positions)
        self.engrams = derive_constants(
            self.text.engram_layer_ids, self.text.engram_vocab_size, self.text.engram_max_ngram_size,
            self.text.engram_n_heads, self.text.engram_compressed_vocab_size,
        )  # fmt: skip

    def _rope_tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        text: TextConfig = self.text
        base = rope_table(length, text.rope_theta, text.qk_rope_head_dim, None)
        yarn = rope_table(length, text.compress_rope_theta, text.qk_rope_head_dim, text.rope_scaling)
        return base.to(self.device), yarn.to(self.device)

    # Tensors

    def read(self, name: str) -> torch.Tensor:
        return self.source.read(name).to(self.device)

    def vector(self, name: str) -> torch.Tensor:
        """A bf16 parameter used as it is: norm weights, embeddings."""
        tensor = self.read(name)
        return tensor.float() if self.smooth else tensor

    def weight(self, *names: str) -> Weight:
        """A dense weight; several names are fused by rows."""
        parts = [self._stored(name) for name in names]
        if len(parts) == 1:
            return parts[0]
        scales = None if parts[0].scales is None else torch.cat([part.scales for part in parts])
        return Weight(_cat_rows([part.values for part in parts]), scales, parts[0].format)

    def _stored(self, name: str) -> Weight:
        values = self.read(f"{name}.weight")
        if values.dtype == torch.float8_e4m3fn:
            return Weight(values, self.read(f"{name}.scale"), "fp8_block32")
        return Weight(values, None, "f32" if values.dtype == torch.float32 else "bf16")

    def dense(self, *names: str) -> Any:
        return self.ops.gemm.prepare_weight(self.weight(*names))

    def experts(self, prefix: str, count: int, *names: str) -> Any:
        """Stacked weights of all experts, `names` fused by rows."""
        first = self.read(f"{prefix}.0.{names[0]}.weight")
        stack = self._trained_experts if first.dtype == torch.float32 else self._stored_experts
        return self.ops.gemm.prepare_expert_weight(stack(prefix, count, names))

    def _stored_experts(self, prefix: str, count: int, names: tuple[str, ...]) -> Weight:
        """MXFP4 as published, filled in expert by expert so that no second copy exists."""
        values = scales = None
        for expert in range(count):
            value = torch.cat([self.read(f"{prefix}.{expert}.{name}.weight") for name in names])
            scale = torch.cat([self.read(f"{prefix}.{expert}.{name}.scale") for name in names])
            if values is None:
                values, scales = value.new_empty(count, *value.shape), scale.new_empty(count, *scale.shape)
            values[expert], scales[expert] = value, scale
        return Weight(values, scales, "mxfp4_row32")

    def _trained_experts(self, prefix: str, count: int, names: tuple[str, ...]) -> Weight:
        """Float32 parameters, stacked so that gradients reach each of them."""
        parts = [torch.cat([self.read(f"{prefix}.{e}.{name}.weight") for name in names]) for e in range(count)]
        return Weight(torch.stack(parts), None, "f32")

    # Parts of a layer

    def site(self, prefix: str, which: str) -> Site:
        names = (f"{prefix}.hc_{which}_{part}" for part in ("fn", "base", "scale"))
        return Site(SiteWeights(*map(self.read, names)), self.vector(f"{prefix}.{which}_norm.weight"))

    def moe(self, prefix: str, experts: int, top_k: int) -> Moe:
        ffn = f"{prefix}.ffn"
        return Moe(
            MoeWeights(
                gate=self.dense(f"{ffn}.gate"),
                bias=self.read(f"{ffn}.gate.bias"),
                bias_vl=self.read(f"{ffn}.gate.bias_vl"),
                w13=self.experts(f"{ffn}.experts", experts, "w1", "w3"),
                w2=self.experts(f"{ffn}.experts", experts, "w2"),
                shared_w13=self.dense(f"{ffn}.shared_experts.w1", f"{ffn}.shared_experts.w3"),
                shared_w2=self.dense(f"{ffn}.shared_experts.w2"),
                top_k=top_k,
                scaling=self.text.routed_scaling_factor,
                limit=self.text.swiglu_limit,
            )
        )

    def attention(self, layer: int, prefix: str) -> Attention:
        topology, attn = self.topology, f"{prefix}.attn"
        compressed = topology.ratio(layer) > 0
        rope = self.yarn_rope if compressed else self.base_rope
        return Attention(
            layer=layer,
            wqa_wkv=self.dense(f"{attn}.wq_a", f"{attn}.wkv"),
            q_norm=self.vector(f"{attn}.q_norm.weight"),
            wq_b=self.dense(f"{attn}.wq_b"),
            latent=LatentWeights(self.vector(f"{attn}.kv_norm.weight"), self.read(f"{attn}.attn_sink"), rope),
            wo_a=self.dense(f"{attn}.wo_a"),
            wo_b=self.dense(f"{attn}.wo_b"),
            entry_source=topology.kv_source[layer] if compressed else None,
            selection_source=topology.index_source[layer] if compressed else None,
            compressor=self.compressor(layer, attn) if layer in topology.kv_sources else None,
            index_key=self.index_key(layer, attn) if layer in topology.index_k_sources else None,
            indexer=self.indexer(layer, attn) if layer in topology.index_sources else None,
            heads=self.text.num_attention_heads,
            eps=self.text.rms_norm_eps,
        )

    def compressor(self, layer: int, attn: str) -> Compressor:
        ratio = self.topology.ratio(layer)
        return Compressor(
            layer=layer,
            ratio=ratio,
            wkv=self.dense(f"{attn}.compressor.wkv"),
            wgate=self.dense(f"{attn}.compressor.wgate") if ratio > 1 else None,
            norm=self.vector(f"{attn}.compressor.norm.weight"),
            rope=self.yarn_rope,
            eps=self.text.rms_norm_eps,
        )

    def index_key(self, layer: int, attn: str) -> IndexKey:
        return IndexKey(
            layer=layer,
            ratio=self.topology.ratio(layer),
            wk=self.dense(f"{attn}.indexer.wk"),
            norm=self.vector(f"{attn}.indexer.k_norm.weight"),
            rope=self.yarn_rope,
            eps=self.text.rms_norm_eps,
        )

    def indexer(self, layer: int, attn: str) -> Indexer:
        topology = self.topology
        return Indexer(
            wq_b=self.dense(f"{attn}.indexer.wq_b"),
            weights_proj=self.dense(f"{attn}.indexer.weights_proj"),
            rope=self.yarn_rope,
            heads=self.text.index_n_heads,
            layer=layer,
            keys_layer=max(source for source in topology.index_k_sources if source <= layer),
            restricted=topology.selects_in_candidates(layer),
            makes_candidates=layer == topology.candidate_source,
        )

    def engram(self, layer: int) -> Engram:
        prefix = f"layers.{layer}.engram"
        values = self.source.map_rows(f"{prefix}.embed.weight")
        if values.dtype == torch.float32:
            table = Weight(values, None, "f32")
        else:
            table = Weight(values, self.source.map_rows(f"{prefix}.embed.scale"), "fp8_row32")
        gate = self.read(f"{prefix}.q_weight").float() * self.read(f"{prefix}.k_weight").float()
        constants = self.engrams[layer].to(self.device)
        return Engram(constants, self.ops.engram.prepare_table(table), self.dense(f"{prefix}.wkv"), gate)

    def layer(self, index: int) -> Layer:
        prefix = f"layers.{index}"
        return Layer(
            index=index,
            attn_site=self.site(prefix, "attn"),
            attention=self.attention(index, prefix),
            ffn_site=self.site(prefix, "ffn"),
            moe=self.moe(prefix, self.text.n_routed_experts, self.text.num_experts_per_tok),
            engram=self.engram(index) if index in self.topology.engram_layers else None,
        )

    # Draft model and globals

    def draft_layer(self, index: int) -> DraftLayer:
        prefix = f"mtp.{index}"
        return DraftLayer(
            attn_site=self.site(prefix, "attn"),
            attention=self.attention(self.text.num_hidden_layers + index, prefix),
            ffn_site=self.site(prefix, "ffn"),
            moe=self.moe(prefix, self.text.dspark_n_routed_experts, self.text.dspark_num_experts_per_tok),
        )

    def dspark(self) -> DSpark | None:
        count = self.text.num_nextn_predict_layers
        if count == 0:
            return None
        last = f"mtp.{count - 1}"
        return DSpark(
            targets=self.topology.dspark_targets,
            main_proj=self.dense("mtp.0.main_proj"),
            main_norm=self.vector("mtp.0.main_norm.weight"),
            main_wkv=self.dense(*(f"mtp.{index}.attn.wkv" for index in range(count))),
            layers=tuple(self.draft_layer(index) for index in range(count)),
            first_ring=self.text.num_hidden_layers,
            norm=self.vector(f"{last}.norm.weight"),
            markov_embed=self.vector(f"{last}.markov_head.embed.weight"),
            markov_head=self.vector(f"{last}.markov_head.head.weight"),
            confidence=self.vector(f"{last}.confidence_head.proj.weight").flatten(),
            noise_id=self.text.dspark_noise_token_id,
            eps=self.text.rms_norm_eps,
        )

    def model(self, vocab_map: torch.Tensor) -> Model:
        return Model(
            ops=self.ops,
            layers=tuple(self.layer(index) for index in range(self.text.num_hidden_layers)),
            boundary=self.topology.boundary,
            embed=self.vector("embed.weight"),
            norm=self.vector("norm.weight"),
            head=self.dense("head"),
            eps=self.text.rms_norm_eps,
            vocab_map=vocab_map.to(self.device, torch.int64),
            engram_pad=self.text.engram_pad_token_id,
            dspark=self.dspark(),
        )


def _cat_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate by rows; torch cannot do that with 8-bit floats, with their bytes it can."""
    dtype = parts[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(parts)
    return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)
