"""The tensors of a checkpoint and the sizes that follow, against the published figures."""

from __future__ import annotations

import json

import pytest

from deepinfer.hub.tensor_spec import SCALE, TensorSpec, scale_name, weight_name
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.manifest import manifest
from deepinfer.models.deepseek_v41.sizes import (
    cache_bytes_per_token,
    count_parameters,
    state_bytes,
    weight_bytes,
)

Specs = dict[str, TensorSpec]


@pytest.fixture(scope="module")
def full() -> Specs:
    return manifest(ModelConfig.builtin("full"))


def test_number_of_tensors_is_the_published_one(full: Specs) -> None:
    assert len(full) == 96_085
    count = {prefix: sum(name.startswith(prefix) for name in full) for prefix in ("layers.", "mtp.", "vision.")}
    assert count["mtp."] == 3 * 798 + 7
    assert count["layers."] == 40 * 2334 + 11 + 32 + 12
    assert sum(name.startswith(("vision.", "aligner.")) for name in full) == 263


def test_index_has_the_published_size_to_the_byte(full: Specs) -> None:
    """7,470,294 bytes: no name can be longer, shorter or missing."""
    total = sum(spec.nbytes for spec in full.values())
    weight_map = dict.fromkeys(full, "model-00001-of-00099.safetensors")
    assert len(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)) == 7_470_294


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "kind"),
    [
        ("embed.weight", (129280, 5120), "BF16", "bf16"),
        ("image_newline", (5120,), "BF16", "bf16"),
        ("layers.0.hc_attn_fn", (24, 20480), "F32", "f32"),
        ("layers.39.hc_ffn_base", (24,), "F32", "f32"),
        ("mtp.2.hc_ffn_scale", (3,), "F32", "f32"),
        ("layers.0.attn.wq_a.weight", (1280, 5120), "F8_E4M3", "fp8_block32"),
        ("layers.0.attn.wq_a.scale", (40, 160), "F8_E8M0", "scale"),
        ("layers.7.attn.wq_b.weight", (32768, 1280), "F8_E4M3", "fp8_block32"),
        ("layers.7.attn.wkv.weight", (512, 5120), "F8_E4M3", "fp8_block32"),
        ("layers.7.attn.wo_a.weight", (8192, 4096), "F8_E4M3", "fp8_block32"),
        ("layers.7.attn.wo_a.scale", (256, 128), "F8_E8M0", "scale"),
        ("layers.7.attn.wo_b.weight", (5120, 8192), "F8_E4M3", "fp8_block32"),
        ("layers.7.attn.attn_sink", (64,), "F32", "f32"),
        ("layers.7.ffn.gate.weight", (384, 5120), "BF16", "bf16"),
        ("layers.7.ffn.gate.bias_vl", (384,), "F32", "f32"),
        ("mtp.1.ffn.gate.bias", (128,), "F32", "f32"),
        ("layers.7.ffn.shared_experts.w2.weight", (5120, 2304), "F8_E4M3", "fp8_block32"),
        ("layers.7.ffn.experts.383.w1.weight", (2304, 2560), "I8", "mxfp4_row32"),
        ("layers.7.ffn.experts.383.w3.scale", (2304, 160), "F8_E8M0", "scale"),
        ("layers.7.ffn.experts.0.w2.weight", (5120, 1152), "I8", "mxfp4_row32"),
        ("layers.7.ffn.experts.0.w2.scale", (5120, 72), "F8_E8M0", "scale"),
        ("layers.14.attn.compressor.wgate.weight", (512, 5120), "BF16", "bf16"),
        ("layers.20.attn.compressor.norm.weight", (512,), "BF16", "bf16"),
        ("layers.24.attn.indexer.wq_b.weight", (4096, 1280), "F8_E4M3", "fp8_block32"),
        ("layers.24.attn.indexer.weights_proj.weight", (32, 5120), "BF16", "bf16"),
        ("layers.20.attn.indexer.wk.weight", (128, 512), "BF16", "bf16"),
        ("layers.20.attn.indexer.k_norm.weight", (128,), "BF16", "bf16"),
        ("layers.1.engram.embed.weight", (384006168, 256), "F8_E4M3", "fp8_row32"),
        ("layers.14.engram.embed.scale", (384016682, 8), "F8_E8M0", "scale"),
        ("layers.14.engram.wkv.weight", (25600, 6144), "F8_E4M3", "fp8_block32"),
        ("layers.14.engram.k_weight", (4, 5120), "BF16", "bf16"),
        ("mtp.0.main_proj.weight", (5120, 15360), "F8_E4M3", "fp8_block32"),
        ("mtp.0.main_norm.weight", (5120,), "BF16", "bf16"),
        ("mtp.2.norm.weight", (5120,), "BF16", "bf16"),
        ("mtp.2.markov_head.embed.weight", (129280, 256), "BF16", "bf16"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16", "bf16"),
        ("vision.patch_embed.proj.weight", (1024, 588), "BF16", "bf16"),
        ("vision.blocks.31.attn.wqkv.weight", (3072, 1024), "BF16", "bf16"),
        ("vision.blocks.31.mlp.w1.weight", (5632, 1024), "BF16", "bf16"),
        ("aligner.w1.weight", (5120, 9216), "BF16", "bf16"),
    ],
)
def test_published_tensors(full: Specs, name: str, shape: tuple[int, ...], dtype: str, kind: str) -> None:
    assert full[name] == TensorSpec(shape, dtype, kind)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",
        "layers.3.attn.compressor.wkv.weight",
        "layers.24.attn.indexer.wk.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "mtp.0.norm.weight",
        "mtp.1.main_proj.weight",
        "hc_head_fn",
        "layers.0.engram.wkv.weight",
    ],
)
def test_tensors_that_do_not_exist(full: Specs, name: str) -> None:
    assert name not in full


def test_every_quantized_weight_has_scales_and_nothing_else(full: Specs) -> None:
    scales = {name for name, spec in full.items() if spec.kind == SCALE}
    quantized = {name for name, spec in full.items() if spec.kind not in (SCALE, "bf16", "f32")}
    assert {scale_name(name) for name in quantized} == scales
    assert {weight_name(name) for name in scales} == quantized


def test_published_parameter_counts() -> None:
    counts = count_parameters(ModelConfig.builtin("full"))
    assert round(counts.backbone / 1e9, 2) == 551.57
    assert round(counts.engram / 1e9, 2) == 196.93
    assert round(counts.draft / 1e9, 2) == 14.23
    assert round(counts.vision / 1e6, 1) == 485.3
    assert round(counts.total / 1e9, 1) == 763.2
    assert round(counts.active_decode / 1e9, 1) == 16.5
    assert round(counts.active_prefill / 1e9, 1) == 8.2


def test_tiny_parameter_counts() -> None:
    counts = count_parameters(ModelConfig.builtin("tiny"))
    assert round((counts.total - counts.vision) / 1e6, 1) == 37.4
    assert counts.vision < 1e6


def test_published_weight_bytes(full: Specs) -> None:
    sizes = weight_bytes(ModelConfig.builtin("full"))
    assert {name: round(size / 1e9) for name, size in sizes.items()} == {
        "routed experts": 289,
        "engram tables": 203,
        "draft experts": 7,
        "other": 12,
    }
    assert sum(sizes.values()) == sum(spec.nbytes for spec in full.values())


def test_published_cache_sizes() -> None:
    config = ModelConfig.builtin("full")
    assert cache_bytes_per_token(config) == 890
    assert state_bytes(config, backtracking=6) == 3_128_928
