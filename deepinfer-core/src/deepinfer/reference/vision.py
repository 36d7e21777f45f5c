"""The image tower: pixels to patches, patches through a vision transformer, features to the text model's width.

Called by `hooks.ops.vision`; model specification 3.16. Images of one call, at least one, are concatenated row by row
and never see each other. Does not know token ids or sequences; attention is passed in, so that a backend's own serves.

    tower    x = patch W + b; per block: x += proj(attention(norm1 x)), x += w2(silu(gate) * up)(norm2 x); final norm
    aligner  ratio x ratio patches become one feature of ratio^2 * width channels; w2 gelu(w1 x + b1) + b2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from deepinfer.reference.gemm import linear
from deepinfer.reference.norm import rms_norm
from deepinfer.reference.resize import resize
from deepinfer.reference.vision_geometry import ImageGeometry, TokenKind, fit_inside

CANVAS_GREY = 127
"""Value of the canvas around an image, in all three channels."""
NORM_EPS = 1e-6

Grid = tuple[int, int]
"""(rows, columns) of one image's patches; host integers."""
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q, k, v [P, heads, d], starts [images + 1] int64) -> [P, heads, d]: full attention within each image."""


class Rounding(NamedTuple):
    """dtype between operations, and dtype sums are formed in."""

    activation: torch.dtype
    accumulate: torch.dtype


class Affine(NamedTuple):
    """weight [out, in] and bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """`vision.blocks.{i}`: norms [D], wqkv [3D, D] in order q, k, v, wo [D, D], w1 = [gate; up] [2I, D], w2 [D, I]."""

    norm1: torch.Tensor
    wqkv: Affine
    wo: Affine
    norm2: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """Everything an image passes through. Any floating dtype; the checkpoint has bfloat16.

    patch_embed [D, 3 p p] (bias [D]), norm [D], aligner_w1 [H, r r D], aligner_w2 [H, H], image_* [H]
    """

    patch_embed: Affine
    blocks: tuple[VisionBlock, ...]
    norm: torch.Tensor
    aligner_w1: Affine
    aligner_w2: Affine
    image_start: torch.Tensor
    image_newline: torch.Tensor
    image_end: torch.Tensor

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], num_blocks: int) -> VisionWeights:
        """Collect the tensors by their checkpoint names (`vision.*`, `aligner.*`, `image_*`)."""

        def affine(name: str) -> Affine:
            return Affine(tensors[f"{name}.weight"], tensors[f"{name}.bias"])

        def block(index: int) -> VisionBlock:
            at = f"vision.blocks.{index}"
            norm1, norm2, w1, w2 = (tensors[f"{at}.{part}.weight"] for part in ("norm1", "norm2", "mlp.w1", "mlp.w2"))
            return VisionBlock(norm1, affine(f"{at}.attn.wqkv"), affine(f"{at}.attn.wo"), norm2, w1, w2)

        return cls(
            patch_embed=affine("vision.patch_embed.proj"),
            blocks=tuple(block(index) for index in range(num_blocks)),
            norm=tensors["vision.norm.weight"],
            aligner_w1=affine("aligner.w1"),
            aligner_w2=affine("aligner.w2"),
            image_start=tensors["image_start"],
            image_newline=tensors["image_newline"],
            image_end=tensors["image_end"],
        )


def patchify(image: torch.Tensor, geometry: ImageGeometry, patch: int, dtype: torch.dtype) -> torch.Tensor:
    """Resize into the canvas, centre, normalize, cut. image [h, w, 3] uint8 RGB -> [patches, 3, patch, patch] `dtype`.

    Patches are row-major. Grey value v becomes (v / 255 - 0.5) / 0.5, rounded once.
    """
    image = resize(image, geometry.squeezed_width, geometry.squeezed_height)
    height, width = geometry.canvas_height, geometry.canvas_width
    fitted_width, fitted_height, left, top = fit_inside(image.shape[1], image.shape[0], width, height)
    canvas = torch.full((height, width, 3), CANVAS_GREY, dtype=torch.uint8, device=image.device)
    canvas[top : top + fitted_height, left : left + fitted_width] = resize(image, fitted_width, fitted_height)
    grey = torch.arange(256, dtype=torch.float32)  # on the host: not every device divides as exactly
    pixels = ((grey / 255 - 0.5) / 0.5).to(dtype).to(image.device)[canvas.to(torch.int64)]
    cells = pixels.view(geometry.patch_rows, patch, geometry.patch_columns, patch, 3)
    return cells.permute(0, 2, 4, 1, 3).reshape(-1, 3, patch, patch)


def encode(
    patches: torch.Tensor,
    grids: Sequence[Grid],
    weights: VisionWeights,
    heads: int,
    theta: float,
    rounding: Rounding,
    attend: Attention,
) -> torch.Tensor:
    """The transformer. patches [P, 3, p, p] of all images -> [P, D] in the activation dtype, after the final norm.

    Residual sums: a norm reads the unrounded sum that the step before it formed, except that after every second block
    the sum is rounded first. What is carried on is always rounded. (In smooth mode nothing is.)
    """
    x = affine(patches.flatten(1), weights.patch_embed, rounding)
    rope = rope_table(grids, x.shape[1] // heads, theta, x.device)
    starts = segment_starts(grids)
    total = x
    for number, block in enumerate(weights.blocks, 1):
        normed = rms_norm(total, block.norm1, NORM_EPS, rounding.accumulate, rounding.activation)
        total, x = _add(x, _attention(normed, block, heads, rope, starts, rounding, attend), rounding)
        normed = rms_norm(total, block.norm2, NORM_EPS, rounding.accumulate, rounding.activation)
        total, x = _add(x, _mlp(normed, block, rounding), rounding)
        if number % 2 == 0:
            total = x
    return rms_norm(total, weights.norm, NORM_EPS, rounding.accumulate, rounding.activation)


def affine(x: torch.Tensor, parameters: Affine, rounding: Rounding) -> torch.Tensor:
    """x W^T + b, summed in the accumulation dtype and rounded once to the activation dtype."""
    product = linear(x, parameters.weight, rounding.accumulate, rounding.accumulate)
    return (product + parameters.bias.to(rounding.accumulate)).to(rounding.activation)


def _add(x: torch.Tensor, y: torch.Tensor, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """x + y unrounded, and rounded to the activation dtype."""
    total = x.to(rounding.accumulate) + y.to(rounding.accumulate)
    return total, total.to(rounding.activation)


def _attention(
    x: torch.Tensor,
    block: VisionBlock,
    heads: int,
    rope: torch.Tensor,
    starts: torch.Tensor,
    rounding: Rounding,
    attend: Attention,
) -> torch.Tensor:
    q, k, v = affine(x, block.wqkv, rounding).view(x.shape[0], 3, heads, -1).unbind(1)  # [P, heads, d] each
    out = attend(rotate_halves(q, rope, rounding), rotate_halves(k, rope, rounding), v, starts)
    return affine(out.flatten(1), block.wo, rounding)


def _mlp(x: torch.Tensor, block: VisionBlock, rounding: Rounding) -> torch.Tensor:
    """SwiGLU without clamp."""
    gate, up = linear(x, block.w1, rounding.accumulate, rounding.activation).to(rounding.accumulate).chunk(2, -1)
    hidden = (functional.silu(gate) * up).to(rounding.activation)
    return linear(hidden, block.w2, rounding.accumulate, rounding.activation)


def segment_starts(grids: Sequence[Grid]) -> torch.Tensor:
    """First patch of every image, and the number of patches as the end. Host int64 [images + 1]."""
    lengths = torch.tensor([0, *(rows * columns for rows, columns in grids)])
    return lengths.cumsum(0)


def rope_table(grids: Sequence[Grid], head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Angles of every patch [P, head_dim / 2] float32: the first half turns with the row, the second with the column.

    head_dim / 4 frequencies theta^(-2i / (head_dim / 2)) serve both; a patch counts from its image's top left.
    """
    half = head_dim // 2
    frequency = theta ** (-torch.arange(0, half, 2, dtype=torch.float64) / half)
    places = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in grids]
    angles = torch.cat(places).unsqueeze(-1) * frequency  # [P, 2, head_dim / 4], made on the host: needs float64
    return angles.flatten(1).to(torch.float32).to(device)


def rotate_halves(x: torch.Tensor, angles: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Turn channel i with channel i + d / 2. x [P, heads, d], angles [P, d / 2]; rounded once."""
    angles = angles.to(rounding.accumulate).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(rounding.accumulate).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(rounding.activation)


def downsample(x: torch.Tensor, grids: Sequence[Grid], ratio: int) -> torch.Tensor:
    """Join ratio x ratio patches into one row. x [P, D] -> [F, D * ratio^2], images in order, row-major.

    Grids are padded with zeros at the right and the bottom; output channel = (channel * ratio + dy) * ratio + dx.
    """
    parts = []
    for (rows, columns), image in zip(grids, x.split([r * c for r, c in grids]), strict=True):
        plane = image.t().reshape(-1, rows, columns)
        plane = functional.pad(plane, (0, -columns % ratio, 0, -rows % ratio))
        parts.append(functional.pixel_unshuffle(plane, ratio).flatten(1).t())
    return torch.cat(parts)


def align(x: torch.Tensor, weights: VisionWeights, rounding: Rounding) -> torch.Tensor:
    """Two layers with exact (erf) GELU between them. x [F, D * ratio^2] -> [F, H] in the activation dtype."""
    hidden = affine(x, weights.aligner_w1, rounding).to(rounding.accumulate)
    return affine(functional.gelu(hidden).to(rounding.activation), weights.aligner_w2, rounding)


def merge(
    embeddings: torch.Tensor,
    kinds: torch.Tensor,
    feature_rows: torch.Tensor,
    features: torch.Tensor,
    weights: VisionWeights,
) -> torch.Tensor:
    """Put images into a row of token embeddings. A new tensor; text rows are copied.

    embeddings [Q, H], kinds [Q] int64 (TokenKind), feature_rows [Q] int64: row of `features` [F, H] where the kind is
    IMAGE, ignored elsewhere.
    """
    out = embeddings.clone()
    for kind, vector in (
        (TokenKind.START, weights.image_start),
        (TokenKind.NEWLINE, weights.image_newline),
        (TokenKind.END, weights.image_end),
    ):
        out = torch.where((kinds == kind).unsqueeze(1), vector.to(out.dtype), out)
    is_image = kinds == TokenKind.IMAGE
    if features.shape[0] == 0:
        return out
    chosen = features.to(out.dtype)[feature_rows.masked_fill(~is_image, 0)]
    return torch.where(is_image.unsqueeze(1), chosen, out)
