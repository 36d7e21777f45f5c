"""Sinkhorn of many small matrices: core's reference on a CPU, one kernel each way on a GPU.

Written out, twenty rounds of a 4 x 4 matrix are hundreds of tiny launches a site. The kernel keeps a row's 16 numbers
in registers and stores every round's divisors [rounds, Q, 4]; going back, it multiplies by them to recover the matrix
before the round, so nothing else is kept. Same formula as `deepinfer.reference.residual.sinkhorn`.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer.reference.residual import sinkhorn as reference_sinkhorn

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch has none, and needs none
    triton = None

ROWS = 128
"""Matrices one program works on."""


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """logits [Q, 4, 4] float32 -> [Q, 4, 4]."""
    if triton is None or not logits.is_cuda:
        return reference_sinkhorn(logits, iterations, eps)
    return _Sinkhorn.apply(logits, iterations, eps)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
        logits = logits.contiguous()
        count = logits.shape[0]
        out = torch.empty_like(logits)
        divisors = logits.new_empty(2 * iterations, count, 4)
        _forward[(triton.cdiv(count, ROWS),)](logits, out, divisors, count, iterations, eps, ROWS)
        ctx.save_for_backward(logits, out, divisors)
        ctx.iterations, ctx.eps = iterations, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, out, divisors = ctx.saved_tensors
        count = logits.shape[0]
        result = torch.empty_like(logits)
        _backward[(triton.cdiv(count, ROWS),)](
            logits, out, divisors, grad.contiguous(), result, count, ctx.iterations, ROWS
        )
        return result, None, None


if triton is not None:

    @triton.jit
    def _forward(logits, out, divisors, count, iterations, eps, ROWS: tl.constexpr):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        four = tl.arange(0, 4)
        place = row[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
        inside = (row < count)[:, None, None]
        sums = row[:, None] * 4 + four[None, :]
        kept = (row < count)[:, None]
        a = tl.load(logits + place, mask=inside, other=0.0)
        a = tl.exp(a - tl.max(a, 2)[:, :, None])
        a = a / tl.sum(a, 2)[:, :, None] + eps
        for step in range(2 * iterations - 1):
            if step % 2 == 0:
                d = tl.sum(a, 1) + eps
                a = a / d[:, None, :]
            else:
                d = tl.sum(a, 2) + eps
                a = a / d[:, :, None]
            tl.store(divisors + step * count * 4 + sums, d, mask=kept)
        tl.store(out + place, a, mask=inside)

    @triton.jit
    def _backward(logits, out, divisors, grad, result, count, iterations, ROWS: tl.constexpr):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        four = tl.arange(0, 4)
        place = row[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
        inside = (row < count)[:, None, None]
        sums = row[:, None] * 4 + four[None, :]
        kept = (row < count)[:, None]
        a = tl.load(out + place, mask=inside, other=0.0)
        g = tl.load(grad + place, mask=inside, other=0.0)
        for back in range(2 * iterations - 1):
            step = 2 * iterations - 2 - back
            d = tl.load(divisors + step * count * 4 + sums, mask=kept, other=1.0)
            # a = before / d with d = sum(before) + eps: the gradient loses what the sum carries
            if step % 2 == 0:
                g = (g - tl.sum(g * a, 1)[:, None, :]) / d[:, None, :]
                a = a * d[:, None, :]
            else:
                g = (g - tl.sum(g * a, 2)[:, :, None]) / d[:, :, None]
                a = a * d[:, :, None]
        s = tl.load(logits + place, mask=inside, other=0.0)
        s = tl.exp(s - tl.max(s, 2)[:, :, None])
        s = s / tl.sum(s, 2)[:, :, None]
        g = s * (g - tl.sum(g * s, 2)[:, :, None])
        tl.store(result + place, g, mask=inside)
