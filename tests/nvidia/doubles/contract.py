"""What the doubles of this folder share: refusing wrong operands, and reading the layouts of scales and caches.

A double takes a library's place on a machine without its chip. It enforces every check of the library's host code
(dtype, shape, stride, alignment, layout), then computes through core's reference. It shares no code with the adapters.
"""

from __future__ import annotations

import torch

from deepinfer.reference import quant


class ContractError(RuntimeError):
    """An operand the real library would refuse, or read wrongly."""


def need(condition: bool, what: str) -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise ContractError(what)


def dtype(name: str, x: torch.Tensor | None, *allowed: torch.dtype) -> None:
    need(x is None or x.dtype in allowed, f"{name}: dtype {None if x is None else x.dtype}, expected one of {allowed}")


def shape(name: str, x: torch.Tensor | None, *expected: int) -> None:
    found = None if x is None else tuple(x.shape)
    need(found in (None, expected), f"{name}: shape {found}, expected {expected}")


def contiguous(name: str, *tensors: torch.Tensor | None) -> None:
    need(all(x is None or x.is_contiguous() for x in tensors), f"{name}: must be contiguous")


def last_contiguous(name: str, x: torch.Tensor | None) -> None:
    need(x is None or x.stride(-1) == 1, f"{name}: last dimension must be contiguous")


def aligned(name: str, x: torch.Tensor, rows: bool = True) -> None:
    """16-byte base, and rows 16 bytes apart, as the copy engine wants."""
    need(x.data_ptr() % 16 == 0, f"{name}: base address must be 16-byte aligned")
    if rows and x.dim() > 1 and x.shape[-2] > 1:
        need(x.stride(-2) * x.element_size() % 16 == 0, f"{name}: rows must be a multiple of 16 bytes apart")


def scale_words(name: str, words: torch.Tensor, rows: int, channels: int, groups: int | None = None) -> None:
    """DeepGEMM's `check_sf_layout` for packed UE8M0 scales of one row and 32 channels."""
    dtype(name, words, torch.int32)
    need(words.dim() == (2 if groups is None else 3), f"{name}: {words.dim()} dimensions")
    if groups is not None:
        need(words.shape[0] == groups, f"{name}: {words.shape[0]} groups, expected {groups}")
        need(words.stride(-3) == words.stride(-1) * words.shape[-1], f"{name}: groups must follow each other")
    need(words.shape[-2:] == (rows, -(-channels // 128)), f"{name}: shape {tuple(words.shape)} for {rows} x {channels}")
    need(words.stride(-2) == 1 or rows == 1, f"{name}: must be contiguous along rows")
    need(
        words.stride(-1) >= -(-rows // 4) * 4 and words.stride(-1) % 4 == 0, f"{name}: columns must be 16-byte aligned"
    )


def scales_of(words: torch.Tensor, channels: int) -> torch.Tensor:
    """uint8 [..., rows, channels / 32], lowest channels in the lowest byte."""
    parts = torch.stack([(words >> shift) & 255 for shift in (0, 8, 16, 24)], -1).flatten(-2)
    return parts.to(torch.uint8)[..., : channels // 32]


def fp8_values(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """bfloat16 values of e4m3 codes [..., rows, K] and scale words."""
    return quant.decode_q8(codes.view(torch.uint8), scales_of(words, codes.shape[-1]))


def fp4_values(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """bfloat16 values of packed e2m1 codes [..., rows, K/2] and scale words."""
    return quant.decode_q4u(codes.view(torch.uint8), scales_of(words, codes.shape[-1] * 2))


def packed(scales: torch.Tensor) -> torch.Tensor:
    """int32 [..., K/128] of scales uint8 [..., K/32], row-major."""
    groups = scales.to(torch.int64).unflatten(-1, (-1, 4))
    words = (groups << torch.tensor([0, 8, 16, 24])).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def column_major(words: torch.Tensor) -> torch.Tensor:
    """The same [rows, n], rows adjacent and columns 16-byte aligned."""
    rows, count = words.shape
    memory = torch.zeros(count, -(-max(rows, 1) // 4) * 4, dtype=torch.int32)
    memory[:, :rows] = words.T
    return memory.T[:rows]


def page_rows(name: str, cache: torch.Tensor, widths: tuple[int, ...]) -> None:
    """A paged cache of FlashMLA: uint8 [blocks, page, 1, bytes of a token], whole blocks contiguous."""
    dtype(name, cache, torch.uint8, torch.int8, torch.float8_e4m3fn)
    need(
        cache.dim() == 4 and cache.shape[2] == 1,
        f"{name}: shape {tuple(cache.shape)}, expected [blocks, page, 1, bytes]",
    )
    need(cache.shape[3] in widths, f"{name}: {cache.shape[3]} bytes a token, expected one of {widths}")
    last_contiguous(name, cache)
    need(cache.stride(1) == cache.shape[3], f"{name}: a block must be contiguous")
    need(cache.stride(0) % cache.shape[3] == 0, f"{name}: blocks must be a multiple of a row apart")
    aligned(name, cache, rows=False)


def decode_rows(cache: torch.Tensor) -> torch.Tensor:
    """bfloat16 [rows, 512] of every row of a paged cache: data, then scales, token by token."""
    flat = cache.view(torch.uint8).reshape(-1, cache.shape[3])
    if cache.shape[3] == 528:
        return quant.decode_q8(flat[:, :512], flat[:, 512:])
    return quant.decode_q4e(flat[:, :256], flat[:, 256:])
