"""The `cpu` backend's hooks. Core's own op bodies run on any torch device, so a CPU needs nothing else."""

from __future__ import annotations

from deepinfer.hooks.devices.host_memory import share_one_arena


class CpuPlugin:
    """Implements no factory: every op of the cpu backend is core's reference or decomposition.

    `DEEPINFER_BATCH_INVARIANT=1` therefore runs those bodies with `Numerics.order_free`, which makes a row's result
    independent of the rows beside it.
    """

    def __init__(self) -> None:
        share_one_arena()  # before the engine starts the thread that steps run on
