"""The two runs of core's reference that results are held against: in the model's dtypes, and in float64.

Both are op tables on the CPU, bound without any backend. The float64 one applies every quantizer *inside* an op, since
that is part of what the op computes, and leaves out every rounding to a dtype; of a result that is quantized at the
very end it keeps the numbers before. `compare.py` says how they are used, `opinfo.context` feeds them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from deepinfer.hooks import CANONICAL, Contribution, Numerics, OpContext, OpTable, Provider, QuantTensor, provides
from deepinfer.hooks.bind import bind
from deepinfer.hooks.ops.gemm import GemmOps
from deepinfer.reference import gemm, quant


@dataclass(frozen=True, slots=True)
class IdealNumerics(Numerics):
    """Activations and sums in float64, quantizers as in the numerics it was made from."""

    @property
    def activation_dtype(self) -> torch.dtype:
        return torch.float64

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return torch.float64

    @classmethod
    def of(cls, numerics: Numerics) -> IdealNumerics:
        """The float64 twin of some numerics."""
        return cls(quantize=numerics.quantize, order_free=True, packed_cache=numerics.packed_cache)


@dataclass(frozen=True, slots=True)
class Unrounded(QuantTensor):
    """A quantized tensor that remembers what it was made from: consumers read `values`, the kit judges `exact`.

    values [..., K] as the quantizer returned them, exact [..., K] float64
    """

    exact: torch.Tensor

    def take(self, rows: torch.Tensor) -> Unrounded:
        return Unrounded(self.values[rows], self.exact[rows])


class YardstickGemm(GemmOps):
    """Quantizing ops that keep the exact numbers next to the quantized ones."""

    @provides()
    def quantize(self, x: torch.Tensor) -> QuantTensor:
        values = quant.fake_q8(x) if self.numerics.quantize else x
        return Unrounded(values, x.double())

    @provides(layouts={"dense_weight": CANONICAL})
    def block_diagonal_linear(self, x: QuantTensor, weight: Any) -> QuantTensor:
        dense = quant.dequantize_weight(weight.values, weight.scales, weight.format, torch.float64)
        return self.quantize(gemm.block_diagonal_linear(x.dequantize(), dense, torch.float64, torch.float64))


def working_context(context: OpContext) -> OpContext:
    """The context of core's reference twin: same numerics and sizes, on the CPU, without settings."""
    return replace(context, device=torch.device("cpu"), settings=None, runtime=None, communicator=None)


def ideal_context(context: OpContext) -> OpContext:
    """The context of the float64 run."""
    return replace(working_context(context), numerics=IdealNumerics.of(context.numerics))


def working_table(context: OpContext) -> OpTable:
    """Core's own bodies in the numerics of `context`."""
    return bind((), working_context(context))


def ideal_table(context: OpContext) -> OpTable:
    """Core's own bodies in float64."""
    provider = Provider("yardstick", "deepinfer-core", "0")
    return bind((Contribution(provider, {"gemm": YardstickGemm}),), ideal_context(context))
