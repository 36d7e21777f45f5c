"""`deepinfer bisect` names the one wrong op among many native ones, and says so where nothing is wrong."""

from __future__ import annotations

import json

import pytest

from deepinfer.hooks import provides
from deepinfer.testing import bisect as bisection
from deepinfer.testing.bisect import Unit, bisect, switchable, text
from deepinfer.testing.conformance.runs import Script
from deepinfer.testing.replay import replay
from deepinfer.testing.subject import load_groups, make_subject

from .kit_backends import (
    HONEST,
    PRIVATE,
    HonestExperts,
    HonestGemm,
    HonestResidual,
    PrivateCache,
    WrongPrivateCache,
    WrongSwiglu,
)

SHORT = {"script": Script.make((5, 60), 4, 512, seed=0)}
"""Less to run than by default, where whole texts show the mistake."""


def other_than(kind):
    return [klass for klass in HONEST if not issubclass(kind, klass)]


@pytest.mark.slow
def test_a_correct_backend_is_equal():
    finding = bisect(load_groups(*HONEST, name="fine"), **SHORT)
    assert not finding.diverges and not finding.culprits
    assert text(finding, "fine") == "fine follows the reference: nothing to find"


def test_the_planted_op_is_named_with_its_first_wrong_call(tmp_path):
    class Planted(WrongSwiglu):
        @provides()
        def swiglu(self, gate_up, limit, row_weight=None):
            return super().swiglu(gate_up, limit, row_weight) * -4

    shown = []
    loaded = load_groups(Planted, *other_than(Planted), name="bad")
    finding = bisect(loaded, directory=tmp_path, show=shown.append, **SHORT)
    assert finding.diverges and finding.culprits == ("gemm.swiglu",) and not finding.with_
    assert shown[0] == "bad: 8 native ops in 8 units that can be switched"
    assert len(shown) <= 8, "halving needs few runs"
    said = text(finding, "bad")
    assert said.startswith("culprit: gemm.swiglu\n") and "--op 'gemm.swiglu=reference'" in said
    (stored,) = tmp_path.glob("*.json")
    assert stored.name == "gemm.swiglu-call1.json" and json.loads(stored.read_text())["provider"] == "bad"
    assert not replay(stored, "bad", loaded).ok and replay(stored, "local", load_groups(HonestGemm)).ok


@pytest.mark.slow
def test_in_a_private_layout_the_op_that_reads_wrong_is_named(tmp_path):
    loaded = load_groups(WrongPrivateCache, HonestGemm, HonestResidual, name="bad")
    units = switchable(make_subject(loaded))
    assert [len(unit.ops) for unit in units].count(12) == 1
    finding = bisect(loaded, directory=tmp_path)
    assert finding.culprits == ("cache.load_window",)
    assert finding.call is not None and not finding.call.ok


class Interplay(HonestGemm):
    """Each half is right alone; together they are wrong."""

    @provides()
    def rms_norm(self, x, weight, eps):
        y = super().rms_norm(x, weight, eps)
        y._marked = True
        return y

    @provides()
    def quantize(self, x):
        return super().quantize(x.roll(1, -1) if hasattr(x, "_marked") else x)


@pytest.mark.slow
def test_ops_that_are_wrong_only_together_are_both_named(tmp_path):
    finding = bisect(load_groups(Interplay, HonestExperts, name="bad"), directory=tmp_path)
    named = {*finding.culprits, *(op for unit in finding.with_ for op in unit.ops)}
    assert named == {"gemm.rms_norm", "gemm.quantize"}
    assert "only together with" in text(finding, "bad")


def test_an_op_that_raises_is_found(tmp_path):
    class Raising(HonestGemm):
        @provides()
        def swiglu(self, gate_up, limit, row_weight=None):
            raise RuntimeError("no such kernel")

    finding = bisect(load_groups(Raising, HonestResidual, name="bad"), directory=tmp_path, **SHORT)
    assert finding.culprits == ("gemm.swiglu",) and "no such kernel" in finding.detail
    assert "raised RuntimeError: no such kernel" in text(finding, "bad")


def test_units_are_single_ops_or_share_a_private_layout():
    units = switchable(make_subject(load_groups(PrivateCache, HonestGemm, name="some")))
    by_size = {len(unit.ops): unit for unit in units}
    assert by_size.keys() == {1, 12}
    assert all(op.startswith("cache.") for op in by_size[12].ops) and PRIVATE in str(by_size[12])
    assert [str(u) for u in units if len(u.ops) == 1] == ["gemm.linear", "gemm.rms_norm", "gemm.swiglu"]


class FakeBench:
    """Diverges where all the ops named are native."""

    def __init__(self, *bad):
        self.bad, self.runs = set(bad), []

    def divergence(self, keep, label, wrappers=()):
        self.runs.append(list(keep))
        return "wrong" if self.bad <= set(keep) else None


@pytest.mark.parametrize("bad", [("a",), ("h",), ("e",), ("b", "g"), ("a", "h"), ("b", "e", "g")])
def test_the_search_finds_every_combination_in_few_runs(bad):
    bench, units = FakeBench(*bad), [Unit((op,)) for op in "abcdefgh"]
    chain = bisection._minimal_chain(bench, units)
    assert {op for unit in chain for op in unit.ops} == set(bad)
    assert len(bench.runs) <= 4 * len(bad)


def test_a_divergence_without_native_ops_is_not_blamed_on_one(monkeypatch, tmp_path):
    bench = FakeBench()
    bench.subject, bench.show = make_subject(load_groups(HonestGemm)), lambda text: None
    finding = bisection._search(bench, tmp_path)
    assert finding.diverges and not finding.culprits and "look at the runtime" in text(finding, "bad")
