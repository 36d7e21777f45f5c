"""Checks of the communicator ops: alone in this process, where everything is the identity, and on several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch

from deepinfer.errors import BackendError
from deepinfer.hooks.collectives.groups import launched_world
from deepinfer.hooks.ops.communicator import CommunicatorCapabilities
from deepinfer.testing.opinfo.context import SampleContext, Trio
from deepinfer.testing.opinfo.expect import require
from deepinfer.testing.opinfo.ranks import Outcome, outcome_of, run_ranks
from deepinfer.testing.opinfo.record import Args, Check, ErrorSample, OpInfo
from deepinfer.testing.opinfo.tree import same_bits
from deepinfer.testing.results import Failure, Skip

GROUP = "ep"
"""Any name serves a process that has no launcher."""
WORLDS = (2, 4)
"""Numbers of processes that collectives run on."""


def alone(check: Callable[[SampleContext], str | None]) -> Check:
    """A check in this process, which must be the only one."""

    def run(trio: Trio) -> str | None:
        if launched_world(os.environ)[1] > 1:
            raise Skip("this process is one of several; run the kit without a launcher")
        return check(trio.found)

    return Check("alone", run)


def together(op: str, size: int) -> Check:
    """An op's check in a world of `size` processes; one start of the processes serves all ops of a run."""

    def run(trio: Trio) -> str | None:
        if trio.found.backend is None:
            raise Skip("other processes cannot open a backend that is not installed")
        key = f"{size} ranks"
        if key not in trio.shared:
            trio.shared[key] = _attempt(trio.found.backend, size)
        results = trio.shared[key]
        if isinstance(results, Failure):
            raise Failure(str(results))
        return outcome_of(results, op)

    return Check(f"{size} processes", run, level=2, slow=True)


def _attempt(backend: str, size: int) -> list[Outcome] | Failure:
    try:
        return run_ranks(backend, size)
    except Failure as failure:
        return failure


# alone


def opened(ctx: SampleContext) -> None:
    comm = ctx.ops.communicator
    comm.open({"world": [[0]], GROUP: [[0]]})
    try:
        require(comm.size("world") == 1 and comm.rank(GROUP) == 0, "a group of one has another size or rank")
        x = numbers(ctx)
        require(comm.all_reduce(x, "world") is x and same_bits(x, numbers(ctx)), "a group of one changes a sum")
    finally:
        comm.close()


def closed(ctx: SampleContext) -> None:
    comm = ctx.ops.communicator
    comm.open({"world": [[0]]})
    comm.close()
    comm.close()


def numbers(ctx: SampleContext) -> torch.Tensor:
    return ctx.put(ctx.normal("x", 3, 4))


def capabilities(ctx: SampleContext) -> str:
    facts = ctx.ops.communicator.capabilities()
    require(
        isinstance(facts, CommunicatorCapabilities), f"is a {type(facts).__name__}, expected CommunicatorCapabilities"
    )
    return repr(facts)


def facts(ctx: SampleContext) -> None:
    comm = ctx.ops.communicator
    found = (comm.rank(GROUP), comm.size(GROUP), tuple(comm.members(GROUP)))
    require(found == (0, 1, (0,)), f"rank, size and members are {found}, expected 0, 1 and (0,)")


def one_fast_domain(ctx: SampleContext) -> None:
    require(ctx.ops.communicator.one_fast_domain(GROUP) is True, "a process alone is no fast domain")


def memory_used(ctx: SampleContext) -> None:
    used = ctx.ops.communicator.memory_used()
    require(type(used) is int and used >= 0, f"is {used!r}, expected bytes")


def unchanged(ctx: SampleContext, x: torch.Tensor, what: str) -> None:
    require(same_bits(x, numbers(ctx)), f"{what} alone gives {x.flatten()[:4].tolist()}")


def all_reduce(ctx: SampleContext) -> None:
    for reduce in ("sum", "max", "min"):
        x = numbers(ctx)
        require(ctx.ops.communicator.all_reduce(x, GROUP, reduce) is x, "does not return its operand")
        unchanged(ctx, x, reduce)


def all_gather_rows(ctx: SampleContext) -> None:
    comm = ctx.ops.communicator
    unchanged(ctx, comm.all_gather_rows(numbers(ctx), GROUP), "a gather")
    unchanged(ctx, comm.all_gather_rows(numbers(ctx), GROUP, [3]), "a gather with counts")


def broadcast(ctx: SampleContext) -> None:
    x = numbers(ctx)
    require(ctx.ops.communicator.broadcast(x, GROUP) is x, "does not return its operand")
    unchanged(ctx, x, "a broadcast")


def broadcast_small(ctx: SampleContext) -> None:
    x = numbers(ctx)
    ctx.ops.communicator.broadcast_small([x, x.new_empty(0)], GROUP)
    unchanged(ctx, x, "a broadcast")


def barrier(ctx: SampleContext) -> None:
    ctx.ops.communicator.barrier(GROUP)


def exchange(ctx: SampleContext) -> None:
    x, target = numbers(ctx), torch.zeros_like(numbers(ctx))
    ctx.ops.communicator.exchange([(x, 0)], [(target, 0)], GROUP)
    unchanged(ctx, target, "a message to oneself")


def all_to_all_rows(ctx: SampleContext) -> None:
    comm = ctx.ops.communicator
    unchanged(ctx, comm.all_to_all_rows(numbers(ctx), [3], [3], GROUP), "dealing out rows")
    require(comm.all_to_all_rows(numbers(ctx)[:0], [0], [0], GROUP).shape == (0, 4), "dealing out no rows")


def gather_session(ctx: SampleContext) -> None:
    with ctx.ops.communicator.gather_session(GROUP) as session:
        own = session.own((3, 4), torch.float32)
        own.copy_(numbers(ctx))
        unchanged(ctx, session.all_gather(own).wait(), "a session's gather")


def exchange_experts(ctx: SampleContext) -> None:
    tables = [ctx.put(torch.arange(4)), ctx.put(torch.arange(4.0).view(4, 1).expand(4, 3).contiguous())]
    ctx.ops.communicator.exchange_experts(tables, [1, 1, 3, 2], GROUP)
    for table in tables:
        found = table.view(4, -1)[:, -1].tolist()
        require(found == [1, 1, 3, 2], f"slots hold {found}, expected [1, 1, 3, 2]")


def objects(ctx: SampleContext) -> None:
    comm = ctx.ops.communicator
    require(comm.gather_objects("a", GROUP) == ["a"], "gather_objects alone is not its own object")
    require(comm.broadcast_object(("b", 1), GROUP) == ("b", 1), "broadcast_object alone is not its own object")


# errors

BACKEND = (BackendError,)


def reduction(ctx: SampleContext) -> Iterator[ErrorSample]:
    yield ErrorSample("unknown reduction", lambda: (numbers(ctx), GROUP, "mean"), BACKEND)


def root(ctx: SampleContext) -> Iterator[ErrorSample]:
    yield ErrorSample("a root outside the group", lambda: (numbers(ctx), GROUP, 1), BACKEND)


def small_root(ctx: SampleContext) -> Iterator[ErrorSample]:
    yield ErrorSample("a root outside the group", lambda: ([numbers(ctx)], GROUP, 1), BACKEND)


def object_root(ctx: SampleContext) -> Iterator[ErrorSample]:
    yield ErrorSample("a root outside the group", lambda: ("a", GROUP, 1), BACKEND)


def gather_counts(ctx: SampleContext) -> Iterator[ErrorSample]:
    yield ErrorSample("counts of other rows", lambda: (numbers(ctx), GROUP, [2]), BACKEND)


def deal_counts(ctx: SampleContext) -> Iterator[ErrorSample]:
    yield ErrorSample("counts of other rows", lambda: (numbers(ctx), [2], [3], GROUP), BACKEND)


def peers(ctx: SampleContext) -> Iterator[ErrorSample]:
    def args(peer: int, rows: int) -> Args:
        return [(numbers(ctx), peer)], [(numbers(ctx)[:rows], peer)], GROUP

    yield ErrorSample("a peer outside the group", lambda: args(1, 3), BACKEND)
    yield ErrorSample("a message to oneself of another shape", lambda: args(0, 2), BACKEND)


def slots(ctx: SampleContext) -> Iterator[ErrorSample]:
    def args(source: list[int]) -> Args:
        return [ctx.put(torch.arange(4))], source, GROUP

    yield ErrorSample("a source outside", lambda: args([0, 1, 2, 4]), BACKEND)
    yield ErrorSample("sources of fewer slots", lambda: args([0, 1]), BACKEND)


def _info(op: str, check: Callable[[SampleContext], str | None], errors: object = None, changes: str = "") -> OpInfo:
    checks = (alone(check), *(together(op, size) for size in WORLDS))
    made = {} if errors is None else {"make_errors": errors}
    return OpInfo(
        f"communicator.{op}", properties=frozenset(), checks=checks, changes=frozenset(changes.split()), **made
    )


INFOS = (
    _info("open", opened),
    _info("close", closed),
    _info("capabilities", capabilities),
    _info("rank", facts),
    _info("size", facts),
    _info("members", facts),
    _info("one_fast_domain", one_fast_domain),
    _info("memory_used", memory_used),
    _info("all_reduce", all_reduce, reduction, "x"),
    _info("all_gather_rows", all_gather_rows, gather_counts),
    _info("broadcast", broadcast, root, "x"),
    _info("broadcast_small", broadcast_small, small_root, "tensors"),
    _info("barrier", barrier),
    _info("exchange", exchange, peers, "receives"),
    _info("all_to_all_rows", all_to_all_rows, deal_counts),
    _info("gather_session", gather_session),
    _info("exchange_experts", exchange_experts, slots, "tables"),
    _info("gather_objects", objects),
    _info("broadcast_object", objects, object_root),
)
