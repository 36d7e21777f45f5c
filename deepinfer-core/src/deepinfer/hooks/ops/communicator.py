"""Communicator ops: groups of ranks and everything that travels between them.

Called by the worker (which opens the groups of the parallel plan and closes them), by the engine (small broadcasts,
objects) and by other ops (expert dispatch, context-parallel gathers). The default needs nothing for one rank and uses
torch.distributed over Gloo for several; tensors of a device pass through the host. One provider serves the whole group.

Groups are called by the name they were opened with; a rank is always meant within its group. Every member of a group
calls the same ops in the same order. fp8 and packed dtypes travel; sums need a dtype the transport can add.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from deepinfer.errors import BackendError
from deepinfer.hooks.api import OpContext, OpGroup, op
from deepinfer.hooks.collectives import messages
from deepinfer.hooks.collectives.gather import GatherSession, PendingGather
from deepinfer.hooks.collectives.groups import Group, ProcessGroups, launched_world
from deepinfer.hooks.collectives.staging import as_bytes, deliver, incoming, outgoing

DEFAULT_TIMEOUT = 14400.0
"""Seconds, where the context carries no settings; equals the default of DEEPINFER_GLOO_TIMEOUT."""

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, slots=True)
class CommunicatorCapabilities:
    """What a communicator can do; every default is the cautious answer.

    device_tensors    tensors go from device to device without passing through the host
    graph_safe        all_reduce, broadcast and broadcast_small may be captured in a device graph
    symmetric_memory  ranks of one fast domain can map each other's buffers
    """

    device_tensors: bool = False
    graph_safe: bool = False
    symmetric_memory: bool = False


class CommunicatorOps(OpGroup):
    """Groups of one worker. A backend with a torch.distributed transport of its own sets the two class attributes.

    transport            name of the torch.distributed backend
    stages_through_host  whether it takes host tensors only
    """

    group = "communicator"
    whole = True

    transport: ClassVar[str] = "gloo"
    stages_through_host: ClassVar[bool] = True

    def __init__(self, context: OpContext) -> None:
        super().__init__(context)
        self._groups: ProcessGroups | None = None

    # life

    @op(level="recommended")
    def open(self, groups: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Join the other ranks and create the groups. Collective; waits for all ranks, at most the timeout.

        groups  {name: partition of all global ranks}, equal on every rank (`ParallelPlan.groups()`)
        raises  ConfigError if the launcher's world does not fit, BackendError if the ranks do not meet
        """
        if self._groups is not None:
            raise BackendError("communicator.open was called twice; close() first")
        seconds = getattr(self.context.settings, "gloo_timeout", DEFAULT_TIMEOUT)
        device = torch.device("cpu" if self.stages_through_host else self.context.device)
        self._groups = ProcessGroups.open(groups, os.environ, self.transport, timedelta(seconds=seconds), device)

    @op(level="recommended")
    def close(self) -> None:
        """Destroy every group this object created. Device graphs go first. May be called twice."""
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.close()

    def _group(self, name: str) -> Group:
        """An open group. Before `open`, a process without launcher is the only member of any group."""
        if self._groups is not None:
            return self._groups[name]
        rank, world = launched_world(os.environ)
        if world > 1:
            raise BackendError(f"rank {rank} of {world} uses group {name!r} before communicator.open")
        return Group(name, (0,), 0)

    # facts

    @op(level="recommended")
    def capabilities(self) -> CommunicatorCapabilities:
        """What this communicator can do."""
        return CommunicatorCapabilities(device_tensors=not self.stages_through_host)

    @op(level="recommended")
    def rank(self, group: str) -> int:
        """This process's rank in the group."""
        return self._group(group).rank

    @op(level="recommended")
    def size(self, group: str) -> int:
        """Members of the group."""
        return self._group(group).size

    @op(level="recommended")
    def members(self, group: str) -> tuple[int, ...]:
        """Global ranks of the group's members, in rank order."""
        return self._group(group).members

    @op()
    def one_fast_domain(self, group: str) -> bool:
        """Whether all members reach each other's device memory directly; decides on fused expert dispatch."""
        return self._group(group).size == 1

    @op()
    def memory_used(self) -> int:
        """Bytes of device memory held for communication between calls."""
        return 0

    # collectives

    @op(level="recommended")
    def all_reduce(self, x: torch.Tensor, group: str, reduce: str = "sum") -> torch.Tensor:
        """Combine x over all members, elementwise. [in-place x]

        x        any shape, equal on all members; reduce: "sum", "max" or "min"
        returns  x. 16-bit floats are summed in float32; with `numerics.order_free` floats are summed in float64 in
                 rank order, so that an element's bits do not depend on the tensor's size. Rounded once.
        """
        if reduce not in _REDUCTIONS:
            raise BackendError(f"all_reduce: reduce is {reduce!r}, expected one of {', '.join(_REDUCTIONS)}")
        to = self._group(group)
        if to.size == 1 or x.numel() == 0:
            return x
        if reduce == "sum" and x.is_floating_point() and self.numerics.order_free:
            parts = self.all_gather_rows(x.unsqueeze(0), group)
            return x.copy_(parts.to(torch.float64).sum(0))
        wide = x.to(torch.float32) if reduce == "sum" and x.dtype in (torch.bfloat16, torch.float16) else x
        total = outgoing(wide, self.stages_through_host)
        dist.all_reduce(total, _REDUCTIONS[reduce], group=to.handle)
        deliver(x, total)
        return x

    @op(level="recommended")
    def all_gather_rows(self, x: torch.Tensor, group: str, counts: Sequence[int] | None = None) -> torch.Tensor:
        """All members' rows, one after another in rank order.

        x        [rows, ...]; without counts equal rows on all members
        counts   rows of every member, known to all of them; own rows == counts[rank]
        returns  [sum of rows, ...]; in a group of one it may be x itself
        """
        to = self._group(group)
        if counts is None:
            return PendingGather(x, to, self.stages_through_host).wait()
        if len(counts) != to.size or counts[to.rank] != x.shape[0]:
            raise BackendError(
                f"all_gather_rows: rank {to.rank} of {to.size} brings {x.shape[0]} rows, but counts are {list(counts)}"
            )
        most = max(counts)
        padded = torch.cat((x, x.new_empty(most - x.shape[0], *x.shape[1:])))
        gathered = PendingGather(padded, to, self.stages_through_host).wait()
        return torch.cat([gathered[rank * most : rank * most + rows] for rank, rows in enumerate(counts)])

    @op(level="recommended")
    def broadcast(self, x: torch.Tensor, group: str, root: int = 0) -> torch.Tensor:
        """Give every member the values of member `root`. [in-place x] Equal shape and dtype; returns x."""
        to = self._group(group)
        source = self._member(to, root)
        if to.size == 1 or x.numel() == 0:
            return x
        mine = to.rank == root
        buffer = outgoing(x, self.stages_through_host) if mine else incoming(x, self.stages_through_host)
        dist.broadcast(as_bytes(buffer), source, group=to.handle)
        if not mine:
            deliver(x, buffer)
        return x

    @staticmethod
    def _member(to: Group, rank: int) -> int:
        """Global rank of a member. Raises BackendError outside the group."""
        if not 0 <= rank < to.size:
            raise BackendError(f"group {to.name!r} has ranks 0..{to.size - 1}, found {rank}")
        return to.members[rank]

    @op(level="recommended")
    def broadcast_small(self, tensors: Sequence[torch.Tensor], group: str, root: int = 0) -> None:
        """Give every member several small tensors of member `root` in one message. [in-place tensors]

        tensors  equal shapes, dtypes and order on all members: draft inputs, a step's integer metadata
        """
        if self._group(group).size == 1 or not tensors:
            self._member(self._group(group), root)
            return
        packed = torch.cat([as_bytes(x.contiguous()) for x in tensors])
        self.broadcast(packed, group, root)
        for x, part in zip(tensors, packed.split([x.nbytes for x in tensors]), strict=True):
            # a slice of bytes may start anywhere; a copy is aligned for any dtype
            x.copy_(part.clone().view(x.dtype).view(x.shape))

    @op(level="recommended")
    def barrier(self, group: str) -> None:
        """Block the host until every member is here."""
        to = self._group(group)
        if to.size > 1:
            dist.barrier(group=to.handle)

    # messages

    @op(level="recommended")
    def exchange(self, sends: Sequence[messages.Message], receives: Sequence[messages.Message], group: str) -> None:
        """Send and receive many tensors at once. [in-place receives]

        sends, receives  (tensor, peer): the i-th tensor a rank sends to a peer fills the i-th that the peer receives
                         from it, equal shapes and dtypes. Messages to oneself are allowed, empty ones send nothing.
        """
        messages.exchange(sends, receives, self._group(group), self.stages_through_host)

    @op(level="recommended")
    def all_to_all_rows(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: str
    ) -> torch.Tensor:
        """Deal out rows: the first send_counts[0] rows of x go to rank 0, the next send_counts[1] to rank 1, ...

        x        [sum of send_counts, ...]
        returns  [sum of receive_counts, ...], rows of rank 0 first
        """
        size = self._group(group).size
        if len(send_counts) != size or len(receive_counts) != size or sum(send_counts) != x.shape[0]:
            raise BackendError(
                f"all_to_all_rows: {x.shape[0]} rows and {size} ranks, but send counts {list(send_counts)} and "
                f"receive counts {list(receive_counts)}"
            )
        out = x.new_empty(sum(receive_counts), *x.shape[1:])
        sends = [(part, peer) for peer, part in enumerate(x.split(list(send_counts)))]
        receives = [(part, peer) for peer, part in enumerate(out.split(list(receive_counts)))]
        self.exchange(sends, receives, group)
        return out

    @op(level="recommended")
    def gather_session(self, group: str, size_hint: int = 0) -> GatherSession:
        """Several asynchronous row gathers that share memory: `own`, `all_gather(x) -> wait()`, left as a scope.

        size_hint  bytes that all gathers of the session will take, over all members; 0 = unknown
        """
        return GatherSession(self._group(group), self.stages_through_host, torch.device(self.context.device))

    @op(level="recommended")
    def exchange_experts(self, tables: Sequence[torch.Tensor], source: Sequence[int], group: str) -> None:
        """Move expert weights between physical slots. [in-place tables]

        tables  [slots, ...] each: this rank's slots of every weight tensor; a rank's slots are consecutive, so global
                slot = rank * slots + local slot
        source  one entry a global slot, equal on all members: the global slot whose content before the call it takes.
                The caller picks among replicas, so that senders pair with receivers evenly.
        Blocks until done; needs memory for the moved slots once more.
        """
        messages.exchange_experts(tables, source, self._group(group), self.stages_through_host)

    # host objects

    @op()
    def gather_objects(self, value: Any, group: str) -> list[Any]:
        """Every member's picklable object, in rank order: start-up checks, statistics. Blocks the host."""
        to = self._group(group)
        if to.size == 1:
            return [value]
        values: list[Any] = [None] * to.size
        dist.all_gather_object(values, value, group=to.handle)
        return values

    @op()
    def broadcast_object(self, value: Any, group: str, root: int = 0) -> Any:
        """Member `root`'s picklable object; the other members' argument is ignored. Blocks the host."""
        to = self._group(group)
        source = self._member(to, root)
        if to.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, source, group=to.handle)
        return values[0]
