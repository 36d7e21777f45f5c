"""Messages between pairs of ranks, many at once, and what is built from them: the exchange of expert weights.

Used by `hooks.ops.communicator`. Both sides list their messages; the i-th message from a to b meets the i-th that b
expects from a.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepinfer.errors import BackendError
from deepinfer.hooks.collectives.groups import Group
from deepinfer.hooks.collectives.staging import as_bytes, deliver, incoming, outgoing

Message = tuple[torch.Tensor, int]
"""(values to send or memory to fill, rank in the group of the other side)."""


def exchange(sends: Sequence[Message], receives: Sequence[Message], group: Group, on_host: bool) -> None:
    """Deliver all messages; returns when this rank's sources may change and its targets are filled.

    Empty tensors send nothing. Raises BackendError for a peer outside the group or a message to oneself that does not
    match the one expected.
    """
    for _, peer in (*sends, *receives):
        if not 0 <= peer < group.size:
            raise BackendError(f"group {group.name!r} has ranks 0..{group.size - 1}, found a message with {peer}")
    sends = [(x, peer) for x, peer in sends if x.numel()]
    receives = [(x, peer) for x, peer in receives if x.numel()]
    _to_oneself(sends, receives, group)
    buffers = [(x, incoming(x, on_host), peer) for x, peer in receives if peer != group.rank]
    operations = _operations(dist.irecv, [(buffer, peer) for _, buffer, peer in buffers], group)
    outgoing_messages = [(outgoing(x, on_host), peer) for x, peer in sends if peer != group.rank]
    operations += _operations(dist.isend, outgoing_messages, group)
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    for x, buffer, _ in buffers:
        deliver(x, buffer)


def _operations(kind: Callable[..., Any], messages: Sequence[Message], group: Group) -> list[dist.P2POp]:
    """Torch's form of messages. Tags count the messages of a pair, so that they cannot overtake each other."""
    count: Counter[int] = Counter()
    operations = []
    for x, peer in messages:
        operations.append(dist.P2POp(kind, as_bytes(x), group.members[peer], group.handle, tag=count[peer]))
        count[peer] += 1
    return operations


def _to_oneself(sends: Sequence[Message], receives: Sequence[Message], group: Group) -> None:
    waiting = deque(x for x, peer in sends if peer == group.rank)
    targets = [x for x, peer in receives if peer == group.rank]
    if [x.shape for x in waiting] != [x.shape for x in targets]:
        raise BackendError(
            f"rank {group.rank} of group {group.name!r} sends itself shapes {[tuple(x.shape) for x in waiting]} "
            f"but expects {[tuple(x.shape) for x in targets]}; list equal messages on both sides"
        )
    for target in targets:
        target.copy_(waiting.popleft())


def exchange_experts(tables: Sequence[torch.Tensor], source: Sequence[int], group: Group, on_host: bool) -> None:
    """Fill every slot s of tables [slots, ...] with what global slot source[s] held before. See the op's contract."""
    slots = len(source) // group.size
    if len(source) != slots * group.size or any(table.shape[0] != slots for table in tables):
        raise BackendError(
            f"{len(source)} sources over {group.size} ranks need tables of {len(source) / group.size:g} slots, "
            f"found {[table.shape[0] for table in tables]}"
        )
    if any(not 0 <= old < len(source) for old in source):
        raise BackendError(f"sources are {list(source)}, expected global slots 0..{len(source) - 1}")
    moved = [(new, old) for new, old in enumerate(source) if new != old]
    sends, receives = [], []
    staged: dict[int, list[torch.Tensor]] = defaultdict(list)  # of own slots: written only after all reads
    for table in tables:
        for new, old in moved:
            if old // slots == group.rank:
                sends.append((table[old % slots], new // slots))
            if new // slots == group.rank:
                staged[new].append(torch.empty_like(table[new % slots]))
                receives.append((staged[new][-1], old // slots))
    exchange(sends, receives, group, on_host)
    for new, values in staged.items():
        for table, value in zip(tables, values, strict=True):
            table[new % slots] = value
