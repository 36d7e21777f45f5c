"""The configurations of the two small models: `v41-tiny-text` and its companion for tests, `v41-tiny-ci`.

Both keep the fixed dimensions of the published format (head 512, rope 64, index head 128, Engram row 256, four residual
streams) and shrink everything else. Sizes of the Engram tables follow from the hash primes.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.reference.engram import derive_constants

TEXT: dict[str, Any] = {
    "vocab_size": 8192,
    "num_attention_heads": 4,
    "o_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_n_heads": 4,
    "index_topk": 64,
    "candidate_topk_blocks": 32,
    "sliding_window": 128,
    "max_position_embeddings": 8192,
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 2003,
    "dspark_markov_rank": 64,
    "dspark_noise_token_id": 9,
}
"""What changes in `text_config` of core's built-in `tiny`."""

CI: dict[str, Any] = {
    **TEXT,
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "compress_ratios": [0, 2, 2, 1, 1, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3,
    "n_routed_experts": 4,
    "engram_layer_ids": [1],
    "engram_vocab_size": 499,
    "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": [3, 4],
    "dspark_n_routed_experts": 4,
}
"""The same for the small companion: five layers, every mechanism once."""

OVERRIDES = {"v41-tiny-text": TEXT, "v41-tiny-ci": CI}
ORIGINAL_POSITIONS = 2048
IMAGE_TOKEN_ID = 8


def tiny_config(name: str, compressed_vocab_size: int, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """The configuration `name`; `compressed_vocab_size` are the Engram classes of its tokenizer.

    `overrides` change keys of `text_config` further.
    """
    raw = deepcopy(dict(ModelConfig.builtin("tiny").raw))
    text = raw["text_config"]
    text.update(OVERRIDES[name] | (overrides or {}))
    text["rope_scaling"]["original_max_position_embeddings"] = ORIGINAL_POSITIONS
    text["engram_compressed_vocab_size"] = compressed_vocab_size
    constants = derive_constants(
        text["engram_layer_ids"], text["engram_vocab_size"], text["engram_max_ngram_size"], text["engram_n_heads"],
        compressed_vocab_size,
    )  # fmt: skip
    text["engram_num_embeddings"] = [constants[layer].num_rows for layer in text["engram_layer_ids"]]
    raw["image_token_id"] = IMAGE_TOKEN_ID
    return ModelConfig.from_dict(raw)
