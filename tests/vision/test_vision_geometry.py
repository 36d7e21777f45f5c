"""Image geometry: worked examples, the limits of every size, and feature count = placeholder count (case MM01)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer.reference.vision_geometry import TokenKind, fit_inside, image_geometry


@dataclass(frozen=True)
class Sizes:
    num_attention_heads: int = 16
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 544 * 544
    max_wh_ratio: float | None = None


FULL = Sizes()
TINY = Sizes(num_attention_heads=2, max_image_tokens=64, min_pixels=56 * 56)
SIDE = st.integers(1, 30_000)


@pytest.mark.parametrize(
    ("size", "canvas", "features"),
    [
        ((544, 544), (546, 546), (13, 13)),  # exactly min_pixels, rounded up to whole patches
        ((1, 1), (546, 546), (13, 13)),  # grown by 544
        ((161, 184), (518, 588), (14, 13)),  # sqrt(295936 / 29624) = 3.16: 508 x 581
        ((700, 13), (4004, 84), (2, 96)),  # grown to 3991 x 74, 286 x 6 patches
        ((1344, 1344), (1302, 1302), (31, 31)),  # 32 * 33 + 2 > 1024; 31.47 columns fit
        ((4000, 3000), (1512, 1134), (27, 36)),  # 36.42 columns, 27.31 rows; both scale by 0.378
        ((100, 30_000), (42, 12_600), (300, 1)),  # 1.41 columns: cut to 1, so 0.42 of the size
        ((10, 30_000), (42, 511 * 42), (511, 1)),  # less than one column would fit
        ((60_000, 10), (1021 * 42, 42), (1, 1021)),  # less than one row would fit
    ],
)
def test_examples_by_hand(size: tuple[int, int], canvas: tuple[int, int], features: tuple[int, int]) -> None:
    geometry = image_geometry(*size, FULL)
    assert (geometry.feature_rows, geometry.feature_columns) == features
    assert (geometry.canvas_width, geometry.canvas_height) == canvas


def check(width: int, height: int, sizes: Sizes) -> None:
    geometry = image_geometry(width, height, sizes)
    counts = Counter(geometry.span())
    assert counts[TokenKind.IMAGE] == geometry.num_features == geometry.feature_rows * geometry.feature_columns
    assert counts[TokenKind.NEWLINE] == geometry.feature_rows
    assert counts[TokenKind.START] == counts[TokenKind.END] == 1
    assert len(geometry.span()) == geometry.num_tokens <= sizes.max_image_tokens
    assert geometry.canvas_width == geometry.patch_columns * sizes.patch_size > 0
    assert geometry.canvas_height == geometry.patch_rows * sizes.patch_size > 0
    for patches, features in (
        (geometry.patch_rows, geometry.feature_rows),
        (geometry.patch_columns, geometry.feature_columns),
    ):
        assert 0 <= features * sizes.downsample_ratio - patches < sizes.downsample_ratio


@pytest.mark.parametrize("sizes", [FULL, TINY], ids=["full", "tiny"])
def test_every_small_size_and_every_thin_one(sizes: Sizes) -> None:
    for width in (*range(1, 60), 161, 700, 1022, 5000):
        for height in (*range(1, 40), 184, 13, 2048):
            check(width, height, sizes)


@settings(max_examples=400, deadline=None)
@given(
    width=SIDE, height=SIDE, patch=st.integers(1, 20), ratio=st.integers(1, 4), limit=st.integers(4, 1500),
    pixels=st.integers(0, 500_000), max_ratio=st.none() | st.floats(0.1, 20),
)  # fmt: skip
@example(width=161, height=184, patch=14, ratio=3, limit=1024, pixels=295_936, max_ratio=None)
@example(width=700, height=13, patch=14, ratio=3, limit=1024, pixels=295_936, max_ratio=None)
@example(width=1, height=30_000, patch=14, ratio=3, limit=4, pixels=0, max_ratio=0.1)
def test_placeholders_equal_features_for_every_size(
    width: int, height: int, patch: int, ratio: int, limit: int, pixels: int, max_ratio: float | None
) -> None:
    sizes = Sizes(16, patch, 10000.0, ratio, limit, pixels, max_ratio)
    check(width, height, sizes)


def test_small_images_grow_and_keep_their_shape() -> None:
    geometry = image_geometry(100, 50, FULL)
    assert geometry.canvas_width * geometry.canvas_height >= FULL.min_pixels
    assert geometry.canvas_width / geometry.canvas_height == pytest.approx(2, rel=0.05)


def test_wide_images_are_squeezed_tall_ones_are_not() -> None:
    sizes = replace(FULL, max_wh_ratio=2.5)
    assert image_geometry(3000, 401, sizes).squeezed_width == 1002
    assert image_geometry(401, 3000, sizes).squeezed_width == 401
    assert image_geometry(3000, 401, FULL).squeezed_width == 3000


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="image is 0 x 5 pixels"):
        image_geometry(0, 5, FULL)
    with pytest.raises(ValueError, match="max_image_tokens is 3, expected at least 4"):
        image_geometry(5, 5, replace(FULL, max_image_tokens=3))


@pytest.mark.parametrize(
    ("image", "canvas", "expected"),
    [
        ((100, 50), (140, 140), (140, 70, 0, 35)),
        ((50, 100), (140, 140), (70, 140, 35, 0)),
        ((100, 50), (200, 100), (200, 100, 0, 0)),
        ((2, 3), (14, 14), (9, 14, 2, 0)),  # 9.33 -> 9; margin 2.5 -> 2, half to even
        ((30_000, 1), (42, 42), (42, 1, 0, 20)),  # 0.0014 rows -> 1; margin 20.5 -> 20
    ],
)
def test_fit_inside(image: tuple[int, int], canvas: tuple[int, int], expected: tuple[int, int, int, int]) -> None:
    assert fit_inside(*image, *canvas) == expected


@given(width=SIDE, height=SIDE, canvas_width=st.integers(1, 2000), canvas_height=st.integers(1, 2000))
def test_fitted_image_lies_inside_and_fills_one_side(
    width: int, height: int, canvas_width: int, canvas_height: int
) -> None:
    w, h, left, top = fit_inside(width, height, canvas_width, canvas_height)
    assert 0 <= left <= left + w <= canvas_width and 0 <= top <= top + h <= canvas_height
    assert w == canvas_width or h == canvas_height
