"""Every tensor of a checkpoint: name, shape, dtype, format. Derived from the configuration alone.

The checkpoint reader validates headers against it before data is read, the writer and the random weights produce it,
`sizes.py` counts it. It knows the published names and formats; it does not know what the tensors are used for.

Symbols: H hidden size, m streams, V vocabulary, I expert width. 2-D shapes are [out, in].
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.hub.tensor_spec import SCALE, TensorSpec, scale_name
from deepinfer.models.deepseek_v41.config import ModelConfig, TextConfig, VisionConfig

BLOCK = 32
"""Channels, and for dense weights also rows, that share one scale."""


def manifest(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors of a checkpoint by name, in the order in which a checkpoint is written."""
    out = _Tensors()
    text = config.text
    _globals(out, text)
    for layer in range(text.num_hidden_layers):
        _layer(out, text, f"layers.{layer}", text.n_routed_experts)
        _sources(out, config, layer)
    for position, layer in enumerate(config.topology.engram_layers):
        _engram(out, text, f"layers.{layer}.engram", text.engram_num_embeddings[position])
    for draft in range(text.num_nextn_predict_layers):
        _layer(out, text, f"mtp.{draft}", text.dspark_n_routed_experts)
    if text.num_nextn_predict_layers:
        _draft_heads(out, text)
    _vision(out, config.vision, text.hidden_size)
    return out.specs


@dataclass(slots=True)
class _Tensors:
    """Collects specs; one method a storage format."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)

    def bf16(self, name: str, *shape: int) -> None:
        self.specs[name] = TensorSpec(shape, "BF16", "bf16")

    def f32(self, name: str, *shape: int) -> None:
        self.specs[name] = TensorSpec(shape, "F32", "f32")

    def fp8(self, name: str, rows: int, columns: int) -> None:
        """One scale for 32 x 32 values."""
        blocks = -(-rows // BLOCK), -(-columns // BLOCK)
        self._scaled(name, TensorSpec((rows, columns), "F8_E4M3", "fp8_block32"), *blocks)

    def fp8_rows(self, name: str, rows: int, columns: int) -> None:
        """One scale for 32 channels of a row."""
        self._scaled(name, TensorSpec((rows, columns), "F8_E4M3", "fp8_row32"), rows, columns // BLOCK)

    def mxfp4(self, name: str, rows: int, columns: int) -> None:
        """Two values a byte, one scale for 32 channels of a row."""
        self._scaled(name, TensorSpec((rows, columns // 2), "I8", "mxfp4_row32"), rows, columns // BLOCK)

    def _scaled(self, name: str, spec: TensorSpec, *scales: int) -> None:
        self.specs[name] = spec
        self.specs[scale_name(name)] = TensorSpec(scales, "F8_E8M0", SCALE)


def _globals(out: _Tensors, text: TextConfig) -> None:
    out.bf16("embed.weight", text.vocab_size, text.hidden_size)
    out.bf16("head.weight", text.vocab_size, text.hidden_size)
    out.bf16("norm.weight", text.hidden_size)
    for name in ("image_start", "image_end", "image_newline"):
        out.bf16(name, text.hidden_size)


def _layer(out: _Tensors, text: TextConfig, prefix: str, experts: int) -> None:
    """What backbone and draft layers have alike."""
    for site in ("attn", "ffn"):
        out.bf16(f"{prefix}.{site}_norm.weight", text.hidden_size)
        mixes = (2 + text.hc_mult) * text.hc_mult
        out.f32(f"{prefix}.hc_{site}_fn", mixes, text.hc_mult * text.hidden_size)
        out.f32(f"{prefix}.hc_{site}_base", mixes)
        out.f32(f"{prefix}.hc_{site}_scale", 3)
    _attention(out, text, f"{prefix}.attn")
    _experts(out, text, f"{prefix}.ffn", experts)


def _attention(out: _Tensors, text: TextConfig, prefix: str) -> None:
    width = text.num_attention_heads * text.head_dim
    out.fp8(f"{prefix}.wq_a.weight", text.q_lora_rank, text.hidden_size)
    out.bf16(f"{prefix}.q_norm.weight", text.q_lora_rank)
    out.fp8(f"{prefix}.wq_b.weight", width, text.q_lora_rank)
    out.fp8(f"{prefix}.wkv.weight", text.head_dim, text.hidden_size)
    out.bf16(f"{prefix}.kv_norm.weight", text.head_dim)
    out.fp8(f"{prefix}.wo_a.weight", text.o_groups * text.o_lora_rank, width // text.o_groups)
    out.fp8(f"{prefix}.wo_b.weight", text.hidden_size, text.o_groups * text.o_lora_rank)
    out.f32(f"{prefix}.attn_sink", text.num_attention_heads)


def _experts(out: _Tensors, text: TextConfig, prefix: str, experts: int) -> None:
    hidden, width = text.hidden_size, text.moe_intermediate_size
    out.bf16(f"{prefix}.gate.weight", experts, hidden)
    out.f32(f"{prefix}.gate.bias", experts)
    out.f32(f"{prefix}.gate.bias_vl", experts)
    shapes = {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}
    for matrix, shape in shapes.items():
        out.fp8(f"{prefix}.shared_experts.{matrix}.weight", *shape)
    for expert in range(experts):
        for matrix, shape in shapes.items():
            out.mxfp4(f"{prefix}.experts.{expert}.{matrix}.weight", *shape)


def _sources(out: _Tensors, config: ModelConfig, layer: int) -> None:
    """Compressor of a KV source, indexer of an index source."""
    text, topology, prefix = config.text, config.topology, f"layers.{layer}.attn"
    if layer in topology.kv_sources:
        out.bf16(f"{prefix}.compressor.wkv.weight", text.head_dim, text.hidden_size)
        if topology.ratio(layer) > 1:
            out.bf16(f"{prefix}.compressor.wgate.weight", text.head_dim, text.hidden_size)
        out.bf16(f"{prefix}.compressor.norm.weight", text.head_dim)
    if layer in topology.index_sources:
        out.fp8(f"{prefix}.indexer.wq_b.weight", text.index_n_heads * text.index_head_dim, text.q_lora_rank)
        out.bf16(f"{prefix}.indexer.weights_proj.weight", text.index_n_heads, text.hidden_size)
    if layer in topology.index_k_sources:
        out.bf16(f"{prefix}.indexer.wk.weight", text.index_head_dim, text.head_dim)
        out.bf16(f"{prefix}.indexer.k_norm.weight", text.index_head_dim)


def _engram(out: _Tensors, text: TextConfig, prefix: str, rows: int) -> None:
    channels = text.engram_rows_per_token * text.engram_head_dim
    out.fp8_rows(f"{prefix}.embed.weight", rows, text.engram_head_dim)
    out.fp8(f"{prefix}.wkv.weight", (text.hc_mult + 1) * text.hidden_size, channels)
    out.bf16(f"{prefix}.q_weight", text.hc_mult, text.hidden_size)
    out.bf16(f"{prefix}.k_weight", text.hc_mult, text.hidden_size)


def _draft_heads(out: _Tensors, text: TextConfig) -> None:
    """The projection before the first draft layer and the heads after the last."""
    hidden, rank = text.hidden_size, text.dspark_markov_rank
    last = f"mtp.{text.num_nextn_predict_layers - 1}"
    out.fp8("mtp.0.main_proj.weight", hidden, len(text.dspark_target_layer_ids) * hidden)
    out.bf16("mtp.0.main_norm.weight", hidden)
    out.bf16(f"{last}.norm.weight", hidden)
    out.bf16(f"{last}.markov_head.embed.weight", text.vocab_size, rank)
    out.bf16(f"{last}.markov_head.head.weight", text.vocab_size, rank)
    out.bf16(f"{last}.confidence_head.proj.weight", 1, hidden + rank)


def _vision(out: _Tensors, vision: VisionConfig, hidden: int) -> None:
    width = vision.hidden_size

    def affine(name: str, rows: int, columns: int) -> None:
        out.bf16(f"{name}.weight", rows, columns)
        out.bf16(f"{name}.bias", rows)

    affine("vision.patch_embed.proj", width, 3 * vision.patch_size**2)
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        out.bf16(f"{prefix}.norm1.weight", width)
        out.bf16(f"{prefix}.norm2.weight", width)
        affine(f"{prefix}.attn.wqkv", 3 * width, width)
        affine(f"{prefix}.attn.wo", width, width)
        out.bf16(f"{prefix}.mlp.w1.weight", 2 * vision.intermediate_size, width)
        out.bf16(f"{prefix}.mlp.w2.weight", width, vision.intermediate_size)
    out.bf16("vision.norm.weight", width)
    affine("aligner.w1", hidden, vision.downsample_ratio**2 * width)
    affine("aligner.w2", hidden, hidden)
