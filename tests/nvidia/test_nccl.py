"""The NCCL communicator without NCCL: what it asks of torch.distributed, and what it knows of its groups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepinfer.errors import BackendError, ConfigError
from deepinfer.hooks import EXACT, Numerics, OpContext
from deepinfer.hooks.bind import bind
from deepinfer.testing.subject import load_groups
from deepinfer_nvidia import communicator as nccl
from deepinfer_nvidia.communicator import Communicator


@pytest.fixture
def make(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DEEPINFER_NCCL_NUM_SMS"):
        monkeypatch.delenv(name, raising=False)
    return lambda: Communicator(
        OpContext(torch.device("cpu"), EXACT, traits=None, settings=SimpleNamespace(gloo_timeout=9))
    )


@pytest.fixture
def two_ranks(monkeypatch):
    """A world of two ranks as rank 0 sees it; records the groups that are made and destroyed."""
    made, destroyed = [], []

    def new_group(ranks, timeout, backend, pg_options):
        assert timeout.total_seconds() == 9
        made.append((tuple(ranks), backend, pg_options.config.min_ctas, pg_options.config.max_ctas))
        used = SimpleNamespace(memory_stats=lambda: {"total": 1000 * len(made)})
        return SimpleNamespace(index=len(made), _get_backend=lambda device: used)

    def gather(values, value, group):
        values[:] = [value, HOSTS[0]] if HOSTS else [value, value]

    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(min_ctas=0, max_ctas=0)))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_reduce", lambda x, *args, group: x)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "destroy_process_group", lambda handle: destroyed.append(handle.index))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    HOSTS.clear()
    return made, destroyed


HOSTS: list[str] = []
"""Host of rank 1, where it is another one."""

GROUPS = {"world": [[0, 1]], "expert": [[0, 1]], "own": [[0], [1]]}


def test_groups_of_several_ranks_are_nccl_with_a_bounded_number_of_ctas(make, two_ranks, monkeypatch):
    made, destroyed = two_ranks
    monkeypatch.setenv("DEEPINFER_NCCL_NUM_SMS", "12")
    group = make()
    group.open(GROUPS)
    assert made == [((0, 1), "nccl", 12, 12)] * 2
    assert (group.size("expert"), group.rank("expert"), group.size("own")) == (2, 0, 1)
    assert group.memory_used() == 2 * 2000
    with pytest.raises(BackendError, match="called twice"):
        group.open(GROUPS)
    group.close()
    group.close()
    assert destroyed == [2, 1]
    assert group.memory_used() == 0


def test_a_wrong_number_of_ctas_is_named(make, two_ranks, monkeypatch):
    monkeypatch.setenv("DEEPINFER_NCCL_NUM_SMS", "many")
    with pytest.raises(ConfigError, match="DEEPINFER_NCCL_NUM_SMS='many': expected an integer"):
        make().open(GROUPS)


def test_one_fast_domain_needs_one_host_and_peer_access(make, two_ranks, monkeypatch):
    group = make()
    group.open(GROUPS)
    assert group.one_fast_domain("expert") and group.one_fast_domain("own")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    assert not group.one_fast_domain("expert")
    group.close()
    HOSTS.append("another host")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    group.open(GROUPS)
    assert not group.one_fast_domain("expert") and group.one_fast_domain("own")


def test_a_build_without_statistics_reports_nothing():
    assert nccl.backend_bytes(SimpleNamespace(_get_backend=lambda device: SimpleNamespace())) == 0


def test_alone_it_needs_no_nccl(make):
    group = make()
    group.open({"world": [[0]]})
    x = torch.arange(4.0)
    assert torch.equal(group.all_reduce(x, "world"), x) and group.one_fast_domain("world")
    assert group.gather_objects("here", "world") == ["here"]
    group.close()


def test_batch_invariance_keeps_the_communicator():
    from deepinfer.hooks.build import contributions
    from deepinfer.models.deepseek_v41.config import ModelConfig
    from deepinfer.testing.subject import model_traits

    loaded = load_groups(Communicator, name="nvidia")
    context = OpContext(torch.device("cpu"), Numerics(order_free=True), model_traits(ModelConfig.builtin("micro")))
    ops = bind(contributions(loaded), context, batch_invariant=True)
    assert {ops.binding(f"communicator.{op}").provider.name for op in ("open", "all_reduce", "barrier")} == {"nvidia"}
