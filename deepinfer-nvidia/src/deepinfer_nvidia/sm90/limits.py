"""Reasons that several op groups refuse with. Each names what was found and what is allowed."""

from __future__ import annotations

from deepinfer.hooks import Numerics


def numerics_problems(numerics: Numerics) -> list[str]:
    """The kernels read bfloat16 activations and packed bytes and have no gradient."""
    if numerics.quantize and numerics.packed_cache:
        return []
    found = f"quantize={numerics.quantize}, packed_cache={numerics.packed_cache}"
    return [f"numerics with {found}, allowed quantize=True, packed_cache=True"]


def power_of_two(name: str, value: int, least: int, most: int) -> list[str]:
    """Sizes that tiles are made of."""
    if least <= value <= most and value & (value - 1) == 0:
        return []
    return [f"{name}={value}, allowed powers of two from {least} to {most}"]


def multiple(name: str, value: int, of: int) -> list[str]:
    """Sizes that whole groups must divide."""
    return [] if value % of == 0 else [f"{name}={value}, allowed multiples of {of}"]
