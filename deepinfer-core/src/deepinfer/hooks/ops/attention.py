"""Attention ops: rope, the latent attention block, the lightning indexer, candidate blocks, draft and image attention.

The block ops `latent`, `draft` and `select` are what the model calls; their default bodies compose the kernel ops
below them through the bound table, so a backend may replace either grain. Mathematics: DeepSeek-V4.1-Flash, sections
"query and window KV", "indexer", "candidate blocks", "core attention" of docs/model.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from deepinfer.hooks.api import OpGroup, op
from deepinfer.hooks.types import KVCache, QuantTensor, Selection, SequenceSpan, StepInputs
from deepinfer.reference import attention as reference
from deepinfer.reference import indexer, quant
from deepinfer.reference.rope import apply_rope


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Parameters of one layer's core attention.

    kv_norm  [head_dim] bf16          RMSNorm of the window key
    sink     [heads] float32          extra logit in the softmax denominator
    rope     [max_positions, 64] f32  cos | sin table of the layer's rope (base or YaRN)
    """

    kv_norm: torch.Tensor
    sink: torch.Tensor
    rope: torch.Tensor


class AttentionOps(OpGroup):
    """Everything that reads keys. Step-wide index tensors are made once by `plan`."""

    group = "attention"

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def plan(self, step: StepInputs) -> object:
        """Work that depends on the step but on no layer; the result is kept in `step.plan`, opaque to the model.

        returns  core: for steps with `in_ring` the visibility [Q, W] bool of each row's window, otherwise one
                 band mask (see reference.attention.band_mask) per span

        Read by `cached` and `chunk`. A provider that overrides `plan` also provides those two, or returns
        `super().plan(step)` and keeps what is its own in `step.scratch`.
        """
        window = self.traits.sliding_window
        if step.in_ring:
            offsets = torch.arange(1 - window, 1, device=step.positions.device)
            return step.positions.unsqueeze(1) + offsets >= step.window_lo.unsqueeze(1)
        return [self._span_mask(step, span, window) for span in step.spans]

    def _span_mask(self, step: StepInputs, span: SequenceSpan, window: int) -> torch.Tensor:
        positions = step.positions[span.rows].view(span.count, span.q_len)
        return reference.band_mask(positions, step.window_lo[span.rows].view_as(positions), window)

    @op(version=1, level="required", status="beta", grain="kernel")
    def rope(
        self, x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool = False
    ) -> torch.Tensor:
        """Rotate adjacent pairs of the last `qk_rope_head_dim` channels, in float32.

        x          [Q, ..., d] bfloat16 or float32
        positions  [Q] int64
        table      [max_positions, rope_dim] float32, cos | sin
        inverse    conjugate rotation (sin -> -sin)
        returns    x's shape and dtype
        """
        return apply_rope(x, positions, table, inverse, self.numerics.accumulate_dtype)

    @op(version=1, level="recommended", status="beta", grain="block", layout="kv_cache", composed=True)
    def latent(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        weights: LatentWeights,
        cache: KVCache,
        layer: int,
        source: int,
        selection: Selection | None,
        step: StepInputs,
    ) -> QuantTensor:
        """Rope, window key norm + rope + quantize + store, attention, inverse rope, quantize. [in-place cache]

        q          [Q, heads, head_dim] activation dtype, before rope
        kv         [Q, head_dim] activation dtype, before norm
        layer      window ring;  source  layer whose compressed entries are read (ignored without selection)
        selection  entries each row attends to, or None for window-only layers
        returns    QuantTensor [Q, o_groups, heads / o_groups * head_dim], quantized from the float32 output (e4m3 per
                   32 channels) with no rounding in between
        """
        ops = self.ops
        q = ops.attention.rope(q, step.positions, weights.rope)
        kv = ops.gemm.rms_norm(kv, weights.kv_norm, self.traits.rms_norm_eps)
        kv = ops.attention.rope(kv, step.positions, weights.rope)
        if step.in_ring:
            ops.cache.store_window(cache, layer, kv, step)
            out = ops.attention.cached(q, cache, layer, source, selection, weights.sink, step)
        else:
            before = ops.cache.load_window(cache, layer, step, self.traits.sliding_window - 1)
            keys = ops.cache.store_window(cache, layer, kv, step)
            out = ops.attention.chunk(q, before, keys, cache, source, selection, weights.sink, step)
        return self._finish(out, weights, step)

    def _finish(self, out: torch.Tensor, weights: LatentWeights, step: StepInputs) -> QuantTensor:
        out = self.ops.attention.rope(out, step.positions, weights.rope, True)
        return self.ops.gemm.quantize(out.reshape(out.shape[0], self.traits.o_groups, -1))

    @op(version=1, level="required", status="beta", grain="kernel", layout="kv_cache", composed=True)
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
        """Decode form: rows read their windows from the ring and their entries from the paged cache.

        q        [Q, heads, head_dim] after rope; the step's own keys are already stored (`step.in_ring`)
        sink     [heads] float32
        returns  [Q, heads, head_dim] float32 (a kernel may return bfloat16)
        """
        keys = self.ops.cache.load_row_windows(cache, layer, step, self.traits.sliding_window)
        visible = step.plan
        if selection is not None:
            entries, local = self._entries(cache, source, selection, step)
            chosen = torch.nn.functional.embedding(local.clamp(min=0), entries)
            keys = torch.cat((keys, chosen), 1)
            visible = torch.cat((visible, local >= 0), 1)
        return self._attend_rows(q, keys, visible, sink)

    def _attend_rows(
        self, q: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        scale = self.traits.head_dim**-0.5
        out = reference.attend_rows(q, keys, visible, sink, scale, self.numerics.accumulate_dtype)
        return out.to(torch.float32)

    @op(version=1, level="required", status="beta", grain="kernel", layout="kv_cache", composed=True)
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
        """Prefill form: rows read the window from `before` and the step's own keys.

        q        [Q, heads, head_dim] after rope
        before   [n, W - 1, head_dim] window keys before each sequence's first row
        keys     [Q, head_dim] the step's own window keys, as the cache returns them
        sink     [heads] float32, extra logit in the softmax denominator
        returns  [Q, heads, head_dim] float32 (a kernel may return bfloat16)
        """
        entries, local = (None, None) if selection is None else self._entries(cache, source, selection, step)
        parts = []
        for span, mask in zip(step.spans, step.plan, strict=True):
            shape = (span.count, span.q_len)
            window = torch.cat((before[span.sequences], keys[span.rows].view(*shape, -1)), 1)
            chosen = None if local is None else local[span.rows].view(*shape, -1)
            out = reference.attend_chunk(
                q[span.rows].view(*shape, *q.shape[1:]), window, mask, entries, chosen, sink,
                self.traits.head_dim**-0.5, self.numerics.accumulate_dtype,
            )  # fmt: skip
            parts.append(out.flatten(0, 1))
        return torch.cat(parts).to(torch.float32)

    def _entries(
        self, cache: KVCache, source: int, selection: Selection, step: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct entries a selection needs [U, d] and, per row, where they are in it [Q, T] (-1 = none).

        Layers that reuse a source read the same entries, so they are loaded once a step.
        """
        places = step.scratch.get(("places", id(selection)))
        if places is None:
            places = (selection, *self._places(cache, selection, step))  # keeps `selection` alive: its id is the key
            step.scratch["places", id(selection)] = places
        _, physical, local = places
        loaded = step.scratch.get(("entries", source, id(selection)))
        if loaded is None:
            loaded = self.ops.cache.load_entries(cache, source, physical)
            step.scratch["entries", source, id(selection)] = loaded
        return loaded, local

    def _places(self, cache: KVCache, selection: Selection, step: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        per_block = cache.spec.block_size // selection.ratio
        entry = selection.entries.clamp(min=0)
        blocks = step.block_table[step.sequence.unsqueeze(1), entry // per_block]
        physical = blocks * per_block + entry % per_block
        missing = selection.entries < 0
        distinct, local = torch.unique(physical.masked_fill(missing, 0), return_inverse=True)
        return distinct, local.masked_fill(missing, -1)

    @op(version=1, level="recommended", status="beta", grain="block", layout="kv_cache", composed=True)
    def select(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: KVCache,
        source: int,
        candidates: torch.Tensor | None,
        make_candidates: bool,
        step: StepInputs,
    ) -> tuple[Selection, torch.Tensor | None]:
        """The lightning indexer's choice: score the visible entries, keep the best `index_topk` of each row.

        q                [Q, index_n_heads, index_head_dim] after rope, not yet quantized
        weights          [Q, index_n_heads] activation dtype
        source           layer whose index keys are read
        candidates       [Q, C] int64 candidate blocks the scores are restricted to (-1 padding), or None
        make_candidates  also choose candidate blocks from the same scores
        returns          (Selection, candidates [Q, C] or None when every block is a candidate)
        """
        ratio = cache.spec.index[source]
        q = self.ops.attention.quantize_index(q)
        chosen, blocks = [], []
        for span in step.spans:
            scores = self.ops.attention.index_scores(q, weights, cache, source, span, step)
            lengths = (step.positions[span.rows] + 1) // ratio
            if make_candidates:
                blocks.append(self.ops.attention.candidate_blocks(scores, lengths))
            if candidates is not None:
                scores = indexer.restrict(scores, candidates[span.rows], self.traits.candidate_block_size)
            chosen.append(self.ops.attention.top_entries(scores, lengths))
        entries = _pad_cat(chosen)
        return Selection(entries, ratio), self._merge_candidates(blocks, step) if make_candidates else None

    def _merge_candidates(self, blocks: list[torch.Tensor | None], step: StepInputs) -> torch.Tensor | None:
        """One list for all spans; a span without restriction lists all of its blocks."""
        if all(part is None for part in blocks):
            return None
        count = self.traits.candidate_topk_blocks
        every = torch.arange(count, device=step.positions.device)
        parts = [
            every.expand(span.count * span.q_len, count) if part is None else part
            for span, part in zip(step.spans, blocks, strict=True)
        ]
        return torch.cat(parts)

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def quantize_index(self, q: torch.Tensor) -> torch.Tensor:
        """Round index queries as index keys are rounded: e2m1 with one power-of-two scale per 32 channels.

        q [Q, heads, index_head_dim] activation dtype; returns the rounded values, same shape and dtype
        """
        return quant.fake_q4u(q, q.dtype) if self.numerics.quantize else q

    @op(version=1, level="required", status="beta", grain="kernel", layout="kv_cache", composed=True)
    def index_scores(
        self, q: torch.Tensor, weights: torch.Tensor, cache: KVCache, source: int, span: SequenceSpan, step: StepInputs
    ) -> torch.Tensor:
        """Scores of the entries of a span's sequences.

        q, weights as in `select`, q already quantized
        returns    [rows, K] activation dtype; columns past a row's visible entries are unspecified.
                   score[p, j] = sum_h relu(q[p, h] . key[j]) * weights[p, h], summed in float32, rounded once
        """
        ratio = cache.spec.index[source]
        per_block = cache.spec.block_size // ratio
        visible = span.max_context // ratio
        blocks = step.block_table[span.sequences, : -(-visible // per_block)]
        keys = self.ops.cache.load_index(cache, source, blocks)[:, :visible]
        shape = (span.count, span.q_len)
        last = torch.arange(span.max_context - span.q_len, span.max_context)  # latest position of each row, host data
        scores = indexer.index_scores(
            q[span.rows].view(*shape, *q.shape[1:]), weights[span.rows].view(*shape, -1), keys, (last + 1) // ratio,
            self.numerics.accumulate_dtype, self.numerics.activation_dtype,
        )  # fmt: skip
        return scores.flatten(0, 1)

    @op(version=1, level="required", status="beta", grain="kernel")
    def candidate_blocks(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """Blocks of `candidate_block_size` entries with the largest score; the last visible block always counts.

        scores [R, K] activation dtype, lengths [R] int64 visible entries
        returns [R, candidate_topk_blocks] int64 ascending with -1 padding, or None when no row has
        more blocks than that
        """
        return indexer.candidate_blocks(
            scores, lengths, self.traits.candidate_block_size, self.traits.candidate_topk_blocks
        )

    @op(version=1, level="required", status="beta", grain="kernel")
    def top_entries(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The `index_topk` best of each row's first `lengths` entries.

        scores [R, K] activation dtype, lengths [R] int64
        returns [R, min(index_topk, K)] int64 ascending, -1 padding; equal scores prefer the lower
        entry, -inf is never chosen
        """
        return indexer.top_entries(scores, lengths, self.traits.index_topk)

    @op(version=1, level="recommended", status="beta", grain="block", layout="kv_cache", composed=True)
    def draft(
        self, q: torch.Tensor, kv: torch.Tensor, weights: LatentWeights, cache: KVCache, layer: int, step: StepInputs
    ) -> QuantTensor:
        """Attention of a DSpark draft block: W ring keys before the block, and the whole block in both directions.

        q        [n * B, heads, head_dim], kv [n * B, head_dim]: B rows per sequence, before rope and norm
        layer    window ring of the draft layer; the block's own keys are not stored
        returns  QuantTensor [n * B, o_groups, ...] as `latent`
        """
        ops, window = self.ops, self.traits.sliding_window
        (span,) = step.spans
        q = ops.attention.rope(q, step.positions, weights.rope)
        kv = ops.gemm.rms_norm(kv, weights.kv_norm, self.traits.rms_norm_eps)
        kv = ops.gemm.quantize(ops.attention.rope(kv, step.positions, weights.rope)).dequantize()
        before = ops.cache.load_window(cache, layer, step, window)
        keys = torch.cat((before, kv.view(span.count, span.q_len, -1)), 1)
        offsets = torch.arange(-window, span.q_len, device=q.device)
        visible = step.q_starts.unsqueeze(1) + offsets >= 0
        # All rows of a block see the same keys, so its rows join the head dimension.
        rows = q.view(span.count, span.q_len * q.shape[1], -1)
        out = self._attend_rows(rows, keys, visible, weights.sink.repeat(span.q_len))
        return self._finish(out.view(q.shape), weights, step)

    @op(version=1, level="optional", status="experimental", grain="kernel")
    def encoder(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Bidirectional attention inside each segment (image patches).

        q, k, v  [N, heads, d] activation dtype; starts [S + 1] int64 ascending segment bounds (host or device), 0 .. N
        returns  [N, heads, d] activation dtype, softmax in float32, scale d^-0.5
        raises   ValueError if the segments do not cover the rows
        """
        bounds = starts.tolist()
        if bounds[0] != 0 or bounds[-1] != q.shape[0]:
            raise ValueError(f"segments reach from {bounds[0]} to {bounds[-1]}, but there are {q.shape[0]} rows")
        parts = [
            reference.attend_segment(q[a:b], k[a:b], v[a:b], self.numerics.accumulate_dtype)
            for a, b in pairwise(bounds)
        ]
        return torch.cat(parts).to(q.dtype)


def _pad_cat(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate lists [R, T] of different widths, padded with -1."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in parts])
