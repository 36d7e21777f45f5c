"""The hooks of the Acme backend: one factory for each op group it has. Imported once the backend is chosen.

A group without a factory here, and every op that a group's class does not override, is served by core.
"""

from __future__ import annotations

import torch

from deepinfer.hooks import OpContext, hookimpl
from deepinfer.hooks.ops import AttentionOps, CacheOps, CommunicatorOps, GemmOps, RuntimeOps
from deepinfer_acme.attention import AcmeAttention
from deepinfer_acme.cache import AcmeCache
from deepinfer_acme.comm import AcmeCommunicator
from deepinfer_acme.gemm import AcmeGemm
from deepinfer_acme.runtime import AcmeRuntime


class AcmePlugin:
    """Created by core, which calls each factory once per engine and worker."""

    @hookimpl
    def deepinfer_register_device(self) -> torch.device:
        """Acme tensors live in host memory, so torch knows them as CPU tensors.

        A device that torch has to learn about: import the library that registers `device_type` here, return None, and
        raise a `BackendError` that says what to install where it is missing.
        """
        return torch.device("cpu")

    @hookimpl
    def deepinfer_create_runtime(self, context: OpContext) -> RuntimeOps:
        """The device. A real backend opens it here, and raises a `BackendError` naming what is missing."""
        return AcmeRuntime(context)

    @hookimpl
    def deepinfer_create_communicator(self, context: OpContext) -> CommunicatorOps:
        """Collectives between ranks."""
        return AcmeCommunicator(context)

    @hookimpl
    def deepinfer_create_attention(self, context: OpContext) -> AttentionOps:
        """Native: `attention.cached`."""
        return AcmeAttention(context)

    @hookimpl
    def deepinfer_create_gemm(self, context: OpContext) -> GemmOps:
        """Native: `gemm.swiglu`."""
        return AcmeGemm(context)

    @hookimpl
    def deepinfer_create_cache(self, context: OpContext) -> CacheOps:
        """Native: all of it, in a layout of its own."""
        return AcmeCache(context)
