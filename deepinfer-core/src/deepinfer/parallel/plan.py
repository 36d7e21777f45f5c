"""The layout of a run over several ranks: sizes, groups and the place of every rank. Pure arithmetic.

The worker builds one plan from the engine's sizes and the launcher's world size, and hands `plan.groups()` to
`communicator.open`. Knows no process, no device and no transport, so every layout can be looked at on one machine.

    dp    = data_parallel_size or max(1, ep // cp)          world = max(cp * dp, enp)
    enp   = engram_parallel_size or cp * dp                 rank  = engine * cp + cp_rank,  dp_rank = engine % dp

An *engine* is `cp` consecutive ranks that work on the same requests; `dp` engines form a *block* of cp * dp ranks.
Several blocks exist only where Engram tables are spread over more ranks than one block has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer.errors import ConfigError

Partition = tuple[tuple[int, ...], ...]
"""Every rank of the world exactly once, as the members of one group after another."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One row of the rank table: where a global rank sits in each of its groups."""

    rank: int
    block: int
    engine: int
    cp: int
    dp: int
    ep: int
    enp: int


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """Sizes that fit together. Built by `create`, which checks them.

    world           ranks in all
    cp              ranks that share the tokens of a request (context parallel)
    dp              engines in a block, each with its own requests (data parallel)
    ep              ranks that share one set of routed experts
    enp             ranks that share one set of Engram tables
    ranks_per_host  consecutive ranks on the same host
    """

    world: int
    cp: int
    dp: int
    ep: int
    enp: int
    ranks_per_host: int

    @classmethod
    def create(
        cls,
        context_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        expert_parallel_size: int = 1,
        engram_parallel_size: int | None = None,
        world_size: int | None = None,
        ranks_per_host: int | None = None,
    ) -> ParallelPlan:
        """Fill in the sizes that were left out (None or 0) and check that all of them fit.

        world_size is what the launcher started, None where nothing runs yet. Raises ConfigError.
        """
        cp = _at_least_one("context_parallel_size", context_parallel_size)
        ep = _at_least_one("expert_parallel_size", expert_parallel_size)
        dp = _at_least_one("data_parallel_size", data_parallel_size or max(1, ep // cp))
        enp = _at_least_one("engram_parallel_size", engram_parallel_size or cp * dp)
        world = max(cp * dp, enp)
        plan = cls(world, cp, dp, ep, enp, _at_least_one("ranks_per_host", ranks_per_host or world_size or world))
        plan._check(world_size)
        return plan

    def _check(self, started: int | None) -> None:
        block = self.cp * self.dp
        layout = f"context parallel {self.cp} x data parallel {self.dp} = {block} ranks"
        if block % self.ep:
            raise ConfigError(
                f"expert_parallel_size is {self.ep}, but {layout} cannot be cut into groups of {self.ep}; "
                f"use one of {_divisors(block)}, or change data_parallel_size"
            )
        if self.world % block:
            raise ConfigError(
                f"engram_parallel_size is {self.enp}, but must be a multiple of {layout} where it is larger; "
                f"use {block * (self.enp // block + 1)}"
            )
        if self.world % self.enp:
            raise ConfigError(
                f"engram_parallel_size is {self.enp}, but {layout} cannot be cut into groups of {self.enp}; "
                f"use one of {_divisors(block)}, or a multiple of {block}"
            )
        if started is not None and started != self.world:
            raise ConfigError(
                f"the launcher started {started} ranks, but {layout} with Engram tables over {self.enp} needs "
                f"{self.world}; start {self.world} ranks or change the parallel sizes"
            )
        if self.world % self.ranks_per_host:
            raise ConfigError(
                f"ranks_per_host is {self.ranks_per_host}, but {self.world} ranks do not fill hosts of that size "
                "evenly; start the same number of ranks on every host"
            )

    @property
    def engines(self) -> int:
        """Engines in the whole world."""
        return self.world // self.cp

    @property
    def expert_copies(self) -> int:
        """Complete sets of routed experts in a block."""
        return self.cp * self.dp // self.ep

    def rank_of(self, engine: int, cp_rank: int = 0) -> int:
        """Global rank of a context rank of an engine. Raises ConfigError outside the world."""
        if not (0 <= engine < self.engines and 0 <= cp_rank < self.cp):
            raise ConfigError(
                f"engine {engine}, context rank {cp_rank}: this plan has engines 0..{self.engines - 1} "
                f"with context ranks 0..{self.cp - 1}"
            )
        return engine * self.cp + cp_rank

    def place(self, rank: int) -> RankPlace:
        """Where a global rank sits. Raises ConfigError outside the world."""
        if not 0 <= rank < self.world:
            raise ConfigError(f"rank {rank} is outside this plan, which has ranks 0..{self.world - 1}")
        engine = rank // self.cp
        return RankPlace(
            rank=rank,
            block=rank // (self.cp * self.dp),
            engine=engine,
            cp=rank % self.cp,
            dp=engine % self.dp,
            ep=rank % self.ep,
            enp=rank % self.enp,
        )

    def table(self) -> tuple[RankPlace, ...]:
        """The place of every rank, in order."""
        return tuple(self.place(rank) for rank in range(self.world))

    def groups(self) -> dict[str, Partition]:
        """All groups by name, each a partition of the world; the same on every rank, in the same order.

        world; cp (consecutive); dp (stride cp within a block); ep and enp (consecutive); ep_in_dp (engines of a dp
        group that share experts, so must step together); local (ranks of one host).
        """
        dp, ep = self._dp_groups(), self._consecutive(self.ep)
        return {
            "world": self._consecutive(self.world),
            "cp": self._consecutive(self.cp),
            "dp": dp,
            "ep": ep,
            "enp": self._consecutive(self.enp),
            "ep_in_dp": _intersections(dp, ep),
            "local": self._consecutive(self.ranks_per_host),
        }

    def _consecutive(self, size: int) -> Partition:
        return tuple(tuple(range(first, first + size)) for first in range(0, self.world, size))

    def _dp_groups(self) -> Partition:
        block = self.cp * self.dp
        return tuple(
            tuple(range(start + cp_rank, start + block, self.cp))
            for start in range(0, self.world, block)
            for cp_rank in range(self.cp)
        )

    def explain(self) -> str:
        """The plan in words and as a table, for `--help`-style output and the log of rank 0."""
        lines = [
            f"{self.world} rank(s) = {self.engines} engine(s) x {self.cp} context rank(s)",
            f"  requests: {self.dp} engine(s) in a block of {self.cp * self.dp} rank(s)",
            f"  routed experts: spread over {self.ep} rank(s), {self.expert_copies} complete set(s) in a block",
            f"  engram tables: spread over {self.enp} rank(s), {self.world // self.enp} complete set(s)",
            f"  hosts: {self.world // self.ranks_per_host} with {self.ranks_per_host} rank(s) each",
        ]
        for name, partition in self.groups().items():
            lines.append(f"  {name:<9}" + " ".join("{" + ",".join(map(str, members)) + "}" for members in partition))
        lines.append("  rank block engine cp dp ep enp")
        for at in self.table():
            lines.append(f"  {at.rank:>4} {at.block:>5} {at.engine:>6} {at.cp:>2} {at.dp:>2} {at.ep:>2} {at.enp:>3}")
        return "\n".join(lines)


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}, expected a whole number of at least 1")
    return value


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _intersections(first: Iterable[tuple[int, ...]], second: Iterable[tuple[int, ...]]) -> Partition:
    """Non-empty intersections of two partitions: again a partition."""
    others = [frozenset(members) for members in second]
    cut = (tuple(rank for rank in one if rank in other) for one in first for other in others)
    return tuple(members for members in cut if members)
