"""Samples of the vision ops: patches, the tower, the aligner, images merged into embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from deepinfer.errors import RequestError
from deepinfer.reference.vision import VisionWeights
from deepinfer.reference.vision_geometry import TokenKind
from deepinfer.testing.opinfo.context import SampleContext, once
from deepinfer.testing.opinfo.record import (
    BATCH_INVARIANT,
    PURE,
    Args,
    ErrorSample,
    OpInfo,
    Sample,
    by_rows,
    by_sequences,
    exactly,
)
from deepinfer.testing.opinfo.strategies import rows_and_seeds

BLOCKS = 3
"""Layers of the samples' towers; an odd number, since every second one rounds its sum."""
Grids = Sequence[tuple[int, int]]


def weights(ctx: SampleContext) -> VisionWeights:
    """Random weights of a tower of `BLOCKS` layers."""
    sizes, hidden = ctx.vision, ctx.traits.hidden_size
    width, inner, patch = sizes.hidden_size, sizes.intermediate_size, 3 * sizes.patch_size**2
    joined = width * sizes.downsample_ratio**2
    shapes = {"vision.patch_embed.proj": (width, patch), "aligner.w1": (hidden, joined), "aligner.w2": (hidden, hidden)}
    shapes |= {
        f"vision.blocks.{i}.attn.{n}": s
        for i in range(BLOCKS)
        for n, s in (("wqkv", (3 * width, width)), ("wo", (width, width)))
    }
    tensors = {f"{name}.bias": ctx.normal(f"{name}.bias", shape[0], scale=0.1) for name, shape in shapes.items()}
    shapes |= {
        f"vision.blocks.{i}.mlp.{n}": s
        for i in range(BLOCKS)
        for n, s in (("w1", (2 * inner, width)), ("w2", (width, inner)))
    }
    tensors |= {f"{name}.weight": ctx.normal(name, *shape, scale=shape[1] ** -0.5) for name, shape in shapes.items()}
    norms = ["vision.norm", *(f"vision.blocks.{i}.norm{n}" for i in range(BLOCKS) for n in (1, 2))]
    tensors |= {f"{name}.weight": ctx.normal(name, width, scale=0.2) + 1 for name in norms}
    tensors |= {name: ctx.normal(name, hidden) for name in ("image_start", "image_newline", "image_end")}
    return VisionWeights.from_tensors({name: ctx.activation(x) for name, x in tensors.items()}, BLOCKS)


# patches


def image(ctx: SampleContext, height: int, width: int) -> torch.Tensor:
    """Pixels [h, w, 3] uint8, with flat areas and hard edges."""
    pixels = ctx.integers("image", 0, 256, height, width, 3)
    pixels[: height // 2, : width // 2] = 255
    pixels[height // 2 :, width // 2 :] //= 8
    return pixels.to(torch.uint8)


def patchify_samples(ctx: SampleContext) -> Iterator[Sample]:
    for height, width in ((56, 56), (61, 130), (200, 37), (1, 1), (300, 500)):
        inner = ctx.at(f"{height} x {width}")
        yield Sample(f"{height} x {width} pixels", partial(_image_args, inner, height, width), height * width > 60_000)


def _image_args(ctx: SampleContext, height: int, width: int) -> Args:
    return ctx.put(image(ctx, height, width)), ctx.vision


def patchify_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    broken = {
        "floating pixels": torch.rand(20, 20, 3),
        "grey image": torch.zeros(20, 20, dtype=torch.uint8),
        "four channels": torch.zeros(20, 20, 4, dtype=torch.uint8),
        "empty image": torch.zeros(0, 20, 3, dtype=torch.uint8),
    }
    for name, pixels in broken.items():
        yield ErrorSample(name, lambda pixels=pixels: (ctx.put(pixels), ctx.vision), (RequestError,))


# tower and aligner

ONE: Grids = ((1, 1),)
SEVERAL: Grids = ((4, 4), (1, 7), (5, 3))
ODD: Grids = ((2, 5), (7, 4))


def counts(grids: Grids) -> list[int]:
    return [rows * columns for rows, columns in grids]


def of_images(numbers: torch.Tensor, sizes: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Rows of some images, in this order."""
    parts = numbers.split(list(sizes))
    return torch.cat([parts[i] for i in order])


def encode(ctx: SampleContext, grids: Grids, slow: bool = False) -> Sample:
    name = f"grids {grids}"
    ctx = ctx.at(name)
    p, sizes = ctx.vision.patch_size, counts(grids)
    patches = once(lambda: ctx.uniform("patches", sum(sizes), 3, p, p) * 2 - 1)
    made = once(lambda: weights(ctx))

    def take(order: Sequence[int]) -> Args:
        chosen = of_images(patches(), sizes, order)
        return ctx.activation(chosen), [grids[i] for i in order], made(), ctx.vision

    return by_sequences(name, sizes, take, slow)


def encode_samples(ctx: SampleContext) -> Iterator[Sample]:
    for grids in (ONE, SEVERAL, ODD):
        yield encode(ctx, grids)
    yield encode(ctx, ((32, 32), (9, 40)), slow=True)


def wrong_grids(make: Any) -> Any:
    """One patch too few for the grids."""

    def errors(ctx: SampleContext) -> Iterator[ErrorSample]:
        def args() -> Args:
            first, *rest = make(ctx, SEVERAL).fresh()
            return (first[:-1], *rest)

        yield ErrorSample("fewer patches than the grids have", args)

    return errors


def features(ctx: SampleContext, grids: Grids) -> list[int]:
    """Features of every image."""
    ratio = ctx.vision.downsample_ratio
    return [-(-rows // ratio) * -(-columns // ratio) for rows, columns in grids]


def downsample(ctx: SampleContext, grids: Grids, aligned: bool = False, slow: bool = False) -> Sample:
    """aligned: operands of `align` instead of `downsample`."""
    name = f"grids {grids}"
    ctx = ctx.at(name)
    sizes = counts(grids)
    x = once(lambda: ctx.normal("x", sum(sizes), ctx.vision.hidden_size))
    made = once(lambda: weights(ctx))

    def take(order: Sequence[int]) -> Args:
        operands = ctx.activation(of_images(x(), sizes, order)), [grids[i] for i in order]
        return (*operands, made(), ctx.vision) if aligned else (*operands, ctx.vision.downsample_ratio)

    return by_sequences(name, features(ctx, grids), take, slow)


def _downsamples(aligned: bool) -> Any:
    def samples(ctx: SampleContext) -> Iterator[Sample]:
        for grids in (ONE, SEVERAL, ODD, ((6, 9),)):
            yield downsample(ctx, grids, aligned)
        yield downsample(ctx, ((32, 32), (9, 40)), aligned, slow=True)

    return samples


# merge


def merge(ctx: SampleContext, rows: int, count: int, text: bool = False) -> Sample:
    """count: features; the first positions are inside an image that began earlier. text: nothing but text."""
    name = f"{rows} rows, {'text only' if text else f'{count} features'}"
    ctx = ctx.at(name)
    hidden = ctx.traits.hidden_size
    pool = [TokenKind.TEXT, TokenKind.START, TokenKind.NEWLINE, TokenKind.END, TokenKind.PAD, TokenKind.UNDEFINED]
    pool += [TokenKind.IMAGE] * 4 if count else []
    pool = [TokenKind.TEXT] if text else pool
    kinds = torch.tensor(pool)[ctx.integers("kinds", 0, len(pool), rows)]
    places = ctx.integers("rows", 0, max(1, count), rows)
    places[kinds != TokenKind.IMAGE] = -7  # ignored there
    embeddings, made = once(lambda: ctx.normal("embeddings", rows, hidden)), once(lambda: weights(ctx))

    def build(index: torch.Tensor) -> Args:
        operands = ctx.put(kinds[index]), ctx.put(places[index]), ctx.activation(ctx.normal("features", count, hidden))
        return (ctx.activation(embeddings()[index]), *operands, made())

    return by_rows(name, rows, build)


def merge_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows, count in ((1, 1), (0, 2), (41, 9), (12, 0)):
        yield merge(ctx, rows, count)
    yield merge(ctx, 5, 0, text=True)


EXACT = {"out": exactly}
INFOS = (
    OpInfo("vision.patchify", patchify_samples, patchify_errors, outputs=("patches", "geometry"),
           judges={"patches": exactly}, properties=PURE - {BATCH_INVARIANT}),
    OpInfo("vision.encode", encode_samples, wrong_grids(encode)),
    OpInfo("vision.downsample", _downsamples(False), wrong_grids(downsample), judges=EXACT),
    OpInfo("vision.align", _downsamples(True)),
    OpInfo("vision.merge", merge_samples, strategy=rows_and_seeds(lambda ctx, rows: merge(ctx, rows, rows // 3)),
           judges=EXACT),
)  # fmt: skip
