"""Stands for FlashMLA (deepinfer-flashmla 1.0.0) on a machine without a compute capability 10.x GPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from doubles.contract import (
    aligned,
    contiguous,
    decode_rows,
    dtype,
    last_contiguous,
    need,
    packed,
    page_rows,
    shape,
)  # fmt: skip

from deepinfer.reference import attention, quant, rope

WIDTHS = (528, 288)


class FlashMLASchedMeta:
    """Filled by the first call that uses it."""

    def __init__(self):
        self.shapes = None


def get_mla_metadata(*ignored, **also_ignored):
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=True, indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
    topk_length=None, extra_topk_length=None, enable_batch_invariant=False,
):  # fmt: skip
    need(
        isinstance(tile_scheduler_metadata, FlashMLASchedMeta),
        "tile_scheduler_metadata: must come from get_mla_metadata",
    )
    need(num_splits is None and indices is not None and not causal and is_fp8_kvcache, "only sparse FP8 decoding")
    need(q.dim() == 4 and q.shape[2] in (64, 128) and q.shape[3] == 512, f"q: shape {tuple(q.shape)}")
    need(head_dim_v == 512, "head_dim_v must be 512")
    batch, per_request, heads, _ = q.shape
    need(batch > 0 and per_request > 0, "q: empty")
    shapes = (q.shape, k_cache.shape[1], indices.shape[-1], None if extra_k_cache is None else extra_k_cache.shape[1])
    need(tile_scheduler_metadata.shapes in (None, shapes), "tile_scheduler_metadata: reused with other shapes")
    tile_scheduler_metadata.shapes = shapes
    dtype("q", q, torch.bfloat16)
    last_contiguous("q", q)
    lists = [(indices, k_cache, topk_length)]
    page_rows("k_cache", k_cache, WIDTHS[:1])
    _check_lists("indices", indices, (batch, per_request), 64)
    need((extra_k_cache is None) == (extra_indices_in_kvcache is None), "extra cache and extra indices belong together")
    if extra_k_cache is not None:
        page_rows("extra_k_cache", extra_k_cache, WIDTHS)
        _check_lists("extra_indices_in_kvcache", extra_indices_in_kvcache, (batch, per_request), 64)
        lists.append((extra_indices_in_kvcache, extra_k_cache, extra_topk_length))
    else:
        need(extra_topk_length is None, "extra_topk_length without extra cache")
    for name, lengths in (("topk_length", topk_length), ("extra_topk_length", extra_topk_length)):
        _check_lengths(name, lengths, batch)
    _check_sink(attn_sink, heads)
    flat = [(i.flatten(0, 1), c, None if n is None else n.repeat_interleave(per_request)) for i, c, n in lists]
    keys, visible = _gather_pages(flat)
    out = _attend(q.flatten(0, 1), keys, visible, attn_sink, softmax_scale or 512**-0.5)
    return out.to(torch.bfloat16).view(q.shape), torch.full((batch, heads, per_request), float("nan"))


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    _check_prefill(q, kv, indices, d_v, attn_sink, topk_length)
    out = _prefill(q, kv, indices, sm_scale, attn_sink, topk_length)
    unknown = torch.full(q.shape[:2], float("nan"))
    return out.to(torch.bfloat16), unknown, unknown


def _prefill_fused(
    enable_q_norm, rms_norm_eps, token_positions, is_rope_neox_style, rope_dim, cos_sin_cache, n_wv_group,
    num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, q, kv, indices, sm_scale, d_v=512,
    attn_sink=None, topk_length=None,
):  # fmt: skip
    _check_prefill(q, kv, indices, d_v, attn_sink, topk_length)
    options = (is_rope_neox_style, rope_dim, num_per_channels)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    _check_fused(q, enable_q_norm, token_positions, cos_sin_cache, n_wv_group, options, flags)
    need(indices.stride(0) * 4 % 32 == 0, "indices: rows must be 32-byte aligned")
    turned = rope.apply_rope(_heads_in_order(q), token_positions.long(), cos_sin_cache)
    out = _prefill(turned, kv, indices, sm_scale, attn_sink, topk_length)
    unknown = torch.full(q.shape[:2], float("nan"))
    return (*_finish(out, token_positions, cos_sin_cache, n_wv_group), unknown, unknown)


def _decode_fused(
    enable_q_norm, rms_norm_eps, token_positions, is_rope_neox_style, rope_dim, cos_sin_cache, n_wv_group,
    num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, q, k_cache, indices_in_kvcache,
    sm_scale, d_v=512, attn_sink=None, topk_length=None, extra_k_cache=None, extra_indices_in_kvcache=None,
    extra_topk_length=None,
):  # fmt: skip
    options = (is_rope_neox_style, rope_dim, num_per_channels)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    _check_fused(q, enable_q_norm, token_positions, cos_sin_cache, n_wv_group, options, flags)
    need(d_v == 512 and len(q) > 0, "d_v must be 512, q not empty")
    page_rows("k_cache", k_cache, WIDTHS[:1])
    need(indices_in_kvcache.dim() == 2, "indices_in_kvcache: expected [s_q, topk]")
    tile = 8 if extra_k_cache is not None else 1
    _check_lists("indices_in_kvcache", indices_in_kvcache, (len(q),), tile)
    need(indices_in_kvcache.stride(0) * 4 % 32 == 0, "indices: rows must be 32-byte aligned")
    lists = [(indices_in_kvcache, k_cache, topk_length)]
    need((extra_k_cache is None) == (extra_indices_in_kvcache is None), "extra cache and extra indices belong together")
    if extra_k_cache is not None:
        page_rows("extra_k_cache", extra_k_cache, WIDTHS)
        _check_lists("extra_indices_in_kvcache", extra_indices_in_kvcache, (len(q),), 8)
        lists.append((extra_indices_in_kvcache, extra_k_cache, extra_topk_length))
    else:
        need(extra_topk_length is None, "extra_topk_length without extra cache")
    _check_lengths("topk_length", topk_length, len(q))
    _check_lengths("extra_topk_length", extra_topk_length, len(q))
    _check_sink(attn_sink, q.shape[1])
    turned = rope.apply_rope(_heads_in_order(q), token_positions.long(), cos_sin_cache)
    out = _attend(turned, *_gather_pages(lists), attn_sink, sm_scale)
    return (*_finish(out, token_positions, cos_sin_cache, n_wv_group), torch.full(q.shape[:2], float("nan")))


fused_norm_rope_attn_rope_cast = SimpleNamespace(prefill=_prefill_fused, decode=_decode_fused)


def _check_prefill(q, kv, indices, d_v, attn_sink, topk_length):
    need(q.dim() == kv.dim() == indices.dim() == 3, "q, kv, indices: expected three dimensions")
    need(q.shape[1] in (64, 128) and q.shape[2] == 512 and d_v == 512, f"q: shape {tuple(q.shape)}, d_v {d_v}")
    dtype("q", q, torch.bfloat16)
    dtype("kv", kv, torch.bfloat16)
    shape("kv", kv, len(kv), 1, 512)
    shape("indices", indices, len(q), 1, indices.shape[2])
    _check_lists("indices", indices, (len(q), 1), 128)
    for name, x in (("q", q), ("kv", kv)):
        last_contiguous(name, x)
        aligned(name, x)
    _check_sink(attn_sink, q.shape[1])
    _check_lengths("topk_length", topk_length, len(q))


def _check_lists(name, indices, leading, tile):
    dtype(name, indices, torch.int32)
    last_contiguous(name, indices)
    need(tuple(indices.shape[:-1]) == leading, f"{name}: shape {tuple(indices.shape)} for {leading}")
    length = indices.shape[-1]
    need(length > 0 and length % tile == 0, f"{name}: lists of {length}, expected multiples of {tile}")


def _check_lengths(name, lengths, count):
    if lengths is not None:
        dtype(name, lengths, torch.int32)
        shape(name, lengths, count)
        contiguous(name, lengths)


def _check_sink(sink, heads):
    if sink is not None:
        dtype("attn_sink", sink, torch.float32)
        shape("attn_sink", sink, heads)
        contiguous("attn_sink", sink)


def _check_fused(q, norm, positions, table, groups, options, flags):
    need(q.dim() == 3 and q.shape[1] in (64, 128) and q.shape[2] == 512, f"q: shape {tuple(q.shape)}")
    dtype("q", q, torch.bfloat16)
    last_contiguous("q", q)
    need(q.stride(1) == 512, "q: a token must be contiguous")
    need(norm is False, "the model's queries have no norm here")
    need(options == (False, 64, 32) and all(flags), "unsupported rope or cast options")
    need(q.shape[1] == groups * 8, f"{q.shape[1]} heads in {groups} groups, expected 8 a group")
    dtype("token_positions", positions, torch.int32)
    shape("token_positions", positions, len(q))
    dtype("cos_sin_cache", table, torch.float32)
    shape("cos_sin_cache", table, len(table), 64)
    contiguous("token_positions, cos_sin_cache", positions, table)


def _heads_in_order(q):
    """Undo the order [16 channels of every head, the next 16, ...]."""
    count, heads, dim = q.shape
    return q.reshape(count, dim // 16, heads, 16).transpose(1, 2).reshape(count, heads, dim)


def _gather_pages(lists):
    """Keys [R, n, 512] and which are visible [R, n]; an index must exist, as the kernel checks none."""
    keys, visible = [], []
    for indices, cache, lengths in lists:
        rows = decode_rows(cache)
        need(int(indices.max()) < len(rows) and int(indices.min()) >= -1, f"index outside of {len(rows)} rows")
        keys.append(rows[indices.clamp(min=0).long()])
        seen = indices >= 0
        if lengths is not None:
            seen &= torch.arange(indices.shape[-1]) < lengths.unsqueeze(1)
        visible.append(seen)
    return torch.cat(keys, 1), torch.cat(visible, 1)


def _prefill(q, kv, indices, scale, sink, lengths):
    lists = indices[:, 0].long()
    visible = (lists >= 0) & (lists < len(kv))
    if lengths is not None:
        visible &= torch.arange(lists.shape[1]) < lengths.unsqueeze(1)
    keys = kv[:, 0][lists.clamp(0, len(kv) - 1)]
    return _attend(q, keys, visible, sink, scale)


def _attend(q, keys, visible, sink, scale):
    sink = torch.full(q.shape[1:2], float("-inf")) if sink is None else sink
    return attention.attend_rows(q, keys, visible, sink, scale, torch.float32)


def _finish(out, positions, table, groups):
    """Inverse rope and cast of [Q, heads, 512] float32; the output's order interleaves 32-channel blocks of 8 heads."""
    out = rope.apply_rope(out, positions.long(), table, inverse=True)
    blocks = out.view(len(out), groups, 8, 16, 32).transpose(2, 3).reshape(len(out), groups, -1)
    codes, scales = quant.encode_q8(blocks)
    words = packed(scales).transpose(0, 1)
    memory = torch.zeros(groups, words.shape[-1], -(-len(out) // 4) * 4, dtype=torch.int32)
    memory[..., : len(out)] = words.transpose(1, 2)
    return codes.view(torch.float8_e4m3fn), memory.transpose(1, 2)[:, : len(out)].transpose(0, 1)
