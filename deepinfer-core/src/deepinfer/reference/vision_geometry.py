"""How an image becomes patches, features and positions of a token sequence. Integers in, integers out, no pixels.

Called by whoever counts the tokens of a prompt (before any pixel is decoded), by `vision.patchify` and by the engine's
image path, so that all of them agree. Every rounding is part of the published behaviour (model specification 3.16):

    1. max_wh_ratio given and w > h * max_wh_ratio: the image is squeezed to w = h * max_wh_ratio
    2. w * h < min_pixels: both grow by sqrt(min_pixels / (w * h)), cut to whole pixels
    3. canvas = w, h rounded up to whole patches; features = patches / downsample_ratio per axis, rounded up
    4. more than max_image_tokens: the largest canvas of the same shape whose tokens fit
    tokens = rows * (columns + 1) + 2: every row ends with a newline, and the span has a start and an end
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class VisionSizes(Protocol):
    """Sizes of the vision tower; `vision_config` of a checkpoint has these keys."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def patch_size(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def downsample_ratio(self) -> int: ...
    @property
    def max_image_tokens(self) -> int: ...
    @property
    def min_pixels(self) -> int: ...
    @property
    def max_wh_ratio(self) -> float | None: ...


class TokenKind(IntEnum):
    """What a position of a sequence holds. Carried beside the token ids; decides its embedding and its router bias."""

    UNDEFINED = 0
    TEXT = 1
    IMAGE = 2
    START = 3
    END = 4
    NEWLINE = 5
    PAD = 6


@dataclass(frozen=True, slots=True)
class ImageGeometry:
    """Sizes of one image on its way into the model. Widths and heights in pixels.

    squeezed_*      after rule 1; equal to the image's own size without it
    canvas_*        what is cut into patches, whole patches
    patch_*         patches down and across;  feature_*: features down and across
    """

    squeezed_width: int
    squeezed_height: int
    canvas_width: int
    canvas_height: int
    patch_rows: int
    patch_columns: int
    feature_rows: int
    feature_columns: int

    @property
    def num_patches(self) -> int:
        """Rows of the vision tower."""
        return self.patch_rows * self.patch_columns

    @property
    def num_features(self) -> int:
        """Rows the aligner yields = IMAGE positions of the span."""
        return self.feature_rows * self.feature_columns

    @property
    def num_tokens(self) -> int:
        """Positions of the whole span."""
        return span_length(self.feature_rows, self.feature_columns)

    def span(self) -> list[TokenKind]:
        """Kind of every position: START, then rows of IMAGE ended by NEWLINE, then END."""
        row = [TokenKind.IMAGE] * self.feature_columns + [TokenKind.NEWLINE]
        return [TokenKind.START, *row * self.feature_rows, TokenKind.END]


def span_length(rows: int, columns: int) -> int:
    """Positions of the span of rows x columns features."""
    return rows * (columns + 1) + 2


def image_geometry(width: int, height: int, sizes: VisionSizes) -> ImageGeometry:
    """Geometry of an image of width x height pixels. Raises ValueError for an empty image or impossible sizes."""
    if width < 1 or height < 1:
        raise ValueError(f"image is {width} x {height} pixels, expected at least 1 x 1")
    if sizes.max_image_tokens < span_length(1, 1):
        raise ValueError(f"max_image_tokens is {sizes.max_image_tokens}, expected at least {span_length(1, 1)}")
    squeezed = _squeezed(width, height, sizes.max_wh_ratio)
    w, h = _at_least(*squeezed, sizes.min_pixels)
    patch, cell = sizes.patch_size, sizes.patch_size * sizes.downsample_ratio
    canvas = _ceil_div(w, patch) * patch, _ceil_div(h, patch) * patch
    if span_length(_ceil_div(canvas[1], cell), _ceil_div(canvas[0], cell)) > sizes.max_image_tokens:
        canvas = _largest_canvas(w, h, patch, cell, sizes.max_image_tokens - span_length(0, 0))
    return ImageGeometry(
        *squeezed,
        *canvas,
        patch_rows=canvas[1] // patch,
        patch_columns=canvas[0] // patch,
        feature_rows=_ceil_div(canvas[1], cell),
        feature_columns=_ceil_div(canvas[0], cell),
    )


def _squeezed(width: int, height: int, max_ratio: float | None) -> tuple[int, int]:
    if max_ratio and width > height * max_ratio:
        return max(1, int(height * max_ratio)), height
    return width, height


def _at_least(width: int, height: int, pixels: int) -> tuple[int, int]:
    if width * height >= pixels:
        return width, height
    factor = math.sqrt(pixels / (width * height))
    return int(width * factor), int(height * factor)


def _ceil_div(number: int, unit: int) -> int:
    return -(-number // unit)


def _largest_canvas(w: int, h: int, patch: int, cell: int, budget: int) -> tuple[int, int]:
    """Rule 4: solve rows * (columns + 1) = budget for real numbers with rows / columns = h / w, then round down."""
    ratio = h / w
    columns = math.sqrt(budget / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        return cell, budget // 2 * cell
    if rows < 1:
        return (budget - 1) * cell, cell
    scale = min(math.floor(columns) * cell / w, math.floor(rows) * cell / h)
    # max: a side just above one cell may otherwise round down to no patch at all
    return max(patch, math.floor(w * scale / patch) * patch), max(patch, math.floor(h * scale / patch) * patch)


def fit_inside(width: int, height: int, canvas_width: int, canvas_height: int) -> tuple[int, int, int, int]:
    """Largest size of the same shape inside a canvas, centred: (width, height, left, top).

    The side that fills the canvas is exact, the other is rounded, half to even as is its margin; at least 1 pixel.
    """
    shape, canvas_shape = width / height, canvas_width / canvas_height
    if shape > canvas_shape:
        fitted = canvas_width, max(1, round(height / width * canvas_width))
    elif shape < canvas_shape:
        fitted = max(1, round(width / height * canvas_height)), canvas_height
    else:
        fitted = canvas_width, canvas_height
    return *fitted, round((canvas_width - fitted[0]) / 2), round((canvas_height - fitted[1]) / 2)
