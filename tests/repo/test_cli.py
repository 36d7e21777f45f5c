"""The `deepinfer` command as a user meets it: output, exit codes, messages; every error is one clean message."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys

import pytest

from deepinfer.cli.arguments import add_engine_arguments, engine_arguments, parse_assignments
from deepinfer.cli.main import COMMANDS, main
from deepinfer.cli.text import format_bytes, format_table
from deepinfer.config import EngineConfig, argument_fields
from deepinfer.environ import VARIABLES, Settings
from deepinfer.errors import ConfigError, DeepInferError

SMALL = ["--max-model-len", "64", "--max-num-seqs", "4", "--max-tokens", "3", "--temperature", "0", "--ignore-eos"]


@pytest.fixture
def deepinfer(capsys):
    """Runs a command; returns (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def tiny(checkpoints) -> str:
    return str(checkpoints("tiny"))


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert all(name in text for name in COMMANDS)
    assert "first steps" in text


def test_no_command_prints_the_help(deepinfer):
    code, out, _ = deepinfer()
    assert code == 0
    assert out.startswith("usage: deepinfer")


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_of_every_command_describes_it(capsys, command):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert f"deepinfer {command}" in text
    assert len(text.split("\n\n")[1]) > 40


def test_unknown_command_and_flag_are_refused(capsys):
    for arguments in (["generat"], ["env", "--jsn"]):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 2
        assert arguments[-1] in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("deepinfer-core 0.")


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "found none of: prompts as arguments, --prompts-file, --input"),
        (["generate", "x", "--prompts-file", "f"], "found several of"),
        (["generate", "x", "--output", "f"], "--output goes with --input"),
        (["generate", "--prompts-file", "/no/such/file"], "/no/such/file: cannot be read"),
        (["generate", "x", "--model", "/no/such/directory"], "/no/such/directory"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--gpu-memory-utilization", "2"], "gpu_memory_utilization=2.0"),
        (["generate", "x", "--expert-parallel-size", "8"], "expert_parallel_size=8: this version runs on one rank"),
        (["generate", "x", "--set", "batch_invarient=1"], "Did you mean batch_invariant?"),
        (["generate", "x", "--set", "nonsense"], "--set 'nonsense': expected NAME=VALUE"),
        (["ops", "--accelerator", "cpuu"], "no such backend. Installed: cpu"),
        (["ops", "--config", "tiny", "--op", "nosuch.op=reference"], "matches no op"),
        (["doctor", "--fit", "tinny"], "expected one of tiny, micro, full"),
        (["doctor", "--fit", "tiny", "--context", "0"], "--context 0: expected at least 1"),
        (["make-checkpoint", "--config", "tiny", "--out", "/proc/nothing"], "/proc/nothing"),
    ],
)
def test_an_error_is_one_message_and_exit_code_2(deepinfer, arguments, message):
    code, out, err = deepinfer(*arguments)
    assert code == 2
    assert out == ""
    assert err.splitlines()[-1].startswith("deepinfer: ") or "\n" in err.strip()
    assert message in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback():
    with pytest.raises(DeepInferError):
        main(["generate", "--debug"])


def test_debug_variable_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("DEEPINFER_DEBUG", "yes")
    with pytest.raises(ConfigError):
        main(["generate"])


def test_a_wrong_variable_stops_a_command_with_its_name(deepinfer, monkeypatch):
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "maybe")
    code, _, err = deepinfer("env")
    assert (code, err) == (2, "deepinfer: DEEPINFER_BATCH_INVARIANT='maybe': expected a boolean: 0/1, true/false, "
                              "yes/no or on/off\n")  # fmt: skip


def test_a_closed_pipe_is_no_error():
    script = f"{sys.executable} -m deepinfer env --json | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


# --- env ------------------------------------------------------------------------------------------------------------


def test_env_lists_every_variable_with_value_and_origin(deepinfer, monkeypatch):
    monkeypatch.setenv("DEEPINFER_GC_INTERVAL_STEP", "5")
    code, out, _ = deepinfer("env", "--set", "strict_ops=1", "--json")
    rows = {row["name"]: row for row in json.loads(out)["settings"]}
    assert code == 0
    assert len(rows) == len(VARIABLES)
    assert (rows["DEEPINFER_GC_INTERVAL_STEP"]["value"], rows["DEEPINFER_GC_INTERVAL_STEP"]["origin"]) == (
        "5", "environment")  # fmt: skip
    assert rows["DEEPINFER_STRICT_OPS"]["origin"] == "argument"
    assert rows["DEEPINFER_TRACE_OPS"]["origin"] == "default"


def test_env_table_can_be_narrowed(deepinfer, monkeypatch):
    monkeypatch.setenv("DEEPINFER_GC_INTERVAL_STEP", "5")
    _, out, _ = deepinfer("env", "yoco")
    assert "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS" in out
    assert "DEEPINFER_ACCELERATOR" not in out
    _, out, _ = deepinfer("env", "--changed")
    names = [line.split()[0] for line in out.splitlines() if line.startswith("  DEEPINFER")]
    assert names == ["DEEPINFER_ACCELERATOR", "DEEPINFER_GC_INTERVAL_STEP"]


# --- doctor and ops -------------------------------------------------------------------------------------------------


def test_doctor_reports_backends_and_the_choice(deepinfer):
    code, out, _ = deepinfer("doctor", "--json")
    report = json.loads(out)
    assert (code, report["problems"]) == (0, [])
    assert report["chosen"]["name"] == "cpu"
    assert {b["name"]: b["state"] for b in report["backends"]}["cpu"] in ("present", "on request")
    assert report["packages"]["torch"]


def test_doctor_says_why_an_engine_cannot_start(deepinfer):
    code, out, _ = deepinfer("doctor", "--accelerator", "nosuch")
    assert code == 1
    assert "An engine cannot start here:" in out
    assert "no such backend" in out


def test_doctor_reports_wrong_settings_and_goes_on(deepinfer, monkeypatch):
    monkeypatch.setenv("DEEPINFER_STRICT_OPS", "perhaps")
    code, out, _ = deepinfer("doctor", "--json")
    report = json.loads(out)
    assert code == 1
    assert "DEEPINFER_STRICT_OPS='perhaps'" in report["problems"][0]
    assert report["backends"]


BROKEN_BACKEND = {
    "acme.py": "import library_that_is_not_installed\n",
    "deepinfer_acme-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: deepinfer-acme\nVersion: 1.2\n",
    "deepinfer_acme-1.2.dist-info/entry_points.txt": "[deepinfer.backends]\nacme = acme:backend\n",
}


def test_doctor_lists_a_broken_plugin_as_broken(tmp_path):
    for name, text in BROKEN_BACKEND.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    result = subprocess.run(
        [sys.executable, "-m", "deepinfer", "doctor"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    line = next(line for line in result.stdout.splitlines() if line.startswith("acme"))
    assert line.split() == ["acme", "broken", "deepinfer-acme", "1.2"]
    assert "No module named 'library_that_is_not_installed'" in result.stdout
    assert "Ready: an engine would run on cpu" in result.stdout
    assert result.returncode == 0


def test_fit_gives_the_published_sizes(deepinfer):
    code, out, _ = deepinfer("doctor", "--fit", "full", "--sequences", "2", "--context", "1000", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["cache_per_token"], report["state_per_sequence"]) == (890, 3_128_928)
    assert report["total"] == report["weights"]["total"] + 2 * (1000 * 890 + 3_128_928)
    assert 500e9 < report["weights"]["total"] < 520e9
    assert report["parameters"]["total"] == pytest.approx(763.2e9, rel=1e-3)


def test_fit_table(deepinfer):
    _, text, _ = deepinfer("doctor", "--fit", "tiny")
    assert text.startswith("tiny: 37.83 M parameters")
    assert "state per sequence" in text
    assert "258,720" in text


def test_fit_reads_a_checkpoint(deepinfer, tiny):
    code, out, _ = deepinfer("doctor", "--fit", tiny, "--json")
    assert (code, json.loads(out)["weights"]) == (
        0,
        json.loads(deepinfer("doctor", "--fit", "tiny", "--json")[1])["weights"],
    )


def test_ops_shows_provider_and_version_of_every_op(deepinfer):
    code, out, _ = deepinfer("ops", "--config", "tiny", "--json")
    table = json.loads(out)
    assert code == 0
    assert {"attention.cached", "gemm.linear", "sampling.draw"} <= {row["op"] for row in table["ops"]}
    assert {row["distribution"] for row in table["ops"]} == {"deepinfer-core"}
    _, text, _ = deepinfer("ops", "--config", "tiny", "--op", "attention.*=reference")
    assert "attention.cached" in text


# --- make-checkpoint and generate -----------------------------------------------------------------------------------


def test_make_checkpoint(deepinfer, tmp_path):
    out = tmp_path / "micro"
    arguments = ("make-checkpoint", "--config", "micro", "--out", str(out), "--seed", "3", "--shards", "2")
    code, text, _ = deepinfer(*arguments)
    assert code == 0
    assert f"{out}: random micro checkpoint, seed 3, " in text
    assert len(list(out.glob("*.safetensors"))) == 4  # two, and one for each Engram table
    code, _, err = deepinfer(*arguments)
    assert (code, "expected an empty or new directory" in err) == (2, True)


def test_generate_prints_texts_in_order(deepinfer, tiny, tmp_path):
    code, out, _ = deepinfer("generate", "one", "two", "--model", tiny, *SMALL)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("--- ")] == ["--- 1: 'one'", "--- 2: 'two'"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    assert deepinfer("generate", "--prompts-file", str(prompts), "--model", tiny, *SMALL)[1] == out


def test_generate_json_and_a_failing_prompt(deepinfer, tiny):
    code, out, err = deepinfer("generate", "short", "long " * 40, "--model", tiny, "--json", *SMALL)
    first, second = map(json.loads, out.splitlines())
    assert code == 1
    assert (first["error"], len(first["token_ids"]), first["finish_reason"]) == (None, 3, "length")
    assert "64" in second["error"]
    code, out, err = deepinfer("generate", "long " * 40, "--model", tiny, *SMALL)
    assert (code, out) == (1, "")
    assert err.startswith("deepinfer: prompt 1: ")


def test_generate_stream_prints_every_result(deepinfer, tiny):
    code, out, _ = deepinfer("generate", "one", "two", "--model", tiny, "--stream", "--json", *SMALL)
    assert code == 0
    assert sorted(json.loads(line)["index"] for line in out.splitlines()) == [0, 1]


def test_generate_from_json_lines(deepinfer, tiny, tmp_path):
    lines = [
        {"id": "a", "prompt": "one"},
        {"id": "b", "prompt_token_ids": [0, 50, 60], "sampling_params": {"max_tokens": 1}},
        {"id": "c", "prompt": 5},
        {"id": "d", "messages": [{"role": "user", "content": "hi"}]},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = deepinfer("generate", "--input", str(source), "--output", str(target), "--model", tiny, *SMALL)
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert (code, out) == (1, "")
    assert "1 of the requests failed" in err
    assert [(r["id"], len(r["token_ids"])) for r in results] == [("a", 3), ("b", 1), ("c", 0), ("d", 3)]
    assert "expected a string" in results[2]["error"]


def test_chat_answers_one_message_and_a_conversation(deepinfer, tiny, monkeypatch):
    code, out, _ = deepinfer("chat", "hello", "--model", tiny, *SMALL)
    assert code == 0
    assert out
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/reset\nhello\n/exit\nnever read\n"))
    code, twice, _ = deepinfer("chat", "--model", tiny, *SMALL)
    assert (code, twice) == (0, out + out)


# --- shared flags ---------------------------------------------------------------------------------------------------


def test_every_engine_argument_has_a_flag():
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    flags = {option for action in parser._actions for option in action.option_strings}
    expected = {"--" + f.name.replace("_", "-") for f in argument_fields()} - {"--op-overrides", "--decode-sequence"}
    assert not (expected | {"--op", "--set"}) - flags


def test_flags_become_arguments_only_where_given():
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    assert engine_arguments(parser.parse_args(["--model", "m"])) == {"model": "m"}
    given = ["--model", "m", "--max-model-len", "64", "--no-chunked-prefill", "--op", "a=b", "--op", "c=d", "--set",
             "DEEPINFER_STRICT_OPS=1"]  # fmt: skip
    config = EngineConfig.create(Settings(), **engine_arguments(parser.parse_args(given)))
    assert (config.max_model_len, config.chunked_prefill, config.op_overrides) == (64, False, ("a=b", "c=d"))
    assert config.settings.strict_ops is True


def test_assignments():
    assert parse_assignments(["A=1", "deepinfer_b = x=y"]) == {"a": "1", "b": "x=y"}


def test_sizes_and_tables():
    assert [format_bytes(n) for n in (0, 999, 1000, 890_000, 3_128_928, 510e9, 2e15)] == [
        "0 B", "999 B", "1 kB", "890 kB", "3.13 MB", "510 GB", "2e+03 TB"]  # fmt: skip
    assert format_table(("a", "bb"), [("ccc", "d")]) == "a    bb\nccc  d"
