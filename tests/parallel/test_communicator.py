"""CommunicatorOps: alone in its process, three ranks over Gloo, and launches that do not fit."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepinfer.errors import BackendError, ConfigError
from deepinfer.hooks.api import OpContext
from deepinfer.hooks.ops.communicator import CommunicatorOps
from deepinfer.hooks.types import EXACT
from deepinfer.parallel.plan import ParallelPlan

RANKS_FILE = Path(__file__).with_name("communicator_ranks.py")
WORLD = 3


def _check_names() -> list[str]:
    spec = importlib.util.spec_from_file_location("communicator_ranks", RANKS_FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [*module.CHECKS, "closing_destroys_every_group"]


def make(timeout: float = 60.0) -> CommunicatorOps:
    settings = SimpleNamespace(gloo_timeout=timeout)
    return CommunicatorOps(OpContext(torch.device("cpu"), EXACT, traits=None, settings=settings))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> object:
    """Sets the launcher's variables of this process; none are set before."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def launch(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return launch


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, str | None]]:
    """Results of every check on every rank."""
    folder = tmp_path_factory.mktemp("ranks")
    common = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(RANKS_FILE), str(folder)]
    processes = [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", _check_names())
def test_three_ranks(three_ranks: list[Mapping[str, str | None]], name: str) -> None:
    for rank, results in enumerate(three_ranks):
        assert name in results, f"rank {rank} stopped before {name}: {[r for r in results.values() if r]}"
        assert results[name] is None, f"rank {rank}: {results[name]}"


@pytest.mark.parametrize("opened", [False, True])
def test_alone_everything_is_identity(launcher: object, opened: bool) -> None:
    comm = make()
    if opened:
        comm.open(ParallelPlan.create().groups())
    x = torch.randn(3, 2)
    assert (comm.rank("ep"), comm.size("ep"), comm.members("ep")) == (0, 1, (0,))
    assert comm.all_reduce(x, "ep") is x and comm.broadcast(x, "cp") is x
    assert torch.equal(comm.all_gather_rows(x, "dp"), x) and torch.equal(comm.all_gather_rows(x, "dp", [3]), x)
    assert torch.equal(comm.all_to_all_rows(x, [3], [3], "ep"), x)
    with comm.gather_session("cp") as session:
        assert torch.equal(session.all_gather(x).wait(), x)
    table = torch.arange(4)
    comm.exchange_experts([table], [1, 1, 3, 2], "ep")
    assert table.tolist() == [1, 1, 3, 2]
    assert comm.gather_objects("a", "world") == ["a"] and comm.broadcast_object("b", "world") == "b"
    comm.barrier("world")
    comm.broadcast_small([x], "cp")
    assert comm.one_fast_domain("ep") and comm.memory_used() == 0
    assert not dist.is_available() or not dist.is_initialized()
    comm.close()


def test_plan_larger_than_the_launch_is_refused(launcher: object) -> None:
    plan = ParallelPlan.create(expert_parallel_size=2)
    with pytest.raises(ConfigError, match=r"group 'world' is \[\[0, 1\]\], .* the 1 launched rank"):
        make().open(plan.groups())


def test_unsorted_members_are_refused(launcher: object) -> None:
    launcher(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    with pytest.raises(ConfigError, match="in ascending order"):
        make().open({"ep": [[1, 0]]})


def test_incomplete_launch_is_refused(launcher: object) -> None:
    launcher(WORLD_SIZE=2, RANK=0)
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT is not set; start the ranks with torchrun"):
        make().open({"world": [[0, 1]]})
    launcher(WORLD_SIZE="two")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two', expected a whole number"):
        make().open({"world": [[0, 1]]})


def test_ranks_that_never_come_end_in_an_error(launcher: object) -> None:
    launcher(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    with pytest.raises(BackendError, match="rank 0 of 2 could not join its process groups over gloo within 1 s"):
        make(timeout=1.0).open({"world": [[0, 1]]})
    assert not dist.is_initialized()


def test_groups_of_an_embedding_program_are_left_alone(launcher: object) -> None:
    launcher(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        comm = make()
        comm.open({"world": [[0]]})
        comm.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
