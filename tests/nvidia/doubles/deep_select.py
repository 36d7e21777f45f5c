"""Stands for DeepSelect (a build of 1.0.0) on a machine without a compute capability 10.x GPU."""

from __future__ import annotations

import torch
from doubles.contract import contiguous, dtype, need, shape

NOTHING = 2**40


def topk(
    input, topk, sorted=False, end=None, indices_type=torch.int32, sorted_index=False, output_idx=None,
    output_idx_offset=None, idx_oob_fill_value=2**31 - 1, value_oob_fill_value=float("-inf"), return_value=True,
    abort_when_nan_found=False,
):  # fmt: skip
    dtype("input", input, torch.bfloat16, torch.float32)
    need(input.dim() == 2 and input.stride(1) == 1, "input: expected [b, V], rows contiguous")
    need(input.stride(0) * input.element_size() % 1024 == 0, "input: rows must be a multiple of 1,024 bytes apart")
    need(0 < topk <= 4096 and input.shape[1] < 2**23, f"topk={topk} of {input.shape[1]}")
    need(not sorted or (input.dtype == torch.float32 and return_value), "sorted needs float32 and values")
    need(indices_type in (torch.int32, torch.int64), "indices_type")
    need(output_idx is None and output_idx_offset is None, "not modelled here")
    if end is not None:
        dtype("end", end, torch.int32)
        shape("end", end, len(input))
        contiguous("end", end)
    column = torch.arange(input.shape[1])
    inside = column < (input.shape[1] if end is None else end.unsqueeze(1))
    inside = inside.expand(input.shape)
    order = input.float().argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, (~inside).gather(1, order).to(torch.int8).argsort(dim=1, stable=True))[:, :topk]
    order = order.masked_fill(~inside.gather(1, order), NOTHING)
    if sorted_index:
        order = order.sort(1).values
    lost = order == NOTHING
    indices = order.masked_fill(lost, idx_oob_fill_value).to(indices_type)
    if not return_value:
        return indices
    return input.gather(1, order.masked_fill(lost, 0)).masked_fill(lost, value_oob_fill_value), indices
