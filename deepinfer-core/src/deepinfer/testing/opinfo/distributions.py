"""Numbers that the samples of the sampling ops share: logits, processed distributions, filters, keys of draws."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepinfer.reference import sampling as reference
from deepinfer.testing.opinfo.context import SampleContext


def logits(ctx: SampleContext, rows: int, width: int, ties: bool = False) -> torch.Tensor:
    """[rows, width] float32; ties: few distinct values, many -inf, a row with one token left."""
    x = ctx.normal("logits", rows, width, scale=3.0)
    if ties:
        x = x.round()
        x[:, 3::5] = -torch.inf
        x[1::6] = -torch.inf
        x[1::6, width // 2] = 0.25
    return x


def name_of(rows: int, width: int, *more: str) -> str:
    return ", ".join([f"{rows} x {width}", *(part for part in more if part)])


def widths(ctx: SampleContext) -> Iterator[tuple[int, int]]:
    """(rows, vocabulary) of the usual samples."""
    vocabulary = ctx.traits.vocab_size
    yield from ((1, vocabulary), (0, vocabulary), (13, vocabulary), (5, 33), (3, 1))


def filters_of(index: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """top_p [R] float32 and top_k [R] int64 of some rows: off, and on at several strengths."""
    top_p = torch.tensor([1.0, 0.9, 0.35, 1.0, 0.7371, 0.0])[index % 6]
    top_k = torch.tensor([0, 3, width + 5, 1, -1, 7, 2])[index % 7]
    return top_p, top_k


def logprobs(ctx: SampleContext, rows: int, width: int, label: str = "") -> torch.Tensor:
    """Processed distributions [rows, width] float32 on the host, the same numbers for everybody."""
    index = torch.arange(rows)
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0])[index % 4]
    return reference.process(logits(ctx.at(label), rows, width), temperature, *filters_of(index, width))


def seeds(ctx: SampleContext, rows: int) -> torch.Tensor:
    """[rows] int64 of all 64 bits."""
    return ctx.integers("seeds", -(2**63), 2**63 - 1, rows)


def places(ctx: SampleContext, rows: int) -> torch.Tensor:
    """Positions [rows] int64, some beyond 32 bits."""
    return ctx.integers("positions", 0, 5000, rows) + (torch.arange(rows) % 4 == 3) * 2**35
