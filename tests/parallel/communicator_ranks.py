"""One rank of the communicator tests: runs every check below and writes {check: None or traceback} as JSON.

Started by test_communicator.py with the variables an elastic launcher sets; argument: folder for the results.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepinfer.errors import BackendError
from deepinfer.hooks.api import OpContext
from deepinfer.hooks.ops.communicator import CommunicatorOps
from deepinfer.hooks.types import EXACT, Numerics

GROUPS = {"world": [[0, 1, 2]], "pair": [[0, 2], [1]], "alone": [[0], [1], [2]]}
CHECKS: dict[str, Callable[[CommunicatorOps], None]] = {}


def check(function: Callable[[CommunicatorOps], None]) -> Callable[[CommunicatorOps], None]:
    CHECKS[function.__name__] = function
    return function


def make(numerics: Numerics = EXACT) -> CommunicatorOps:
    context = OpContext(torch.device("cpu"), numerics, traits=None, settings=SimpleNamespace(gloo_timeout=60.0))
    return CommunicatorOps(context)


def raises(part: str, call: Callable[[], object]) -> None:
    with pytest.raises(BackendError, match=re.escape(part)):
        call()


@check
def facts(comm: CommunicatorOps) -> None:
    me = dist.get_rank()
    assert (comm.rank("world"), comm.size("world"), comm.members("world")) == (me, 3, (0, 1, 2))
    assert (comm.rank("pair"), comm.size("pair")) == {0: (0, 2), 1: (0, 1), 2: (1, 2)}[me]
    assert comm.one_fast_domain("alone") and not comm.one_fast_domain("world")
    raises("no process group 'cp'; open are world, pair, alone", lambda: comm.size("cp"))


@check
def all_reduce(comm: CommunicatorOps) -> None:
    me = comm.rank("world")
    for reduce, expected in (("sum", 3), ("max", 2), ("min", 0)):
        for dtype in (torch.float32, torch.int64, torch.int32):
            x = torch.full((2, 3), me, dtype=dtype)
            assert comm.all_reduce(x, "world", reduce) is x
            assert torch.equal(x, torch.full_like(x, expected)), (reduce, dtype, x)
    strided = torch.full((4, 3), float(me)).t()[:, ::2]
    assert comm.all_reduce(strided, "world") is strided and strided.eq(3).all()
    x = torch.full((2,), float(me))
    comm.all_reduce(x, "pair")
    assert x[0] == {0: 2, 1: 1, 2: 2}[me]
    raises("expected one of sum, max, min", lambda: comm.all_reduce(x, "world", "mean"))


@check
def sum_of_16_bit_floats_is_rounded_once(comm: CommunicatorOps) -> None:
    values = torch.tensor([256.0, 1.0, 1.0])  # bf16 steps: 256 + 1 is lost, 256 + 2 is not
    x = values[comm.rank("world")].to(torch.bfloat16).repeat(4)
    assert comm.all_reduce(x, "world").dtype == torch.bfloat16 and x.eq(258).all(), x


@check
def order_free_sum_does_not_depend_on_size(comm: CommunicatorOps) -> None:
    free = make(Numerics(order_free=True))
    free._groups = comm._groups
    part = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank("world"))) * 1000
    whole, alone = part.clone(), part[:7].clone()
    free.all_reduce(whole, "world")
    free.all_reduce(alone, "world")
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) * 1000 for r in range(3)]
    assert torch.equal(whole[:7], alone)
    assert torch.equal(whole, sum(p.double() for p in parts).float())


@check
def all_gather_rows(comm: CommunicatorOps) -> None:
    me = comm.rank("world")
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool):
        x = torch.tensor([[0, 1], [1, 0]]).to(dtype) if me == 1 else torch.ones(2, 2).to(dtype)
        out = comm.all_gather_rows(x, "world")
        assert out.dtype == dtype and out.shape == (6, 2)
        assert out.to(torch.float32).tolist() == [[1, 1], [1, 1], [0, 1], [1, 0], [1, 1], [1, 1]], dtype
    assert comm.all_gather_rows(torch.empty(0, 5), "world").shape == (0, 5)
    assert comm.all_gather_rows(torch.full((1, 1), me), "pair").flatten().tolist() == ([1] if me == 1 else [0, 2])


@check
def all_gather_rows_of_unequal_counts(comm: CommunicatorOps) -> None:
    me, counts = comm.rank("world"), [2, 0, 3]
    out = comm.all_gather_rows(torch.full((counts[me], 4), float(me)), "world", counts)
    assert out[:, 0].tolist() == [0, 0, 2, 2, 2] and out.shape == (5, 4)
    raises("but counts are [1, 1, 1]", lambda: comm.all_gather_rows(torch.ones(2, 4), "world", [1, 1, 1]))


@check
def broadcast(comm: CommunicatorOps) -> None:
    me = comm.rank("world")
    for root in range(3):
        x = torch.full((2, 2), float(me)).to(torch.float8_e4m3fn).t()
        assert comm.broadcast(x, "world", root) is x and x.float().eq(root).all()
    if me != 1:
        x = torch.tensor([me])
        comm.broadcast(x, "pair", 1)
        assert x.item() == 2
    raises("has ranks 0..2, found 3", lambda: comm.broadcast(torch.ones(1), "world", 3))


@check
def broadcast_small(comm: CommunicatorOps) -> None:
    me = comm.rank("world")
    flags, ids = torch.full((3,), me == 0), torch.arange(4) * (1 if me == 0 else -1)
    scales = torch.full((2, 2), 0.5 if me == 0 else 9.0, dtype=torch.float64)
    empty = torch.empty(0, dtype=torch.int32)
    comm.broadcast_small([flags, ids, empty, scales], "world")
    assert flags.all() and ids.tolist() == [0, 1, 2, 3] and scales.eq(0.5).all()


@check
def exchange(comm: CommunicatorOps) -> None:
    me = comm.rank("world")

    def payload(source: int, target: int, number: int) -> torch.Tensor:
        return torch.full((2, number + 1), source * 100 + target * 10 + number, dtype=torch.int16)

    sends = [(payload(me, peer, number), peer) for number in range(3) for peer in range(3)]
    receives = [(torch.zeros(number + 1, 2, dtype=torch.int16).t(), peer) for peer in range(3) for number in range(3)]
    comm.exchange([*sends, (torch.empty(0), (me + 1) % 3)], receives, "world")
    for index, (x, peer) in enumerate(receives):
        assert torch.equal(x, payload(peer, me, index % 3)), (index, x)
    comm.exchange([], [], "world")
    raises("found a message with 3", lambda: comm.exchange([(torch.ones(1), 3)], [], "world"))
    raises("sends itself shapes [(1,)] but expects []", lambda: comm.exchange([(torch.ones(1), me)], [], "world"))


@check
def exchange_in_a_smaller_group_uses_group_ranks(comm: CommunicatorOps) -> None:
    if comm.size("pair") == 2:
        other, x = 1 - comm.rank("pair"), torch.zeros(1)
        comm.exchange([(torch.full((1,), float(comm.rank("pair"))), other)], [(x, other)], "pair")
        assert x.item() == other


@check
def all_to_all_rows(comm: CommunicatorOps) -> None:
    me, counts = comm.rank("world"), [[1, 2, 0], [0, 1, 3], [2, 0, 1]]  # counts[source][target]
    x = torch.cat([torch.full((rows, 2), me * 10 + peer) for peer, rows in enumerate(counts[me])])
    out = comm.all_to_all_rows(x, counts[me], [row[me] for row in counts], "world")
    expected = [peer * 10 + me for peer in range(3) for _ in range(counts[peer][me])]
    assert out[:, 0].tolist() == expected and out.shape[1] == 2
    raises("send counts [9, 0, 0]", lambda: comm.all_to_all_rows(x, [9, 0, 0], [1, 1, 1], "world"))


@check
def gather_session(comm: CommunicatorOps) -> None:
    me = comm.rank("world")
    with comm.gather_session("world", 1 << 10) as session:
        own = session.own((2, 3), torch.bfloat16)
        own.fill_(me)
        first, second = session.all_gather(own), session.all_gather(torch.full((1,), me, dtype=torch.int32))
        assert second.wait().tolist() == [0, 1, 2]
        rows = first.wait()
        assert rows.shape == (6, 3) and rows[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
        assert first.wait() is rows
        session.all_gather(own)  # never waited for: closing the session finishes it
    raises("session that has ended", first.wait)
    raises("session has ended", lambda: session.all_gather(own))


@check
def exchange_experts(comm: CommunicatorOps) -> None:
    me, slots = comm.rank("world"), 2
    source = [3, 1, 3, 0, 4, 2]  # swaps between ranks, a replica, one slot that stays, one that moves within its rank
    scales = torch.arange(me * slots, (me + 1) * slots, dtype=torch.uint8).view(slots, 1)
    weights = scales.to(torch.float32).view(slots, 1, 1).expand(slots, 3, 2).contiguous().to(torch.float8_e4m3fn)
    comm.exchange_experts([weights, scales], source, "world")
    expected = source[me * slots : (me + 1) * slots]
    assert scales.flatten().tolist() == expected
    assert weights.float()[:, 2, 1].tolist() == expected
    raises("need tables of 1 slots, found [2, 2]", lambda: comm.exchange_experts([weights, scales], [0] * 3, "world"))
    raises("expected global slots 0..5", lambda: comm.exchange_experts([weights, scales], [6] * 6, "world"))


@check
def objects(comm: CommunicatorOps) -> None:
    me = comm.rank("world")
    assert comm.gather_objects({"rank": me}, "world") == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert comm.broadcast_object(("step", me), "world", 2) == ("step", 2)


@check
def opening_twice_is_refused(comm: CommunicatorOps) -> None:
    raises("called twice", lambda: comm.open(GROUPS))


def run(name: str, comm: CommunicatorOps) -> str | None:
    """The traceback of a check on this rank, or a note that another rank failed, or None."""
    try:
        CHECKS[name](comm)
        error = None
    except Exception:
        error = traceback.format_exc()
    try:
        failed = [rank for rank, other in enumerate(comm.gather_objects(error, "world")) if other]
    except RuntimeError:  # the others are still inside the check and will time out
        failed = ["unknown"]
    return error or (f"failed on rank(s) {failed}" if failed else None)


def main(folder: Path) -> None:
    comm, results = make(), {}
    raises("before communicator.open", lambda: comm.size("world"))
    comm.open(GROUPS)
    for name in CHECKS:
        results[name] = run(name, comm)
        if results[name]:
            break  # the ranks may be out of step from here on
    comm.close()
    comm.close()
    results["closing_destroys_every_group"] = "still initialised" if dist.is_initialized() else None
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
