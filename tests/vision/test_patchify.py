"""Resizing and patchify: bytes recorded from Pillow, and properties that need no oracle."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import pytest
import torch

from deepinfer.reference.resize import resampling_weights, resize
from deepinfer.reference.vision import patchify
from deepinfer.reference.vision_geometry import ImageGeometry, image_geometry


@dataclass(frozen=True)
class Sizes:
    patch_size: int = 14
    downsample_ratio: int = 3
    max_image_tokens: int = 64
    min_pixels: int = 3136
    max_wh_ratio: float | None = None


def pattern(width: int, height: int) -> torch.Tensor:
    """The test image of the recorded checksums, [h, w, 3]."""
    x, y, c = torch.arange(width).view(1, -1, 1), torch.arange(height).view(-1, 1, 1), torch.arange(3).view(1, 1, 3)
    return ((x * x * 3 + y * y * 7 + x * y * 5 + c * 71) % 256).to(torch.uint8)


def crc(image: torch.Tensor) -> int:
    return zlib.crc32(image.contiguous().numpy().tobytes())


@pytest.mark.parametrize(
    ("width", "height", "to_width", "to_height", "checksum"),
    [
        (31, 17, 64, 48, 1451135301),
        (64, 48, 31, 17, 3864991415),
        (5, 90, 20, 33, 1920567929),
        (120, 9, 40, 9, 3276663025),
        (1, 1, 14, 28, 3911278456),
        (13, 700, 8, 420, 569654384),
        (97, 60, 97, 61, 4150924451),
    ],
)
def test_resize_gives_pillows_bytes(width: int, height: int, to_width: int, to_height: int, checksum: int) -> None:
    """zlib.crc32 of Image.fromarray(pattern).resize((to_width, to_height), Image.BICUBIC), Pillow 12.2.0."""
    assert crc(resize(pattern(width, height), to_width, to_height)) == checksum


@pytest.mark.parametrize(
    ("width", "height", "canvas_width", "canvas_height", "checksum"),
    [
        (161, 184, 168, 196, 2795950572),
        (50, 20, 56, 84, 462092739),
        (20, 50, 70, 42, 2565624540),
        (300, 7, 126, 14, 1236721475),
        (33, 33, 56, 56, 3537827669),
    ],
)
def test_canvas_gives_pillows_bytes(
    width: int, height: int, canvas_width: int, canvas_height: int, checksum: int
) -> None:
    """The canvas put together from its patches = ImageOps.pad(..., BICUBIC, color=(127, 127, 127)), Pillow 12.2.0."""
    rows, columns = canvas_height // 14, canvas_width // 14
    geometry = ImageGeometry(width, height, canvas_width, canvas_height, rows, columns, rows, columns)
    patches = patchify(pattern(width, height), geometry, 14, torch.float32)
    canvas = patches.view(rows, columns, 3, 14, 14).permute(0, 3, 1, 4, 2).reshape(canvas_height, canvas_width, 3)
    assert crc(((canvas + 1) * 127.5).round().to(torch.uint8)) == checksum


def test_weights_sum_to_one_and_stay_inside() -> None:
    for length, size in ((1, 9), (9, 1), (100, 37), (37, 100), (5000, 7)):
        index, weight = resampling_weights(length, size)
        assert index.min() >= 0 and index.max() < length
        assert (weight.sum(1) - (1 << 22)).abs().max() <= index.shape[1]


def test_flat_images_stay_flat() -> None:
    for level in (0, 1, 127, 255):
        assert resize(torch.full((7, 11, 3), level, dtype=torch.uint8), 29, 3).eq(level).all()


def test_squeezed_image_fills_its_canvas() -> None:
    sizes = Sizes(max_wh_ratio=1.0)
    geometry = image_geometry(300, 60, sizes)
    assert (geometry.squeezed_width, geometry.squeezed_height) == (60, 60)
    patches = patchify(torch.zeros(60, 300, 3, dtype=torch.uint8), geometry, 14, torch.float32)
    assert patches.eq(-1).all(), "a black image of the canvas's shape leaves no grey margin"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_normalization_is_rounded_once(dtype: torch.dtype) -> None:
    image = torch.arange(196, dtype=torch.uint8).view(14, 14, 1).expand(14, 14, 3)
    geometry = ImageGeometry(14, 14, 14, 14, 1, 1, 1, 1)
    (patch,) = patchify(image, geometry, 14, dtype)
    expected = ((image.permute(2, 0, 1).double() / 255 - 0.5) / 0.5).float().to(dtype)
    assert patch.dtype == dtype
    torch.testing.assert_close(patch, expected, rtol=0 if dtype == torch.bfloat16 else 1e-6, atol=1e-7)
