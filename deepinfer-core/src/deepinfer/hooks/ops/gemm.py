"""GEMM ops: weight preparation, dense, block-diagonal and grouped products, and the row-wise ops around them.

The model calls them for every projection; the expert and residual contracts compose theirs from them. Prepared
weights are opaque to everyone else. Core keeps a weight as the checkpoint stores it and dequantizes it on every use
(exact numerics), or dequantizes it once (smooth numerics, where gradients may flow into it). Mathematics:
`deepinfer.reference.{gemm,quant,norm,activation}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deepinfer.hooks.api import OpGroup, op
from deepinfer.hooks.types import QuantTensor, Weight
from deepinfer.reference import activation, gemm, norm, quant

EXPERT_SLICE = 1 << 28
"""Most elements of expert weights that core dequantizes at a time."""


class GemmOps(OpGroup):
    """Products with weights, quantization, norms and SwiGLU.

    "Activation dtype" is bfloat16 in exact numerics, float32 in smooth ones, where quantizers change nothing.
    """

    group = "gemm"

    @op(version=1, level="recommended", status="beta", grain="kernel", layout="dense_weight")
    def prepare_weight(self, weight: Weight) -> object:
        """Bring a dense weight into the form this provider's products read. Called once per weight after loading.

        weight   [out, in] in any format of `Weight`
        returns  opaque to the caller; core: a `Weight`, float32 in smooth numerics
        """
        return self._prepare(weight)

    @op(version=1, level="required", status="beta", grain="kernel", layout="dense_weight")
    def linear(self, x: torch.Tensor | QuantTensor, weight: Any, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x times weight transposed: sums in float32 (`numerics.accumulate_dtype`), one rounding at the end.

        x          [..., K] activation dtype; a QuantTensor for weights in FP8
        weight     prepared [N, K]
        out_dtype  None = activation dtype; float32 keeps the sums
        returns    [..., N]
        """
        out_dtype = out_dtype or self.numerics.activation_dtype
        return gemm.linear(_values(x), self._dense(weight), self.numerics.accumulate_dtype, out_dtype)

    @op(version=1, level="recommended", status="beta", grain="kernel", layout="dense_weight")
    def block_diagonal_linear(self, x: QuantTensor, weight: Any) -> QuantTensor:
        """Every group of x with its own rows of the weight; the sums are quantized without a rounding in between.

        x        [Q, G, K]
        weight   prepared [G * O, K]; group g owns rows g*O .. g*O + O-1
        returns  [Q, G * O], e4m3 per 32 channels
        """
        sums = gemm.block_diagonal_linear(_values(x), self._dense(weight), self.numerics.accumulate_dtype)
        return self._quantize(sums)

    @op(version=1, level="recommended", status="beta", grain="kernel", layout="expert_weight")
    def prepare_expert_weight(self, weight: Weight) -> object:
        """`prepare_weight` for stacked experts. weight [E, out, in] -> opaque; core: as for dense weights."""
        return self._prepare(weight)

    @op(version=1, level="required", status="beta", grain="kernel", layout="expert_weight")
    def grouped_linear(self, x: QuantTensor, weight: Any, offsets: torch.Tensor) -> torch.Tensor:
        """Every expert's rows times that expert's weight, sums and rounding as in `linear`.

        x        [R, K] sorted by expert
        weight   prepared [E, N, K]
        offsets  [E] int64: expert e owns rows offsets[e-1] .. offsets[e] - 1 (offsets[-1] = 0), offsets[E-1] = R
        returns  [R, N] activation dtype
        raises   ValueError if offsets and weight have different numbers of experts
        """
        if offsets.shape[0] != weight.shape[0]:
            raise ValueError(f"offsets are of {offsets.shape[0]} experts, the weight has {weight.shape[0]}")
        values, dtype, accumulate = _values(x), self.numerics.activation_dtype, self.numerics.accumulate_dtype
        if values.shape[0] == 0:
            return values.new_zeros(0, weight.shape[1], dtype=dtype)
        parts = [
            gemm.grouped_linear(rows, self._dense(experts), ends, accumulate, dtype)
            for rows, experts, ends in _expert_slices(values, weight, offsets)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @op(version=1, level="required", status="beta", grain="kernel")
    def quantize(self, x: torch.Tensor) -> QuantTensor:
        """e4m3 with one power-of-two scale per 32 channels. Straight-through gradient.

        x [..., K] bfloat16 or float32, K a multiple of 32 -> QuantTensor [..., K]
        """
        return self._quantize(x)

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, the weight applied before the only rounding.

        x [..., d] activation dtype, weight [d] -> [..., d] activation dtype
        """
        return norm.rms_norm(x, weight, eps, self.numerics.accumulate_dtype, self.numerics.activation_dtype)

    @op(version=1, level="optional", status="beta", grain="block")
    def rms_norm_quantize(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, QuantTensor]:
        """`rms_norm` and the quantization of its rounded result.

        x, weight, eps  as in `rms_norm`
        returns         [..., d] activation dtype, and the same quantized
        """
        normed = self.ops.gemm.rms_norm(x, weight, eps)
        return normed, self.ops.gemm.quantize(normed)

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def swiglu(self, gate_up: torch.Tensor, limit: float, row_weight: torch.Tensor | None = None) -> torch.Tensor:
        """silu(min(gate, limit)) * clamp(up, -limit, limit) * row_weight, rounded once.

        gate_up     [R, 2 I] activation dtype, gate first
        row_weight  [R] float32 or None (1)
        returns     [R, I] float32
        """
        return activation.swiglu(gate_up, limit, row_weight, self.numerics.accumulate_dtype)

    @op(version=1, level="optional", status="beta", grain="block")
    def swiglu_quantize(
        self, gate_up: torch.Tensor, limit: float, row_weight: torch.Tensor | None = None
    ) -> QuantTensor:
        """`swiglu`, quantized from float32.

        gate_up, limit, row_weight  as in `swiglu`
        returns                     QuantTensor [R, I]
        """
        return self.ops.gemm.quantize(self.ops.gemm.swiglu(gate_up, limit, row_weight))

    def _prepare(self, weight: Weight) -> Weight:
        if self.numerics.quantize:
            return weight
        values = quant.dequantize_weight(weight.values, weight.scales, weight.format, torch.float32)
        return Weight(values, None, "f32")

    def _dense(self, weight: Weight) -> torch.Tensor:
        """Dense numbers of a prepared weight; bfloat16 holds every stored format but float32 itself."""
        dtype = torch.float32 if weight.format == "f32" else torch.bfloat16
        return quant.dequantize_weight(weight.values, weight.scales, weight.format, dtype)

    def _quantize(self, x: torch.Tensor) -> QuantTensor:
        return QuantTensor(quant.fake_q8(x) if self.numerics.quantize else x.to(torch.float32))


def _values(x: torch.Tensor | QuantTensor) -> torch.Tensor:
    return x.dequantize() if isinstance(x, QuantTensor) else x


def _expert_slices(
    x: torch.Tensor, weight: Weight, offsets: torch.Tensor
) -> Iterator[tuple[torch.Tensor, Weight, torch.Tensor]]:
    """(rows, experts, offsets within the rows), in slices whose dequantized weights stay below `EXPERT_SLICE`.

    Stored experts without rows are left out, so that a small step does not dequantize the whole layer.
    """
    if weight.scales is not None:
        present = torch.diff(offsets, prepend=offsets.new_zeros(1)).nonzero().squeeze(1)
        weight, offsets = _take_experts(weight, present), offsets[present]
    count, out, width = weight.shape
    size = max(1, EXPERT_SLICE // (out * width))
    if size >= count:
        yield x, weight, offsets
        return
    ends = [0, *offsets.tolist()]
    for first in range(0, count, size):
        experts = torch.arange(first, min(first + size, count), device=x.device)
        rows = x[ends[first] : ends[first + len(experts)]]
        yield rows, _take_experts(weight, experts), offsets[experts] - ends[first]


def _take_experts(weight: Weight, experts: torch.Tensor) -> Weight:
    """Some experts of a stacked weight, itself if it is all of them. experts: int64, ascending."""
    if experts.shape[0] == weight.shape[0]:
        return weight
    scales = None if weight.scales is None else weight.scales[experts]
    return Weight(weight.values[experts], scales, weight.format)
