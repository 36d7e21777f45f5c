"""Writes the model card of a checkpoint from result files; no number in it is typed by hand.

    python card.py --data data.json --log train_log.json [--evaluation evaluation.json] --out model_card.md

data.json        description of the token files (`tokens.py`); format in TOKENS.md
train_log.json   what training measured; format in TOKENS.md
evaluation.json  results of `score.py`; format in its docstring. Without it the card says that there are none.
A missing key stops the program with its path. Targets are those of the evaluation sets and of `TARGETS`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import string
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("model_card.md")
REAL_LOSS, GENERATED_LENGTH, REAL_LENGTH, CALIBRATION = 3.6, 3.0, 1.8, 0.03
"""Targets: nats per token on real text, mean accepted lengths, expected calibration error."""

Results = dict[str, Any]


class MissingKey(Exception):  # noqa: N818 - reads as what it says
    """A result file lacks something that the card shows."""


def card(data: Results, log: Results, evaluation: Results | None, data_sha256: str) -> str:
    """The text of the card. Raises MissingKey, and ValueError if the log belongs to other data."""
    found = need(log, "data_sha256")
    if found != data_sha256:
        raise ValueError(f"train_log.json: found data_sha256 {found}, expected {data_sha256} (data.json)")
    fields = {
        "model": need(log, "model"),
        "summary": summary(data, log),
        "sources": sources_table(data),
        "families": families_table(data),
        "seeds": seeds_text(data, log),
        "stages": stages_table(log),
        "losses": losses_table(data, log),
        "loads": rows(
            ("layer", "busiest expert / mean"), ((k, f"{v:.2f}") for k, v in need(log, "expert_load").items())
        ),
        "draft": draft_text(log),
        "acceptance": acceptance_table(log),
        "evaluation": evaluation_text(evaluation),
    }
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(fields)


def need(values: Results, path: str) -> Any:
    """The value at a path such as "draft/steps"; MissingKey naming the part that is not there."""
    found: Any = values
    for place, key in enumerate(path.split("/")):
        if not isinstance(found, dict) or key not in found:
            raise MissingKey(f"found no {'/'.join(path.split('/')[: place + 1])!r}, expected it in the result file")
        found = found[key]
    return found


def rows(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def summary(data: Results, log: Results) -> str:
    seconds = sum(need(stage, "seconds") for stage in need(log, "stages")) + need(log, "draft/seconds")
    seen = sum(need(stage, "tokens") for stage in log["stages"])
    every, active = need(log, "parameters") / 1e6, need(log, "active_parameters") / 1e6
    entries, classes = need(data, "vocab_size"), need(data, "engram_compressed_vocab_size")
    lines = (
        ("parameters", f"{every:.1f} M, {active:.1f} M active per token"),
        ("vocabulary", f"{entries:,} entries, {classes:,} Engram classes"),
        ("tokens seen", f"{seen / 1e6:.0f} M"),
        ("trained on", f"{need(log, 'device')}, PyTorch {need(log, 'torch')}, {need(log, 'date')}"),
        ("time", f"{seconds / 60:.1f} minutes"),
    )
    return rows(("", ""), lines)


def sources_table(data: Results) -> str:
    lines = [
        (
            name,
            f"`{need(entry, 'package')}` {need(entry, 'version')}",
            need(entry, "license"),
            f"{need(entry, 'tokens'):,}",
        )
        for name, entry in need(data, "sources").items()
    ]
    lines += [(name, f"left out: {reason}", "", "0") for name, reason in need(data, "skipped").items()]
    return rows(("source", "package", "licence", "training tokens"), lines)


def families_table(data: Results) -> str:
    lines = []
    for name, entry in need(data, "families").items():
        first = need(entry, "first_seed")
        seeds = f"{first} to {first + need(entry, 'seeds') - 1}"
        lines.append((name, f"{need(entry, 'documents'):,}", f"{need(entry, 'tokens'):,}", seeds))
    return rows(("family", "documents", "training tokens", "seeds"), lines)


def seeds_text(data: Results, log: Results) -> str:
    split, shuffle = need(data, "seeds/split"), need(data, "seeds/shuffle")
    return (
        f"Seeds: split {split}, shuffle {shuffle}, training {need(log, 'seed')}. SHA-256 of `data.json`: "
        f"`{log['data_sha256']}`, of `tokenizer.json`: `{need(data, 'tokenizer_sha256')}`."
    )


def stages_table(log: Results) -> str:
    lines = []
    for stage in need(log, "stages"):
        first, last = need(stage, "learning_rate")
        lines.append(
            (
                need(stage, "name"), f"{need(stage, 'steps'):,}", f"{need(stage, 'tokens') / 1e6:.1f} M",
                f"{need(stage, 'rows')} x {need(stage, 'sequence')}", f"{first:.2g} to {last:.2g}",
                "yes" if need(stage, "quantized") else "no", f"{need(stage, 'seconds'):.0f} s",
                f"{need(stage, 'tokens_per_second'):,.0f}", f"{need(stage, 'loss'):.3f}",
            )
        )  # fmt: skip
    head = ("stage", "steps", "tokens", "batch", "learning rate", "fake quantization", "time", "tokens/s", "loss")
    return rows(head, lines)


def losses_table(data: Results, log: Results) -> str:
    """Validation loss of every segment, and of all real text together with its target."""
    segments = {segment["name"]: segment for segment in need(data, "parts/valid/segments")}
    lines, nats, tokens, size = [], 0.0, 0, 0
    for name, loss in need(log, "validation").items():
        if name not in segments:
            raise MissingKey(f"found no segment {name!r} in data.json, expected one for every entry of 'validation'")
        segment = segments[name]
        count, per_token = need(loss, "tokens"), need(loss, "nats_per_token")
        lines.append((name, f"{count:,}", f"{per_token:.3f}", f"{_bits(per_token * count, segment['bytes']):.3f}"))
        if segment["kind"] == "real":
            nats, tokens, size = nats + per_token * count, tokens + count, size + segment["bytes"]
    if tokens:
        mark = _mark(nats / tokens <= REAL_LOSS)
        label = f"**all real text** (target {REAL_LOSS}: {mark})"
        lines.append((label, f"{tokens:,}", f"{nats / tokens:.3f}", f"{_bits(nats, size):.3f}"))
    return rows(("segment", "tokens", "nats/token", "bits/byte"), lines)


def draft_text(log: Results) -> str:
    draft = need(log, "draft")
    before, after = need(draft, "calibration_error_before"), need(draft, "calibration_error_after")
    temperatures = ",".join(f"{value:g}" for value in need(draft, "temperatures"))
    return (
        f"{need(draft, 'steps'):,} steps in {need(draft, 'seconds'):.0f} s, final loss {need(draft, 'loss'):.3f}. "
        f"Confidence: expected calibration error {before:.1%} before and {after:.1%} after calibration "
        f"(target {CALIBRATION:.0%}: {_mark(after <= CALIBRATION)}), AUROC {need(draft, 'auroc'):.3f}. Use "
        f"`DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE={temperatures}`."
    )


def acceptance_table(log: Results) -> str:
    """Teacher-forced acceptance of every slot and the mean accepted length that follows from it."""
    acceptance, lengths = need(log, "draft/acceptance"), need(log, "draft/mean_accepted_length")
    slots = max(map(len, acceptance.values()), default=0)
    lines = []
    for name, values in acceptance.items():
        if name not in lengths:
            raise MissingKey(f"found no 'draft/mean_accepted_length/{name}', expected it beside 'draft/acceptance'")
        lines.append((name, *(f"{value:.2f}" for value in values), f"{lengths[name]:.2f}"))
    for kind, wanted in (("generated", GENERATED_LENGTH), ("real", REAL_LENGTH)):
        found = [length for name, length in lengths.items() if name.startswith(kind)]
        if found:
            mean = sum(found) / len(found)
            label = f"**mean of the {kind} sets** (target {wanted}: {_mark(mean >= wanted)})"
            lines.append((label, *([""] * slots), f"{mean:.2f}"))
    return rows(("set", *(f"slot {k}" for k in range(slots)), "mean accepted length"), lines)


def evaluation_text(evaluation: Results | None) -> str:
    """One table a run."""
    if evaluation is None:
        return "No evaluation results were given when this card was written."
    parts = []
    for run, results in need(evaluation, "runs").items():
        lines = [_set_line(name, result) for name, result in sorted(need(results, "sets").items())]
        parts.append(f"### Run `{run}`\n\n" + rows(("set", "items", "right", "target", "mean accepted length"), lines))
        if losses := need(results, "held_out"):
            held = [
                (source, f"{loss['tokens']:,}", f"{loss['nats_per_token']:.3f}", f"{loss['bits_per_byte']:.3f}")
                for source, loss in losses.items()
            ]
            parts.append(rows(("held-out text", "tokens", "nats/token", "bits/byte"), held))
    return "\n\n".join(parts)


def _set_line(name: str, result: Results) -> tuple[str, ...]:
    rate, target = need(result, "rate"), need(result, "target")
    right = f"not run: {need(result, 'first_error')}" if rate is None else f"{rate:.1%}"
    if "valid_rate" in result:
        right += f" ({result['valid_rate']:.1%} valid)"
    wanted = (
        "report only"
        if target is None
        else f"{target:.0%}"
        if rate is None
        else f"{target:.0%}: {_mark(rate >= target)}"
    )
    length = need(result, "mean_accepted_length")
    return name, str(need(result, "items")), right, wanted, "" if length is None else f"{length:.2f}"


def _bits(nats: float, size: int) -> float:
    return nats / size / math.log(2)


def _mark(reached: bool) -> str:
    return "reached" if reached else "missed"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--evaluation", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    data = options.data.read_bytes()
    evaluation = json.loads(options.evaluation.read_text(encoding="utf-8")) if options.evaluation else None
    log = json.loads(options.log.read_text(encoding="utf-8"))
    text = card(json.loads(data), log, evaluation, hashlib.sha256(data).hexdigest())
    options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
