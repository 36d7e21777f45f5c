"""The runner: which levels and ops run, what results count as, and what a report says."""

from __future__ import annotations

import json
import re

import pytest

from deepinfer.errors import ConfigError
from deepinfer.testing.conformance import runner
from deepinfer.testing.conformance.expected import Expectations, read_expectations
from deepinfer.testing.conformance.runner import Options, parse_levels, run_conformance
from deepinfer.testing.results import Case, CaseResult, Failure, Skip, run_case
from deepinfer.testing.subject import load_groups

from .kit_backends import HonestGemm, WrongNorm


def results(name="gemm.rms_norm", **options):
    """Report of a backend with one wrong op."""
    return run_conformance(load_groups(HonestGemm, name="fine"), Options(op=name, quick=True, **options))


# --- levels and ops ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "levels"), [("0", (0,)), ("0-2", (0, 1, 2)), ("4,0-1", (0, 1, 4)), ("5", (5,)), (" 1 , 3 ", (1, 3))]
)
def test_levels_are_numbers_ranges_and_lists(text, levels):
    assert parse_levels(text) == levels


@pytest.mark.parametrize("text", ["6", "2-1", "", "a", "1-", "-1", "0-9"])
def test_other_levels_are_refused_with_their_names(text):
    with pytest.raises(ConfigError, match="0 hygiene, 1 ops, 2 properties, 3 blocks, 4 engine, 5 speed"):
        parse_levels(text)


def test_by_default_speed_is_left_out_and_an_op_pattern_means_single_ops():
    assert Options().chosen_levels == (0, 1, 2, 3, 4)
    assert Options(op="gemm.*").chosen_levels == (1, 2)
    assert Options(op="gemm.*", levels=(5,)).chosen_levels == (5,)


def test_a_pattern_that_matches_nothing_suggests_an_op():
    with pytest.raises(ConfigError, match="'gem.linear': matches no op. Did you mean gemm.linear?"):
        results("gem.linear")


def test_only_the_ops_asked_for_are_run():
    report = results("gemm.swiglu*")
    assert {result.op for result in report.results if result.op} == {"gemm.swiglu", "gemm.swiglu_quantize"}
    assert {result.level for result in report.results} == {1, 2}
    assert report.ok and sum(result.status == "pass" for result in report.results) > 10


def test_the_same_seed_gives_the_same_numbers_and_another_one_does_not():
    def errors(seed):
        return [r.worst["error"] for r in results(seed=seed).results if r.worst and "error" in r.worst]

    assert errors(1) == errors(1) != errors(2)


# --- cases ------------------------------------------------------------------------------------------------------------


def test_a_case_passes_fails_or_is_skipped_and_says_why():
    def fail():
        raise Failure("too large", {"error": 1.0, "bound": 0.5})

    def skip():
        raise Skip("no device")

    def crash():
        raise RuntimeError("boom")

    assert run_case(1, "a.b", "fine", lambda: None).status == "pass"
    assert run_case(1, "a.b", "bad", fail).worst == {"error": 1.0, "bound": 0.5}
    assert run_case(1, None, "left", skip).detail == "no device"
    crashed = run_case(1, None, "crash", crash)
    assert crashed.bad and "raised RuntimeError: boom" in crashed.detail and "test_runner.py" in crashed.detail


def test_a_long_level_says_how_far_it_is():
    """A user who waits for minutes learns that something happens, and at once whether something failed."""
    coming = [CaseResult(1, "gemm.linear", f"case {n}", "fail" if n == 1 else "pass", "why") for n in range(3)]
    shown: list[str] = []
    assert list(runner.watched(coming, shown.append, interval=0)) == coming
    assert shown == [
        "  ... 1 cases, 0 failed; last: gemm.linear: case 0",
        "  ... 2 cases, 1 failed; last: gemm.linear: case 1",
        "  ... 3 cases, 1 failed; last: gemm.linear: case 2",
    ]
    shown.clear()
    assert list(runner.watched(coming, shown.append, interval=60)) == coming and not shown


def test_a_skip_without_a_reason_and_an_unknown_status_are_mistakes_of_the_kit():
    with pytest.raises(ValueError, match="has to say why"):
        CaseResult(1, None, "x", "skip")
    with pytest.raises(ValueError, match="status='ok'"):
        CaseResult(1, None, "x", "ok")


def test_a_level_that_breaks_is_a_failure_and_not_the_end(monkeypatch):
    def broken(subject, infos, quick):
        yield CaseResult(3, None, "first", "pass")
        raise RuntimeError("lost the device")

    monkeypatch.setattr(runner, "_results", lambda level, *rest: broken(*rest[:3]))
    report = run_conformance(load_groups(name="any"), Options(levels=(3,)))
    assert [result.status for result in report.results] == ["pass", "fail"]
    assert "lost the device" in report.results[1].detail


# --- expected failures ------------------------------------------------------------------------------------------------

ENTRY = {"op": "gemm.rms_norm", "case": "*", "reason": "one channel", "issue": "https://acme/1", "until": "99"}


def written(tmp_path, text):
    file = tmp_path / "conformance.toml"
    file.write_text(text)
    return read_expectations(file, runner.op_names(), core="0.1.0")


def toml(**entry):
    return "[[xfail]]\n" + "\n".join(f"{key} = {value!r}" for key, value in (ENTRY | entry).items())


def test_an_expected_failure_does_not_fail_the_run_and_is_reported(tmp_path):
    # what has no row cannot be wrong, and errors are raised all the same
    expected = written(tmp_path, toml(case="norm, [1-9]*") + "\n" + toml(case="heads*"))
    report = run_conformance(
        load_groups(WrongNorm, name="bad"), Options(levels=(1,), op="gemm.rms_norm", quick=True, expected=expected)
    )
    failed = [result for result in report.results if result.status == "xfail"]
    assert failed and report.ok
    assert "one channel (https://acme/1, until core 99)" in failed[0].detail
    assert report.matrix()[[r["op"] for r in report.matrix()].index("gemm.rms_norm")]["state"] == "xfail"


def test_one_that_passes_all_the_same_fails_the_run(tmp_path):
    report = results(levels=(1,), expected=written(tmp_path, toml()))
    assert not report.ok and {result.status for result in report.results} == {"xpass"}
    assert "expects it to fail" in report.results[0].detail


def test_expectations_change_neither_skips_nor_other_cases():
    entry = Expectations(xfails=(_entry(),))
    skipped, other = CaseResult(1, "a.b", "x", "skip", "why"), CaseResult(1, "c.d", "x", "fail")
    assert entry.apply(skipped) == skipped and entry.apply(other) == other


def _entry(**fields):
    from deepinfer.testing.conformance.expected import ExpectedFailure

    return ExpectedFailure(**(ENTRY | {"op": "a.b"} | fields))


def test_cases_about_no_op_are_matched_by_a_dash():
    assert _entry(op="-", case="same*").matches(CaseResult(4, None, "same run", "fail"))
    assert not _entry(op="*.*", case="*").matches(CaseResult(4, None, "same run", "fail"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (toml(op="gemm.rms_nrom"), "unknown op 'gemm.rms_nrom'. Did you mean gemm.rms_norm?"),
        (toml(until="0.0.9"), "expired: gemm.rms_norm '*' was accepted until core 0.0.9, this is 0.1.0"),
        (toml(until="soon"), "until='soon' is no version"),
        (toml(reason=" "), "reason is missing"),
        ("[[xfail]]\nop = 'gemm.*'", "case is missing"),
        (toml(owner="me"), "unknown key 'owner'"),
        ("[[xfial]]\nop = 'x'", "unknown key 'xfial'. Did you mean xfail?"),
        ("op_allowlist = ['gemn.*']", "op_allowlist: unknown op 'gemn.*'"),
        ("op_allowlist = 'gemm.*'", "expected a list of patterns"),
        ("[[exclude_level]]\nlevel = 4", "reason is missing"),
        ("[[exclude_level]]\nlevel = 9\nreason = 'x'", "level=9, expected 0 to 5"),
        ("xfail = 1", "expected a list of tables"),
        ("= 1", "not TOML"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_what_to_write(tmp_path, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        written(tmp_path, text)


def test_an_entry_holds_until_its_version_and_not_longer(tmp_path):
    assert len(written(tmp_path, toml(until="0.1.0")).xfails) == 1
    with pytest.raises(ConfigError, match="expired"):
        written(tmp_path, toml(until="0.1.0rc1"))


def test_all_mistakes_of_a_file_are_listed_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, toml(until="x") + "\n" + toml(op="nope.nope"))
    assert "number 1" in str(caught.value) and "number 2" in str(caught.value)


def test_an_entry_that_matches_no_case_of_a_complete_run_is_a_failure():
    found = [CaseResult(1, "a.b", "large rows", "pass")]
    (failure,) = Expectations(xfails=(_entry(case="larg rows"),)).unused(found)
    assert failure.bad and "Did you mean 'large rows'?" in failure.detail
    assert not Expectations(xfails=(_entry(case="large*"),)).unused(found)


def test_only_complete_runs_judge_entries_by_what_they_matched():
    assert Options().complete
    assert not any(o.complete for o in (Options(quick=True), Options(op="gemm.*"), Options(levels=(0, 1))))


def test_ops_that_are_not_on_the_allowlist_are_skipped_with_the_reason(tmp_path):
    expected = written(tmp_path, "op_allowlist = ['gemm.swiglu', 'gemm.rms_*']")
    report = run_conformance(load_groups(HonestGemm, name="young"), Options(levels=(1,), quick=True, expected=expected))
    run = {result.op for result in report.results if result.status != "skip"}
    assert run == {"gemm.swiglu", "gemm.rms_norm", "gemm.rms_norm_quantize"}
    others = len(runner.op_names()) - 3
    assert len([r for r in report.results if r.status == "skip"]) == others
    assert f"{others} x  not on the op_allowlist of conformance.toml" in re.sub(r"\s+x", " x", report.ending())


def test_an_excluded_level_is_one_skip(tmp_path):
    expected = written(tmp_path, "[[exclude_level]]\nlevel = 4\nreason = 'no memory'")
    report = run_conformance(load_groups(name="any"), Options(levels=(4,), expected=expected))
    (only,) = report.results
    assert only.status == "skip" and "no memory" in only.detail and report.ok


# --- reports ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """A run that fails, its lines as they were shown, and where its report is."""
    shown = []
    report = run_conformance(
        load_groups(WrongNorm, name="bad"), Options(levels=(1, 2), op="gemm.r*", quick=True), shown.append
    )
    return report, "\n".join(shown), report.write(tmp_path_factory.mktemp("report"))


def test_the_summary_names_op_case_and_worst_element(failing):
    report, shown, _ = failing
    assert not report.ok
    assert "deepinfer conformance: bad 0 (in-process) on cpu, model micro, seed 0" in shown
    assert re.search(r"1 ops +\d+ +\d+ +- +- +- +\d", shown)
    assert re.search(r"  1 gemm.rms_norm: norm, .*\n      out: largest error", shown)
    assert re.search(r"worst at \[\d+, 3\]: found .*, expected .*, error .*, allowed ", shown)
    assert shown.splitlines()[-1].startswith("bad FAILS: ")
    assert "gemm.rms_norm" in shown.splitlines()[-1]


def test_no_line_of_the_summary_is_too_long(failing):
    assert max(map(len, failing[1].splitlines())) <= 160


def test_the_json_report_holds_what_a_program_needs(failing):
    report, _, place = failing
    data = json.loads((place / "report.json").read_text())
    assert data["format"] == 1 and data["ok"] is False and data["digest"] == report.ops.digest
    assert data["backend"]["name"] == "bad" and data["environment"]["packages"]["torch"]
    assert len(data["cases"]) == sum(data["counts"].values()) == len(report.results)
    assert data["options"] == {"levels": [1, 2], "op": "gemm.r*", "quick": True, "seed": 0, "overrides": []}
    rows = {row["op"]: row for row in data["matrix"]}
    assert len(rows) == len(runner.op_names())
    assert rows["gemm.rms_norm"]["state"] == "fail" and rows["gemm.rms_norm"]["kind"] == "native"
    assert rows["gemm.linear"]["state"] == "native" and rows["gemm.linear"]["cases"] == {}
    assert rows["experts.moe"]["state"] == "decomposed"
    worst = data["worst"][0]
    assert worst["op"].startswith("gemm.rms_norm") and worst["share"] > 1 and worst["index"][-1] == 3


def test_the_page_holds_matrix_failures_and_environment(failing):
    text = (failing[2] / "report.md").read_text()
    assert "| op | native | decomposed | reference | xfail | fail |" in text
    assert re.search(r"\| gemm.rms_norm \| x \|  \|  \|  \| \d+ \|", text)
    assert "| gemm.linear | x |  |  |  |  |" in text and "| gemm.quantize |  |  | x |  |  |" in text
    assert "## Failures" in text and "## Worst errors" in text and "| torch |" in text


def test_a_run_without_cases_is_no_success():
    report = run_conformance(load_groups(name="any"), Options(levels=()))
    assert not report.ok and report.verdict() == "any: no case was run"


def test_numbers_json_lacks_are_written_as_text():
    result = CaseResult(1, "a.b", "x", "fail", worst={"error": float("inf"), "bound": float("nan"), "index": (1, 2)})
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["worst"] == {
        "error": "inf", "bound": "nan", "index": [1, 2],
    }  # fmt: skip


# --- speed ------------------------------------------------------------------------------------------------------------


def test_speed_reports_times_against_core_and_the_last_report(tmp_path):
    options = Options(levels=(5,), op="gemm.rms_norm", quick=True)
    report = run_conformance(load_groups(HonestGemm, name="fine"), options)
    (timing,) = report.to_json()["timings"].values()
    assert report.ok and timing["seconds"] > 0 and timing["reference_seconds"] > 0
    slower = {name: {**t, "seconds": 1e-12} for name, t in report.to_json()["timings"].items()}
    last = tmp_path / "report.json"
    last.write_text(json.dumps({"timings": slower}))
    again = Options(levels=(5,), op="gemm.rms_norm", quick=True, last_report=last)
    assert run_conformance(load_groups(HonestGemm, name="fine"), again).ok, "times fail only when asked"
    checked = Options(levels=(5,), op="gemm.rms_norm", quick=True, last_report=last, check_speed=True)
    bad = [r for r in run_conformance(load_groups(HonestGemm, name="fine"), checked).results if r.bad and r.op]
    assert "slower than" in bad[0].detail


def test_a_file_that_is_no_report_is_refused(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("[]")
    with pytest.raises(ConfigError, match="is no report.json"):
        runner.read_timings(file)


def test_a_case_runs_when_it_is_run_and_not_before():
    ran = []
    case = Case(4, None, "later", lambda: ran.append(1))
    assert not ran and case.run().status == "pass" and ran == [1]
