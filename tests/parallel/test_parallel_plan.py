"""ParallelPlan: the layouts worked out by hand, the invariants of every legal layout, the refusals."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deepinfer.errors import ConfigError
from deepinfer.parallel.plan import ParallelPlan


def test_alone() -> None:
    plan = ParallelPlan.create()
    assert (plan.world, plan.cp, plan.dp, plan.ep, plan.enp, plan.engines) == (1, 1, 1, 1, 1, 1)
    assert set(plan.groups().values()) == {((0,),)}


def test_eight_experts_ranks_are_eight_engines() -> None:
    plan = ParallelPlan.create(expert_parallel_size=8)
    assert (plan.dp, plan.engines, plan.enp, plan.expert_copies) == (8, 8, 8, 1)
    assert plan.groups()["dp"] == (tuple(range(8)),)


def test_expert_pairs_in_eight_engines() -> None:
    plan = ParallelPlan.create(expert_parallel_size=2, data_parallel_size=8)
    groups = plan.groups()
    assert plan.engines == 8 and plan.expert_copies == 4
    assert groups["ep"] == groups["ep_in_dp"] == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_one_engine_over_eight_context_ranks() -> None:
    plan = ParallelPlan.create(context_parallel_size=8, expert_parallel_size=2)
    groups = plan.groups()
    assert (plan.dp, plan.engines) == (1, 1)
    assert groups["cp"] == (tuple(range(8)),)
    assert groups["ep"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups["ep_in_dp"] == tuple((rank,) for rank in range(8))


def test_context_and_data_parallel() -> None:
    plan = ParallelPlan.create(context_parallel_size=2, expert_parallel_size=8)
    assert plan.dp == 4
    assert plan.groups()["dp"] == ((0, 2, 4, 6), (1, 3, 5, 7))
    at = plan.place(5)
    assert (at.engine, at.cp, at.dp, at.ep, at.block) == (2, 1, 2, 5, 0)
    assert plan.rank_of(2, 1) == 5


def test_engram_over_more_ranks_than_a_block() -> None:
    plan = ParallelPlan.create(context_parallel_size=2, data_parallel_size=2, engram_parallel_size=8)
    assert (plan.world, plan.engines) == (8, 4)
    assert plan.groups()["dp"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert [plan.place(r).dp for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [plan.place(r).block for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_zero_means_derive() -> None:
    assert ParallelPlan.create(2, 0, 8, 0) == ParallelPlan.create(2, None, 8, None)


def test_hosts() -> None:
    plan = ParallelPlan.create(expert_parallel_size=8, ranks_per_host=4)
    assert plan.groups()["local"] == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"expert_parallel_size": 0}, "expert_parallel_size is 0, expected a whole number of at least 1"),
        ({"context_parallel_size": -2}, "context_parallel_size is -2"),
        ({"data_parallel_size": 1.5}, "data_parallel_size is 1.5"),
        ({"data_parallel_size": 6, "expert_parallel_size": 4}, "groups of 4; use one of 1, 2, 3, 6"),
        ({"data_parallel_size": 4, "engram_parallel_size": 6}, "multiple of context parallel 1 x data parallel 4"),
        ({"data_parallel_size": 4, "engram_parallel_size": 3}, "groups of 3; use one of 1, 2, 4, or a multiple of 4"),
        ({"expert_parallel_size": 4, "world_size": 2}, "launcher started 2 ranks, but .* needs 4; start 4 ranks"),
        ({"expert_parallel_size": 4, "ranks_per_host": 3}, "4 ranks do not fill hosts"),
    ],
)
def test_refusals_name_what_to_do(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelPlan.create(**sizes)


def test_places_outside_the_world_are_refused() -> None:
    plan = ParallelPlan.create(context_parallel_size=2, expert_parallel_size=4)
    with pytest.raises(ConfigError, match="rank 4 is outside this plan, which has ranks 0..3"):
        plan.place(4)
    with pytest.raises(ConfigError, match="engines 0..1 with context ranks 0..1"):
        plan.rank_of(2)


def test_explanation_names_every_group_and_rank() -> None:
    text = ParallelPlan.create(context_parallel_size=2, expert_parallel_size=4).explain()
    assert "4 rank(s) = 2 engine(s) x 2 context rank(s)" in text
    assert "dp       {0,2} {1,3}" in text
    assert text.splitlines()[-1].split() == ["3", "0", "1", "1", "1", "3", "3"]


@given(cp=st.integers(1, 6), dp=st.integers(0, 6), ep=st.integers(1, 12), enp=st.integers(0, 24))
def test_every_legal_plan_partitions_the_world(cp: int, dp: int, ep: int, enp: int) -> None:
    try:
        plan = ParallelPlan.create(cp, dp, ep, enp)
    except ConfigError:
        assume(False)
    groups, sizes = plan.groups(), {"cp": plan.cp, "dp": plan.dp, "ep": plan.ep, "enp": plan.enp}
    for name, partition in groups.items():
        assert sorted(rank for members in partition for rank in members) == list(range(plan.world)), name
    for name, size in sizes.items():
        assert {len(members) for members in groups[name]} == {size}
        for members in groups[name]:
            assert [getattr(plan.place(rank), name) for rank in members] == list(range(size)), name
    for members in groups["dp"]:
        assert len({plan.place(rank).cp for rank in members}) == len({plan.place(rank).block for rank in members}) == 1
    for members in groups["ep"]:
        assert len({plan.place(rank).block for rank in members}) == 1
    for members in groups["ep_in_dp"]:
        assert len({(plan.place(r).cp, plan.place(r).block, r // plan.ep) for r in members}) == 1
