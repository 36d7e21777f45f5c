"""Which layer does what: who owns compressed keys, who selects, where the decoder half begins.

Built by `config.py` from checked lists; used by the model, the manifest and the cache. It knows layer numbers only, no
sizes and no weights. Draft layers are numbered after the backbone's: num_layers, num_layers + 1, ...

Terms: `kv_source[L]` is the layer whose compressed cache layer L reads, `index_source[L]` the layer whose top-k list it
uses; a source maps to itself, and so does a layer before the first source and every draft layer (they read neither).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer.models.deepseek_v41.config import TextConfig

WINDOW = "window"
"""sliding window only"""
FULL = "full"
"""compresses its own keys and selects among them"""
REUSE = "reuse"
"""reads a source's compressed keys through a source's selection"""
REINDEX = "reindex"
"""reads a source's compressed keys, selects anew"""
DRAFT = "draft"
"""draft layer, sliding window only"""


@dataclass(frozen=True, slots=True)
class Topology:
    """Layer roles of one model; all tuples hold layer numbers in ascending order unless said otherwise."""

    num_layers: int
    ratios: tuple[int, ...]
    """compression ratio of every layer including the draft layers"""
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_k_sources: tuple[int, ...]
    kv_source: tuple[int, ...]
    """map over all layers"""
    index_source: tuple[int, ...]
    """map over all layers"""
    boundary: int
    """first layer of the decoder half: the first one with ratio 1"""
    candidate_source: int | None
    """layer that chooses the candidate blocks; None = no candidate blocks"""
    draft_layers: tuple[int, ...]
    engram_layers: tuple[int, ...]
    """in the order of the configuration, which the hash constants depend on"""
    dspark_targets: tuple[int, ...]

    @classmethod
    def from_text_config(cls, text: TextConfig) -> Topology:
        """Derive all maps; `constraints.check` must have passed."""
        total = len(text.compress_ratios)
        drafts = range(text.num_hidden_layers, total)
        index_k = text.index_k_source_layer_ids
        return cls(
            num_layers=text.num_hidden_layers,
            ratios=text.compress_ratios,
            kv_sources=text.kv_source_layer_ids,
            index_sources=text.index_source_layer_ids,
            index_k_sources=text.kv_source_layer_ids if index_k is None else index_k,
            kv_source=source_map(text.kv_source_layer_ids, text.num_hidden_layers, total),
            index_source=source_map(text.index_source_layer_ids, text.num_hidden_layers, total),
            boundary=text.compress_ratios.index(1),
            candidate_source=text.candidate_source_layer_id,
            draft_layers=tuple(drafts),
            engram_layers=text.engram_layer_ids,
            dspark_targets=text.dspark_target_layer_ids,
        )

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry of a layer; 0 = it reads no compressed keys."""
        return self.ratios[layer]

    def is_decoder(self, layer: int) -> bool:
        """Whether the layer belongs to the decoder half (draft layers do not)."""
        return self.boundary <= layer < self.num_layers

    def in_candidate_group(self, layer: int) -> bool:
        """Whether the layer's selection comes from, or is made by, the candidate source."""
        return self.candidate_source is not None and self.candidate_source <= layer < self.num_layers

    def selects_in_candidates(self, layer: int) -> bool:
        """Whether the layer scores only entries of the candidate blocks."""
        return layer in self.index_sources and self.in_candidate_group(layer) and layer != self.candidate_source

    def kind(self, layer: int) -> str:
        """WINDOW, FULL, REUSE, REINDEX or DRAFT."""
        if layer >= self.num_layers:
            return DRAFT
        if self.ratios[layer] == 0:
            return WINDOW
        if layer in self.kv_sources:
            return FULL
        return REINDEX if layer in self.index_sources else REUSE

    @property
    def kinds(self) -> tuple[str, ...]:
        """`kind` of every layer including the draft layers."""
        return tuple(self.kind(layer) for layer in range(len(self.ratios)))

    def require_compactable(self) -> None:
        """Raise ConfigError where dropping prompt rows at the boundary would take them from a layer that needs all."""
        targets = {target >= self.boundary for target in self.dspark_targets}
        if len(targets) > 1:
            expected = f"all below or all from {self.boundary} on"
            self._refuse("dspark_target_layer_ids", self.dspark_targets, expected)
        if any(layer >= self.boundary for layer in self.engram_layers):
            self._refuse("engram_layer_ids", self.engram_layers, f"all below layer {self.boundary}")
        if self.index_k_sources[-1] > self.boundary:
            self._refuse("index_k_source_layer_ids", self.index_k_sources, f"none above layer {self.boundary}")

    @staticmethod
    def _refuse(key: str, found: tuple[int, ...], expected: str) -> None:
        raise ConfigError(
            f"text_config.{key}: found {list(found)}, expected {expected}: prefill truncation mode 'compact' drops "
            f"prompt rows at the first decoder layer; use mode 'off' or 'mask'"
        )


def source_map(sources: Sequence[int], num_layers: int, total: int) -> tuple[int, ...]:
    """For every layer the nearest source at or below it; itself before the first source and from `num_layers` on."""

    def nearest(layer: int) -> int:
        if layer >= num_layers or not sources or layer < sources[0]:
            return layer
        return sources[bisect_right(sources, layer) - 1]

    return tuple(nearest(layer) for layer in range(total))
