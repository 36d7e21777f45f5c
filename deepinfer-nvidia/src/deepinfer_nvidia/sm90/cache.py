"""Stores into core's cache bytes with this package's own kernels; memory and loads are core's. Created by
`groups.create`."""

from __future__ import annotations

import torch

from deepinfer.hooks import CANONICAL, KVCache, ModelTraits, StepInputs, provides
from deepinfer.hooks.ops import CacheOps
from deepinfer_nvidia import kernels
from deepinfer_nvidia.machine import OnMachine
from deepinfer_nvidia.sm90.limits import numerics_problems, power_of_two


class Cache(OnMachine, CacheOps):
    """Window keys quantized and stored in one pass."""

    def refuse(self, op: str, traits: ModelTraits) -> list[str]:
        """Device, numerics and the shapes the tiles are made for."""
        reasons = [*kernels.problems(self.context.device, self.machine.libraries), *numerics_problems(self.numerics)]
        if op == "cache.store_window":
            reasons += power_of_two("head_dim", traits.head_dim, 64, 512)
        return reasons

    @provides(version=1, batch_invariant=True, graph_safe=True, layouts={"kv_cache": CANONICAL})
    def store_window(self, cache: KVCache, layer: int, keys: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Codes, scales and the rounded keys from one read of the keys."""
        if keys.shape[0] != step.num_rows:
            raise ValueError(f"keys has {keys.shape[0]} rows, expected the step's {step.num_rows}")
        ring = step.rings[cache.spec.ring]
        table = cache.storage.windows[layer].bytes
        return kernels.load("cache_rows").store_window(keys, ring.rows, ring.physical, table)
