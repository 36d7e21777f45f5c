"""Stands for DeepGEMM (deepinfer-gemm 2.8.2) on a machine without a compute capability 10.x GPU."""

from __future__ import annotations

import torch
from doubles.contract import (
    aligned,
    contiguous,
    dtype,
    fp4_values,
    fp8_values,
    last_contiguous,
    need,
    packed,
    scale_words,
    shape,
)  # fmt: skip

from deepinfer.reference import activation, experts, gemm, indexer, norm, quant, residual

SMS = 148
MEGA_TILES = (8, 16, 32, 64, 96, 128, 192, 240)
MEGA_ALIGNMENT = 1920


def get_num_sms():
    return SMS


def get_mk_alignment_for_contiguous_layout():
    return 128


# --- products -------------------------------------------------------------------------------------------------------


def fp8_fp4_gemm_nt(
    a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk", disable_ue8m0_cast=False,
    alpha=None, epilogue=None,
):  # fmt: skip
    _check_recipe(recipe, recipe_a, recipe_b)
    _matrix("a", a[0], torch.float8_e4m3fn)
    _matrix("b", b[0], torch.float8_e4m3fn)
    (rows, width), (outputs, _) = a[0].shape, b[0].shape
    need(b[0].shape[1] == width, f"a has {width} channels, b {b[0].shape[1]}")
    scale_words("a's scales", a[1], rows, width)
    scale_words("b's scales", b[1], outputs, width)
    _result(d, rows, outputs)
    need(c is None and alpha is None and epilogue is None and not disable_ue8m0_cast, "not modelled here")
    d.copy_(gemm.linear(fp8_values(*a), fp8_values(*b), torch.float32, d.dtype))


def bf16_gemm_nt(a, b, d, c=None, compiled_dims="nk", alpha=None, epilogue=None):
    _matrix("a", a, torch.bfloat16)
    _matrix("b", b, torch.bfloat16)
    need(a.shape[1] == b.shape[1], f"a has {a.shape[1]} channels, b {b.shape[1]}")
    _result(d, len(a), len(b))
    d.copy_(gemm.linear(a, b, torch.float32, d.dtype))


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk", disable_ue8m0_cast=False,
    use_psum_layout=False, ensure_zero_padding=False, expected_m_for_psum_layout=None, epilogue=None,
):  # fmt: skip
    _check_recipe(recipe, recipe_a, recipe_b)
    _matrix("a", a[0], torch.float8_e4m3fn)
    dtype("b", b[0], torch.int8)
    contiguous("b", b[0])
    (rows, width), (groups, outputs, half) = a[0].shape, b[0].shape
    need(half * 2 == width, f"a has {width} channels, b {half * 2}")
    scale_words("a's scales", a[1], rows, width)
    scale_words("b's scales", b[1], outputs, width, groups)
    dtype("d", d, torch.bfloat16)
    _result(d, rows, outputs)
    need(use_psum_layout, "the adapters use psum layouts")
    dtype("grouped_layout", grouped_layout, torch.int32)
    shape("grouped_layout", grouped_layout, groups)
    contiguous("grouped_layout", grouped_layout)
    d.fill_(float("nan"))  # gaps are never written
    begin = 0
    for group, end in enumerate(grouped_layout.tolist()):
        need(begin <= end <= rows, f"group {group} ends at {end}, begins at {begin}, of {rows} rows")
        if end > begin:
            values = fp8_values(a[0][begin:end], a[1][begin:end])
            d[begin:end] = gemm.linear(values, fp4_values(b[0][group], b[1][group]), torch.float32, torch.bfloat16)
        begin = -(-end // 128) * 128


def fp8_einsum(expr, a, b, d, c=None, recipe=(1, 128, 128), epilogue=None):
    need(expr == "bhr,hdr->bhd" and recipe == (1, 1, 32) and c is None, f"{expr} with recipe {recipe}")
    need(isinstance(d, tuple), "the adapters ask for a quantized result")
    (rows, groups, width), (_, outputs, _) = a[0].shape, b[0].shape
    dtype("a", a[0], torch.float8_e4m3fn)
    dtype("b", b[0], torch.float8_e4m3fn)
    dtype("d", d[0], torch.float8_e4m3fn)
    for name, x in (("a", a[0]), ("b", b[0]), ("d", d[0])):
        last_contiguous(name, x)
        aligned(name, x)
    shape("b", b[0], groups, outputs, width)
    shape("d", d[0], rows, groups, outputs)
    need(
        d[0].stride(1) == outputs and outputs % 128 == 0,
        f"d: groups of {outputs} must follow each other, multiples of 128",
    )
    scale_words("a's scales", a[1].permute(1, 0, 2), rows, width, groups)
    scale_words("b's scales", b[1], outputs, width, groups)
    scale_words("d's scales", d[1], rows, groups * outputs)
    weight = fp8_values(*b).flatten(0, 1)
    sums = gemm.block_diagonal_linear(fp8_values(*a), weight, torch.float32)
    codes, scales = quant.encode_q8(sums)
    d[0].view(torch.uint8).copy_(codes.view(rows, groups, outputs))
    d[1].copy_(packed(scales))


def _check_recipe(recipe, recipe_a, recipe_b):
    need(
        (recipe is None) != (recipe_a is None) and (recipe_a is None) == (recipe_b is None), "recipe or recipe_a and _b"
    )
    need(recipe == (1, 1, 32) or (recipe_a == recipe_b == (1, 32)), f"recipe {recipe or (recipe_a, recipe_b)}")


def _matrix(name, x, kind):
    dtype(name, x, kind)
    need(x.dim() == 2 and x.stride(1) == 1, f"{name}: expected a K-major matrix, strides {x.stride()}")
    aligned(name, x)


def _result(d, rows, columns):
    dtype("d", d, torch.bfloat16, torch.float32)
    shape("d", d, rows, columns)
    last_contiguous("d", d)
    aligned("d", d)


# --- index scores ---------------------------------------------------------------------------------------------------


def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None):
    dtype("context_lens", context_lens, torch.int32)
    shape("context_lens", context_lens, len(context_lens), 1)
    contiguous("context_lens, indices", context_lens, indices)
    need(num_sms > 0 and block_kv in (32, 64, 128), f"block_kv={block_kv}, num_sms={num_sms}")
    need(indices is not None, "indices: one request a row")
    _check_requests(indices, len(context_lens))
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32)


def fp8_fp4_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, indices=None
):
    count, per_row, heads, _ = q[0].shape
    need(per_row == 1, "one query a row")
    _check_queries(q, weights, count, heads, 128)
    codes, words = _pages(kv_cache, (32, 64, 128))
    _check_table(block_table, count)
    shape("schedule_meta", schedule_meta, SMS + 1, 2)
    dtype("schedule_meta", schedule_meta, torch.int32)
    dtype("context_lens", context_lens, torch.int32)
    shape("context_lens", context_lens, count, 1)
    _check_requests(indices, count)
    logits = _logits(count, max_context_len, 384)
    page, queries = codes.shape[1], _decoded_queries(q)
    for row, length in enumerate(context_lens[:, 0].tolist()):
        need(
            0 < length <= block_table.shape[1] * page, f"row {row}: context of {length} in {block_table.shape[1]} pages"
        )
        blocks = block_table[row, : -(-length // page)].long()
        keys = fp4_values(codes[blocks].flatten(0, 1), words[blocks].flatten(0, 1).unsqueeze(-1))[:length]
        _score(logits, row, queries, weights, keys[:max_context_len])
    return logits


def fp8_fp4_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k, schedule_meta=None):
    count, heads, half = q[0].shape
    _check_queries(q, weights, count, heads, 128)
    dtype("kv", kv[0], torch.int8)
    contiguous("kv", *kv)
    shape("kv", kv[0], len(kv[0]), half)
    dtype("kv's scales", kv[1], torch.int32)
    shape("kv's scales", kv[1], len(kv[0]))
    for name, bound in (("start", cu_seq_len_k_start), ("end", cu_seq_len_k_end)):
        dtype(name, bound, torch.int32)
        shape(name, bound, count)
        contiguous(name, bound)
    need(max_seqlen_k > 0, "max_seqlen_k")
    logits = _logits(count, max_seqlen_k, 384)
    keys, queries = fp4_values(kv[0], kv[1].unsqueeze(-1)), _decoded_queries(q)
    for row, (start, end) in enumerate(zip(cu_seq_len_k_start.tolist(), cu_seq_len_k_end.tolist(), strict=True)):
        need(0 <= start <= end <= len(keys) and end - start <= max_seqlen_k, f"row {row}: keys {start} to {end}")
        _score(logits, row, queries, weights, keys[start:end])
    return logits


def get_paged_sparse_mqa_logits_metadata(
    context_lens, block_table, indices, page_kv, sparse_kv_block_indices, qk_dtype, sparse_block_kv
):
    count = len(sparse_kv_block_indices)
    dtype("context_lens", context_lens, torch.int32)
    need(count > 0 and context_lens.numel() == count, "context_lens: one a row")
    dtype("sparse_kv_block_indices", sparse_kv_block_indices, torch.int32)
    contiguous("context_lens, sparse_kv_block_indices", context_lens, sparse_kv_block_indices)
    _check_table(block_table, count)
    _check_requests(indices, count)
    need(
        sparse_block_kv in (8, 16) and page_kv % sparse_block_kv == 0,
        f"blocks of {sparse_block_kv} in pages of {page_kv}",
    )
    need(qk_dtype == torch.int8, "qk_dtype")
    listed = sparse_kv_block_indices
    for row, length in enumerate(context_lens.flatten().tolist()):
        prefix = listed[row, : min(-(-length // sparse_block_kv), listed.shape[1])]
        need(bool((prefix.diff() > 0).all()), f"row {row}: blocks must ascend, found {prefix.tolist()}")
        need(
            int(prefix[0]) >= 0 and int(prefix[-1]) * sparse_block_kv < length, f"row {row}: block outside the context"
        )
    return (context_lens.clone(), block_table.clone(), listed.clone(), page_kv)


def fp8_fp4_paged_sparse_mqa_logits(q, kv_cache, weights, metadata, num_max_sparse_blocks, sparse_block_kv):
    context_lens, block_table, listed, page = metadata
    count, per_row, heads, half = q[0].shape
    need(per_row == 1 and half == 64 and heads <= 32 and heads % 4 == 0, f"q: shape {tuple(q[0].shape)}")
    _check_queries(q, weights, count, heads, 32)
    need(num_max_sparse_blocks % 4 == 0 and 0 < num_max_sparse_blocks <= 4096, f"{num_max_sparse_blocks} blocks")
    need(listed.shape == (count, num_max_sparse_blocks), "metadata belongs to another call")
    codes, words = _pages(kv_cache, (page,))
    need(
        kv_cache.stride(0) % 128 == 0 and kv_cache.data_ptr() % 16 == 0, "pages must be 128 bytes apart, aligned to 16"
    )
    logits = _logits(count, num_max_sparse_blocks * sparse_block_kv, 1)
    queries, column = _decoded_queries(q), torch.arange(sparse_block_kv)
    for row, length in enumerate(context_lens.flatten().tolist()):
        prefix = listed[row, : min(-(-length // sparse_block_kv), listed.shape[1])].long()
        entry = (prefix.unsqueeze(1) * sparse_block_kv + column).flatten()
        block = block_table[row, entry // page].long()
        keys = fp4_values(codes[block, entry % page], words[block, entry % page].unsqueeze(-1))
        _score(logits, row, queries, weights, keys)
        logits[row, : len(entry)].masked_fill_(entry >= length, float("nan"))
    return logits


def _check_queries(q, weights, count, heads, most):
    dtype("q", q[0], torch.int8)
    dtype("q's scales", q[1], torch.int32)
    contiguous("q", *q)
    need(q[0].shape[-1] in (32, 64) and 0 < heads <= most and heads % 4 == 0, f"q: shape {tuple(q[0].shape)}")
    need(q[1].shape == q[0].shape[:-1], f"q's scales: shape {tuple(q[1].shape)}")
    dtype("weights", weights, torch.bfloat16)
    shape("weights", weights, count, heads)
    last_contiguous("weights", weights)
    need(weights.stride(0) * 2 % 16 == 0, "weights: rows must be a multiple of 16 bytes apart")


def _check_table(table, count):
    dtype("block_table", table, torch.int32)
    need(table.dim() == 2 and len(table) == count and table.shape[1] > 0 and table.stride(1) == 1, "block_table")


def _check_requests(indices, count):
    dtype("indices", indices, torch.int32)
    shape("indices", indices, count)
    contiguous("indices", indices)
    need(bool((indices.diff() >= 0).all()), "indices: rows of a request must be together")


def _pages(cache, sizes):
    """Codes int8 [blocks, page, 64] and scale words int32 [blocks, page]: a block holds its codes, then its words."""
    dtype("kv_cache", cache, torch.uint8)
    known = cache.dim() == 4 and cache.shape[1] in sizes and cache.shape[2:] == (1, 68)
    need(known, f"kv_cache: shape {tuple(cache.shape)}")
    need(cache.stride(1) == 68 and cache.stride(3) == 1 and cache.stride(0) % 4 == 0, "kv_cache: blocks must be whole")
    flat = cache.reshape(len(cache), -1)
    size = cache.shape[1]
    words = flat[:, size * 64 :].contiguous().view(torch.int32)
    return flat[:, : size * 64].reshape(len(cache), size, 64).view(torch.int8), words


def _decoded_queries(q):
    """bfloat16 [R, h, 128]."""
    codes, words = (x.squeeze(1) if x.dim() > full else x for x, full in zip(q, (3, 2), strict=True))
    return fp4_values(codes, words.unsqueeze(-1))


def _logits(rows, columns, tile):
    """Uncleared memory with rows 1,024 bytes apart; NaN where the real one has leftovers."""
    width = -(-(-(-columns // tile) * tile) // 512) * 512
    return torch.full((rows, width), float("nan"), dtype=torch.bfloat16)[:, :columns]


def _score(logits, row, queries, weights, keys):
    if len(keys):
        seen = torch.tensor([len(keys)])
        operands = (queries[row][None, None], weights[row][None, None], keys[None])
        logits[row, : len(keys)] = indexer.index_scores(*operands, seen, torch.float32, torch.bfloat16)[0, 0]


# --- fused gate, site and experts -----------------------------------------------------------------------------------


def bf16_mega_gate(
    x, weight, num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, ep_rank,
    scoring_func="sqrtsoftplus", mask=None, bias=None, image_bias=None, image_token_mask=None, fix_routing_mask=None,
    to_physical_map=None, logical_count=None, unmapped_topk_idx=None, force_random=None, out=None,
):  # fmt: skip
    (rows, width), total = x.shape, len(weight)
    need(width % 256 == 0 and total <= 512 and total % 4 == 0, f"{width} channels, {total} experts")
    for name, operand, kind, expected in (
        ("x", x, torch.bfloat16, (rows, width)), ("weight", weight, torch.bfloat16, (total, width)),
        ("bias", bias, torch.float32, (total,)), ("image_bias", image_bias, torch.float32, (total,)),
        ("image_token_mask", image_token_mask, torch.bool, (rows,)),
    ):  # fmt: skip
        dtype(name, operand, kind)
        shape(name, operand, *expected)
        contiguous(name, operand)
    need((image_bias is None) == (image_token_mask is None), "image bias and mask belong together")
    need(0 < num_topk <= min(total, 32) and ep_rank >= 0 and scoring_func == "sqrtsoftplus", "routing options")
    need(not use_shared_as_routed and num_shared_experts == 0 and mask is None, "not modelled here")
    logits = gemm.linear(x, weight, torch.float32, torch.float32)
    return experts.route(logits, bias, num_topk, routed_scaling_factor, image_bias, image_token_mask, torch.float32)


def mega_mhc(
    x, residual, shifted_prev_mix, post_mix, comb_res_mix, fn, mix_scales, mix_bases, hc_mult, hc_norm_eps, hc_pre_eps,
    hc_post_scale, sinkhorn_eps, num_sinkhorn_iters, rmsnorm_weight, rmsnorm_eps, rmsnorm_scale, new_residual,
    new_prev_mix, new_post_mix, new_comb_res_mix, y_bf16=None, y_fp8=None, y_gemm_sf=None, y_routed_sf=None,
    y_shared_sf=None, shared_sf_block_m=0,
):  # fmt: skip
    rows, width = x.shape
    need(width % 1024 == 0 and 0 < rows <= 2**20 and hc_mult == 4, f"{rows} rows of {width}, {hc_mult} streams")
    bf16, f32 = torch.bfloat16, torch.float32
    for name, operand, kind, expected in (
        ("x", x, bf16, (rows, width)), ("residual", residual, bf16, (rows, 4, width)),
        ("shifted_prev_mix", shifted_prev_mix, f32, (rows, 4, 1)), ("post_mix", post_mix, f32, (rows, 4, 1)),
        ("comb_res_mix", comb_res_mix, f32, (rows, 4, 4)), ("fn", fn, f32, (24, 4 * width)),
        ("mix_scales", mix_scales, f32, (3,)), ("mix_bases", mix_bases, f32, (24,)),
        ("rmsnorm_weight", rmsnorm_weight, bf16, (width,)), ("new_residual", new_residual, bf16, (rows, 4, width)),
        ("new_prev_mix", new_prev_mix, f32, (rows, 4, 1)), ("new_post_mix", new_post_mix, f32, (rows, 4, 1)),
        ("new_comb_res_mix", new_comb_res_mix, f32, (rows, 4, 4)), ("y_bf16", y_bf16, bf16, (rows, width)),
        ("y_fp8", y_fp8, torch.float8_e4m3fn, (rows, width)),
    ):  # fmt: skip
        need(operand is not None, f"{name}: the adapters pass it")
        dtype(name, operand, kind)
        shape(name, operand, *expected)
        contiguous(name, operand)
    need(y_routed_sf is None and y_shared_sf is None and shared_sf_block_m == 0, "one layout of scales")
    scale_words("y_gemm_sf", y_gemm_sf, rows, width)
    need(hc_post_scale == 2.0 and rmsnorm_scale == 1.0 and num_sinkhorn_iters >= 1, "factors of the model")
    streams = _residual.write_back(residual, x, post_mix.squeeze(-1), comb_res_mix, f32)
    pre, post, comb = _residual.mix(
        streams, fn, mix_bases, mix_scales, hc_norm_eps, hc_pre_eps, num_sinkhorn_iters, f32
    )
    need(sinkhorn_eps == hc_pre_eps, "the model has one epsilon")
    hidden = _residual.collapse(streams, shifted_prev_mix.squeeze(-1), f32)
    normed = norm.rms_norm(hidden, rmsnorm_weight, rmsnorm_eps, f32, bf16)
    codes, scales = quant.encode_q8(normed)
    new_residual.copy_(streams)
    new_prev_mix.copy_(pre.unsqueeze(-1))
    new_post_mix.copy_(post.unsqueeze(-1))
    new_comb_res_mix.copy_(comb)
    y_bf16.copy_(normed)
    y_fp8.view(torch.uint8).copy_(codes)
    y_gemm_sf.copy_(packed(scales))


_residual, _swiglu = residual, activation.swiglu


class SymmBuffer:
    """Views of one symmetric allocation; here separate tensors, full of numbers nobody wrote."""

    def __init__(
        self, group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, num_shared_experts=0,
        mma_type="fp8xfp4", activation="swiglu", base=None,
    ):  # fmt: skip
        need(group.size() == 1 and group.rank() == 0, "one rank")
        group.barrier()
        need(mma_type == "fp8xfp4" and activation == "swiglu" and base is None, "not modelled here")
        need(hidden % 128 == 0 and intermediate_hidden % 128 == 0, "sizes of whole scale words")
        capacity = -(-num_max_tokens_per_rank // MEGA_ALIGNMENT) * MEGA_ALIGNMENT
        self.group, self.num_experts, self.num_topk = group, num_experts, num_topk
        self.num_max_tokens_per_rank, self.num_shared_experts = capacity, num_shared_experts
        self.sizes = (hidden, intermediate_hidden)
        self.x = torch.full((capacity, hidden), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        self.x_sf = torch.full((capacity, hidden // 128), -1, dtype=torch.int32)
        self.topk_idx = torch.full((capacity, num_topk), 2**40)
        self.topk_weights = torch.full((capacity, num_topk), float("nan"))
        rows = max(-(-capacity // tile) * (-(-tile // 128) * 128) for tile in MEGA_TILES)
        self.shared_l1_acts_sf = torch.full((hidden // 128, rows), -1, dtype=torch.int32).T


def get_block_m_for_mega_moe(num_ranks, num_experts, num_max_tokens_per_rank, num_tokens, num_topk, mma_type):
    need(num_ranks == 1 and num_tokens <= num_max_tokens_per_rank and mma_type == "fp8xfp4", "block of another kernel")
    return 8 if num_tokens < 16 else 96


def fp8_fp4_mega_moe(
    y, l1_weights, l2_weights, sym_buffer, shared_l1_weights=None, shared_l2_weights=None,
    cumulative_local_expert_recv_stats=None, recipe=(1, 1, 32), activation="swiglu", activation_clamp=None,
    fast_math=True,
):  # fmt: skip
    rows, width = y.shape
    inner, total, top_k = sym_buffer.sizes[1], sym_buffer.num_experts, sym_buffer.num_topk
    dtype("y", y, torch.bfloat16)
    contiguous("y", y)
    need(recipe == (1, 1, 32) and activation == "swiglu" and width == sym_buffer.sizes[0], "options")
    need(rows <= sym_buffer.num_max_tokens_per_rank and activation_clamp >= 0, "rows, clamp")
    for name, (codes, words), kind, size, groups in (
        ("l1", l1_weights, torch.int8, (total, 2 * inner, width), total),
        ("l2", l2_weights, torch.int8, (total, width, inner), total),
        ("shared l1", shared_l1_weights, torch.float8_e4m3fn, (2 * inner * sym_buffer.num_shared_experts, width), None),
        ("shared l2", shared_l2_weights, torch.float8_e4m3fn, (width, inner * sym_buffer.num_shared_experts), None),
    ):  # fmt: skip
        dtype(name, codes, kind)
        contiguous(name, codes)
        packing = 2 if kind == torch.int8 else 1
        need(tuple(codes.shape) == (*size[:-1], size[-1] // packing), f"{name}: shape {tuple(codes.shape)}")
        scale_words(f"{name}'s scales", words, size[-2], size[-1], groups)
    tile = get_block_m_for_mega_moe(1, total, sym_buffer.num_max_tokens_per_rank, rows, top_k, "fp8xfp4")
    shared_words = torch.stack([sym_buffer.shared_l1_acts_sf[_shared_row(row, tile)] for row in range(rows)])
    need(torch.equal(shared_words, sym_buffer.x_sf[:rows]), "scales of the shared expert's rows are in another layout")
    x = fp8_values(sym_buffer.x[:rows], sym_buffer.x_sf[:rows])
    ids, weights = sym_buffer.topk_idx[:rows], sym_buffer.topk_weights[:rows]
    need(int(ids.max()) < total and int(ids.min()) >= 0, "expert out of range")
    w13, w2 = _mega_weight(l1_weights, fp4_values, True), _mega_weight(l2_weights, fp4_values, False)
    shared_w13, shared_w2 = (
        _mega_weight(shared_l1_weights, fp8_values, True),
        _mega_weight(shared_l2_weights, fp8_values, False),
    )
    order, offsets, position = experts.sort_by_expert(ids, total)
    bf16, f32 = torch.bfloat16, torch.float32
    gate_up = gemm.grouped_linear(x[order // top_k], w13, offsets, f32, bf16)
    hidden = quant.fake_q8(_swiglu(gate_up, activation_clamp, weights.flatten()[order]))
    routed = gemm.grouped_linear(hidden, w2, offsets, f32, bf16)
    hidden = quant.fake_q8(_swiglu(gemm.linear(x, shared_w13, f32, bf16), activation_clamp))
    y.copy_(experts.combine(routed, position, gemm.linear(hidden, shared_w2, f32, bf16), f32))


def _shared_row(row, tile):
    within = row % tile
    return row // tile * (-(-tile // 128) * 128) + within // 128 * 128 + within % 32 * 4 + within % 128 // 32


def _mega_weight(weight, decode, interleaved):
    """bfloat16 [.., N, K] in the checkpoint's order."""
    codes, words = weight
    count = codes.shape[-2]
    place = torch.tensor([row // 128 * 128 + row % 32 * 4 + row % 128 // 32 for row in range(count)])
    values = decode(codes, words[..., place, :])
    if not interleaved:
        return values
    row, half = torch.arange(count), count // 2
    source = torch.where(row < half, row // 8 * 16 + row % 8, (row - half) // 8 * 16 + 8 + (row - half) % 8)
    return values[..., source, :]
