"""The real op contracts: every op documented and declared, nothing the framework cannot bind exactly."""

from __future__ import annotations

import inspect
import re

import pytest

from deepinfer.hooks import OpContext, OpGroup, OpSpec
from deepinfer.hooks.ops import CONTRACTS, contracts
from deepinfer.hooks.table import OpTable

ALL = [spec for contract in contracts() for spec in contract.op_specs.values()]
PRIMARY = ("runtime", "communicator", "attention", "gemm", "experts")


def test_every_group_has_its_contract():
    assert [contract.group for contract in contracts()] == [group for group, _ in CONTRACTS]
    assert len(contracts()) == 11
    for contract in contracts():
        assert issubclass(contract, OpGroup)
        assert contract.__doc__
        assert contract.factory == f"deepinfer_create_{contract.group}"
        assert contract.group not in dir(OpTable), "collides with a member of the table"
        assert contract.op_specs, f"{contract.group} has no op"
    assert {c.group for c in contracts() if c.whole} == {"runtime", "communicator"}
    assert {c.group for c in contracts()} >= set(PRIMARY)


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_op(spec: OpSpec):
    """Docstring with what goes in and comes out; positional parameters only; a layout where private data is made."""
    assert spec.function.__doc__, f"{spec.name} has no docstring"
    parameters = list(inspect.signature(spec.function).parameters.values())
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}, f"{spec.name}: {parameters}"
    assert parameters[0].name == "self"
    assert spec.version >= 1
    text = spec.function.__doc__
    if spec.group in ("runtime", "communicator"):
        return  # tensors of any shape and dtype pass through
    tensors = [p.name for p in parameters if "Tensor" in str(p.annotation)]
    undocumented = [name for name in tensors if not re.search(rf"\b{name}\b", text)]
    assert not undocumented, f"{spec.name}: the docstring does not mention {undocumented}"
    if tensors:
        assert re.search(r"\[[^\]]*\]", text), f"{spec.name}: the docstring gives no shapes"


@pytest.mark.parametrize("contract", contracts(), ids=lambda contract: contract.group)
def test_public_methods_are_ops_or_say_that_they_are_not(contract: type[OpGroup]):
    """A public method that is no op would be bound by nobody; one that is meant to be overridden only says so."""
    loose = [
        name
        for name, value in vars(contract).items()
        if not name.startswith("_") and inspect.isfunction(value) and name not in contract.op_specs and name != "refuse"
    ]
    assert [name for name in loose if "Not an op" not in (vars(contract)[name].__doc__ or "")] == []


def test_composed_bodies_touch_no_private_data():
    """A composed body serves any layout, so it may hand storage on but not look into it."""
    guilty = [s.name for s in ALL if s.composed and s.layouts and "storage" in s.function.__code__.co_names]
    assert guilty == []


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_opaque_operands_have_a_layout_tag(spec: OpSpec):
    """Whoever reads a cache or a prepared weight must agree with whoever made it."""
    annotations = " ".join(str(p.annotation) for p in inspect.signature(spec.function).parameters.values())
    if "KVCache" in annotations:
        assert "kv_cache" in spec.layouts
    if re.search(r"prepared (dense|\[)", spec.function.__doc__ or "") and spec.group in ("gemm", "experts"):
        assert {"dense_weight", "expert_weight"} & set(spec.layouts)
    if "MoeWeights" in annotations:
        assert {"dense_weight", "expert_weight"} <= set(spec.layouts)


def test_bodies_reach_other_ops_through_the_table():
    """`self.<op>` in a body would bypass overrides and op packs; whole groups have one provider and may."""
    guilty = []
    for contract in contracts():
        if contract.whole:
            continue
        for spec in contract.op_specs.values():
            source = inspect.getsource(spec.function)
            guilty += [f"{spec.name} calls self.{m}" for m in contract.op_specs if re.search(rf"\bself\.{m}\(", source)]
    assert guilty == []


def test_context_has_the_whole_groups():
    assert {"runtime", "communicator"} <= set(OpContext.__dataclass_fields__)
