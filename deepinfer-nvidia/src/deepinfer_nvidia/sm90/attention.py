"""Latent attention with this package's own kernels, over core's cache bytes. Created by `groups.create`."""

from __future__ import annotations

import torch

from deepinfer.hooks import CANONICAL, KVCache, ModelTraits, Selection, SequenceSpan, StepInputs, provides
from deepinfer.hooks.ops import AttentionOps
from deepinfer_nvidia import kernels
from deepinfer_nvidia.machine import OnMachine
from deepinfer_nvidia.sm90.limits import numerics_problems, power_of_two

CACHE = {"kv_cache": CANONICAL}
DECODE_SPLITS = 2
"""Slices of a decode row's key list: 64 rows then fill 128 multiprocessors. A constant, so that bits never depend on
the batch; prefill takes 1, and so does decode where sums must not depend on anything but the row."""


class Attention(OnMachine, AttentionOps):
    """Decode and prefill attention, and rope."""

    def refuse(self, op: str, traits: ModelTraits) -> list[str]:
        """Device, numerics and the shapes the tiles are made for."""
        reasons = [*kernels.problems(self.context.device, self.machine.libraries), *numerics_problems(self.numerics)]
        if op in ("attention.cached", "attention.chunk"):
            reasons += power_of_two("head_dim", traits.head_dim, 64, 512)
            if self.machine.chip.major != 9:  # Triton 3.6 leaves an empty kernel there
                reasons.append(f"compute capability {self.machine.chip.capability}, allowed 9.x")
        if op == "attention.index_scores":
            reasons += power_of_two("index_head_dim", traits.index_head_dim, 64, 128)
        if op == "attention.candidate_blocks":
            reasons += power_of_two("candidate_block_size", traits.candidate_block_size, 1, 128)
        return reasons

    @provides(version=1, batch_invariant=True, graph_safe=True)
    def rope(
        self, x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool = False
    ) -> torch.Tensor:
        """One pass over x."""
        return kernels.load("rowwise").rope(x, positions, table, inverse)

    @provides(version=1, batch_invariant=True, graph_safe=True, layouts=CACHE)
    def cached(
        self,
        q: torch.Tensor,
        cache: KVCache,
        layer: int,
        source: int,
        selection: Selection | None,
        sink: torch.Tensor,
        step: StepInputs,
    ) -> torch.Tensor:
        """Ring rows and entries decoded inside the kernel; slices are joined in order."""
        splits = 1 if self.numerics.order_free else DECODE_SPLITS
        return self._attend(q, cache.storage.windows[layer].bytes, cache, source, selection, sink, step, splits)

    @provides(version=1, batch_invariant=True, graph_safe=True, layouts=CACHE)
    def chunk(
        self,
        q: torch.Tensor,
        before: torch.Tensor,
        keys: torch.Tensor,
        cache: KVCache,
        source: int,
        selection: Selection | None,
        sink: torch.Tensor,
        step: StepInputs,
    ) -> torch.Tensor:
        """The same kernel, with the window as bfloat16 rows."""
        return self._attend(q, (before, keys), cache, source, selection, sink, step, 1)

    @provides(version=1, batch_invariant=True, graph_safe=True, layouts=CACHE)
    def index_scores(
        self, q: torch.Tensor, weights: torch.Tensor, cache: KVCache, source: int, span: SequenceSpan, step: StepInputs
    ) -> torch.Tensor:
        """Keys are read as the cache's bytes; no decoded copy exists."""
        ratio = cache.spec.index[source]
        return kernels.load("index").index_scores(
            q, weights, cache.storage.index[source].bytes, step.block_table, row_start=span.row_start,
            first=span.first, count=span.count, q_len=span.q_len, visible=span.max_context // ratio,
            per_block=cache.spec.block_size // ratio,
        )  # fmt: skip

    @provides(version=1, batch_invariant=True, graph_safe=True)
    def candidate_blocks(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """Block maxima, then the same choice as `top_entries`."""
        traits = self.traits
        return kernels.load("index").candidate_blocks(
            scores, lengths, traits.candidate_block_size, traits.candidate_topk_blocks
        )

    @provides(version=1, batch_invariant=True, graph_safe=True)
    def top_entries(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Exact and stable without a sort."""
        return kernels.load("index").top_entries(scores, lengths, self.traits.index_topk)

    def _attend(
        self,
        q: torch.Tensor,
        window: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        cache: KVCache,
        source: int,
        selection: Selection | None,
        sink: torch.Tensor,
        step: StepInputs,
        splits: int,
    ) -> torch.Tensor:
        rows = None if selection is None else cache.storage.entries[source].bytes
        return kernels.load("sparse_attention").sparse_attention(
            q, window, rows, None if selection is None else selection.entries, sink, step.positions, step.sequence,
            step.slots, step.window_lo, step.row_starts, step.block_table, window_size=self.traits.sliding_window,
            ring=cache.spec.ring, per_block=cache.spec.block_size // (1 if selection is None else selection.ratio),
            capacity=self.traits.index_topk, splits=splits,
        )  # fmt: skip
