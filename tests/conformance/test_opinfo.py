"""The op records: complete, reproducible, and passed by the cpu backend on levels 1 and 2."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest
import torch

from deepinfer.hooks import Numerics, QuantTensor, provides
from deepinfer.hooks.devices.facts import RuntimeCapabilities
from deepinfer.hooks.ops import CONTRACTS, contracts
from deepinfer.hooks.ops.gemm import GemmOps
from deepinfer.hooks.ops.runtime import RuntimeOps
from deepinfer.testing import yardstick
from deepinfer.testing.conformance import ops, properties
from deepinfer.testing.opinfo import Trio, op_infos
from deepinfer.testing.opinfo.context import ForeignQuant
from deepinfer.testing.opinfo.tree import memory, same_bits, tensors, values
from deepinfer.testing.results import FAIL, PASS, SKIP
from deepinfer.testing.subject import load_groups, make_subject

SPECS = {spec.name: spec for contract in contracts() for spec in contract.op_specs.values()}
INFOS = op_infos()
NUMERIC = [name for name, info in INFOS.items() if info.group not in ("runtime", "communicator")]


@pytest.fixture(scope="module")
def subject():
    return make_subject("cpu", "micro")


@pytest.fixture(scope="module")
def trio(subject):
    return Trio.of(subject, seed=3)


def bad(results):
    return [f"{r.op} | {r.case} | {r.detail}" for r in results if r.bad]


# the records


def test_every_op_has_a_record_and_every_record_an_op():
    assert list(INFOS) == list(SPECS)
    for group, _ in CONTRACTS:
        written = [info.name for info in importlib.import_module(f"deepinfer.testing.opinfo.{group}").INFOS]
        assert Counter(written) == Counter(name for name in SPECS if name.startswith(f"{group}."))


@pytest.mark.parametrize("name", NUMERIC)
def test_samples_have_names_of_their_own(trio, name):
    samples = list(INFOS[name].samples(trio.found))
    names = [sample.name for sample in samples]
    assert len(names) == len(set(names)) >= 1
    assert [s.name for s in INFOS[name].samples(trio.found, quick=True)] == [s.name for s in samples if not s.slow]


@pytest.mark.parametrize("name", [name for name in INFOS if name not in NUMERIC])
def test_ops_without_numbers_have_checks(name):
    assert INFOS[name].checks


@pytest.mark.parametrize("name", NUMERIC)
def test_samples_of_all_contexts_have_equal_values_in_memory_of_their_own(trio, name):
    """What the subject gets is what the reference gets, and a second `fresh` shares nothing that may be changed."""
    info = INFOS[name]
    made = [list(info.samples(ctx, quick=True)) for ctx in trio.all]
    assert len({tuple(s.name for s in samples) for samples in made}) == 1
    for found, working, ideal in list(zip(*made, strict=True))[:3]:
        args, again = found.fresh(), found.fresh()
        plain = {key: x for key, x in tensors(args) if "storage" not in key}
        assert all(same_bits(x, dict(tensors(again))[key]) for key, x in plain.items()), found.name
        for key, x in tensors(working.fresh()):
            assert same_bits(x, dict(tensors(args))[key]), f"{found.name}: {key}"
        for key, x in values(ideal.fresh()):
            if isinstance(x, torch.Tensor) and key in plain and x.dtype == torch.float64:
                assert torch.equal(x, plain[key].double()) or (x - plain[key].double()).isnan().any(), key


@pytest.mark.parametrize("name", NUMERIC)
def test_costs_are_numbers(trio, name):
    for sample in INFOS[name].samples(trio.found, quick=True):
        cost = INFOS[name].cost(sample)
        assert cost.flops >= 0
        assert cost.bytes >= 0


def test_the_cost_of_a_product(trio):
    sample = next(s for s in INFOS["gemm.linear"].samples(trio.found) if "37 x" in s.name)
    out = trio.found.traits.q_lora_rank + trio.found.traits.head_dim
    assert INFOS["gemm.linear"].cost(sample).flops == 2 * 37 * out * trio.found.traits.hidden_size


def test_another_seed_gives_other_numbers(trio):
    info = INFOS["residual.collapse"]
    first, second = (next(iter(info.samples(ctx))).fresh() for ctx in (trio.found, trio.found.reseeded(4)))
    assert not torch.equal(first[0], second[0])
    assert first[0].shape == second[0].shape


def test_foreign_layouts_hold_what_the_quantizer_gives(trio):
    ctx = trio.found.at("foreign")
    x = ctx.uneven("x", 5, 96)
    foreign = ctx.foreign(x)
    assert isinstance(foreign, ForeignQuant)
    assert torch.equal(foreign.dequantize(), ctx.quantized(x).dequantize())
    assert torch.equal(foreign.take(torch.tensor([3])).dequantize(), foreign.dequantize()[3:4])


def test_the_yardstick_keeps_quantizers_inside_and_leaves_roundings_out(subject):
    ideal = yardstick.ideal_table(subject.context)
    x = torch.randn(3, 64, dtype=torch.float64)
    held = ideal.gemm.quantize(x)
    assert isinstance(held, QuantTensor)
    assert torch.equal(held.exact, x)
    assert not torch.equal(held.dequantize().double(), x)
    normed = ideal.gemm.rms_norm(x, torch.ones(64, dtype=torch.float64), 1e-6)
    assert normed.dtype == torch.float64
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(normed, expected, rtol=1e-14, atol=0)


# the cpu backend passes


def test_level_1_of_cpu(subject):
    results = list(ops.run(subject, INFOS, quick=True))
    assert not bad(results)
    assert {r.op for r in results} == set(SPECS)
    assert [r.detail for r in results if r.status == SKIP] == ["every index means the one CPU"]
    assert max(Counter((r.op, r.case) for r in results).values()) == 1


def test_level_2_of_cpu(subject):
    results = list(properties.run(subject, INFOS, quick=True))
    assert not bad(results)
    assert [r.detail for r in results if r.status == SKIP] == ["the runtime has no device graphs"]
    assert max(Counter((r.op, r.case) for r in results).values()) == 1
    cases = {r.case.split(":")[0] for r in results}
    assert {"repeatable", "side stream", "canary", "batch invariant, order-free sums", "prompt cut anywhere",
            "prompt cut anywhere, order-free sums", "frequencies", "identity experts"} <= cases  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "numerics", [Numerics(quantize=False), Numerics(order_free=True)], ids=["smooth", "order-free"]
)
@pytest.mark.parametrize("level", [ops, properties])
def test_cpu_in_other_numerics(level, numerics):
    assert not bad(level.run(make_subject("cpu", "micro", numerics=numerics), INFOS, quick=True, seed=11))


@pytest.mark.slow
@pytest.mark.parametrize("level", [ops, properties])
def test_everything_of_cpu(subject, level):
    results = list(level.run(subject, INFOS, quick=False, seed=5))
    assert not bad(results)
    assert any(r.case == "4 processes" and r.status == PASS for r in results) == (level is properties)
    assert any("2^31 bytes" in r.case for r in results) == (level is ops)


@pytest.mark.slow
def test_cpu_passes_with_other_numbers(subject):
    chosen = [INFOS[name] for name in NUMERIC]
    assert not bad(ops.run(subject, chosen, quick=True, seed=100))
    assert not bad(properties.run(subject, chosen, quick=True, seed=100))


# what failures say


def group(base, **methods):
    """A class of `base` with these overrides, and its subject."""
    return make_subject(load_groups(type("Local", (base,), methods), name="local"), "micro")


def first_bad(level, subject, name, **options):
    return next(r for r in level.run(subject, {name: INFOS[name]}, quick=True, **options) if r.bad)


def test_an_op_that_raises_fails_its_case_and_not_the_run():
    @provides()
    def swiglu(self, gate_up, limit, row_weight=None):
        if gate_up.shape[0] == 37:
            raise RuntimeError("no kernel for 37 rows")
        return GemmOps.swiglu(self, gate_up, limit, row_weight)

    results = list(ops.run(group(GemmOps, swiglu=swiglu), {"gemm.swiglu": INFOS["gemm.swiglu"]}, quick=True))
    failed = [r for r in results if r.status == FAIL]
    assert [r.op for r in failed] == ["gemm.swiglu"]
    assert "37 x" in failed[0].case
    assert "raised RuntimeError: no kernel for 37 rows" in failed[0].detail
    assert results[-1].status == PASS


def test_a_failure_names_the_seed_and_the_seed_brings_it_back():
    @provides()
    def rms_norm(self, x, weight, eps):
        out = GemmOps.rms_norm(self, x, weight, eps)
        return torch.where(x > 2.9, 0.0, out)

    made = group(GemmOps, rms_norm=rms_norm)
    found = first_bad(ops, made, "gemm.rms_norm", seed=77)
    assert "[seed 77]" in found.detail
    assert set(found.worst) == {"error", "bound", "index", "found", "expected"}
    assert first_bad(ops, made, "gemm.rms_norm", seed=77).worst == found.worst


def test_uninitialised_memory_shows():
    @provides()
    def rms_norm(self, x, weight, eps):
        out = torch.empty_like(x)
        whole = GemmOps.rms_norm(self, x, weight, eps)
        out[..., :-1] = whole[..., :-1]
        return out

    found = first_bad(ops, group(GemmOps, rms_norm=rms_norm), "gemm.rms_norm")
    assert "nan at" in found.detail


def test_a_wrong_dtype_and_a_missing_error_show():
    @provides()
    def swiglu(self, gate_up, limit, row_weight=None):
        return GemmOps.swiglu(self, gate_up, limit, row_weight).to(torch.bfloat16)

    assert (
        "out has the dtype torch.bfloat16, expected torch.float32"
        in first_bad(ops, group(GemmOps, swiglu=swiglu), "gemm.swiglu").detail
    )

    @provides()
    def rms_norm(self, x, weight, eps):
        return GemmOps.rms_norm(self, x, weight[: x.shape[-1]].new_ones(x.shape[-1]) * weight[0], eps)

    last = [r for r in ops.run(group(GemmOps, rms_norm=rms_norm), [INFOS["gemm.rms_norm"]], quick=True) if r.bad][-1]
    assert last.case == "error: weight of another width"
    assert "accepted operands that break the contract" in last.detail


def test_native_ops_need_not_be_repeatable_if_they_say_so():
    calls = []

    def swiglu(self, gate_up, limit, row_weight=None):
        calls.append(1)
        return GemmOps.swiglu(self, gate_up, limit, row_weight) * (1 + len(calls) % 2 * 1e-7)

    honest = group(GemmOps, swiglu=provides(deterministic=False)(swiglu))
    results = list(properties.run(honest, [INFOS["gemm.swiglu"]], quick=True))
    assert not bad(results)
    assert "not declared deterministic" in {r.detail for r in results if r.status == SKIP}
    found = first_bad(properties, group(GemmOps, swiglu=provides()(swiglu)), "gemm.swiglu")
    assert found.case.startswith("repeatable")
    assert "call 2 with equal operands gives other bits" in found.detail


class GraphRuntime(RuntimeOps):
    """A runtime that says it has graphs; a replay runs the function again."""

    @provides()
    def capabilities(self):
        return RuntimeCapabilities(supports_graphs=True)


def graphs_of(swiglu):
    """Graph replay cases of an implementation of gemm.swiglu."""
    klass = type("Local", (GemmOps,), {"swiglu": swiglu})
    made = make_subject(load_groups(klass, GraphRuntime, name="local"), "micro")
    return [r for r in properties.run(made, [INFOS["gemm.swiglu"]], quick=True) if r.case.startswith("graph replay")]


def swiglu_as_it_is(self, gate_up, limit, row_weight=None):
    return GemmOps.swiglu(self, gate_up, limit, row_weight)


def test_graph_replay_is_tried_where_the_runtime_has_graphs_and_the_op_is_declared_safe():
    assert [r.status for r in graphs_of(provides(graph_safe=True)(swiglu_as_it_is))] == [PASS]


def test_graph_replay_is_not_tried_where_the_op_is_not_declared_safe():
    assert graphs_of(provides()(swiglu_as_it_is)) == []


def test_a_value_kept_from_the_first_call_is_found_by_a_replay():
    seen = {}

    @provides(graph_safe=True)
    def frozen(self, gate_up, limit, row_weight=None):
        kept = seen.setdefault(gate_up.data_ptr(), (gate_up, gate_up.clone()))[1]
        return GemmOps.swiglu(self, kept, limit, row_weight)

    (found,) = graphs_of(frozen)
    assert found.status == FAIL
    assert "replayed, the call gives other bits than a plain one on changed operands" in found.detail


def test_memory_of_results_is_compared_by_storage():
    x = torch.zeros(4, 4)
    assert x[1:].untyped_storage().data_ptr() in memory({"x": x})
    assert memory({"empty": torch.zeros(0)}) == {}
