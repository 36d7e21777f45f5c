"""Every adapter of compute capability 10.x against core's conformance samples, through contract doubles on the CPU."""

from __future__ import annotations

import pytest

from deepinfer.testing.conformance import ops as conformance
from deepinfer.testing.opinfo import op_infos
from deepinfer.testing.subject import make_subject

ADAPTED = (
    "attention.latent", "attention.cached", "attention.chunk", "attention.select", "attention.index_scores",
    "attention.candidate_blocks", "attention.top_entries", "gemm.prepare_weight", "gemm.linear",
    "gemm.block_diagonal_linear", "gemm.prepare_expert_weight", "gemm.grouped_linear", "gemm.quantize",
    "gemm.swiglu_quantize", "experts.route", "experts.ffn", "experts.moe", "residual.site",
)  # fmt: skip
SLOW = ("attention.latent",)


@pytest.fixture(scope="module")
def subject(open_doubles, kernel_shaped):
    return make_subject(open_doubles(), kernel_shaped())


def test_all_adapters_are_bound(subject):
    assert set(subject.native) == set(ADAPTED)


@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.slow if op in SLOW else ()) for op in ADAPTED])
def test_adapter_equals_the_reference(subject, op):
    results = list(conformance.run(subject, [op_infos()[op]], quick=True))
    assert results
    assert not [f"{r.case}: {r.detail}" for r in results if r.bad]
