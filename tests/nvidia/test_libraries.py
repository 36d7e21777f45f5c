"""Kernel libraries are judged by what they offer, and the op table says why an op is not served."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from deepinfer.hooks import SMOOTH
from deepinfer.testing.subject import make_subject
from deepinfer_nvidia import groups
from deepinfer_nvidia.libraries import SM100_EXTRA, Libraries, Need, parameters_of
from deepinfer_nvidia.machine import Chip

NEED = Need("flash_mla", {"decode": ("q", "extra_k_cache"), "fused.prefill": ()})
FUSED = SimpleNamespace(prefill=lambda: None)


def decode(q, extra_k_cache):
    """A build that has everything."""


def old_decode(q):
    """A build without the second cache."""


def compiled(signature):
    """Like a pybind function: no signature but the docstring's first line."""

    class Compiled:
        __doc__ = f"{signature}\n\nMore."
        __signature__ = "unreadable"

        def __call__(self):
            return None

    return Compiled()


def reasons(ops, name):
    return [reason for refused in ops.binding(name).refused for reason in refused.reasons]


def test_a_build_with_everything_is_taken():
    assert Libraries({"flash_mla": SimpleNamespace(decode=decode, fused=FUSED)}).missing(NEED) == []


def test_a_missing_module_names_the_command():
    assert Libraries({"flash_mla": None}).missing(NEED) == [f"no module flash_mla; install it: {SM100_EXTRA}"]


def test_a_missing_function_and_a_missing_parameter_are_both_named():
    found = Libraries({"flash_mla": SimpleNamespace(decode=old_decode)}).missing(NEED)
    assert found == [
        f"flash_mla.decode (no distribution) has no parameter extra_k_cache; a build that has it: {SM100_EXTRA}",
        f"flash_mla (no distribution) has no fused.prefill; a build that has it: {SM100_EXTRA}",
    ]


def test_parameters_of_compiled_functions_come_from_the_docstring():
    taken = compiled("decode(q: torch.Tensor, extra_k_cache: object = None) -> torch.Tensor")
    assert parameters_of(taken) == ("q", "extra_k_cache")
    lacking = SimpleNamespace(decode=compiled("decode(q: torch.Tensor)"), fused=FUSED)
    assert "has no parameter extra_k_cache" in Libraries({"flash_mla": lacking}).missing(NEED)[0]
    for signature in ("no signature here", "decode(*args, **kwargs)"):
        unknown = SimpleNamespace(decode=compiled(signature), fused=FUSED)
        assert Libraries({"flash_mla": unknown}).missing(NEED) == []
    assert parameters_of(lambda q, **more: q) is None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('undefined symbol: _ZN2at')", "cannot be imported: ImportError: undefined symbol"),
        ("raise AssertionError('NCCL 2.28 loaded, 2.32 built')", "cannot be imported: AssertionError: NCCL 2.28"),
        ("import a_wheel_nobody_has", "cannot be imported: No module named 'a_wheel_nobody_has'"),
    ],
)
def test_a_build_for_another_torch_is_a_reason_not_an_error(tmp_path, monkeypatch, source, said):
    (tmp_path / "odd_library.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd_library", raising=False)
    (reason,) = Libraries().missing(Need("odd_library", {"run": ()}))
    assert said in reason


def test_nothing_is_imported_before_a_group_is_created(tmp_path, monkeypatch):
    (tmp_path / "flash_mla.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
    libraries = Libraries()
    import deepinfer_nvidia.sm100.attention  # noqa: F401

    assert "flash_mla" not in sys.modules
    assert "RuntimeError: imported" in libraries.missing(NEED)[0]


def test_findings_list_every_known_module():
    found = dict(Libraries({"flash_mla": None, "deep_gemm": SimpleNamespace()}).findings())
    assert found["flash_mla"].startswith("no module flash_mla; sparse attention") and SM100_EXTRA in found["flash_mla"]
    assert found["deep_gemm"].startswith("no distribution; block-scaled products")


# --- in the op table ------------------------------------------------------------------------------------------------


def test_without_flash_mla_only_its_ops_are_left_to_others(open_doubles, kernel_shaped):
    ops = make_subject(open_doubles(flash_mla=None), kernel_shaped()).ops
    for op in ("attention.latent", "attention.cached", "attention.chunk"):
        assert ops.binding(op).kind != "native"
        assert f"no module flash_mla; install it: {SM100_EXTRA}" in reasons(ops, op)
    assert ops.binding("attention.select").kind == "native"
    assert ops.binding("gemm.linear").kind == "native"


def test_an_older_deep_gemm_keeps_what_it_can(open_doubles, kernel_shaped):
    """A build without the fused kernels: the parts serve, weights stay in their layout."""
    from doubles import deep_gemm

    older = {
        k: v for k, v in vars(deep_gemm).items() if not k.startswith(("fp8_fp4_mega", "mega_", "bf16_mega", "Symm"))
    }
    ops = make_subject(open_doubles(deep_gemm=SimpleNamespace(**older)), kernel_shaped()).ops
    assert any("has no fp8_fp4_mega_moe" in reason for reason in reasons(ops, "experts.moe"))
    assert ops.binding("experts.moe").kind == "decomposed"
    assert ops.binding("experts.ffn").kind == "native"
    assert ops.binding("residual.site").kind == "decomposed"


def test_without_deep_gemm_weights_go_back_to_core(open_doubles, kernel_shaped):
    ops = make_subject(open_doubles(deep_gemm=None), kernel_shaped()).ops
    for op in ("gemm.prepare_weight", "gemm.linear", "gemm.prepare_expert_weight", "experts.ffn", "experts.moe"):
        assert ops.binding(op).kind != "native"
    assert ops.binding("attention.cached").kind == "native"


def test_sizes_no_kernel_covers_are_named(open_doubles):
    ops = make_subject(open_doubles(), "micro").ops
    assert "num_attention_heads=8, allowed 64 or 128" in reasons(ops, "attention.cached")
    assert "heads_of_an_output_group=4, allowed 8" in reasons(ops, "attention.latent")
    assert reasons(ops, "residual.site") == ["hidden_size=256, allowed multiples of 1024"]
    assert ops.binding("experts.moe").kind == "native"


def test_smooth_numerics_are_left_to_core(open_doubles, kernel_shaped):
    subject = make_subject(open_doubles(), kernel_shaped(), numerics=SMOOTH)
    assert subject.native == ()
    assert any("allowed quantize=True" in reason for reason in reasons(subject.ops, "gemm.linear"))


def test_another_chip_is_served_by_its_own_family():
    hopper, blackwell, older = (groups.group_classes("attention", major) for major in (9, 10, 8))
    assert [c.__module__ for c in hopper] == ["deepinfer_nvidia.sm90.attention"]
    assert [c.__module__ for c in blackwell] == ["deepinfer_nvidia.sm100.attention", "deepinfer_nvidia.sm90.attention"]
    assert older == []


def test_adapters_refuse_other_chips(open_doubles, kernel_shaped):
    from deepinfer_nvidia.machine import Machine
    from deepinfer_nvidia.sm100.gemm import Gemm

    subject = make_subject(open_doubles(), kernel_shaped())
    group = Gemm(
        subject.context, Machine(Chip("H200", 9, 0, 132, 0), Libraries({"deep_gemm": None, "tile_kernels": None}))
    )
    assert "compute capability 9.0, allowed 10.x" in group.refuse("gemm.quantize", subject.traits)


@pytest.mark.parametrize(("width", "what"), [(528, "528-byte window keys"), (288, "288-byte entries")])
def test_a_build_that_reads_pages_another_way_is_refused(open_doubles, kernel_shaped, monkeypatch, width, what):
    """The builds of September 10 to 24 have the same names and arguments; only their bytes tell."""
    from doubles import flash_mla

    token_by_token = flash_mla.decode_rows

    def page_by_page(cache):
        if cache.shape[3] != width:
            return token_by_token(cache)
        data = {528: 512, 288: 256}[width]
        page = cache.view(torch.uint8).reshape(len(cache), -1)
        split = cache.shape[1] * data
        parts = (page[:, :split].reshape(-1, data), page[:, split:].reshape(-1, width - data))
        return token_by_token(torch.cat(parts, 1).view(cache.shape))

    monkeypatch.setattr(flash_mla, "decode_rows", page_by_page)
    ops = make_subject(open_doubles(), kernel_shaped()).ops
    for op in ("attention.cached", "attention.latent"):
        assert any(f"reads {what} in another order of bytes (key 0" in reason for reason in reasons(ops, op))
    assert ops.binding("attention.chunk").kind == "native"


def test_doctor_shows_what_was_found(open_doubles, monkeypatch, capsys):
    from deepinfer.cli import doctor
    from deepinfer.hooks import load

    monkeypatch.setattr(load, "open_backend", lambda settings: open_doubles(flash_mla=None))
    report = doctor.examine("cpu")
    found = dict(report["chosen"]["findings"])
    assert found["flash_mla"].startswith("no module flash_mla") and "block-scaled products" in found["deep_gemm"]
    doctor._print_report(report)
    assert SM100_EXTRA in capsys.readouterr().out
