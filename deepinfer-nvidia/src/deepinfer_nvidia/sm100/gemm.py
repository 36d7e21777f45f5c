"""Products on DeepGEMM's block-scaled kernels, quantization and SwiGLU on TileKernels. Created by `groups.create`.

Weights are kept in `weights.DENSE` and `weights.EXPERTS`, activations as `formats.Fp8Tensor`. Where TileKernels is
missing, quantizers run in plain torch; products without their library are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer.hooks import ModelTraits, OpContext, QuantTensor, Weight, provides
from deepinfer.hooks.ops import GemmOps
from deepinfer_nvidia.libraries import Need
from deepinfer_nvidia.machine import Machine, OnMachine
from deepinfer_nvidia.sm100 import aligned, limits
from deepinfer_nvidia.sm100.formats import GROUP, WORD, Fp8Tensor, align, empty_scales, quantize_fp8
from deepinfer_nvidia.sm100.weights import DENSE, EXPERTS, DenseWeight, ExpertWeight, dense_weight, expert_weight

PRODUCTS = Need(
    "deep_gemm",
    {
        "fp8_fp4_gemm_nt": ("a", "b", "d", "recipe"),
        "bf16_gemm_nt": ("a", "b", "d"),
        "fp8_einsum": ("expr", "a", "b", "d", "recipe"),
    },
)
GROUPED = Need(
    "deep_gemm",
    {
        "m_grouped_fp8_fp4_gemm_nt_contiguous": ("grouped_layout", "recipe_a", "recipe_b", "use_psum_layout"),
        "get_mk_alignment_for_contiguous_layout": (),
    },
)
CASTS = Need(
    "tile_kernels",
    {
        "quant.per_token_cast": ("use_tma_aligned_col_major_sf", "round_sf", "use_packed_ue8m0"),
        "quant.swiglu_forward_and_per_token_cast": ("topk_weights", "use_packed_ue8m0", "clamp_value"),
    },
)

RECIPE = (1, 1, GROUP)
"""Scales of a product: one a row and 32 channels, on both sides."""

_ROW_BYTES = 32
"""Rows of a product's result start at multiples of this."""
_TILE = 64
"""Channels that a row of TileKernels' casts must be a multiple of."""


class Gemm(OnMachine, GemmOps):
    """Dense, block-diagonal and grouped products, quantizers."""

    def __init__(self, context: OpContext, machine: Machine) -> None:
        super().__init__(context, machine)
        libraries = machine.libraries
        self._products: Any = None if libraries.missing(PRODUCTS) else libraries.get("deep_gemm")
        self._casts: Any = None if libraries.missing(CASTS) else libraries.get("tile_kernels")

    def refuse(self, op: str, traits: ModelTraits) -> list[str]:
        """Chip, numerics, libraries, and sizes that scale words divide."""
        needs = {"gemm.prepare_expert_weight": (GROUPED,), "gemm.grouped_linear": (GROUPED,)}
        dense = ("gemm.prepare_weight", "gemm.linear", "gemm.block_diagonal_linear")
        reasons = limits.problems(self.machine, self.numerics, *needs.get(op, (PRODUCTS,) if op in dense else ()))
        if op in dense:
            reasons += limits.multiple(128, o_lora_rank=traits.o_lora_rank)
        return reasons

    # dense

    @provides(version=1, layouts={"dense_weight": DENSE})
    def prepare_weight(self, weight: Weight) -> DenseWeight:
        """Scales for every row, packed and MN-major."""
        return dense_weight(weight)

    @provides(version=1, graph_safe=True, layouts={"dense_weight": DENSE})
    def linear(self, x: torch.Tensor | QuantTensor, weight: Any, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Block-scaled for e4m3 weights; bfloat16 for bfloat16 ones; torch for the rest (float32 weights)."""
        out_dtype = out_dtype or self.numerics.activation_dtype
        if weight.quantized and isinstance(x, QuantTensor):
            operand = self._packed(x)
            return self._product("fp8_fp4_gemm_nt", (operand.values, operand.words), weight.plain(), out_dtype)
        values = x.dequantize() if isinstance(x, QuantTensor) else x
        if values.dtype != torch.bfloat16 or weight.quantized or weight.values.dtype != torch.bfloat16:
            product = torch.nn.functional.linear(values.to(torch.float32), weight.dense(torch.float32))
            return product.to(out_dtype)
        rows = values.reshape(-1, values.shape[-1]).contiguous()
        out = self._product("bf16_gemm_nt", rows, weight.values, out_dtype)
        return out.view(*values.shape[:-1], -1)

    def _product(self, name: str, a: Any, b: Any, out_dtype: torch.dtype) -> torch.Tensor:
        rows = (a[0] if isinstance(a, tuple) else a).shape[0]
        values = b[0] if isinstance(b, tuple) else b
        width = values.shape[0]
        out = torch.empty(rows, align(width, _ROW_BYTES // out_dtype.itemsize), dtype=out_dtype, device=values.device)
        out = out[:, :width]
        if rows:
            options = {"recipe": RECIPE} if isinstance(a, tuple) else {}
            getattr(self._products, name)(a, b, out, **options)
        return out.contiguous()

    @provides(version=1, graph_safe=True, layouts={"dense_weight": DENSE})
    def block_diagonal_linear(self, x: QuantTensor, weight: Any) -> QuantTensor:
        """One batched product that quantizes its own sums."""
        rows, groups = x.values.shape[:2]
        operand = self._packed(x)
        out = torch.empty(rows, weight.shape[0], dtype=torch.float8_e4m3fn, device=operand.values.device)
        words = empty_scales(rows, weight.shape[0] // 128, device=out.device)
        if rows:
            self._products.fp8_einsum(
                "bhr,hdr->bhd",
                (operand.values, operand.words),
                weight.groups(groups, operand.chunks),
                (out.view(rows, groups, -1), words),
                recipe=RECIPE,
            )
        return Fp8Tensor(out, words)

    # experts

    @provides(version=1, layouts={"expert_weight": EXPERTS})
    def prepare_expert_weight(self, weight: Weight) -> ExpertWeight | Weight:
        """Packed codes and scales MN-major; other formats than MXFP4 stay as they are."""
        return expert_weight(weight) if weight.format == "mxfp4_row32" else weight

    @provides(version=1, graph_safe=True, layouts={"expert_weight": EXPERTS})
    def grouped_linear(self, x: QuantTensor, weight: Any, offsets: torch.Tensor) -> torch.Tensor:
        """Rows are copied so that every expert's begin at a tile, and back."""
        if isinstance(weight, Weight):
            return super().grouped_linear(x, weight, offsets)
        if offsets.shape[0] != weight.shape[0]:
            raise ValueError(f"offsets are of {offsets.shape[0]} experts, the weight has {weight.shape[0]}")
        library = self.machine.libraries.get("deep_gemm")
        if x.values.shape[0] == 0:
            return torch.empty(0, weight.shape[1], dtype=self.numerics.activation_dtype, device=offsets.device)
        places = aligned.places(offsets, x.values.shape[0], library.get_mk_alignment_for_contiguous_layout())
        return aligned.product(library, aligned.spread(self._packed(x), places), weight.plain(), places)[places.rows]

    # quantizers

    @provides(version=1, graph_safe=True)
    def quantize(self, x: torch.Tensor) -> QuantTensor:
        """One cast of bfloat16 rows on TileKernels; torch for float32 and for [Q, G, K]."""
        if self._casts is None or x.dtype != torch.bfloat16 or x.dim() != 2 or not len(x) or x.shape[1] % _TILE:
            return quantize_fp8(x) if x.dim() < 4 else quantize_fp8(x.flatten(0, -2))
        codes, words = self._casts.quant.per_token_cast(
            x.contiguous(), "e4m3", GROUP,
            use_tma_aligned_col_major_sf=True, round_sf=True, use_packed_ue8m0=True,
        )  # fmt: skip
        return Fp8Tensor(codes, words)

    @provides(version=1, graph_safe=True)
    def swiglu_quantize(
        self, gate_up: torch.Tensor, limit: float, row_weight: torch.Tensor | None = None
    ) -> QuantTensor:
        """SwiGLU, the routing weight and the cast in one pass; torch's quantizer where TileKernels is missing."""
        width = gate_up.shape[-1] // 2
        if self._casts is None or gate_up.dtype != torch.bfloat16 or not len(gate_up) or width % WORD:
            return super().swiglu_quantize(gate_up, limit, row_weight)
        weights = torch.ones(len(gate_up), device=gate_up.device) if row_weight is None else row_weight
        codes, words = self._casts.quant.swiglu_forward_and_per_token_cast(
            gate_up.contiguous(), "e4m3", GROUP, topk_weights=weights,
            use_tma_aligned_col_major_sf=True, round_sf=True, use_packed_ue8m0=True, clamp_value=limit,
        )  # fmt: skip
        return Fp8Tensor(codes, words)

    def _packed(self, x: QuantTensor) -> Fp8Tensor:
        """A foreign layout is decoded and quantized again, which loses nothing."""
        return x if isinstance(x, Fp8Tensor) else quantize_fp8(x.dequantize())
