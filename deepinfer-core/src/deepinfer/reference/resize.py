"""Resampling of 8-bit images: bicubic with antialiasing, in fixed-point arithmetic, one axis after the other.

Called by `vision.patchify`. Gives the same bytes as `Image.resize(..., BICUBIC)` of Pillow up to 12, which the
published image processor uses, because a changed grey level is a changed prompt. (Pillow 13 may take the height first,
which changes some levels where the shape changes too.) Each output pixel weighs the input pixels under a cubic kernel
(a = -1/2), stretched when shrinking so that no pixel is left out; weights are rounded to 22 fractional bits, each axis
to 8 bits.
"""

from __future__ import annotations

import math

import torch

_FRACTION_BITS = 22
"""8 bits of value and 2 of headroom for overshoot leave this many of 32."""
_CUBIC_SUPPORT = 2.0


def resize(image: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """Resize image [h, w, channels] uint8 to [height, width, channels] uint8. Width first, then height."""
    if image.shape[1] != width:
        image = _resample_rows(image.transpose(0, 1), width).transpose(0, 1)
    if image.shape[0] != height:
        image = _resample_rows(image, height)
    return image


def _resample_rows(image: torch.Tensor, size: int) -> torch.Tensor:
    """Resample dimension 0 of image [n, m, channels] uint8 to `size`. The loop runs over the taps of the kernel."""
    index, weight = resampling_weights(image.shape[0], size)
    index, weight = index.to(image.device), weight.to(image.device)
    total = torch.full((size, *image.shape[1:]), 1 << (_FRACTION_BITS - 1), dtype=torch.int32, device=image.device)
    for tap in range(index.shape[1]):
        total.addcmul_(image[index[:, tap]].to(torch.int32), weight[:, tap].view(-1, 1, 1))
    return (total >> _FRACTION_BITS).clamp(0, 255).to(torch.uint8)


def resampling_weights(length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which input pixels make each output pixel, and how much each counts.

    Returns index [size, taps] int64 and weight [size, taps] int32 in units of 2^-22; a row's weights sum to about
    2^22. Taps beyond the edge have weight 0.
    """
    scale = length / size
    stretch = max(scale, 1.0)
    support = _CUBIC_SUPPORT * stretch
    centre = (torch.arange(size, dtype=torch.float64) + 0.5) * scale
    first = (centre - support + 0.5).to(torch.int64).clamp(min=0)  # conversion cuts towards zero
    last = (centre + support + 0.5).to(torch.int64).clamp(max=length)
    index = first.unsqueeze(1) + torch.arange(2 * math.ceil(support) + 1)
    weight = _cubic((index - centre.unsqueeze(1) + 0.5) / stretch)
    weight = weight.masked_fill(index >= last.unsqueeze(1), 0.0)
    weight = weight / weight.sum(1, keepdim=True) * (1 << _FRACTION_BITS)
    weight = (weight + torch.where(weight < 0, -0.5, 0.5)).to(torch.int32)
    return index.clamp(max=length - 1), weight


def _cubic(x: torch.Tensor) -> torch.Tensor:
    """Cubic convolution kernel with a = -1/2, zero from 2 on."""
    a, x = -0.5, x.abs()
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return torch.where(x < 1.0, near, torch.where(x < _CUBIC_SUPPORT, far, 0.0))
