"""Own kernels of the NVIDIA backend without a GPU: semantics in Triton's interpreter, held to core's conformance
samples, and machine code from the compiler in Triton's wheel. Skipped where Triton is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install 'triton>=3.6,<4'"
)
QUICK = ("gemm.quantize", "gemm.rms_norm", "gemm.swiglu_quantize", "attention.candidate_blocks")
SLOW = (
    "gemm.linear", "gemm.grouped_linear", "attention.rope", "attention.index_scores", "attention.top_entries",
    "attention.chunk", "attention.cached",
)  # fmt: skip


@pytest.fixture(scope="module")
def subject():
    """Micro bound to the Hopper classes, kernels in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from triton.runtime import interpreter

        patch_tensor = interpreter._patch_lang_tensor

        def with_index(tensor, scope):  # its own `__index__` calls int() on an array, which numpy 2.4 refuses
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        patch.setattr(interpreter, "_patch_lang_tensor", with_index)
        yield _bound()
    for name in [name for name in sys.modules if name.startswith("deepinfer_nvidia.kernels.")]:
        del sys.modules[name]  # made for the interpreter


def _bound():
    from deepinfer.testing.subject import load_groups, make_subject
    from deepinfer_nvidia.machine import Chip, Machine
    from deepinfer_nvidia.sm90 import attention, gemm

    machine = Machine(Chip("interpreter", 9, 0, 132, 0))

    class Attention(attention.Attention):
        def __init__(self, context):
            super().__init__(context, machine)

    class Gemm(gemm.Gemm):
        def __init__(self, context):
            super().__init__(context, machine)

    return make_subject(load_groups(Attention, Gemm), "micro")


def _hold(subject, op):
    from deepinfer.testing.conformance import ops
    from deepinfer.testing.opinfo import op_infos

    assert subject.ops.binding(op).kind == "native"
    results = list(ops.run(subject, [op_infos()[op]], quick=True))
    assert results
    assert not [f"{r.case}: {r.detail}" for r in results if r.bad]


@pytest.mark.parametrize("op", QUICK)
def test_interpreted_op_equals_the_reference(subject, op):
    _hold(subject, op)


@pytest.mark.slow
@pytest.mark.parametrize("op", SLOW)
def test_interpreted_heavy_op_equals_the_reference(subject, op):
    _hold(subject, op)


def test_interpreted_store_writes_the_published_bytes(subject):
    import torch

    from deepinfer.reference import quant
    from deepinfer_nvidia import kernels

    x = (torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    table = torch.full((9, 66), 7, dtype=torch.uint8)
    rows, places = torch.tensor([1, 3, 4]), torch.tensor([8, 0, 2])
    back = kernels.load("cache_rows").store_window(x, rows, places, table)
    codes, scales = quant.encode_q8(x)
    assert torch.equal(back, quant.fake_q8(x))
    assert torch.equal(table[places], torch.cat((codes, scales), 1)[rows])
    assert bool((table[[1, 3, 4, 5, 6, 7]] == 7).all())


def test_attention_refuses_what_its_tiles_do_not_cover(subject):
    from dataclasses import replace

    from deepinfer_nvidia.machine import Chip, Machine
    from deepinfer_nvidia.sm90.attention import Attention

    on_blackwell = Attention(subject.context, Machine(Chip("interpreter", 10, 0, 148, 0)))
    odd = replace(subject.traits, head_dim=96)
    assert any("compute capability 10.0" in r for r in on_blackwell.refuse("attention.cached", subject.traits))
    assert any("head_dim=96" in r for r in on_blackwell.refuse("attention.chunk", odd))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sparse attention, decode whole", {"sm_90a": "wgmma"}),
        ("grouped MXFP4 64", {"sm_90a": "wgmma", "sm_100a": "tcgen05.mma"}),
        ("top-k", {"sm_90a": "none", "sm_100a": "none"}),
    ],
)
def test_kernel_becomes_machine_code(name, expected, tmp_path):
    table = tmp_path / "table.json"
    command = [sys.executable, "-m", "deepinfer_nvidia.kernels.build", "--only", name, "--json", str(table)]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    package = Path(__file__).parents[2] / "deepinfer-nvidia" / "src"
    environment["PYTHONPATH"] = os.pathsep.join([str(package), *sys.path])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    reports = json.loads(table.read_text())
    assert {report["arch"]: report["matrix_instruction"] for report in reports} == expected
    assert all(report["registers"] >= 8 for report in reports)
