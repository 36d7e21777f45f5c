"""The whole model "on" compute capability 10.x: every adapter over contract doubles equals core's reference."""

from __future__ import annotations

import pytest
import torch

from deepinfer.runner import worker
from deepinfer.testing.checkpoint import write_checkpoint
from deepinfer.testing.logits import Harness

LENGTHS = (100, 75)
"""Tokens of the two sequences; 65 make selection and candidate blocks visible."""


@pytest.fixture(scope="module")
def checkpoint(kernel_shaped, tmp_path_factory):
    return write_checkpoint(kernel_shaped(num_hidden_layers=8), tmp_path_factory.mktemp("sm100") / "model")


@pytest.fixture(scope="module")
def runs(checkpoint, open_doubles):
    """{name: (op table, logits of prefill, chunk and decode steps)}: reference, its float64 sums, and the doubles."""
    return {
        "reference": _run(checkpoint, None),
        "yardstick": _run(checkpoint, None, batch_invariant=True),
        "doubles": _run(checkpoint, open_doubles()),
    }


def _run(checkpoint, backend, **arguments):
    bind = worker.bind_ops
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(worker, "bind_ops", lambda config, model: bind(config, model, backend))
        harness = Harness(checkpoint, max_len=max(LENGTHS), sequences=2, accelerator="cpu", **arguments)
        source = torch.Generator().manual_seed(3)
        texts = [torch.randint(10, 480, (n,), generator=source).tolist() for n in LENGTHS]
        first, second = texts
        steps = [
            [(0, first, 0, 40)],  # a prompt
            [(0, first, 40, 98), (1, second, 0, 73)],  # the rest of it beside another prompt
            [(0, first, 98, 99), (1, second, 73, 74)],  # decode
            [(0, first, 99, 100), (1, second, 74, 75)],
        ]
        return harness.ops, [harness.logits(harness.inputs(chunks)) for chunks in steps]


@pytest.mark.slow
def test_logits_are_as_near_to_exact_sums_as_the_reference(runs):
    """Rounding steps turn the order of a sum into whole steps, so the reference's own distance is the measure."""
    for exact, wanted, found in zip(*(runs[name][1] for name in ("yardstick", "reference", "doubles")), strict=True):
        noise, error = ((x - exact).norm() / exact.norm() for x in (wanted, found))
        assert 0 < error <= 1.5 * noise


@pytest.mark.slow
def test_a_row_with_one_key_equals_the_reference_bit_for_bit(runs):
    """Its sums have one order only: every product, rounding and layout on the way is the same."""
    assert torch.equal(runs["doubles"][1][0][0], runs["reference"][1][0][0])


@pytest.mark.slow
def test_the_adapters_served_it(runs):
    ops = runs["doubles"][0]
    for op in ("attention.latent", "attention.select", "gemm.linear", "experts.moe", "residual.site"):
        assert ops.binding(op).kind == "native"
