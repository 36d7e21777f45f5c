"""Stands for DeepEP (deepinfer-ep 2.5.0) in a group of one rank, on a machine without the NCCL it needs."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from doubles.contract import contiguous, dtype, need, shape


class EPBuffer:
    def __init__(
        self, group, num_bytes=None, num_max_tokens_per_rank=0, hidden=0, num_topk=0, use_fp8_dispatch=False,
        lb_allocation_plan_or_num_bytes=0, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True,
        prefer_overlap_with_compute=True, sl_idx=None, num_allocated_qps=0, num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100, explicitly_destroy=False,
    ):  # fmt: skip
        need(group.size() == 1, "a group of one")
        need(num_bytes is None and min(num_max_tokens_per_rank, hidden, num_topk) > 0, "sizes of the buffer")
        self.most, self.hidden, self.fp8, self.alive = num_max_tokens_per_rank, hidden, use_fp8_dispatch, True

    def dispatch(
        self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None,
        num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None,
        async_with_compute_stream=False, allocate_on_comm_stream=False, handle=None, do_handle_copy=False,
        do_cpu_sync=None, do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False,
        defer_epilogue=False,
    ):  # fmt: skip
        need(self.alive and isinstance(x, tuple) and self.fp8, "a buffer for FP8 rows")
        codes, words = x
        rows, top_k = topk_idx.shape
        dtype("x", codes, torch.float8_e4m3fn)
        shape("x", codes, rows, self.hidden)
        contiguous("x, topk_idx, topk_weights", codes, topk_idx, topk_weights)
        need(self.hidden % 16 == 0 and rows <= self.most, f"{rows} rows of {self.hidden}")
        dtype("scales", words, torch.int32)
        shape("scales", words, rows, self.hidden // 128)
        dtype("topk_idx", topk_idx, torch.int64)
        dtype("topk_weights", topk_weights, torch.float32)
        shape("topk_weights", topk_weights, rows, top_k)
        need(do_expand and do_cpu_sync is False and not defer_epilogue and handle is None, "how the adapter asks")
        tile = expert_alignment or 1
        size = self.most * min(top_k, num_experts) + (tile - 1) * num_experts
        size = -(-size // tile) * tile
        out = torch.full((size, self.hidden), 0x7F, dtype=torch.uint8)
        step = (1, -(-size // 4) * 4) if use_tma_aligned_col_major_sf else (words.shape[1], 1)
        scales = torch.empty_strided((size, words.shape[1]), step, dtype=torch.int32).fill_(-1)
        weights, source, ends, begin = torch.full((size,), float("nan")), torch.full((size,), -1), [], 0
        for expert in range(num_experts):
            row, slot = (topk_idx == expert).nonzero(as_tuple=True)
            end = begin + len(row)
            out[begin:end], scales[begin:end] = codes.view(torch.uint8)[row], words[row]
            weights[begin:end], source[begin:end] = topk_weights[row, slot], row
            ends.append(end)
            begin = -(-end // tile) * tile
            if do_zero_padding:
                out[end:begin], weights[end:begin] = 0, 0.0
        kept = SimpleNamespace(
            psum_num_recv_tokens_per_expert=torch.tensor(ends, dtype=torch.int32), source=source, rows=rows, buffer=self
        )
        return (out.view(torch.float8_e4m3fn), scales), None, weights, kept, None

    def combine(
        self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
        async_with_compute_stream=False, allocate_on_comm_stream=False, defer_epilogue=False,
    ):  # fmt: skip
        need(self.alive and handle.buffer is self, "a handle of this buffer")
        dtype("x", x, torch.bfloat16)
        contiguous("x", x)
        shape("x", x, len(handle.source), self.hidden)
        dtype("bias", bias, torch.bfloat16)
        shape("bias", bias, handle.rows, self.hidden)
        contiguous("bias", bias)
        used = handle.source >= 0
        total = bias.float().index_add(0, handle.source[used], x[used].float())
        return total.to(torch.bfloat16), None, None

    def destroy(self):
        self.alive = False
