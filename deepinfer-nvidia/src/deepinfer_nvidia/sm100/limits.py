"""Reasons that several op groups refuse with. Each names what was found and what is allowed."""

from __future__ import annotations

from deepinfer.hooks import Numerics
from deepinfer_nvidia.libraries import Need
from deepinfer_nvidia.machine import Machine


def problems(machine: Machine, numerics: Numerics, *needs: Need) -> list[str]:
    """Chip, numerics and libraries: every reason against a kernel of compute capability 10.x."""
    reasons = []
    if machine.chip.major != 10:
        reasons.append(f"compute capability {machine.chip.capability}, allowed 10.x")
    if not (numerics.quantize and numerics.packed_cache):
        found = f"quantize={numerics.quantize}, packed_cache={numerics.packed_cache}"
        reasons.append(f"numerics with {found}, allowed quantize=True, packed_cache=True")
    return reasons + machine.libraries.missing(*needs)


def multiple(of: int, **sizes: int) -> list[str]:
    """Sizes that tiles and copies must divide."""
    return [f"{name}={size}, allowed multiples of {of}" for name, size in sizes.items() if size % of]


def one_of(allowed: tuple[int, ...], **sizes: int) -> list[str]:
    """Sizes that kernels are instantiated for."""
    listed = " or ".join(map(str, allowed))
    return [f"{name}={size}, allowed {listed}" for name, size in sizes.items() if size not in allowed]
