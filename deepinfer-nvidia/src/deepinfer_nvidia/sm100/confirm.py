"""Does the FlashMLA that was found read the caches as core writes them? Asked once, with two keys, before binding.

Builds of one name differ in the order of bytes: every token's data followed by its scales, or a block's data followed
by its scales. A query of zeros that sees one key returns that key, so a wrong order shows at once.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_nvidia.libraries import SM100_EXTRA
from deepinfer_nvidia.sm100.formats import GROUP, decode_fp8, widen_fp4
from deepinfer_nvidia.sm100.rows import padded

WIDTH = 512
_FP4_GROUP = 16


def layout_problems(library: Any, heads: int, device: torch.device) -> list[str]:
    """Why decode attention would read other keys than were stored; empty if it does not."""
    problems = []
    for name, make in (("528-byte window keys", _fp8_keys), ("288-byte entries", _fp4_keys)):
        cache, keys = make(device)
        try:
            found = _read(library, cache, heads)
        except Exception as error:  # whatever a build for something else raises
            problems.append(f"flash_mla cannot read {name}: {type(error).__name__}: {error}")
            continue
        if not torch.equal(found, keys):
            place = int((found != keys).any(1).nonzero()[0])
            problems.append(
                f"flash_mla reads {name} in another order of bytes (key {place} of a block comes back wrong); "
                f"a build whose scales follow each token's data: {SM100_EXTRA}"
            )
    return problems


def _read(library: Any, cache: torch.Tensor, heads: int) -> torch.Tensor:
    """The keys of a block of two, each seen by one query."""
    lists = padded(torch.arange(2, device=cache.device).unsqueeze(1)).unsqueeze(1)
    none, window = torch.full_like(lists, -1), _fp8_keys(cache.device)[0]
    extra = {}
    if cache.shape[3] != window.shape[3]:
        extra = {"extra_k_cache": cache, "extra_indices_in_kvcache": lists}
        cache, lists = window, none
    q = torch.zeros(2, 1, heads, WIDTH, dtype=torch.bfloat16, device=cache.device)
    metadata = library.get_mla_metadata()[0]
    out, _ = library.flash_mla_with_kvcache(q, cache, None, None, WIDTH, metadata, indices=lists, **extra)
    return out[:, 0, 0]


def _codes(count: int, device: torch.device) -> torch.Tensor:
    """uint8 [2, count], different everywhere."""
    return (torch.arange(2 * count, device=device) * 37 % 251).to(torch.uint8).view(2, count)


def _fp8_keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of two window keys uint8 [1, 2, 1, 528], and the keys bfloat16 [2, 512]."""
    codes = _codes(WIDTH, device) & 0b10110111  # magnitudes below 2
    scales = 124 + _codes(WIDTH // GROUP, device) % 7
    keys = decode_fp8(codes.view(torch.float8_e4m3fn), scales, torch.bfloat16)
    return torch.cat((codes, scales), 1).view(1, 2, 1, -1), keys


def _fp4_keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of two entries uint8 [1, 2, 1, 288], and the entries bfloat16 [2, 512]."""
    codes = _codes(WIDTH // 2, device)
    scales = 0x30 + _codes(WIDTH // _FP4_GROUP, device) % 16  # e4m3 between 0.5 and 2
    values = widen_fp4(codes).to(torch.float32).unflatten(-1, (-1, _FP4_GROUP))
    keys = values * scales.view(torch.float8_e4m3fn).to(torch.float32).unsqueeze(-1)
    return torch.cat((codes, scales), 1).view(1, 2, 1, -1), keys.flatten(-2).to(torch.bfloat16)
