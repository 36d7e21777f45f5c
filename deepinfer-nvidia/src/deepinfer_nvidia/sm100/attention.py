"""Latent attention on FlashMLA, the indexer on DeepGEMM and DeepSelect, over core's cache bytes.

The fused kernel (`latent`) takes q and returns its output in orders of its own. The output's order travels with the
`Fp8Tensor` and is met by a re-laid output projection; q is reordered here, because a prepared weight does not say that
it makes queries. Created by `groups.create`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from deepinfer.hooks import CANONICAL, KVCache, ModelTraits, QuantTensor, Selection, SequenceSpan, StepInputs, provides
from deepinfer.hooks.ops import AttentionOps
from deepinfer.hooks.ops.attention import LatentWeights
from deepinfer_nvidia.libraries import Need
from deepinfer_nvidia.machine import OnMachine
from deepinfer_nvidia.sm100 import confirm, index, limits, rows
from deepinfer_nvidia.sm100.formats import GROUP, Fp8Tensor

_FUSED = ("token_positions", "cos_sin_cache", "n_wv_group", "attn_sink")
FUSED = Need(
    "flash_mla",
    {
        "fused_norm_rope_attn_rope_cast.prefill": ("kv", "indices", *_FUSED),
        "fused_norm_rope_attn_rope_cast.decode": ("k_cache", "indices_in_kvcache", "extra_k_cache", *_FUSED),
    },
)
DECODE = Need(
    "flash_mla",
    {"flash_mla_with_kvcache": ("indices", "extra_k_cache", "enable_batch_invariant"), "get_mla_metadata": ()},
)
PREFILL = Need("flash_mla", {"flash_mla_sparse_fwd": ("kv", "indices", "attn_sink")})
SCORES = Need(
    "deep_gemm",
    {
        "fp8_fp4_mqa_logits": ("q", "kv", "weights", "max_seqlen_k"),
        "fp8_fp4_paged_mqa_logits": ("kv_cache", "block_table", "schedule_meta", "indices"),
        "get_paged_mqa_logits_metadata": ("context_lens", "block_kv", "num_sms", "indices"),
        "get_num_sms": (),
    },
)
SPARSE_SCORES = Need(
    "deep_gemm",
    {
        "get_paged_sparse_mqa_logits_metadata": ("sparse_kv_block_indices", "sparse_block_kv"),
        "fp8_fp4_paged_sparse_mqa_logits": ("kv_cache", "metadata", "num_max_sparse_blocks"),
    },
)
TOP = Need("deep_select", {"topk": ("topk", "end", "sorted_index", "idx_oob_fill_value", "return_value")})

CACHE = {"kv_cache": CANONICAL}
HEADS_OF_GROUP = 8
"""Heads of an output group that the fused kernel is built for."""
_CHANNELS_OF_Q = 16
"""Channels of a head that lie together in the fused kernel's queries."""


class Attention(OnMachine, AttentionOps):
    """Decode, prefill, both fused with rope and cast; index scores, their restriction to blocks, and top-k."""

    def refuse(self, op: str, traits: ModelTraits) -> list[str]:
        """Chip, numerics, libraries, and the shapes kernels are instantiated for."""
        needs = {
            "attention.latent": (FUSED,),
            "attention.cached": (DECODE,),
            "attention.chunk": (PREFILL,),
            "attention.index_scores": (SCORES,),
            "attention.select": (SCORES, SPARSE_SCORES),
            "attention.top_entries": (TOP,),
            "attention.candidate_blocks": (TOP,),
        }
        reasons = limits.problems(self.machine, self.numerics, *needs.get(op, ()))
        if op in ("attention.latent", "attention.cached", "attention.chunk"):
            reasons += limits.one_of((64, 128), num_attention_heads=traits.num_attention_heads)
            reasons += limits.one_of((512,), head_dim=traits.head_dim)
        if op == "attention.latent":
            size = traits.num_attention_heads // traits.o_groups
            reasons += limits.one_of((HEADS_OF_GROUP,), heads_of_an_output_group=size)
            reasons += limits.one_of((64,), qk_rope_head_dim=traits.qk_rope_head_dim)
        if op in ("attention.latent", "attention.cached") and not reasons:
            reasons += self._layout_problems
        if op in ("attention.index_scores", "attention.select"):
            reasons += limits.multiple(8, index_n_heads=traits.index_n_heads)
            reasons += limits.one_of((128,), index_head_dim=traits.index_head_dim, block_size=traits.block_size)
        if op == "attention.index_scores" and traits.index_n_heads > 128:
            reasons.append(f"index_n_heads={traits.index_n_heads}, allowed at most 128")
        if op == "attention.select":
            reasons += self._sparse_reasons(traits)
        return reasons

    @cached_property
    def _layout_problems(self) -> list[str]:
        library = self.machine.libraries.get("flash_mla")
        return confirm.layout_problems(library, self.traits.num_attention_heads, torch.device(self.context.device))

    def _sparse_reasons(self, traits: ModelTraits) -> list[str]:
        reasons = limits.one_of((8, 16), candidate_block_size=traits.candidate_block_size)
        reasons += limits.multiple(4, candidate_topk_blocks=traits.candidate_topk_blocks)
        if traits.candidate_topk_blocks > 4096:
            reasons.append(f"candidate_topk_blocks={traits.candidate_topk_blocks}, allowed at most 4096")
        if traits.index_n_heads > 32:
            reasons.append(f"index_n_heads={traits.index_n_heads}, allowed at most 32")
        return reasons

    # latent attention

    @provides(version=1, graph_safe=True, layouts=CACHE)
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
        """Queries' rope, attention, inverse rope and cast in one kernel."""
        ops = self.ops
        kv = ops.gemm.rms_norm(kv, weights.kv_norm, self.traits.rms_norm_eps)
        kv = ops.attention.rope(kv, step.positions, weights.rope)
        if step.in_ring:
            ops.cache.store_window(cache, layer, kv, step)
            main = {
                "k_cache": _window_cache(cache, layer),
                "indices_in_kvcache": rows.window(step, cache.spec.ring, self.traits.sliding_window),
            }
            return self._fused("decode", q, main | self._extra(cache, source, selection, step), weights, step)
        before = ops.cache.load_window(cache, layer, step, self.traits.sliding_window - 1)
        keys = ops.cache.store_window(cache, layer, kv, step)
        keys, lists = self._chunk_keys(before, keys, cache, source, selection, step)
        return self._fused("prefill", q, {"kv": keys, "indices": lists}, weights, step)

    def _fused(
        self, form: str, q: torch.Tensor, operands: dict[str, Any], weights: LatentWeights, step: StepInputs
    ) -> Fp8Tensor:
        kernel = getattr(self.machine.libraries.get("flash_mla").fused_norm_rope_attn_rope_cast, form)
        codes, words, *_ = kernel(
            enable_q_norm=False,
            rms_norm_eps=self.traits.rms_norm_eps,
            token_positions=rows.cached(step, "sm100 positions", lambda: step.positions.to(torch.int32)),
            is_rope_neox_style=False,
            rope_dim=self.traits.qk_rope_head_dim,
            cos_sin_cache=weights.rope,
            n_wv_group=self.traits.o_groups,
            num_per_channels=GROUP,
            use_tma_aligned_col_major_sf=True,
            round_sf=True,
            use_packed_ue8m0=True,
            q=interleave_heads(q),
            sm_scale=self.traits.head_dim**-0.5,
            attn_sink=weights.sink,
            **operands,
        )
        return Fp8Tensor(codes, words, HEADS_OF_GROUP)

    @provides(version=1, graph_safe=True, layouts=CACHE)
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
        """Every row is a request of one query."""
        library = self.machine.libraries.get("flash_mla")
        extra = self._extra(cache, source, selection, step)
        if extra:
            extra["extra_indices_in_kvcache"] = extra["extra_indices_in_kvcache"].unsqueeze(1)
        out, _ = library.flash_mla_with_kvcache(
            q.contiguous().unsqueeze(1),
            _window_cache(cache, layer),
            None,
            None,
            self.traits.head_dim,
            library.get_mla_metadata()[0],
            softmax_scale=self.traits.head_dim**-0.5,
            indices=rows.window(step, cache.spec.ring, self.traits.sliding_window).unsqueeze(1),
            attn_sink=sink,
            **extra,
        )
        return out.squeeze(1)

    @provides(version=1, graph_safe=True, layouts=CACHE)
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
        """Keys and entries as bfloat16 rows, one list of them a query."""
        keys, lists = self._chunk_keys(before, keys, cache, source, selection, step)
        scale = self.traits.head_dim**-0.5
        out, *_ = self.machine.libraries.get("flash_mla").flash_mla_sparse_fwd(
            q.contiguous(), keys, lists, scale, self.traits.head_dim, attn_sink=sink
        )
        return out

    def _extra(
        self, cache: KVCache, source: int, selection: Selection | None, step: StepInputs
    ) -> dict[str, torch.Tensor]:
        """The second cache of a decode kernel."""
        if selection is None:
            return {}
        lists, counts = rows.entries(step, cache, selection)
        return {
            "extra_k_cache": _entry_cache(cache, source),
            "extra_indices_in_kvcache": lists,
            "extra_topk_length": counts,
        }

    def _chunk_keys(
        self,
        before: torch.Tensor,
        keys: torch.Tensor,
        cache: KVCache,
        source: int,
        selection: Selection | None,
        step: StepInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [S, 1, head_dim] bfloat16 that a prefill kernel reads, and its lists int32 [Q, 1, ...]."""
        parts = [before.flatten(0, 1), keys]
        lists = rows.chunk_window(step, self.traits.sliding_window)
        if selection is not None:
            chosen, local = self._entries(cache, source, selection, step)
            local = torch.where(local < 0, local, local + len(parts[0]) + len(keys))
            parts, lists = [*parts, chosen], torch.cat((lists, local), 1)
        return torch.cat(parts).unsqueeze(1), rows.padded(lists).unsqueeze(1)

    # indexer

    @provides(version=1, graph_safe=True, layouts=CACHE)
    def index_scores(
        self, q: torch.Tensor, weights: torch.Tensor, cache: KVCache, source: int, span: SequenceSpan, step: StepInputs
    ) -> torch.Tensor:
        """Straight from the pages for few rows a sequence; long chunks gather the keys once."""
        return self._scores(q, weights, cache, source, span, step).contiguous()

    def _scores(
        self, q: torch.Tensor, weights: torch.Tensor, cache: KVCache, source: int, span: SequenceSpan, step: StepInputs
    ) -> torch.Tensor:
        """`index_scores` with the library's distance between rows."""
        if span.max_context < cache.spec.index[source]:
            return q.new_empty(span.count * span.q_len, 0)
        library = self.machine.libraries.get("deep_gemm")
        form = index.paged_scores if span.q_len <= index.FEW_ROWS else index.gathered_scores
        return form(library, q[span.rows], weights[span.rows], cache, source, span, step)

    @provides(version=1, layouts=CACHE)
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
        """Logits go to top-k as the kernel leaves them; of candidate blocks alone where there are some."""
        ratio, ops = cache.spec.index[source], self.ops.attention
        q = ops.quantize_index(q)
        if candidates is not None and not make_candidates:
            return Selection(self._among(q, weights, cache, source, candidates, step), ratio), None
        chosen, blocks = [], []
        for span in step.spans:
            scores = self._scores(q, weights, cache, source, span, step)
            lengths = (step.positions[span.rows] + 1) // ratio
            if make_candidates:
                blocks.append(ops.candidate_blocks(scores, lengths))
            if candidates is not None:
                scores = index.restrict(scores, candidates[span.rows], self.traits.candidate_block_size)
            chosen.append(ops.top_entries(scores, lengths))
        entries = index.joined(chosen)
        return Selection(entries, ratio), self._merge_candidates(blocks, step) if make_candidates else None

    def _among(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: KVCache,
        source: int,
        candidates: torch.Tensor,
        step: StepInputs,
    ) -> torch.Tensor:
        """Entries [Q, T] chosen from candidate blocks [Q, C]."""
        size = self.traits.candidate_block_size
        lengths = (step.positions + 1) // cache.spec.index[source]
        entries_a_page = cache.spec.block_size // cache.spec.index[source]
        blocks, listed = index.completed(candidates, lengths, size, step.block_table.shape[1] * entries_a_page // size)
        library = self.machine.libraries.get("deep_gemm")
        scores = index.sparse_scores(library, q, weights, cache, source, blocks, size, lengths, step)
        entries = (blocks.unsqueeze(-1) * size + torch.arange(size, device=q.device)).flatten(1)
        lost = ~listed.repeat_interleave(size, 1) | (entries >= lengths.unsqueeze(1))
        scores = scores.masked_fill(lost, float("-inf"))
        places = self.ops.attention.top_entries(scores, torch.full_like(lengths, scores.shape[1]))
        return entries.gather(1, places.clamp(min=0)).masked_fill(places < 0, -1)

    @provides(version=1, graph_safe=True)
    def top_entries(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Which of equal scores at the edge is taken is the library's choice."""
        return index.top(self.machine.libraries.get("deep_select"), scores, lengths, self.traits.index_topk)

    @provides(version=1, graph_safe=True)
    def candidate_blocks(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """Block maxima in torch, then the same top-k."""
        size, count = self.traits.candidate_block_size, self.traits.candidate_topk_blocks
        if -(-scores.shape[1] // size) <= count:
            return None
        best, blocks = index.block_maxima(scores, lengths, size)
        return index.top(self.machine.libraries.get("deep_select"), best, blocks, count)


def interleave_heads(q: torch.Tensor) -> torch.Tensor:
    """q [Q, heads, d] as the fused kernel reads it: 16 channels of every head, then the next 16."""
    count, heads, dim = q.shape
    return q.unflatten(-1, (-1, _CHANNELS_OF_Q)).transpose(1, 2).reshape(count, heads, dim)


def _window_cache(cache: KVCache, layer: int) -> torch.Tensor:
    """Window rings of a layer: uint8 [slots, ring, 1, 528]."""
    table = cache.storage.windows[layer].bytes
    return table.view(-1, cache.spec.ring, 1, table.shape[-1])


def _entry_cache(cache: KVCache, source: int) -> torch.Tensor:
    """Compressed entries of a source: uint8 [blocks, entries per block, 1, 288 or 528]."""
    table = cache.storage.entries[source].bytes
    return table.view(-1, cache.spec.block_size // cache.spec.compressed[source], 1, table.shape[-1])
