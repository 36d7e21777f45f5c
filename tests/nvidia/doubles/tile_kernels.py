"""Stands for TileKernels 2.1.0: the casts, without the compiler they need."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from doubles.contract import column_major, contiguous, dtype, need, packed, shape

from deepinfer.reference import activation
from deepinfer.reference import quant as reference


def _per_token_cast(
    x, fmt, num_per_channels, x_block_size=None, use_tma_aligned_col_major_sf=False, round_sf=False,
    use_packed_ue8m0=False, use_e4m3_sf=False, stochastic_cast=False, out=None,
):  # fmt: skip
    dtype("x", x, torch.bfloat16)
    need(x.dim() == 2 and x.stride(1) == 1 and x.shape[1] % 64 == 0 and len(x) > 0, f"x: shape {tuple(x.shape)}")
    need((fmt, num_per_channels) == ("e4m3", 32), f"{fmt} in groups of {num_per_channels}")
    need(use_tma_aligned_col_major_sf and round_sf and use_packed_ue8m0, "scales must be packed and column-major")
    return _codes(x)


def _swiglu_forward_and_per_token_cast(
    x, fmt, num_per_channels, psum_num_tokens_per_expert=None, topk_weights=None, routed_scaling_factor=None,
    use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False, clamp_value=None, clamped_count=None,
):  # fmt: skip
    dtype("x", x, torch.bfloat16)
    contiguous("x", x)
    need(x.dim() == 2 and x.shape[1] % 256 == 0 and len(x) > 0, f"x: shape {tuple(x.shape)}")
    need((fmt, num_per_channels) == ("e4m3", 32), f"{fmt} in groups of {num_per_channels}")
    need(use_tma_aligned_col_major_sf and round_sf and use_packed_ue8m0, "scales must be packed and column-major")
    need(clamp_value is not None, "the model clamps")
    if topk_weights is not None:
        dtype("topk_weights", topk_weights, torch.float32)
        shape("topk_weights", topk_weights, len(x))
    return _codes(activation.swiglu(x.nan_to_num(), clamp_value, topk_weights))


def _codes(x):
    codes, scales = reference.encode_q8(x)
    padded = torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))
    return codes.view(torch.float8_e4m3fn), column_major(packed(padded))


quant = SimpleNamespace(
    per_token_cast=_per_token_cast, swiglu_forward_and_per_token_cast=_swiglu_forward_and_per_token_cast
)
