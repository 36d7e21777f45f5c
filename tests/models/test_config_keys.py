"""The configuration is read strictly: published keys and values only, every fault named with found and expected."""

from __future__ import annotations

import copy
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.config import BUILTIN, MICRO_OVERRIDES, ModelConfig


def stored(name: str) -> dict[str, Any]:
    file = resources.files("deepinfer.models.deepseek_v41").joinpath("configs", f"{name}.json")
    return json.loads(file.read_text(encoding="utf-8"))


def changed(path: str, value: Any) -> dict[str, Any]:
    """The tiny configuration with one key set; "text_config.rope_scaling.factor" reaches into objects."""
    raw = stored("tiny")
    *sections, key = path.split(".")
    target = raw
    for section in sections:
        target = target[section]
    target[key] = value
    return raw


def without(path: str) -> dict[str, Any]:
    raw = changed(path, None)
    *sections, key = path.split(".")
    target = raw
    for section in sections:
        target = target[section]
    del target[key]
    return raw


def fault(raw: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw)
    return str(caught.value)


def leaves(raw: dict[str, Any], prefix: str = "") -> list[str]:
    """Paths of all keys that are no objects."""
    paths = []
    for key, value in raw.items():
        paths += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return paths


IGNORED = {"transformers_version", "text_config.initializer_range", "text_config.use_cache"}
OPTIONAL = {*IGNORED, "tokenizer_compatibility"}


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_configurations_parse(name: str) -> None:
    config = ModelConfig.builtin(name)
    assert config.raw["text_config"]["hidden_size"] == config.text.hidden_size
    assert config.text.compress_ratios == tuple(config.raw["text_config"]["compress_ratios"])


def test_full_configuration_is_the_published_file() -> None:
    raw = stored("full")
    assert len((json.dumps(raw, indent=2) + "\n").encode()) == 3311
    config = ModelConfig.builtin("full")
    text = {key: getattr(config.text, key) for key in raw["text_config"] if key != "rope_scaling"}
    expected = {key: tuple(value) if isinstance(value, list) else value for key, value in raw["text_config"].items()}
    del expected["rope_scaling"]
    assert text == expected
    assert config.text.rope_scaling.original_max_position_embeddings == 65536
    assert config.tokenizer_compatibility == "release"
    assert config.vision.max_wh_ratio is None


def test_micro_is_tiny_with_smaller_selection() -> None:
    tiny, micro = ModelConfig.builtin("tiny"), ModelConfig.builtin("micro")
    differing = {
        key for key in tiny.raw["text_config"] if tiny.raw["text_config"][key] != micro.raw["text_config"][key]
    }
    assert differing == set(MICRO_OVERRIDES)
    assert micro.text.candidate_topk_blocks * micro.text.candidate_block_size == 64


@pytest.mark.parametrize("path", sorted(set(leaves(stored("tiny"))) - OPTIONAL))
def test_every_published_key_is_required(path: str) -> None:
    assert f"{path}: found no such key" in fault(without(path))


@pytest.mark.parametrize("path", sorted(OPTIONAL))
def test_keys_that_do_not_matter_may_be_absent(path: str) -> None:
    ModelConfig.from_dict(without(path))


@pytest.mark.parametrize("path", sorted(set(leaves(stored("tiny"))) - IGNORED))
@pytest.mark.parametrize("value", ["?", True, -7, {}], ids=repr)
def test_every_key_refuses_values_of_other_kinds(path: str, value: Any) -> None:
    if value is True and isinstance(stored_value(path), bool):
        value = not stored_value(path)
    message = fault(changed(path, value))
    assert path in message
    assert "found" in message
    assert "expected" in message


def stored_value(path: str) -> Any:
    value: Any = stored("tiny")
    for key in path.split("."):
        value = value[key]
    return value


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("architectures", ["DeepseekV3ForCausalLM"], '["DeepseekV41ForCausalLM"]'),
        ("architectures", ["DeepseekV41ForCausalLM", "Other"], '["DeepseekV41ForCausalLM"]'),
        ("model_type", "deepseek_v4", '"deepseek_v41"'),
        ("dtype", "float16", '"bfloat16"'),
        ("quantization_config.weight_block_size", [128, 128], "[32, 32]"),
        ("quantization_config.scale_fmt", "float", '"ue8m0"'),
        ("quantization_config.expert_dtype", "fp8", '"fp4"'),
        ("text_config.hidden_act", "gelu", '"silu"'),
        ("text_config.num_key_value_heads", 8, "1"),
        ("text_config.head_dim", 128, "512"),
        ("text_config.qk_rope_head_dim", 32, "64"),
        ("text_config.index_head_dim", 64, "128"),
        ("text_config.hc_mult", 2, "4"),
        ("text_config.n_shared_experts", 2, "1"),
        ("text_config.scoring_func", "sigmoid", '"sqrtsoftplus"'),
        ("text_config.topk_method", "greedy", '"noaux_tc"'),
        ("text_config.norm_topk_prob", False, "true"),
        ("text_config.tie_word_embeddings", True, "false"),
        ("text_config.attention_bias", True, "false"),
        ("text_config.attention_dropout", 0.1, "0.0"),
        ("text_config.rope_scaling.rope_type", "linear", '"yarn"'),
        ("text_config.hc_shifted", False, "true"),
        ("text_config.dspark_target_attn_input", False, "true"),
        ("text_config.candidate_source_layer_id", -1, "null"),
        ("text_config.candidate_topk_blocks", 12, "multiple of 8"),
        ("text_config.candidate_topk_blocks", 4104, "at most 4096"),
        ("text_config.hidden_size", 250, "multiple of 32"),
        ("text_config.engram_head_dim", 64, "multiple of 128"),
        ("text_config.engram_compressed_vocab_size", 0, "at least 1"),
        ("text_config.vocab_size", 512.0, "an integer"),
        ("text_config.rms_norm_eps", 0, "positive"),
        ("text_config.dspark_block_size", 33, "at most 32"),
        ("vision_config.max_wh_ratio", 0, "positive number or null"),
        ("tokenizer_compatibility", "auto", '"release" or "native"'),
    ],
)
def test_values_the_model_cannot_honour_are_named(path: str, value: Any, expected: str) -> None:
    message = fault(changed(path, value))
    assert f"{path}: found {json.dumps(value)}" in message
    assert expected in message.split("expected", 1)[1]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config.rope_scaling", None),
        ("text_config.candidate_source_layer_id", None),
        ("text_config.use_fp4_sparse_kv", False),
        ("text_config.index_k_source_layer_ids", [2, 4, 5, 6]),
        ("text_config.hc_shifted", True),
        ("text_config.dspark_target_attn_input", True),
        ("text_config.rope_theta", 10000.0),
        ("text_config.swiglu_limit", 7),
        ("vision_config.max_wh_ratio", 4),
        ("transformers_version", "4.0"),
        ("tokenizer_compatibility", "release"),
    ],
)
def test_values_the_model_honours_are_accepted(path: str, value: Any) -> None:
    ModelConfig.from_dict(changed(path, value))


@pytest.mark.parametrize(
    ("path", "published"),
    [
        ("text_config.n_activated_experts", "text_config.num_experts_per_tok"),
        ("text_config.score_func", "text_config.scoring_func"),
        ("text_config.route_scale", "text_config.routed_scaling_factor"),
        ("text_config.engram_pad_id", "text_config.engram_pad_token_id"),
        ("n_mtp_layers", "text_config.num_nextn_predict_layers"),
        ("dspark_n_activated_experts", "text_config.dspark_num_experts_per_tok"),
        ("vision_n_layers", "vision_config.num_hidden_layers"),
        ("torch_dtype", "dtype"),
        ("text_config.rope_scaling.type", "text_config.rope_scaling.rope_type"),
        ("text_config.hiden_size", "text_config.hidden_size"),
    ],
)
def test_other_spellings_are_answered_with_the_published_one(path: str, published: str) -> None:
    message = fault(changed(path, 3))
    assert f"{path}: found unknown key with value 3" in message
    assert f"published spelling {published}" in message


def test_unknown_keys_are_errors_in_every_section() -> None:
    for section in ("", "text_config.", "vision_config.", "quantization_config.", "text_config.rope_scaling."):
        assert f"{section}gate_temp: found unknown key" in fault(changed(f"{section}gate_temp", 1.0))


def test_one_error_names_all_faults() -> None:
    raw = changed("text_config.hidden_act", "relu")
    raw["text_config"]["q_lora_rank"] = 100
    raw["vision_config"]["patch_size"] = 0
    raw["text_config"]["gate_temp"] = 1
    message = fault(raw)
    for key in ("text_config.hidden_act", "text_config.q_lora_rank", "vision_config.patch_size", "gate_temp"):
        assert key in message
    assert len(message.splitlines()) == 4


@pytest.mark.parametrize("raw", [None, [], "tiny", 3, {}])
def test_something_else_than_a_configuration_is_refused(raw: Any) -> None:
    fault(raw)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not a JSON configuration"),
        (b'{"dtype": 1, "dtype": 2}', "given twice"),
        (b'{"dtype": NaN}', "NaN is not a JSON number"),
        (b"\xff\xfe", "not a JSON configuration"),
        (b"[]", "expected an object"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        ModelConfig.from_file(path)
    assert str(path) in str(caught.value)


def test_load_takes_names_files_and_directories(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(stored("tiny")), encoding="utf-8")
    assert ModelConfig.load(path) == ModelConfig.load(tmp_path) == ModelConfig.load("tiny")
    assert ModelConfig.load("full") != ModelConfig.load("tiny")
    with pytest.raises(ConfigError, match="tiny, micro, full"):
        ModelConfig.load("tinny")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        ModelConfig.from_directory(tmp_path / "none")


def test_a_configuration_cannot_be_changed() -> None:
    raw = stored("tiny")
    config = ModelConfig.from_dict(raw)
    before = copy.deepcopy(config.raw)
    raw["text_config"]["hidden_size"] = 1
    assert config.raw == before
    with pytest.raises(AttributeError):
        config.text.hidden_size = 1  # type: ignore[misc]
