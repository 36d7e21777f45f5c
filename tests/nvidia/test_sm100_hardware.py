"""`pytest -m sm100` on a machine with a B200: every op, block and engine check, and the report that proves them.

DG_FORCE_BUILD=1 pip install --no-build-isolation 'deepinfer-nvidia[sm100]'
python -m pytest -m sm100 tests/nvidia && python deepinfer-nvidia/status.py
"""

from __future__ import annotations

import json

import pytest
import torch
from proof import EVIDENCE, prove

on_hardware = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10),
    reason="no GPU of compute capability 10.x here: pytest -m sm100 needs one, and its libraries",
)


@pytest.mark.sm100
@on_hardware
def test_every_library_is_there():
    from deepinfer_nvidia.libraries import Libraries
    from deepinfer_nvidia.sm100 import attention, experts, gemm, mega, residual

    needs = (
        attention.FUSED, attention.DECODE, attention.PREFILL, attention.SCORES, attention.SPARSE_SCORES, attention.TOP,
        experts.GATE, gemm.PRODUCTS, gemm.GROUPED, gemm.CASTS, mega.MEGA, residual.SITE,
    )  # fmt: skip
    assert Libraries().missing(*needs) == []


@pytest.mark.sm100
@on_hardware
def test_conformance_of_all_levels(kernel_shaped):
    from deepinfer.hooks import open_backend

    report = prove(open_backend("nvidia"), kernel_shaped(), (0, 1, 2, 3, 4), EVIDENCE)
    assert report.ok, report.ending()


@pytest.mark.sm100
@on_hardware
def test_the_runtime_captures_times_and_forbids():
    from deepinfer.hooks import EXACT, OpContext
    from deepinfer_nvidia.libraries import Libraries
    from deepinfer_nvidia.runtime import Runtime

    runtime = Runtime(OpContext(torch.device("cuda"), EXACT, traits=None), Libraries())
    runtime.select(0)
    x = torch.zeros(4, device="cuda")

    def work():
        with runtime.timer("add"):
            return x + 1

    graph = runtime.capture(work, runtime.new_graph_pool())
    for value in (1.0, 2.0):
        x.fill_(value)
        assert graph.replay().tolist() == [value + 1] * 4
    assert len(runtime.read_timers(True)["add"]) == 2
    with runtime.forbid_sync(), pytest.raises(RuntimeError):
        x.sum().item()
    graph.destroy()


def test_the_proof_runs_and_reports_over_doubles(open_doubles, kernel_shaped, tmp_path):
    report = prove(open_doubles(), kernel_shaped(), (1,), tmp_path, "attention.cached")
    assert report.ok
    rows = {row["op"]: row for row in json.loads((tmp_path / "report.json").read_text())["matrix"]}
    assert rows["attention.cached"]["state"] == "native" and rows["attention.cached"]["cases"]["pass"] > 3
