"""Layer roles of the published and the tiny model, the rules between layer lists, and what caches follow from them."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.topology import DRAFT, FULL, REINDEX, REUSE, WINDOW, source_map


def derived(base: str = "tiny", **changes: Any) -> ModelConfig:
    """A built-in configuration with other text keys."""
    raw = dict(ModelConfig.builtin(base).raw)
    raw["text_config"] = {**raw["text_config"], **changes}
    return ModelConfig.from_dict(raw)


def test_published_layer_table() -> None:
    topology = ModelConfig.builtin("full").topology
    kinds = [WINDOW] * 2 + [REUSE] * 38 + [DRAFT] * 3
    for layer in (2, 8, 14, 20):
        kinds[layer] = FULL
    for layer in (24, 28, 32, 36):
        kinds[layer] = REINDEX
    assert list(topology.kinds) == kinds
    assert topology.boundary == 20
    assert topology.draft_layers == (40, 41, 42)
    assert [topology.ratio(layer) for layer in (0, 2, 19, 20, 39, 40)] == [0, 2, 2, 1, 1, 0]


def test_published_source_maps() -> None:
    topology = ModelConfig.builtin("full").topology
    segments = [(2, 8, 2), (8, 14, 8), (14, 20, 14), (20, 40, 20)]
    kv = [0, 1] + [source for first, end, source in segments for _ in range(first, end)] + [40, 41, 42]
    assert list(topology.kv_source) == kv
    index = kv[:24] + [layer // 4 * 4 for layer in range(24, 40)] + [40, 41, 42]
    assert list(topology.index_source) == index
    assert topology.index_k_sources == topology.kv_sources == (2, 8, 14, 20)


def test_published_candidate_group() -> None:
    topology = ModelConfig.builtin("full").topology
    assert [layer for layer in range(43) if topology.in_candidate_group(layer)] == list(range(20, 40))
    assert [layer for layer in range(43) if topology.selects_in_candidates(layer)] == [24, 28, 32, 36]
    assert [layer for layer in range(43) if topology.is_decoder(layer)] == list(range(20, 40))


def test_tiny_layer_table() -> None:
    topology = ModelConfig.builtin("tiny").topology
    assert topology.kinds == (WINDOW, WINDOW, FULL, REUSE, FULL, FULL, REINDEX, REUSE, DRAFT, DRAFT)
    assert topology.kv_source == (0, 1, 2, 2, 4, 5, 5, 5, 8, 9)
    assert topology.index_source == (0, 1, 2, 2, 4, 5, 6, 6, 8, 9)
    assert topology.boundary == 5


def test_source_map_before_the_first_source() -> None:
    assert source_map((2, 4), 6, 8) == (0, 1, 2, 2, 4, 4, 6, 7)
    assert source_map((), 2, 3) == (0, 1, 2)


def test_without_candidates_every_index_source_selects_among_all() -> None:
    topology = derived(candidate_source_layer_id=None).topology
    assert not any(topology.selects_in_candidates(layer) or topology.in_candidate_group(layer) for layer in range(10))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 4, 4, 2, 1, 1, 1, 0, 0]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 2, 2, 2, 0, 0]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 2, 0, 2, 1, 1, 1, 0, 0]}, "compress_ratios[3]"),
        ({"compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1, 0, 0]}, "compress_ratios[1]"),
        ({"compress_ratios": [0, 0, 2, 1, 2, 1, 1, 1, 0, 0]}, "compress_ratios[3]"),
        ({"compress_ratios": [0, 0, 0, 0, 2, 1, 1, 1, 0, 0]}, "compress_ratios[2]"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 0, 0]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": []}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [4, 2, 5]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [2, 4, 5, 8]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [2, 4, 5, 7]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [2, 4], "index_source_layer_ids": [2, 4, 6]}, "kv_source_layer_ids"),
        ({"index_source_layer_ids": [1, 2, 4, 5, 6]}, "index_source_layer_ids"),
        ({"index_source_layer_ids": [2, 4, 5, 5]}, "index_source_layer_ids"),
        ({"index_source_layer_ids": [2, 4, 5, 9]}, "index_source_layer_ids"),
        ({"index_k_source_layer_ids": [2, 4]}, "kv_source_layer_ids"),
        ({"index_k_source_layer_ids": [2, 4, 5, 7]}, "index_k_source_layer_ids"),
        ({"candidate_source_layer_id": 7}, "candidate_source_layer_id"),
        ({"candidate_source_layer_id": 2}, "candidate_source_layer_id"),
        ({"candidate_source_layer_id": 40}, "candidate_source_layer_id"),
        ({"candidate_block_size": 4}, "candidate_block_size"),
        ({"candidate_topk_blocks": 8, "index_topk": 65}, "candidate_topk_blocks"),
        ({"index_n_heads": 64}, "index_n_heads"),
        ({"engram_layer_ids": [1, 1]}, "engram_layer_ids"),
        ({"engram_layer_ids": [1, 8]}, "engram_layer_ids"),
        ({"engram_layer_ids": [4]}, "engram_num_embeddings"),
        ({"engram_num_embeddings": [6090, 6297]}, "engram_num_embeddings"),
        ({"engram_vocab_size": 1009}, "engram_num_embeddings"),
        ({"engram_pad_token_id": 512}, "engram_pad_token_id"),
        ({"dspark_noise_token_id": 512}, "dspark_noise_token_id"),
        ({"dspark_target_layer_ids": [5, 6, 8]}, "dspark_target_layer_ids"),
        ({"dspark_target_layer_ids": [6, 5]}, "dspark_target_layer_ids"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok"),
        ({"dspark_num_experts_per_tok": 9}, "dspark_num_experts_per_tok"),
        ({"o_groups": 3}, "o_groups"),
    ],
)
def test_rules_between_keys(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        derived(**changes)
    assert f"text_config.{key}: found" in str(caught.value)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (None, "image_token_id", 512),
        (None, "bos_token_id", 600),
        ("vision_config", "hidden_size", 60),
        ("vision_config", "num_attention_heads", 3),
    ],
)
def test_rules_outside_the_text_section(section: str | None, key: str, value: int) -> None:
    raw = dict(ModelConfig.builtin("tiny").raw)
    if section is None:
        raw[key] = value
    else:
        raw[section] = {**raw[section], key: value}
    with pytest.raises(ConfigError, match=r"(image_token_id|bos_token_id|vision_config\.hidden_size): found"):
        ModelConfig.from_dict(raw)


def test_beta_fast_below_beta_slow() -> None:
    scaling = {**ModelConfig.builtin("tiny").raw["text_config"]["rope_scaling"], "beta_fast": 0.5}
    with pytest.raises(ConfigError, match=r"rope_scaling\.beta_fast: found 0\.5, expected at least beta_slow = 1"):
        derived(rope_scaling=scaling)


def test_kernel_only_rules_do_not_refuse_a_configuration() -> None:
    """candidate rows of 128 bytes: a rule of one kernel, not of the model."""
    text = ModelConfig.builtin("micro").text
    assert text.candidate_topk_blocks * text.candidate_block_size * 2 == 128


def test_prefill_truncation_needs_sources_in_the_encoder() -> None:
    ModelConfig.builtin("full").topology.require_compactable()
    ModelConfig.builtin("tiny").topology.require_compactable()
    late = {"engram_layer_ids": [1, 5]}
    with pytest.raises(ConfigError, match="engram_layer_ids"):
        derived(**late).topology.require_compactable()
    with pytest.raises(ConfigError, match="dspark_target_layer_ids"):
        derived(dspark_target_layer_ids=[4, 6]).topology.require_compactable()
    with pytest.raises(ConfigError, match="index_k_source_layer_ids"):
        derived(index_k_source_layer_ids=[2, 4, 5, 6]).topology.require_compactable()


def test_cache_spec_of_the_published_model() -> None:
    spec = ModelConfig.builtin("full").cache_spec(block_size=128, backtracking=6)
    assert spec.ring == 134
    assert spec.window_layers == 43
    assert spec.compressed == spec.index == {2: 2, 8: 2, 14: 2, 20: 1}
    assert spec.state == {2: 7, 8: 7, 14: 7}
    assert spec.compressed_format == "fp4"
    assert spec.bytes_per_block() == 890 * 128
    assert spec.bytes_per_slot() == 3_042_336 + 86_016


@pytest.mark.parametrize(("backtracking", "rows"), [(0, 2), (1, 2), (2, 3), (6, 7)])
def test_state_rows_follow_backtracking(backtracking: int, rows: int) -> None:
    spec = ModelConfig.builtin("tiny").cache_spec(128, backtracking)
    assert spec.state == {2: rows, 4: rows}
    assert spec.ring == 32 + backtracking


def test_cache_spec_variants() -> None:
    assert derived(use_fp4_sparse_kv=False).cache_spec(128, 6).compressed_format == "fp8"
    assert derived(index_k_source_layer_ids=[2, 4, 5, 6]).cache_spec(128, 6).index == {2: 2, 4: 2, 5: 1, 6: 1}
    with pytest.raises(ConfigError, match="block_size: found 33"):
        ModelConfig.builtin("tiny").cache_spec(33, 6)


def test_traits() -> None:
    traits = ModelConfig.builtin("full").traits(block_size=128, backtracking=6, max_positions=4096)
    assert (traits.hidden_size, traits.ring, traits.block_size, traits.max_positions) == (5120, 134, 128, 4096)
    assert (traits.rms_norm_eps, traits.hc_eps, traits.swiglu_limit) == (1e-20, 1e-6, 10.0)


TINY_TEXT = {
    "vocab_size": 8192,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_n_heads": 4,
    "index_topk": 64,
    "candidate_topk_blocks": 32,
    "sliding_window": 128,
    "max_position_embeddings": 8192,
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 2003,
    "engram_num_embeddings": [8058, 8184],
    "engram_compressed_vocab_size": 5692,
    "dspark_markov_rank": 64,
    "dspark_noise_token_id": 9,
}
TINY_CI = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "compress_ratios": [0, 2, 2, 1, 1, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "engram_layer_ids": [1],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 499,
    "engram_num_embeddings": [499 + 503 + 509 + 521],
    "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": [3, 4],
    "dspark_n_routed_experts": 4,
}


@pytest.mark.parametrize("changes", [TINY_TEXT, TINY_CI], ids=["tiny-text", "tiny-ci"])
def test_other_sizes_of_the_same_design_parse(changes: dict[str, Any]) -> None:
    config = derived(**changes)
    assert config.topology.boundary == config.text.compress_ratios.index(1)
