"""The levels that are about more than single ops: hygiene (0), blocks (3), engine (4), two backends side by side."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
import torch

from deepinfer.hooks import provides
from deepinfer.hooks.ops import GemmOps, RuntimeOps
from deepinfer.testing.conformance import blocks, deviation, engine, hygiene, runs
from deepinfer.testing.conformance.against import compare_ops, run_against
from deepinfer.testing.conformance.deviation import Noise
from deepinfer.testing.conformance.margins import FORCED, block_scores, entry_scores, routing_gaps
from deepinfer.testing.conformance.runner import Options, select_infos
from deepinfer.testing.conformance.runs import CALM, Checkpoints, Forced, Script
from deepinfer.testing.results import Failure
from deepinfer.testing.subject import load_groups, load_plugin_object, make_reference, make_subject

from .kit_backends import HONEST, HonestGemm, WrongLatent, WrongNorm, WrongSelect, WrongSink, WrongSite, WrongSwiglu

ENTRY, PROBE, PURE = (
    "entry module imports quickly, without torch or a device library",
    "probe answers quickly, from files",
    "changes nothing in torch, deepinfer and builtins",
)
VARIABLES, MISSING, DECLARED, METADATA = (
    "sets only the environment variables it declares",
    "a device that is not there is refused",
    "declared = registered",
    "metadata",
)


# --- level 0 ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(entry=..., plugin=..., ...)`: a backend in a folder on the path, this process's and its children's."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name, entry="", record="", probe="def present():\n    return True", plugin="class Plugin: pass",
             requires="deepinfer-core>=0.1,<0.2", version="0.2.0"):  # fmt: skip
        package = tmp_path / f"deepinfer_{name}"
        package.mkdir()
        modules = f"plugin='deepinfer_{name}.plugin:Plugin', probe='deepinfer_{name}.probe:present'"
        (package / "__init__.py").write_text(
            f"from deepinfer.hooks import Backend\n{textwrap.dedent(entry)}\n"
            f"backend = Backend(name={name!r}, api=(0, 1), device_type='cpu', {modules}, {record})\n"
        )
        (package / "probe.py").write_text(textwrap.dedent(probe))
        (package / "plugin.py").write_text(textwrap.dedent(plugin))
        info = tmp_path / f"deepinfer_{name}-{version}.dist-info"
        info.mkdir()
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepinfer-{name}\nVersion: {version}\n{needs}")
        (info / "entry_points.txt").write_text(f"[deepinfer.backends]\n{name} = deepinfer_{name}:backend\n")
        return name

    return make


def hygiene_of(name, *wanted):
    """{case: result} of level 0 on an installed backend; only the wanted cases run."""
    subject = make_subject(name)
    return {case.name: case.run() for case in hygiene.cases(subject, {}) if not wanted or case.name in wanted}


def test_a_clean_backend_passes_level_0(install):
    found = hygiene_of(install("clean"))
    assert {r.status for name, r in found.items() if name != MISSING} == {"pass"}
    assert found[MISSING].status == "skip" and "host" in found[MISSING].detail
    assert "requires deepinfer-core<0.2,>=0.1" in found[METADATA].detail


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        pytest.param("import torch", "imported torch", marks=pytest.mark.slow),
        ("import time; time.sleep(0.2)", "allowed 50 ms"),
        ("import os; os.environ['ACME_X'] = '1'", "changed environment variables: ACME_X"),
        ("import threading, time as t; threading.Thread(target=t.sleep, args=(2,), daemon=True).start()", "left 1 thr"),
        ("import numpy.random", "loaded compiled modules: "),
    ],
)
def test_an_entry_module_that_does_more_than_describe_fails(install, monkeypatch, entry, message):
    monkeypatch.setattr(hygiene, "ATTEMPTS", 1)
    name = install(f"busy{abs(hash(entry)) % 10**6}", entry=entry)
    assert message in hygiene_of(name, ENTRY)[ENTRY].detail


def test_a_probe_that_takes_long_fails(install, monkeypatch):
    monkeypatch.setattr(hygiene, "ATTEMPTS", 1)
    name = install("slowprobe", probe="import time\ndef present():\n    time.sleep(0.2)\n    return True")
    found = hygiene_of(name, ENTRY, PROBE)
    assert found[ENTRY].status == "pass" and "asking the probe: took" in found[PROBE].detail


@pytest.mark.slow
def test_a_plugin_that_patches_torch_fails(install):
    plugin = """
        import sys, torch
        if sys.argv[0].endswith("child.py"):  # not in the process of the tests
            torch.nn.functional.silu = print
        class Plugin: pass
    """
    found = hygiene_of(install("patcher", plugin=plugin), PURE)
    assert "torch.nn.functional.silu was replaced" in found[PURE].detail


@pytest.mark.slow
def test_only_declared_variables_may_change(install):
    plugin = "import os\nos.environ['ACME_MODE'] = '1'\nclass Plugin: pass"
    found = hygiene_of(install("vars", plugin=plugin), VARIABLES)
    assert "changed ACME_MODE; declare them" in found[VARIABLES].detail


@pytest.mark.slow
def test_the_message_about_a_missing_device_names_it(install):
    runtime = """
        from deepinfer.hooks import BackendError, hookimpl, provides
        from deepinfer.hooks.ops import RuntimeOps
        class Runtime(RuntimeOps):
            @provides()
            def select(self, index):
                if index > 3:
                    raise {error}
                return super().select(index)
        class Plugin:
            @hookimpl
            def deepinfer_create_runtime(self, context):
                return Runtime(context)
    """
    good = install("good", plugin=runtime.format(error="BackendError(f'rank {index}: this host has 4 devices')"))
    assert hygiene_of(good, MISSING)[MISSING].detail == "rank 999: this host has 4 devices"
    bad = install("bad", plugin=runtime.format(error="IndexError(index)"))
    assert "raised IndexError" in hygiene_of(bad, MISSING)[MISSING].detail
    vague = install("vague", plugin=runtime.format(error="BackendError('no such device')"))
    assert "does not name the device" in hygiene_of(vague, MISSING)[MISSING].detail


@pytest.mark.parametrize(
    ("requires", "message"),
    [
        ("", "does not require deepinfer-core"),
        ("deepinfer-core>=0.1", "has no upper bound"),
        ("deepinfer-core>=0.9,<1", "installed is"),
    ],
)
def test_metadata_has_to_say_which_core_fits(install, requires, message):
    name = install(f"bounds{len(requires)}", requires=requires)
    assert message in hygiene_of(name, METADATA)[METADATA].detail


def test_a_method_that_is_declared_but_no_op_fails():
    class Leftover(GemmOps):
        @provides()
        def _linaer(self, x, weight, out_dtype=None):
            return x

    (case,) = (c for c in hygiene.cases(make_subject(load_groups(Leftover)), {}) if c.name == DECLARED)
    assert "Leftover._linaer carries @provides, but gemm has no such op" in case.run().detail


def test_a_backend_given_as_an_object_skips_what_needs_an_installation():
    found = {case.name: case.run() for case in hygiene.cases(make_subject(load_groups(HonestGemm)), {})}
    assert found[ENTRY].status == found[PURE].status == found[METADATA].status == "skip"
    assert "given as an object" in found[PURE].detail
    assert found[DECLARED].detail == "3 ops declared, 3 bound"


def test_a_plugin_object_with_a_hook_that_would_not_be_called_is_refused():
    class Plugin:
        def deepinfer_create_gemm(self, context):
            return HonestGemm(context)

    with pytest.raises(ValueError, match="has no @hookimpl"):
        load_plugin_object(Plugin())


# --- level 3 ----------------------------------------------------------------------------------------------------------


def blocks_of(*classes):
    return {result.case: result for result in blocks.run(make_subject(load_groups(*classes)), {})}


def test_honest_backends_pass_all_blocks():
    found = blocks_of(*HONEST)
    assert {r.status for r in found.values()} == {"pass"}, [(r.case, r.detail) for r in found.values() if r.bad]
    kinds = "window only", "ratio 2, source", "ratio 2, reusing a source", "ratio 1, source of candidates"
    assert {f"attention, {kind}" for kind in kinds} <= found.keys()
    assert {"mixture of experts", "hyper-connection sites", "engram", "draft head"} <= found.keys()


@pytest.mark.parametrize(
    ("wrong", "failing", "passing"),
    [
        (WrongLatent, "attention, window only", "mixture of experts"),
        (WrongSink, "attention, ratio 2, reusing a source", "engram"),
        (WrongSite, "hyper-connection sites", "attention, window only"),
        (WrongSelect, "selection, ratio 2, source", "attention, ratio 2, source"),
        (WrongSwiglu, "mixture of experts", "hyper-connection sites"),
    ],
)
@pytest.mark.slow
def test_a_wrong_block_is_found_where_it_is(wrong, failing, passing):
    found = blocks_of(wrong)
    assert found[failing].status == "fail" and found[passing].status == "pass"
    assert found[failing].detail


def test_a_model_that_is_too_large_is_skipped_with_its_size():
    (only,) = blocks.run(make_subject(load_groups(name="any"), "full"), {})
    assert only.status == "skip" and "GB" in only.detail


def test_scores_behind_selections():
    call = {"scores": torch.tensor([[1.0, 5.0, 3.0, 9.0]]), "lengths": torch.tensor([3])}
    assert entry_scores(call).tolist() == [[1.0, 5.0, 3.0, -torch.inf]]
    assert block_scores(2)(call).tolist() == [[5.0, FORCED]]
    empty = {"scores": torch.zeros(1, 4), "lengths": torch.tensor([0])}
    assert block_scores(2)(empty).tolist() == [[-torch.inf, -torch.inf]]


def test_gap_between_the_last_expert_chosen_and_the_first_left_out():
    ops = make_reference(make_subject(load_groups(name="any")))
    u = torch.eye(3, 32, dtype=torch.bfloat16)
    gate = torch.zeros(4, 32, dtype=torch.bfloat16)
    gate[0, 0] = gate[1, 0] = 1.0  # row 0: two experts tie for the best
    gate[2, 1] = 2.0  # row 1: one stands out
    from deepinfer.hooks import Weight

    call = {"u": u, "gate": ops.gemm.prepare_weight(Weight(gate, None, "bf16")), "bias": torch.zeros(4), "top_k": 1}
    gaps = routing_gaps(ops, call)
    assert gaps[0] == 0 and gaps[1] > 0.4 and gaps[2] == 0
    biased = call | {"bias_vl": torch.tensor([0.0, 0.0, 0.0, 9.0]), "image_mask": torch.tensor([True, False, False])}
    assert routing_gaps(ops, biased)[0] > 7


# --- level 4 ----------------------------------------------------------------------------------------------------------


def run_of(*rows):
    return Forced(None, [torch.tensor(rows, dtype=torch.float64).numpy()])


def noise_of(size):
    return Noise(mean=size, part=2 * size, largest=5 * size)


def test_deviations_are_held_to_the_noise_all_in_all_in_each_part_and_anywhere():
    expected, noise = run_of([0.0] * 100), noise_of(0.01)
    assert deviation.hold(run_of([0.03] * 100), expected, noise)["error"] == pytest.approx(0.03)
    with pytest.raises(Failure, match="all in all 0.05 nats away, 4.90 times the reference's own noise, allowed 4"):
        deviation.hold(run_of([0.05] * 100), expected, noise)
    with pytest.raises(Failure, match=r"at most, at \['generated tokens of prompt 0', 0, 7\], 0.3 nats away"):
        deviation.hold(run_of([0.3 if i == 7 else 0.0 for i in range(100)]), expected, noise)
    one_bad = Forced(None, [np.zeros((1, 900)), np.full((1, 100), 0.1)])
    with pytest.raises(Failure, match="generated tokens of prompt 1 0.1 nats away, 4.95 times"):
        deviation.hold(one_bad, Forced(None, [np.zeros((1, 900)), np.zeros((1, 100))]), noise)
    with pytest.raises(Failure, match="no numbers, or bans other tokens"):
        deviation.hold(run_of([-9999.0] + [0.0] * 99), expected, noise)
    deviation.hold(run_of([-9999.0] + [0.0] * 99), run_of([-9999.0] + [0.0] * 99), noise)


def test_equality_is_bit_for_bit():
    deviation.same(run_of([0.1, 0.2]), run_of([0.1, 0.2]))
    with pytest.raises(Failure, match="1 of 2 log-probabilities differ"):
        deviation.same(run_of([0.1, 0.2]), run_of([0.1, 0.2 + 1e-16 + 1e-12]))


def test_greedy_tokens_may_differ_only_in_ties():
    reference, noise = run_of([-1.0, -1.01, -5.0]), noise_of(0.01)
    text = deviation.hold_tokens([(1,)], run_of([-1.02, -1.0, -5.0]), [(0,)], reference, noise)
    assert text.startswith("0 of 1 tokens equal")
    with pytest.raises(Failure, match="token 0: 2, expected 0, which the reference prefers by 4 nats"):
        deviation.hold_tokens([(2,)], run_of([-2.0, -2.0, -1.0]), [(0,)], reference, noise)
    with pytest.raises(Failure, match="generated 2, but 0 is its likeliest token"):
        deviation.hold_tokens([(2,)], run_of([-1.0, -2.0, -9.0]), [(0,)], reference, noise)


ENGINE_CASES = {
    "pass": ("log-probabilities follow the reference", "greedy tokens follow the reference", "the same run twice",
             "chunked = unchunked prefill", "alone = in a batch", "mask = compact truncation",
             "preemption changes nothing", "batch-invariant mode is bitwise", "equal seeds, equal samples"),
    "skip": ("drafts on = off", "data parallel 1 = 2", "context parallel 1 = 2", "expert parallel 1 = 2",
             "graphs on = off", "structured output is legal"),
}  # fmt: skip


@pytest.mark.slow
def test_an_honest_backend_passes_level_4_and_what_core_lacks_is_skipped():
    found = {r.case: r for r in engine.run(make_subject(load_groups(*HONEST)), {}, quick=True)}
    assert not [r for r in found.values() if r.bad]
    assert {name for name, r in found.items() if r.status == "pass"} >= set(ENGINE_CASES["pass"])
    for name in ENGINE_CASES["skip"]:
        assert found[name].status in ("skip", "pass") and (found[name].detail or found[name].status == "pass")


@pytest.mark.slow
def test_a_wrong_op_shows_end_to_end():
    subject = make_subject(load_groups(WrongNorm))
    wanted = ENGINE_CASES["pass"][:3]
    found = {case.name: case.run() for case in engine.cases(subject, {}, quick=True) if case.name in wanted}
    assert found[wanted[0]].status == "fail" and "times the reference's own noise" in found[wanted[0]].detail
    assert found[wanted[2]].status == "pass", "it is wrong, but the same every time"


class Forgetful(HonestGemm):
    """Adds something that changes from call to call."""

    @provides()
    def rms_norm(self, x, weight, eps):
        self._calls = getattr(self, "_calls", 0) + 1
        return super().rms_norm(x, weight, eps) + (self._calls % 7) * 0.01


@pytest.mark.slow
def test_an_op_that_keeps_something_between_calls_shows_in_a_second_run():
    subject = make_subject(load_groups(Forgetful))
    (case,) = (case for case in engine.cases(subject, {}, quick=True) if case.name == "the same run twice")
    assert "log-probabilities differ" in case.run().detail


def test_checkpoints_are_written_once_and_select_everything_when_calm():
    made = Checkpoints()
    assert made.path(CALM) == made.path(CALM)
    text = runs.configuration(CALM).text
    assert text.index_topk >= runs.MAX_LENGTH and text.candidate_topk_blocks * 8 >= runs.MAX_LENGTH
    script = Script.make((3, 5), 2, 512, seed=1)
    assert [len(p) for p in script.prompts] == [3, 5] and script == Script.make((3, 5), 2, 512, seed=1)


# --- two backends -----------------------------------------------------------------------------------------------------


def test_two_backends_are_compared_op_by_op():
    infos = select_infos("gemm.rms_norm", Options().expected)
    infos |= select_infos("gemm.swiglu", Options().expected)
    good, other = make_subject(load_groups(HonestGemm, name="one")), make_subject(load_groups(name="two"))
    equal = list(compare_ops(good, other, infos, quick=True))
    assert equal and {r.status for r in equal} == {"pass"}
    assert any(r.worst and 0 < r.worst["error"] < r.worst["bound"] for r in equal)
    wrong = list(compare_ops(good, make_subject(load_groups(WrongNorm, name="two")), infos, quick=True))
    assert any(r.bad and r.detail.startswith("two against the reference: ") for r in wrong)


@pytest.mark.slow
def test_two_backends_are_compared_end_to_end_in_the_same_kind_of_report(tmp_path):
    one, two = load_groups(*HONEST, name="one"), load_groups(WrongNorm, name="two")
    shown = []
    report = run_against(one, two, Options(levels=(4,), quick=True), shown.append)
    assert not report.ok
    assert "one 0 (in-process) on cpu against two 0 (in-process) on cpu" in shown[0]
    assert report.to_json()["against"]["name"] == "two"
    report.write(tmp_path)
    assert "| against | two" in (tmp_path / "report.md").read_text()
    assert run_against(one, load_groups(name="base"), Options(levels=(4,), quick=True)).ok


def test_the_runtime_is_no_op_that_is_compared_by_samples():
    infos = select_infos("runtime.*", Options().expected)
    pair = make_subject(load_groups(RuntimeOps, name="one")), make_subject(load_groups(name="two"))
    assert not [r for r in compare_ops(*pair, infos, quick=True) if r.bad]
