"""Gathering rows of all members: one asynchronous gather, and the session in which several share their memory.

Used by `hooks.ops.communicator`. In a context-parallel prefill every attention layer gathers its compressed rows; a
session lets a backend serve all of them from one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from deepinfer.errors import BackendError
from deepinfer.hooks.collectives.groups import Group
from deepinfer.hooks.collectives.staging import as_bytes, outgoing

# torch renamed this collective; older versions only have the second name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class PendingGather:
    """A gather that is under way, or a result that needed none."""

    def __init__(self, x: torch.Tensor, group: Group, on_host: bool) -> None:
        self._device = x.device
        self._closed = False
        self._work: Any = None
        if group.size == 1:
            self._rows = x
            return
        self._source = outgoing(x, on_host)  # kept: the transport reads it until the work is done
        self._rows = self._source.new_empty(group.size * x.shape[0], *x.shape[1:])
        if x.numel():
            self._work = _all_gather(as_bytes(self._rows), as_bytes(self._source), group=group.handle, async_op=True)

    def wait(self) -> torch.Tensor:
        """The gathered rows [size * rows, ...], in rank order. Raises BackendError after the session."""
        if self._closed:
            raise BackendError("this gather belongs to a session that has ended; copy what must outlive it")
        self._finish()
        return self._rows

    def _finish(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._rows = self._rows.to(self._device)

    def close(self) -> None:
        """Finish the transfer, then refuse further waits. May be called twice."""
        self._finish()
        self._closed = True


class GatherSession:
    """Several gathers of one step over one group. A context manager; results are valid until it is left.

    This default gives every gather its own memory, so it uses no size hint.
    """

    def __init__(self, group: Group, on_host: bool, device: torch.device) -> None:
        self._group, self._on_host, self._device = group, on_host, device
        self._pending: list[PendingGather] = []
        self._open = True

    def own(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """This rank's shard [rows, ...] inside the session's memory, uninitialised: fill it, then gather it."""
        self._require_open()
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def all_gather(self, x: torch.Tensor) -> PendingGather:
        """Start gathering x [rows, ...], equal shape on all members; x may not change before `wait`."""
        self._require_open()
        pending = PendingGather(x, self._group, self._on_host)
        self._pending.append(pending)
        return pending

    def _require_open(self) -> None:
        if not self._open:
            raise BackendError("this gather session has ended; open a new one")

    def close(self) -> None:
        """Finish every gather and end the session. May be called twice."""
        self._open = False
        for pending in self._pending:
            pending.close()
        self._pending.clear()

    def __enter__(self) -> GatherSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
