"""Collectives over NCCL through torch.distributed. Created by the plugin.

The world meets over Gloo, which needs no GPU; every group of several ranks is NCCL with a bounded number of CTAs, so
that collectives leave the other multiprocessors to kernels that run beside them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from deepinfer.hooks import BackendError, CommunicatorCapabilities, OpContext, provides
from deepinfer.hooks.collectives.groups import Group, ProcessGroups
from deepinfer.hooks.ops import CommunicatorOps
from deepinfer.hooks.ops.communicator import DEFAULT_TIMEOUT
from deepinfer_nvidia.settings import NCCL_NUM_SMS, value_of


class NcclGroups(ProcessGroups):
    """Process groups whose NCCL communicators use a fixed number of CTAs."""

    def _join(self, transport: str, timeout: timedelta) -> None:
        super()._join("gloo", timeout)

    def _create(self, name: str, partition: Sequence[Sequence[int]], transport: str, timeout: timedelta) -> Group:
        mine: Group | None = None
        for members in map(tuple, partition):
            handle = None
            if len(members) > 1:
                handle = dist.new_group(list(members), timeout=timeout, backend=transport, pg_options=group_options())
            if self.rank in members:
                mine = Group(name, members, members.index(self.rank), handle)
        assert mine is not None, "checked: a partition holds every rank"
        return mine


def group_options() -> Any:
    """Least and most CTAs, equal, so that NCCL does not choose by message size."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = value_of(NCCL_NUM_SMS)
    return options


class Communicator(CommunicatorOps):
    """Core's bodies over NCCL; tensors stay on the device."""

    transport: ClassVar[str] = "nccl"
    stages_through_host: ClassVar[bool] = False

    def __init__(self, context: OpContext) -> None:
        super().__init__(context)
        self._hosts: dict[str, list[str]] = {}

    @provides(batch_invariant=True)
    def open(self, groups: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Core's checks, NCCL's groups, and which members share a host."""
        if self._groups is not None:
            raise BackendError("communicator.open was called twice; close() first")
        value_of(NCCL_NUM_SMS)  # a wrong value is named now, not as ranks that could not meet
        seconds = getattr(self.context.settings, "gloo_timeout", DEFAULT_TIMEOUT)
        device = torch.device(self.context.device)
        self._groups = NcclGroups.open(groups, os.environ, self.transport, timedelta(seconds=seconds), device)
        self._hosts = {name: self.gather_objects(socket.gethostname(), name) for name in groups}

    @provides(batch_invariant=True)
    def capabilities(self) -> CommunicatorCapabilities:
        """NCCL's collectives may be captured; torch's symmetric memory maps peers of one host."""
        return CommunicatorCapabilities(device_tensors=True, graph_safe=True, symmetric_memory=True)

    @provides(batch_invariant=True)
    def one_fast_domain(self, group: str) -> bool:
        """Whether all members share a host whose GPUs reach each other."""
        if self.size(group) == 1:
            return True
        return len(set(self._hosts[group])) == 1 and peers_reachable()

    @provides(batch_invariant=True)
    def memory_used(self) -> int:
        """What NCCL reports of every group; 0 for a build that reports nothing."""
        handles = [self._group(name).handle for name in self._hosts]
        return sum(backend_bytes(handle) for handle in handles if handle is not None)

    @provides(batch_invariant=True)
    def close(self) -> None:
        """Core's, and what was learnt of the groups."""
        self._hosts = {}
        super().close()


def peers_reachable() -> bool:
    """Whether every pair of visible GPUs has peer access."""
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return bool(pairs) and all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


def backend_bytes(handle: Any) -> int:
    """Device memory of one NCCL communicator."""
    backend = handle._get_backend(torch.device("cuda"))
    statistics = getattr(backend, "memory_stats", None)
    return 0 if statistics is None else int(statistics()["total"])
