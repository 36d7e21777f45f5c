"""The model's configuration: `config.json` in the published spelling, read strictly and frozen.

Called by everything that needs a size: the model, the loader's manifest, the engine (through `traits` and
`cache_spec`), `deepinfer doctor --fit`. It knows the keys and what each may be; rules between keys live in
`constraints.py`, what follows from the layer lists in `topology.py`.

A key that is unknown, spelled as another program spells it, missing, or set to a value the model cannot honour is a
`ConfigError` naming key, found and expected value. Two checkpoints that differ in a way that matters can therefore
never be confused.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.errors import ConfigError
from deepinfer.hub import strict_json
from deepinfer.models.deepseek_v41 import schema
from deepinfer.models.deepseek_v41.constraints import check
from deepinfer.models.deepseek_v41.spellings import OTHER_SPELLINGS
from deepinfer.models.deepseek_v41.topology import Topology

if TYPE_CHECKING:
    from deepinfer.hooks.types import CacheSpec, ModelTraits

BUILTIN = ("tiny", "micro", "full")
"""Names of the configurations inside the package."""

MICRO_OVERRIDES = {"sliding_window": 8, "index_topk": 8, "candidate_topk_blocks": 8}
"""What `micro` changes in `tiny`'s text_config: selection and candidate pruning become visible from 65 positions on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """`quantization_config`: the one published weight format."""

    quant_method: str = schema.only("fp8")
    activation_scheme: str = schema.only("dynamic")
    weight_block_size: tuple[int, int] = schema.only([32, 32])
    scale_fmt: str = schema.only("ue8m0")
    expert_dtype: str = schema.only("fp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """`rope_scaling`: YaRN, used by layers with a compression ratio of at least 1."""

    rope_type: str = schema.only("yarn")
    factor: float = schema.positive()
    beta_fast: float = schema.positive()
    beta_slow: float = schema.positive()
    original_max_position_embeddings: int = schema.integer()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """`text_config`. Field names are the published keys."""

    model_type: str = schema.only("deepseek_v41_text")
    vocab_size: int = schema.integer()
    hidden_size: int = schema.integer(multiple=32)
    moe_intermediate_size: int = schema.integer(multiple=32)
    num_hidden_layers: int = schema.integer()
    num_attention_heads: int = schema.integer()
    num_key_value_heads: int = schema.only(1)
    head_dim: int = schema.only(512)
    qk_rope_head_dim: int = schema.only(64)
    q_lora_rank: int = schema.integer(multiple=32)
    o_lora_rank: int = schema.integer(multiple=32)
    o_groups: int = schema.integer()
    hidden_act: str = schema.only("silu")
    swiglu_limit: float = schema.positive()
    rms_norm_eps: float = schema.positive()
    attention_bias: bool = schema.only(False)
    attention_dropout: float = schema.only(0.0)
    initializer_range: float = schema.anything(default=0.02)
    use_cache: bool = schema.anything(default=True)
    tie_word_embeddings: bool = schema.only(False)
    max_position_embeddings: int = schema.integer()
    rope_theta: float = schema.positive()
    rope_scaling: RopeScaling | None = field(default=None, metadata=schema.section(RopeScaling, nullable=True))
    n_routed_experts: int = schema.integer()
    n_shared_experts: int = schema.only(1)
    num_experts_per_tok: int = schema.integer()
    scoring_func: str = schema.only("sqrtsoftplus")
    topk_method: str = schema.only("noaux_tc")
    norm_topk_prob: bool = schema.only(True)
    routed_scaling_factor: float = schema.positive()
    sliding_window: int = schema.integer()
    compress_ratios: tuple[int, ...] = schema.integers()
    compress_rope_theta: float = schema.positive()
    kv_source_layer_ids: tuple[int, ...] = schema.integers()
    index_source_layer_ids: tuple[int, ...] = schema.integers()
    index_k_source_layer_ids: tuple[int, ...] | None = schema.integers(default=None)
    """absent = kv_source_layer_ids; `topology.index_k_sources` has the resolved list"""
    index_n_heads: int = schema.integer()
    index_head_dim: int = schema.only(128)
    index_topk: int = schema.integer()
    candidate_source_layer_id: int | None = schema.optional_layer()
    candidate_topk_blocks: int = schema.integer(multiple=8, maximum=4096)
    candidate_block_size: int = schema.integer()
    hc_mult: int = schema.only(4)
    hc_sinkhorn_iters: int = schema.integer()
    hc_eps: float = schema.positive()
    hc_shifted: bool = schema.only(True, default=True)
    engram_layer_ids: tuple[int, ...] = schema.integers()
    engram_num_embeddings: tuple[int, ...] = schema.integers()
    engram_max_ngram_size: int = schema.integer(2)
    engram_vocab_size: int = schema.integer(2)
    engram_n_heads: int = schema.integer()
    engram_head_dim: int = schema.integer(multiple=128)
    engram_pad_token_id: int = schema.integer(0)
    engram_compressed_vocab_size: int = schema.integer()
    num_nextn_predict_layers: int = schema.integer(0)
    dspark_block_size: int = schema.integer(maximum=32)
    dspark_noise_token_id: int = schema.integer(0)
    dspark_target_layer_ids: tuple[int, ...] = schema.integers()
    dspark_target_attn_input: bool = schema.only(True, default=True)
    dspark_markov_rank: int = schema.integer()
    dspark_n_routed_experts: int = schema.integer()
    dspark_num_experts_per_tok: int = schema.integer()
    use_fp4_sparse_kv: bool = schema.boolean(default=True)

    @property
    def engram_rows_per_token(self) -> int:
        """Table rows one token reads in one Engram layer: `engram_n_heads` for each n-gram order from 2 on."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """`vision_config`. Field names are the published keys."""

    model_type: str = schema.only("deepseek_v41_vision")
    num_hidden_layers: int = schema.integer()
    hidden_size: int = schema.integer()
    num_attention_heads: int = schema.integer()
    intermediate_size: int = schema.integer()
    patch_size: int = schema.integer()
    rope_theta: float = schema.positive()
    downsample_ratio: int = schema.integer()
    max_image_tokens: int = schema.integer()
    min_pixels: int = schema.integer()
    max_wh_ratio: float | None = schema.positive(nullable=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """The top level of `config.json`."""

    architectures: tuple[str, ...] = schema.only(["DeepseekV41ForCausalLM"])
    model_type: str = schema.only("deepseek_v41")
    dtype: str = schema.only("bfloat16")
    transformers_version: str = schema.anything(default="")
    bos_token_id: int = schema.integer(0)
    eos_token_id: int = schema.integer(0)
    pad_token_id: int = schema.integer(0)
    image_token_id: int = schema.integer(0)
    quantization_config: QuantizationConfig = field(metadata=schema.section(QuantizationConfig))
    text_config: TextConfig = field(metadata=schema.section(TextConfig))
    vision_config: VisionConfig = field(metadata=schema.section(VisionConfig))
    tokenizer_compatibility: str = schema.one_of("release", "native", default="release")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A valid configuration. Build it with `from_dict`, `from_directory`, `from_file`, `builtin` or `load`."""

    text: TextConfig
    vision: VisionConfig
    topology: Topology
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    tokenizer_compatibility: str
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    """the JSON object as read"""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed `config.json`. Raises ConfigError naming each wrong key, what was found and expected."""
        keys = schema.read(_Keys, raw, "", OTHER_SPELLINGS)
        check(keys)
        return cls(
            text=keys.text_config,
            vision=keys.vision_config,
            topology=Topology.from_text_config(keys.text_config),
            bos_token_id=keys.bos_token_id,
            eos_token_id=keys.eos_token_id,
            pad_token_id=keys.pad_token_id,
            image_token_id=keys.image_token_id,
            tokenizer_compatibility=keys.tokenizer_compatibility,
            raw=deepcopy(raw),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Read a JSON file; messages begin with its path."""
        path = Path(path)
        try:
            raw = strict_json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
        except (UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{path}: not a JSON configuration: {error}") from None
        try:
            return cls.from_dict(raw)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Read `config.json` of a checkpoint directory."""
        return cls.from_file(Path(directory) / "config.json")

    @classmethod
    def builtin(cls, name: str) -> ModelConfig:
        """One of the configurations inside the package (`BUILTIN`): `full` is the published one."""
        if name not in BUILTIN:
            raise ConfigError(f"built-in configuration: found {name!r}, expected one of {', '.join(BUILTIN)}")
        stored = "tiny" if name == "micro" else name
        text = resources.files(__package__).joinpath("configs", f"{stored}.json").read_text(encoding="utf-8")
        raw = strict_json.loads(text)
        if name == "micro":
            raw["text_config"].update(MICRO_OVERRIDES)
        return cls.from_dict(raw)

    @classmethod
    def load(cls, source: str | Path) -> ModelConfig:
        """A built-in name, a JSON file or a checkpoint directory: what `--config` accepts."""
        if str(source) in BUILTIN:
            return cls.builtin(str(source))
        path = Path(source)
        if not path.exists():
            expected = f"one of {', '.join(BUILTIN)}, a JSON file or a directory"
            raise ConfigError(f"configuration: found {str(source)!r}, expected {expected}")
        return cls.from_directory(path) if path.is_dir() else cls.from_file(path)

    def traits(self, block_size: int, backtracking: int, max_positions: int) -> ModelTraits:
        """Sizes that ops are refused or chosen by. `max_positions` is an exclusive bound of positions at run time."""
        from deepinfer.hooks.types import ModelTraits

        derived = {
            "ring": self.text.sliding_window + backtracking,
            "block_size": block_size,
            "max_positions": max_positions,
        }
        names = [name for name in ModelTraits.__dataclass_fields__ if name not in derived]
        return ModelTraits(**{name: getattr(self.text, name) for name in names}, **derived)

    def cache_spec(self, block_size: int, backtracking: int) -> CacheSpec:
        """What one sequence leaves behind; `backtracking` tokens can be taken back without losing earlier ones."""
        from deepinfer.hooks.types import CacheSpec

        topology = self.topology
        if block_size < 1 or any(block_size % topology.ratio(layer) for layer in topology.kv_sources):
            raise ConfigError(f"block_size: found {block_size}, expected a multiple of every compression ratio")
        kept = max(0, backtracking - 1)
        ratios = {layer: topology.ratio(layer) for layer in topology.kv_sources}
        return CacheSpec(
            block_size=block_size,
            ring=self.text.sliding_window + backtracking,
            window_layers=topology.num_layers + len(topology.draft_layers),
            head_dim=self.text.head_dim,
            index_head_dim=self.text.index_head_dim,
            compressed=ratios,
            index={layer: topology.ratio(layer) for layer in topology.index_k_sources},
            state={layer: ratio + kept for layer, ratio in ratios.items() if ratio > 1},
            compressed_format="fp4" if self.text.use_fp4_sparse_kv else "fp8",
        )
