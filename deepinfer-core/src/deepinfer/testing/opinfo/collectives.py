"""What every member of a group of processes checks of the communicator ops: one function an op, the same on all ranks.

Run by `ranks.py` in processes of their own. What a collective must give is worked out on every rank from all ranks'
numbers, which follow from their rank. Members, counts and roots vary; one rank brings nothing where that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.errors import BackendError
from deepinfer.testing.opinfo.expect import raises, require
from deepinfer.testing.opinfo.tree import same_bits

WORLD = "world"
CHECKS: dict[str, Callable[[Member], None]] = {}
"""{op: check}, in the order they are run; `close` comes last."""


@dataclass(frozen=True)
class Member:
    """This process as a member of the world group.

    ops   the bound table;  device: where its tensors live;  rank, size: its place in the world
    """

    ops: Any
    device: torch.device
    rank: int
    size: int

    @property
    def comm(self) -> Any:
        return self.ops.communicator

    def numbers(self, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What `rank` brings."""
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(100 + rank)) * 8
        return x.to(dtype).to(self.device)

    def all(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """What every rank brings."""
        return [self.numbers(rank, *shape, dtype=dtype) for rank in range(self.size)]


def partitions(size: int) -> dict[str, list[list[int]]]:
    """Groups of a world of `size` ranks: all, neighbours, every other one, each alone."""
    half = max(1, size // 2)
    neighbours = [list(range(half)), list(range(half, size))]
    strided = [list(range(first, size, 2)) for first in range(min(2, size))]
    return {
        WORLD: [list(range(size))],
        "neighbours": neighbours,
        "strided": strided,
        "alone": [[r] for r in range(size)],
    }


def check(op: str) -> Callable[[Callable[[Member], None]], Callable[[Member], None]]:
    """Register the check of an op."""

    def register(function: Callable[[Member], None]) -> Callable[[Member], None]:
        CHECKS[op] = function
        return function

    return register


def group_of(me: Member, name: str) -> list[int]:
    """Members of this rank's group of a partition."""
    return next(members for members in partitions(me.size)[name] if me.rank in members)


@check("rank")
@check("size")
@check("members")
def facts(me: Member) -> None:
    for name in partitions(me.size):
        members = group_of(me, name)
        found = (me.comm.rank(name), me.comm.size(name), tuple(me.comm.members(name)))
        expected = (members.index(me.rank), len(members), tuple(members))
        require(found == expected, f"rank, size and members of {name!r} are {found}, expected {expected}")
    raises(BackendError, lambda: me.comm.size("nobody"), "size of a group that was never opened")


@check("one_fast_domain")
def one_fast_domain(me: Member) -> None:
    require(me.comm.one_fast_domain("alone") is True, "a group of one is no fast domain")
    same = set(me.comm.gather_objects(me.comm.one_fast_domain(WORLD), WORLD))
    require(len(same) == 1, "ranks disagree on whether the world is a fast domain")


@check("capabilities")
def capabilities(me: Member) -> None:
    facts = me.comm.gather_objects(me.comm.capabilities(), WORLD)
    require(all(fact == facts[0] for fact in facts), f"ranks differ: {facts}")


@check("memory_used")
def memory_used(me: Member) -> None:
    me.comm.all_reduce(me.numbers(me.rank, 1024), WORLD)
    used = me.comm.memory_used()
    require(type(used) is int and used >= 0, f"is {used!r}, expected bytes")


@check("open")
def open_twice(me: Member) -> None:
    raises(BackendError, lambda: me.comm.open(partitions(me.size)), "a second open")


@check("all_reduce")
def all_reduce(me: Member) -> None:
    reductions: dict[str, Any] = {"sum": lambda x: x.sum(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0)}
    for reduce, combine in reductions.items():
        for dtype in (torch.float32, torch.int64, torch.int32, torch.bfloat16):
            x = me.numbers(me.rank, 5, 3, dtype=dtype)
            expected = combine(torch.stack(me.all(5, 3, dtype=dtype)).to(torch.float64)).to(dtype)
            require(me.comm.all_reduce(x, WORLD, reduce) is x, "does not return its operand")
            close = torch.allclose(
                x.double(), expected.double(), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
            )
            require(
                close, f"{reduce} of {dtype} is {x.flatten()[:4].tolist()}, expected {expected.flatten()[:4].tolist()}"
            )
    x = me.numbers(me.rank, 4, 6).t()[:, ::2]
    me.comm.all_reduce(x, WORLD)
    require(torch.allclose(x, sum(y.t()[:, ::2] for y in me.all(4, 6)), atol=1e-4), "a strided operand comes out wrong")
    x = torch.full((3,), float(me.rank), device=me.device)
    me.comm.all_reduce(x, "neighbours")
    require(x.tolist() == [float(sum(group_of(me, "neighbours")))] * 3, "a sum goes beyond its group")
    require(me.comm.all_reduce(torch.empty(0, 4, device=me.device), WORLD).shape == (0, 4), "an empty operand")
    raises(BackendError, lambda: me.comm.all_reduce(x, WORLD, "mean"), "an unknown reduction")


@check("all_gather_rows")
def all_gather_rows(me: Member) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool):
        found = me.comm.all_gather_rows(me.numbers(me.rank, 2, 3, dtype=dtype), WORLD)
        require(
            same_bits(found, torch.cat(me.all(2, 3, dtype=dtype))), f"{dtype} rows are not those of all ranks in order"
        )
    counts = [rank * 2 % 3 for rank in range(me.size)]  # rank 0 brings nothing
    found = me.comm.all_gather_rows(me.numbers(me.rank, 4, 3)[: counts[me.rank]], WORLD, counts)
    expected = torch.cat([x[:n] for x, n in zip(me.all(4, 3), counts, strict=True)])
    require(
        same_bits(found, expected),
        f"unequal counts {counts} come out as {list(found.shape)}, expected {list(expected.shape)}",
    )
    members = group_of(me, "strided")
    found = me.comm.all_gather_rows(torch.full((1, 1), me.rank, device=me.device), "strided")
    require(found.flatten().tolist() == members, f"rows of {found.flatten().tolist()}, expected {members}")
    wrong = [9] * me.size
    raises(
        BackendError, lambda: me.comm.all_gather_rows(torch.ones(2, 4, device=me.device), WORLD, wrong), "wrong counts"
    )


@check("broadcast")
def broadcast(me: Member) -> None:
    for root in range(me.size):
        for dtype in (torch.float32, torch.float8_e4m3fn, torch.int64):
            x = me.numbers(me.rank, 3, 4, dtype=dtype).t()
            require(me.comm.broadcast(x, WORLD, root) is x, "does not return its operand")
            require(same_bits(x, me.numbers(root, 3, 4, dtype=dtype).t()), f"{dtype} of rank {root} does not arrive")
    raises(BackendError, lambda: me.comm.broadcast(torch.ones(1, device=me.device), WORLD, me.size), "a root outside")


@check("broadcast_small")
def broadcast_small(me: Member) -> None:
    root = me.size - 1
    mine, wanted = (
        [
            me.numbers(rank, 3),
            me.numbers(rank, 4, dtype=torch.int64),
            torch.empty(0, dtype=torch.int32, device=me.device),
            me.numbers(rank, 2, 2, dtype=torch.bfloat16),
            torch.tensor([rank == root] * 5, device=me.device),
        ]
        for rank in (me.rank, root)
    )
    me.comm.broadcast_small(mine, WORLD, root)
    for i, (found, expected) in enumerate(zip(mine, wanted, strict=True)):
        require(same_bits(found, expected), f"tensor {i} is {found.tolist()}, expected {expected.tolist()}")


@check("barrier")
def barrier(me: Member) -> None:
    for name in (WORLD, "neighbours", "alone"):
        me.comm.barrier(name)


@check("exchange")
def exchange(me: Member) -> None:
    """Three messages of different sizes between every two ranks, one's own included, and an empty one."""

    def message(source: int, target: int, number: int) -> torch.Tensor:
        return torch.full((2, number + 1), source * 100 + target * 10 + number, dtype=torch.int16, device=me.device)

    others = [(number, peer) for number in range(3) for peer in range(me.size)]
    receives = [(torch.zeros(number + 1, 2, dtype=torch.int16, device=me.device).t(), peer) for number, peer in others]
    sends = [(message(me.rank, peer, number), peer) for number, peer in others]
    me.comm.exchange([*sends, (torch.empty(0, device=me.device), (me.rank + 1) % me.size)], receives, WORLD)
    for (found, _), (number, peer) in zip(receives, others, strict=True):
        require(
            torch.equal(found, message(peer, me.rank, number)), f"message {number} of rank {peer} is {found.tolist()}"
        )


def _deal(size: int) -> list[list[int]]:
    """counts[source][target] of rows; the last rank sends nothing."""
    return [[(source + 2 * target) % 3 if source < size - 1 else 0 for target in range(size)] for source in range(size)]


@check("all_to_all_rows")
def all_to_all_rows(me: Member) -> None:
    counts = _deal(me.size)

    def rows(source: int) -> list[torch.Tensor]:
        return [torch.full((n, 2), source * 10 + target, device=me.device) for target, n in enumerate(counts[source])]

    received = [row[me.rank] for row in counts]
    found = me.comm.all_to_all_rows(torch.cat(rows(me.rank)), counts[me.rank], received, WORLD)
    expected = torch.cat([rows(source)[me.rank] for source in range(me.size)])
    require(torch.equal(found, expected), f"received {found[:, 0].tolist()}, expected {expected[:, 0].tolist()}")
    wrong = [9] * me.size
    raises(BackendError, lambda: me.comm.all_to_all_rows(expected, wrong, received, WORLD), "wrong counts")


@check("gather_session")
def gather_session(me: Member) -> None:
    with me.comm.gather_session(WORLD, 1 << 12) as session:
        own = session.own((2, 3), torch.bfloat16)
        own.copy_(me.numbers(me.rank, 2, 3))
        first, second = session.all_gather(own), session.all_gather(torch.full((1,), me.rank, device=me.device))
        order, rows = second.wait().tolist(), first.wait().clone()
    require(order == list(range(me.size)), f"ranks come as {order}")
    require(same_bits(rows, torch.cat([x.to(torch.bfloat16) for x in me.all(2, 3)])), "rows are not those of all ranks")
    raises(BackendError, lambda: session.all_gather(own), "a gather after the session")


@check("exchange_experts")
def exchange_experts(me: Member) -> None:
    slots = 2
    total = slots * me.size
    source = [(3 * new + 1) % total if new != 1 else 1 for new in range(total)]  # moves, a replica, one that stays
    mine = torch.arange(me.rank * slots, (me.rank + 1) * slots, device=me.device)
    tables = [mine.to(torch.uint8).view(slots, 1), mine.float().view(slots, 1, 1).expand(slots, 3, 2).contiguous()]
    me.comm.exchange_experts(tables, source, WORLD)
    expected = source[me.rank * slots : (me.rank + 1) * slots]
    for table in tables:
        require(
            table.flatten(1)[:, -1].tolist() == expected,
            f"slots hold {table.flatten(1)[:, -1].tolist()}, expected {expected}",
        )
    raises(BackendError, lambda: me.comm.exchange_experts(tables, [total] * total, WORLD), "a source outside")


@check("gather_objects")
def gather_objects(me: Member) -> None:
    found = me.comm.gather_objects({"rank": me.rank}, WORLD)
    require(found == [{"rank": rank} for rank in range(me.size)], f"objects are {found}")


@check("broadcast_object")
def broadcast_object(me: Member) -> None:
    for root in range(me.size):
        found = me.comm.broadcast_object(("step", me.rank), WORLD, root)
        require(found == ("step", root), f"the object of rank {root} arrives as {found}")


def expert_parallel(me: Member, counts: Sequence[int]) -> None:
    """Rows dealt out to the ranks that own their experts and brought back are the rows again."""
    rows = me.numbers(me.rank, counts[me.rank], 4)
    owner = torch.arange(counts[me.rank], device=me.device) % me.size
    order = torch.sort(owner, stable=True).indices
    sends = torch.bincount(owner, minlength=me.size).tolist()
    receives = [len(range(me.rank, n, me.size)) for n in counts]
    there = me.comm.all_to_all_rows(rows[order], sends, receives, WORLD)
    back = me.comm.all_to_all_rows(there, receives, sends, WORLD)
    require(same_bits(back, rows[order]), "rows sent to their experts' ranks and back are not the same rows")


@check("dispatch and combine")
def dispatch_and_combine(me: Member) -> None:
    expert_parallel(me, [0] + [5] * (me.size - 1))


@check("close")
def close(me: Member) -> None:
    me.comm.close()
    me.comm.close()
    me.comm.open(partitions(me.size))
    x = torch.ones(2, device=me.device)
    require(me.comm.all_reduce(x, WORLD).tolist() == [float(me.size)] * 2, "groups opened again do not work")
    me.comm.close()
