"""Weights as DeepGEMM reads them, re-laid once: per-row scales, expert stacks, and the orders that fused kernels want.

Made by `gemm.prepare_weight` and `gemm.prepare_expert_weight`, private to this package's op groups (layouts
`deepgemm_dense_v1`, `deepgemm_experts_v1`). A weight does not say what it is for, so an order that one kernel wants is
made when that kernel first meets it; the original order is dropped then, and made again if another op asks for it.
"""

from __future__ import annotations

import torch

from deepinfer.hooks import Weight
from deepinfer_nvidia.sm100.formats import GROUP, decode_fp8, empty_scales, pack_scales, unpack_scales, widen_fp4

DENSE = "deepgemm_dense_v1"
EXPERTS = "deepgemm_experts_v1"

_INTERLEAVE = 8
"""Rows of gate and of up that alternate in the fused expert kernel's first weight."""
_BLOCK = 128
"""Rows whose scales the tensor memory takes at a time, 32 lanes of 4."""


class DenseWeight:
    """A dense weight [N, K].

    values  e4m3 [N, K], or bfloat16 / float32 [N, K]
    words   int32 [N, K/128] MN-major for e4m3, else None
    """

    def __init__(self, values: torch.Tensor, words: torch.Tensor | None) -> None:
        self.shape = tuple(values.shape)
        self._plain: tuple[torch.Tensor, torch.Tensor | None] | None = (values, words)
        self._forms: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def quantized(self) -> bool:
        """Whether the weight is e4m3 with scales."""
        return self._plain is None or self._plain[1] is not None

    @property
    def values(self) -> torch.Tensor:
        return self.plain()[0]

    def plain(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(values [N, K], words) in the checkpoint's order."""
        if self._plain is None:
            self._plain = self._restore()
        return self._plain

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Numbers [N, K]."""
        values, words = self.plain()
        if words is None:
            return values.to(dtype)
        return decode_fp8(values, unpack_scales(words, self.shape[1]), dtype)

    def groups(self, count: int, chunks: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(e4m3 [G, O, K], words [G, O, K/128]) of a block-diagonal product with `count` groups.

        chunks  as in `Fp8Tensor`: K in the order of the fused attention's output, with `chunks` heads a group
        """
        name = f"groups/{count}/{chunks}"
        if name not in self._forms:
            values, words = self.plain()
            assert words is not None
            scales = unpack_scales(words, self.shape[1]).unflatten(0, (count, -1))
            codes = values.view(torch.uint8).unflatten(0, (count, -1))
            if chunks:
                codes = codes.unflatten(-1, (chunks, -1, GROUP)).transpose(-2, -3).flatten(-3)
                scales = scales.unflatten(-1, (chunks, -1)).transpose(-1, -2).flatten(-2)
            self._forms[name] = (codes.contiguous().view(torch.float8_e4m3fn), pack_scales(scales))
            self._plain = None
        return self._forms[name]

    def mega(self, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(e4m3 [N, K], words) as the fused expert kernel's shared weights. interleaved: rows are gate, then up."""
        name = f"mega/{int(interleaved)}"
        if name not in self._forms:
            values, words = self.plain()
            assert words is not None
            codes, laid = _for_mega(values.view(torch.uint8).unsqueeze(0), words.unsqueeze(0), interleaved)
            self._forms[name] = (codes[0].view(torch.float8_e4m3fn), laid[0])
            self._plain = None
        return self._forms[name]

    def _restore(self) -> tuple[torch.Tensor, torch.Tensor]:
        name, (values, words) = next(iter(self._forms.items()))
        kind, first, *rest = name.split("/")
        codes = values.view(torch.uint8)
        if kind == "mega":
            codes, laid = _from_mega(codes.unsqueeze(0), words.unsqueeze(0), first == "1")
            return codes[0].view(torch.float8_e4m3fn), laid[0]
        scales, chunks = unpack_scales(words, self.shape[1]), int(rest[0])
        if chunks:
            codes = codes.unflatten(-1, (-1, chunks, GROUP)).transpose(-2, -3).flatten(-3)
            scales = scales.unflatten(-1, (-1, chunks)).transpose(-1, -2).flatten(-2)
        return codes.flatten(0, 1).contiguous().view(torch.float8_e4m3fn), pack_scales(scales.flatten(0, 1))


class ExpertWeight:
    """Stacked experts [E, N, K]: packed e2m1 int8 [E, N, K/2] and words int32 [E, N, K/128]."""

    def __init__(self, values: torch.Tensor, words: torch.Tensor) -> None:
        self.shape = (*values.shape[:2], values.shape[2] * 2)
        self._plain: tuple[torch.Tensor, torch.Tensor] | None = (values, words)
        self._mega: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, words) in the checkpoint's order. Only one order is kept: the weights are most of the memory."""
        if self._plain is None:
            ((interleaved, data),) = self._mega.items()
            self._plain = _from_mega(*data, interleaved)
            self._mega.clear()
        return self._plain

    def mega(self, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, words) as the fused expert kernel reads them. interleaved: rows are gate, then up."""
        if interleaved not in self._mega:
            self._mega[interleaved] = _for_mega(*self.plain(), interleaved)
            self._plain = None
        return self._mega[interleaved]


def dense_weight(weight: Weight) -> DenseWeight:
    """From the checkpoint's form. A block scale is repeated for each of its 32 rows."""
    if weight.scales is None:
        return DenseWeight(weight.values, None)
    scales, values = weight.scales, weight.values.contiguous()
    if weight.format == "mxfp4_row32":
        values = widen_fp4(values)  # every e2m1 number is an e4m3 number
    if weight.format == "fp8_block32":
        scales = scales.repeat_interleave(GROUP, 0)[: weight.shape[0]]
    return DenseWeight(values, pack_scales(scales))


def expert_weight(weight: Weight) -> ExpertWeight:
    """From the checkpoint's form; the codes are taken as they are."""
    assert weight.scales is not None
    return ExpertWeight(weight.values.contiguous().view(torch.int8), pack_scales(weight.scales))


def _for_mega(values: torch.Tensor, words: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of [E, N, ..] reordered: gate and up in alternating eights; scales of 128 rows as 32 lanes of 4."""
    rows = _interleaved(values.shape[1]) if interleaved else torch.arange(values.shape[1])
    lanes = _lanes(values.shape[1])
    return _rows(values, rows), _word_rows(words, rows[lanes])


def _from_mega(values: torch.Tensor, words: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _interleaved(values.shape[1]) if interleaved else torch.arange(values.shape[1])
    return _rows(values, rows.argsort()), _word_rows(words, rows[_lanes(values.shape[1])].argsort())


def _interleaved(count: int) -> torch.Tensor:
    """gate 0..7, up 0..7, gate 8..15, up 8..15, ... of rows that hold all of gate, then all of up."""
    return torch.arange(count).view(2, -1, _INTERLEAVE).transpose(0, 1).flatten()


def _lanes(count: int) -> torch.Tensor:
    """Row that stands at each place: within 128 rows, place 4 * lane + quarter holds row 32 * quarter + lane."""
    return torch.arange(count).view(-1, 4, _BLOCK // 4).transpose(1, 2).flatten()


def _rows(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return values.index_select(1, order.to(values.device))


def _word_rows(words: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    laid = empty_scales(*words.shape, device=words.device)
    return laid.copy_(words.index_select(1, order.to(words.device)))
