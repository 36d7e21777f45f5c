"""Process groups by name, built from rank lists and owned by one object. Used by `hooks.ops.communicator`.

Ranks come from the environment of an elastic launcher (torchrun): RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Without
them there is one rank and torch.distributed is never touched. Does not know what the groups are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepinfer.errors import BackendError, ConfigError

_ADDRESS = ("RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Group:
    """One group as a rank sees it.

    members  global ranks, in order; rank: this process's place among them
    handle   torch's process group, None for a group of one
    """

    name: str
    members: tuple[int, ...]
    rank: int
    handle: Any = None

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)


def launched_world(environ: Mapping[str, str]) -> tuple[int, int]:
    """(rank, world size) of this process: what the embedding program joined, else the launcher's, else (0, 1).

    Raises ConfigError if the launcher's variables are incomplete.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world = _number(environ, "WORLD_SIZE") if environ.get("WORLD_SIZE") else 1
    if world <= 1:
        return 0, 1
    missing = [name for name in _ADDRESS if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {world}, but {', '.join(missing)} is not set; start the ranks with torchrun, "
            "or unset WORLD_SIZE to run alone"
        )
    return _number(environ, "RANK"), world


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name} is {environ[name]!r}, expected a whole number; torchrun sets it") from None


class ProcessGroups:
    """The groups of one communicator. `open` is collective: every rank calls it with the same partitions."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._groups: dict[str, Group] = {}
        self._owns_default = False

    @classmethod
    def open(
        cls,
        partitions: Mapping[str, Sequence[Sequence[int]]],
        environ: Mapping[str, str],
        transport: str,
        timeout: timedelta,
        device: torch.device,
    ) -> ProcessGroups:
        """Join the world, create this rank's group of every partition and try each of them.

        transport  torch.distributed backend, e.g. "gloo"
        timeout    of joining and of every later operation
        device     on which the transport takes tensors
        Raises ConfigError for partitions that do not fit the launch, BackendError if ranks do not meet in time.
        """
        groups = cls(*launched_world(environ))
        for name, partition in partitions.items():
            groups._check(name, partition)
        try:
            groups._join(transport, timeout)
            for name, partition in partitions.items():
                groups._groups[name] = groups._create(name, partition, transport, timeout)
            groups._connect(device)
        except (RuntimeError, ValueError) as cause:  # what torch raises for a transport, an address, a timeout
            groups.close()
            raise BackendError(
                f"rank {groups.rank} of {groups.world} could not join its process groups over {transport} within "
                f"{timeout.total_seconds():g} s ({cause}); check that all ranks run and reach "
                f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
            ) from cause
        return groups

    def _check(self, name: str, partition: Sequence[Sequence[int]]) -> None:
        found = [list(members) for members in partition]
        if sorted(rank for members in found for rank in members) != list(range(self.world)):
            raise ConfigError(
                f"group {name!r} is {found}, which does not hold each of the {self.world} launched rank(s) once; "
                "start as many ranks as the parallel plan has (torchrun), or change the parallel sizes"
            )
        if any(members != sorted(members) for members in found):
            raise ConfigError(f"group {name!r} is {found}; list the members of each group in ascending order")

    def _join(self, transport: str, timeout: timedelta) -> None:
        """Join torch's default group, unless the program that embeds the engine already has."""
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group(transport, rank=self.rank, world_size=self.world, timeout=timeout)
            self._owns_default = True

    def _create(self, name: str, partition: Sequence[Sequence[int]], transport: str, timeout: timedelta) -> Group:
        """Create all groups of a partition (torch asks every rank to) and keep the one this rank is in."""
        mine: Group | None = None
        for members in map(tuple, partition):
            handle = dist.new_group(list(members), timeout=timeout, backend=transport) if len(members) > 1 else None
            if self.rank in members:
                mine = Group(name, members, members.index(self.rank), handle)
        assert mine is not None, "checked: a partition holds every rank"
        return mine

    def __getitem__(self, name: str) -> Group:
        group = self._groups.get(name)
        if group is None:
            raise BackendError(f"no process group {name!r}; open are {', '.join(self._groups) or 'none'}")
        return group

    def _connect(self, device: torch.device) -> None:
        """Run one operation in every group: connections are made lazily, and a broken one should show at the start."""
        for group in self._groups.values():
            if group.handle is not None:
                dist.all_reduce(torch.ones(1, device=device), group=group.handle)

    def close(self) -> None:
        """Destroy what this object created, newest first. May be called twice."""
        groups, self._groups = self._groups, {}
        for group in reversed(groups.values()):
            if group.handle is not None:
                dist.destroy_process_group(group.handle)
        if self._owns_default:
            self._owns_default = False
            dist.destroy_process_group()
