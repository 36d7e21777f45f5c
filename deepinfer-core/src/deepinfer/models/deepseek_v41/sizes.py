"""How large a model is: parameters, bytes of weights, bytes of cache. From the configuration alone.

Used by `deepinfer doctor --fit` and to plan memory. It counts what the manifest lists; nothing is measured.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.manifest import manifest

ROUTED_EXPERTS = "routed experts"
ENGRAM_TABLES = "engram tables"
DRAFT_EXPERTS = "draft experts"
OTHER = "other"
STATE_ALIGNMENT = 32
"""State slots begin at multiples of this and of a window entry."""


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Parameters by part (scales are no parameters, packed values count twice), and those one token uses."""

    backbone: int
    engram: int
    draft: int
    vision: int
    active_decode: int
    """a decoded token: its experts, all other backbone weights, embedding and head"""
    active_prefill: int
    """a prompt token that only the encoder half computes: half the layers and the embedding"""

    @property
    def total(self) -> int:
        """All parameters of the checkpoint."""
        return self.backbone + self.engram + self.draft + self.vision


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Parameters of a model with this configuration."""
    parts: Counter[str] = Counter()
    decode = prefill = 0.0
    chosen = config.text.num_experts_per_tok / config.text.n_routed_experts
    for name, spec in manifest(config).items():
        part = _part(name)
        parts[part] += spec.num_parameters
        if part == "backbone":
            active = spec.num_parameters * (chosen if ".experts." in name else 1)
            decode += active
            prefill += active if _in_encoder(name, config.topology.boundary) else 0
    return ParameterCounts(**parts, active_decode=round(decode), active_prefill=round(prefill))


def weight_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of a checkpoint by class; their sum is the size of all shards without headers."""
    sizes = dict.fromkeys((ROUTED_EXPERTS, ENGRAM_TABLES, DRAFT_EXPERTS, OTHER), 0)
    for name, spec in manifest(config).items():
        sizes[weight_class(name)] += spec.nbytes
    return sizes


def weight_class(name: str) -> str:
    """Class of a tensor for memory planning: classes differ in where they may live and how they are split."""
    if ".engram.embed." in name:
        return ENGRAM_TABLES
    if ".ffn.experts." in name:
        return DRAFT_EXPERTS if name.startswith("mtp.") else ROUTED_EXPERTS
    return OTHER


def cache_bytes_per_token(config: ModelConfig) -> int:
    """Paged cache bytes that one more token of context costs (compressed keys and index keys of all sources)."""
    block_size = 128
    return config.cache_spec(block_size, backtracking=0).bytes_per_block() // block_size


def state_bytes(config: ModelConfig, backtracking: int) -> int:
    """Bytes of one sequence's state slot (window rings, compressor state), aligned as slots are."""
    spec = config.cache_spec(128, backtracking)
    window_entry = 33 * spec.head_dim // 32
    alignment = math.lcm(STATE_ALIGNMENT, window_entry)
    return -(-spec.bytes_per_slot() // alignment) * alignment


def _part(name: str) -> str:
    if name.startswith(("vision.", "aligner.", "image_")):
        return "vision"
    if name.startswith("mtp."):
        return "draft"
    return "engram" if ".engram." in name else "backbone"


def _in_encoder(name: str, boundary: int) -> bool:
    """Whether a backbone tensor is used by a prompt token that the decoder half skips."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) < boundary
    return name == "embed.weight"
