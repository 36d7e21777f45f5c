"""Samples of `attention.encoder`, the attention of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from deepinfer.testing.opinfo.context import SampleContext
from deepinfer.testing.opinfo.record import Args, ErrorSample, OpInfo, Sample, by_sequences


def encoder(ctx: SampleContext, segments: Sequence[int], scale: float = 1.0, slow: bool = False) -> Sample:
    """segments: patches of every image."""
    heads = ctx.vision.num_attention_heads
    width = ctx.vision.hidden_size // heads
    name = f"segments of {', '.join(map(str, segments))}{'' if scale == 1 else ', huge'}"
    ctx = ctx.at(name)
    scales = {"q": scale, "k": 1.0, "v": 1.0}

    def take(order: Sequence[int]) -> Args:
        parts = [
            [ctx.normal(f"{kind} {i}", segments[i], heads, width, scale=s) for i in order] for kind, s in scales.items()
        ]
        q, k, v = (ctx.activation(torch.cat(part)) for part in parts)
        return q, k, v, torch.tensor([0, *(segments[i] for i in order)]).cumsum(0)

    return by_sequences(name, segments, take, slow, 4.0 * sum(n * n for n in segments) * heads * width)


def encoder_samples(ctx: SampleContext) -> Iterator[Sample]:
    for segments in ((1,), (16, 1, 9), (37,), (5, 0, 3)):
        yield encoder(ctx, segments)
    yield encoder(ctx, (12, 5), scale=200.0)
    yield encoder(ctx, (1024, 300), slow=True)


def encoder_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    heads, width = ctx.vision.num_attention_heads, 32

    def args(rows: int, last: int, channels: int = width) -> Args:
        x = ctx.activation(ctx.normal("x", rows, heads, channels))
        return x, x, x, torch.tensor([0, 3, last])

    yield ErrorSample("segments end before the rows do", lambda: args(9, 7))
    yield ErrorSample("keys of fewer channels", lambda: (args(9, 9)[0], *args(9, 9, width - 8)[1:]))


INFOS = (
    OpInfo("attention.encoder", encoder_samples, encoder_errors),
)  # fmt: skip
