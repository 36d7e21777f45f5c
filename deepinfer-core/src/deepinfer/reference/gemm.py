"""Matrix products: dense, block-diagonal, and grouped by expert.

Called by the op contracts of `hooks/ops/` and by other references. Operands are dense tensors; how a weight is stored
is `quant.py`'s business. `accumulate` is the dtype sums are formed in: float32, or float64 where a row must not depend
on how many rows surround it (a float64 sum rounded once does not show the order of its terms).
"""

from __future__ import annotations

import torch
from torch.nn import functional


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    accumulate: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed -> [..., N] in `out_dtype` (None: x's dtype), rounded once."""
    out_dtype = out_dtype or x.dtype
    operand = _operand_dtype(x, weight, accumulate, out_dtype)
    return functional.linear(x.to(operand), weight.to(operand)).to(out_dtype)


def block_diagonal_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    accumulate: torch.dtype = torch.float32,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Every group with its own rows of the weight.

    x [Q, G, K], weight [G * O, K] (group g owns rows g*O .. g*O + O-1) -> [Q, G * O] in `out_dtype`, rounded once.
    """
    groups = x.shape[1]
    operand = _operand_dtype(x, weight, accumulate, out_dtype)
    blocks = weight.unflatten(0, (groups, -1)).to(operand)  # [G, O, K]
    product = torch.bmm(x.to(operand).transpose(0, 1), blocks.transpose(1, 2))  # [G, Q, O]
    return product.transpose(0, 1).flatten(1).to(out_dtype)


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    accumulate: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Every expert's rows times that expert's weight.

    x [R, K] sorted by expert, weight [E, N, K], offsets int64 [E]: expert e owns rows offsets[e-1] .. offsets[e] - 1,
    and offsets[E-1] = R. Returns [R, N] in `out_dtype` (None: x's dtype), rounded once.
    """
    out_dtype = out_dtype or x.dtype
    operand = _operand_dtype(x, weight, accumulate, out_dtype)
    x, weight = x.to(operand), weight.to(operand)
    if x.shape[0] == 0:
        return x.new_zeros(0, weight.shape[1], dtype=out_dtype)
    product = _grouped_mm(x, weight, offsets) if _has_grouped_mm(x) else _padded_bmm(x, weight, offsets)
    return product.to(out_dtype)


def _operand_dtype(
    x: torch.Tensor, weight: torch.Tensor, accumulate: torch.dtype, out_dtype: torch.dtype
) -> torch.dtype:
    """dtype both operands are given in. bfloat16 products are summed in float32 by the library and rounded once, so
    bfloat16 operands serve when the result is bfloat16 too; a wider result needs wider operands."""
    if accumulate == torch.float64:
        return torch.float64
    all_bfloat16 = x.dtype == weight.dtype == out_dtype == torch.bfloat16
    return torch.bfloat16 if all_bfloat16 and _fast_bfloat16(x.device) else torch.float32


def _fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are worth asking for. Without vector support a CPU runs them one by one."""
    if device.type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _has_grouped_mm(x: torch.Tensor) -> bool:
    """The CPU's grouped product takes any row counts; other devices' versions have alignment rules and gaps."""
    return x.device.type == "cpu" and x.dtype != torch.float64 and hasattr(functional, "grouped_mm")


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets.to(torch.int32))


def _padded_bmm(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """One batched product over experts, each padded to the largest row count."""
    row = torch.arange(x.shape[0], device=x.device)
    expert = torch.searchsorted(offsets, row, right=True)
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    within = row - (offsets - counts)[expert]
    padded = x.new_zeros(weight.shape[0], int(counts.max()), x.shape[1])
    padded = padded.index_put((expert, within), x)
    return torch.bmm(padded, weight.transpose(1, 2))[expert, within]
