"""The hooks a plugin may implement: one factory for each op group, and two events.

Registered with pluggy by `load.py`; the factories are called once per engine and worker by `build.py`, through the
registered implementation itself so that every object's origin is known. Nothing here is called in a step.

Rules for all factories
* Implement only the groups you have; core serves the rest.
* Return an object of a class derived from the contract, or None if there is nothing to offer in this context.
* Called after settings are final and before weights are loaded. The op table does not exist yet: the object gets it
  as `self.ops` when all ops are bound, so a constructor may not call ops. Exceptions: `context.runtime` and
  `context.communicator` are bound before the other groups and may be used.
* Parameters are positional and may be left out if unused. Keyword-only parameters are never passed and are refused.
* Raise a `deepinfer.errors.DeepInferError` that says what is missing and what to do; nothing falls back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from deepinfer.hooks.api import OpContext, hookspec

if TYPE_CHECKING:
    import torch

    from deepinfer.hooks import ops

_HOOK_MARK = "__deepinfer_hook__"
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class HookLevel:
    """How much a backend misses without a hook (level) and how firm its signature is (status)."""

    level: str
    status: str


def _hook(level: str, status: str = "beta", historic: bool = False) -> Callable[[_Function], _Function]:
    def mark(function: _Function) -> _Function:
        setattr(function, _HOOK_MARK, HookLevel(level, status))
        return hookspec(function, historic=historic)

    return mark


def hook_level(name: str) -> HookLevel:
    """Level and status of a hook of this module."""
    return getattr(globals()[name], _HOOK_MARK)


def hook_names() -> tuple[str, ...]:
    """Names of all hooks, in the order of this file."""
    return tuple(name for name, value in globals().items() if hasattr(value, _HOOK_MARK))


@_hook("optional", historic=True)
def deepinfer_plugin_registered(plugin_name: str, distribution: str, version: str) -> None:
    """A plugin was registered. [event, level optional]

    When: once for every loaded plugin, the own one and those registered earlier included. Do not load devices or
    import kernels here; no context exists yet.

    Example::

        @hookimpl
        def deepinfer_plugin_registered(self, plugin_name, distribution, version):
            self.companions.append(plugin_name)
    """


@_hook("optional")
def deepinfer_register_device() -> torch.device | None:
    """Teach torch the backend's device type, or name the torch device that stands for it. [level optional]

    When: after the plugin was registered and before the first `torch.device` of its type is made. Needed only for
    device types torch does not know by itself: import the library that registers it here. Raise a `BackendError`
    naming what is missing. Do not open the device.

    returns  None: tensors live on `torch.device(device_type, index)`. A `torch.device`: they live there, for a device
             whose memory torch knows under another type, e.g. an emulator or a chip that works in the host's memory.

    Example::

        @hookimpl
        def deepinfer_register_device(self):
            import torch_acme  # registers the device type "acme"
    """


@_hook("optional")
def deepinfer_findings() -> list[tuple[str, str]]:
    """What the backend found on this machine: libraries, drivers, and what they lack. [level optional]

    When: `deepinfer doctor` asks the chosen backend, with or without its device. Importing kernel libraries is allowed,
    opening the device is not; what cannot be had is a finding, never an exception.

    returns  (name, finding) pairs, shown in this order

    Example::

        @hookimpl
        def deepinfer_findings(self):
            return [("acme-kernels", "1.3 at /opt/acme, without fused attention")]
    """


@_hook("required")
def deepinfer_create_runtime(context: OpContext) -> ops.RuntimeOps | None:
    """Device, streams, events, memory, pinning, graphs, timers. [whole group, level required]

    When: first of all factories. This is where a backend opens its device; raise a `BackendError` naming what is
    needed if none is there. Do not allocate the memory the caches will need.

    Example::

        @hookimpl
        def deepinfer_create_runtime(self, context):
            return AcmeRuntime(context)         # class AcmeRuntime(RuntimeOps)
    """


@_hook("recommended")
def deepinfer_create_communicator(context: OpContext) -> ops.CommunicatorOps | None:
    """Process groups and collectives between ranks. [whole group, level recommended]

    When: second, in every rank at the same point. `context.runtime` is bound. Joining process groups belongs into the
    contract's ops, not into the constructor, which also runs in tools that have one rank.

    Example::

        @hookimpl
        def deepinfer_create_communicator(self, context):
            return AcmeCommunicator(context)
    """


@_hook("recommended")
def deepinfer_create_attention(context: OpContext) -> ops.AttentionOps | None:
    """Latent and sparse attention, indexer scores and top-k, candidate blocks, encoder attention. [level recommended]

    When: after runtime and communicator. Do not compile kernels for sizes you can refuse: `refuse(op, traits)` is
    asked before an implementation is chosen, so compile on first use.

    Example::

        @hookimpl
        def deepinfer_create_attention(self, context):
            return AcmeAttention(context)
    """


@_hook("recommended")
def deepinfer_create_gemm(context: OpContext) -> ops.GemmOps | None:
    """Linear layers of every weight format, quantize, norm, activation, weight preparation. [level recommended]

    When: after runtime and communicator; weights are not loaded yet. Repacking belongs into `prepare_weight`, which
    is bound together with the ops that read its result.

    Example::

        @hookimpl
        def deepinfer_create_gemm(self, context):
            return AcmeGemm(context)
    """


@_hook("recommended")
def deepinfer_create_experts(context: OpContext) -> ops.ExpertOps | None:
    """Routing, dispatch, expert FFN, combine, and the whole MoE block. [level recommended]

    When: after runtime and communicator. Communication buffers may be allocated here through `context.runtime`.

    Example::

        @hookimpl
        def deepinfer_create_experts(self, context):
            return AcmeExperts(context)
    """


@_hook("optional")
def deepinfer_create_cache(context: OpContext) -> ops.CacheOps | None:
    """Layouts, store, load, compress, clone and zero of the caches. [level optional]

    When: after runtime and communicator, before memory is measured: caches are allocated by the op `cache.allocate`,
    never in the constructor. Ops that share the layout `kv_cache` come from one provider or from core.

    Example::

        @hookimpl
        def deepinfer_create_cache(self, context):
            return AcmeCache(context)
    """


@_hook("optional")
def deepinfer_create_residual(context: OpContext) -> ops.ResidualOps | None:
    """Hyper-connections: post, mix, Sinkhorn, collapse, with norm and quantize where fused. [level optional]

    When: after runtime and communicator. Keep no state between calls: layers and steps share the object.

    Example::

        @hookimpl
        def deepinfer_create_residual(self, context):
            return AcmeResidual(context)
    """


@_hook("optional")
def deepinfer_create_engram(context: OpContext) -> ops.EngramOps | None:
    """N-gram hashing, table fetch and gated injection. [level optional]

    When: after runtime and communicator. Tables may be far larger than device memory; do not reserve room here.

    Example::

        @hookimpl
        def deepinfer_create_engram(self, context):
            return AcmeEngram(context)
    """


@_hook("optional")
def deepinfer_create_sampling(context: OpContext) -> ops.SamplingOps | None:
    """Logit processing, draws, verification of drafts, draft blocks. [level optional]

    When: after runtime and communicator. Random numbers are core's, counted by (seed, position, purpose): do not
    bring a generator.

    Example::

        @hookimpl
        def deepinfer_create_sampling(self, context):
            return AcmeSampling(context)
    """


@_hook("optional")
def deepinfer_create_step_inputs(context: OpContext) -> ops.StepInputOps | None:
    """Integer metadata of a step. [level optional]

    When: after runtime and communicator. Its ops run once a step, before any layer, and may not wait for the device.

    Example::

        @hookimpl
        def deepinfer_create_step_inputs(self, context):
            return AcmeStepInputs(context)
    """


@_hook("optional")
def deepinfer_create_vision(context: OpContext) -> ops.VisionOps | None:
    """Patchify, encode and merge images. [level optional]

    When: after runtime and communicator, also for text-only runs: load nothing here.

    Example::

        @hookimpl
        def deepinfer_create_vision(self, context):
            return AcmeVision(context)
    """
