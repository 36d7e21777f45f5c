"""`docs/ops.md` is what the contracts say."""

from __future__ import annotations

from pathlib import Path

from deepinfer.hooks import specs
from deepinfer.hooks.docs import ops_page
from deepinfer.hooks.ops import contracts

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == ops_page(), "run: deepinfer ops --markdown > docs/ops.md"


def test_it_has_every_op_and_hook_with_its_parameters():
    page = ops_page()
    for contract in contracts():
        for spec in contract.op_specs.values():
            assert f"### {spec.name}\n\nversion {spec.version} · {spec.level}" in page
            section = page.partition(f"### {spec.name}\n")[2].partition("\n### ")[0]
            names = spec.function.__code__.co_varnames[1 : spec.function.__code__.co_argcount]
            assert all(f"{name}:" in section for name in names), spec.name
    assert all(f"\n{name}(" in page for name in specs.hook_names())


def test_records_that_cross_hooks_are_explained():
    page = ops_page()
    for name in ("StepInputs", "KVCache", "ModelTraits", "LatentWeights", "MoeWeights", "DeviceProperties"):
        assert f"\nclass {name}\n    " in page
