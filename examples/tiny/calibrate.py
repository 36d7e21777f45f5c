"""Measures a trained model as it will be served and finds the confidence head's temperatures; writes train_log.json.

    python calibrate.py --model v41-tiny-text --data FOLDER --vocab-map map.npy --state STATE.pt --log train_log.json

On the validation part: loss of every segment, load of the experts, and what drafts are worth. For the latter, drafts
are sampled at random anchors and the backbone runs once more over the drafted tokens, so that slot k is judged behind
the drafts before it, as in serving. A draft d is accepted with probability min(1, q(d) / p(d)); temperatures T_0, T_1,
.. are chosen one after the other so that the product of sigmoid(s_i / T_i), i <= k, comes closest to the chance that
drafts 0 .. k are accepted (sequential temperature scaling, DSpark paper 3.2.1).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from draft_model import DraftModel, draft_blocks, expected_length, targets_of
from draft_train import SLOTS, DraftRun, anchors_of, frozen, make_draft_run
from model_weights import Numbers, quick, serve
from train import LOG, SEED, Run, arguments, data_sha256, open_run
from train_data import Part, in_rows, validation_windows
from train_state import Clock

from deepinfer.models.deepseek_v41.sizes import count_parameters

BINS = 15
GRID = [0.5 + 0.05 * i for i in range(51)]
CONTEXT = 256
Tensor = torch.Tensor


@dataclass(slots=True)
class Drafted:
    """Sampled drafts of n anchors: confidence logits [n, N], chance of acceptance given the prefix [n, N]."""

    scores: Tensor
    accepted: Tensor


@torch.no_grad()
def validation(run: Run, main: dict[str, Tensor], part: Part, length: int, numbers: Numbers) -> dict[str, dict]:
    """{segment: nats per token and tokens} with every target weighing 1."""
    losses, rows = {}, max(1, run.tokens // length)
    for segment in part.segments:
        total = count = 0.0
        for batch, _ in in_rows(validation_windows(part, segment, length), rows):
            result = run.model.forward(main, batch.inputs, numbers, select=True)
            nll, _ = run.model.kernels.token_losses(result.normed, main["head"], batch.targets.flatten())
            total += (nll * batch.weights.flatten()).sum().item()
            count += batch.weights.sum().item()
        losses[segment["name"]] = {"nats_per_token": total / count, "tokens": int(count)}
    return losses


@torch.no_grad()
def expert_loads(run: Run, main: dict[str, Tensor], part: Part, length: int, numbers: Numbers) -> dict[str, float]:
    """{layer: busiest expert / mean} over the whole part, but for its last, incomplete batch."""
    loads: dict[str, Tensor] = {}
    rows = max(1, run.tokens // length)
    everything = validation_windows(part, {"start": 0, "stop": part.ids.shape[0]}, length)
    for first in range(0, max(1, everything.inputs.shape[0] - rows), rows):
        result = run.model.forward(main, everything.inputs[first : first + rows], numbers, select=True)
        for name, load in result.loads.items():
            loads[name] = loads.get(name, 0) + load
    return {name.split(".")[1]: (load.max() / load.mean()).item() for name, load in loads.items()}


@torch.no_grad()
def teacher_forced(
    draft: DraftRun, main: dict[str, Tensor], w: dict[str, Tensor], part: Part, numbers: Numbers
) -> dict:
    """{segment: mean acceptance of every slot} on the true text."""
    run, out = draft.run, {}
    generator = torch.Generator(part.ids.device).manual_seed(SEED)
    for segment in part.segments:
        accepted = torch.zeros(SLOTS, device=part.ids.device)
        counted = torch.zeros(SLOTS, device=part.ids.device)
        for batch, real in in_rows(validation_windows(part, segment, draft.length), max(1, run.tokens // draft.length)):
            ids = batch.inputs
            result = run.model.forward(main, ids, numbers, select=True)
            texts, anchors = anchors_of(*ids.shape, SLOTS, generator)
            drafts = draft_blocks(draft.drafter, main, w, ids, result.features, texts, anchors, SLOTS, numbers)
            targets = targets_of(ids, texts, anchors, SLOTS)
            logits, confidence = draft.drafter.heads(w, drafts, targets.previous)
            target = run.model.vocabulary(main, result.normed[targets.rows.flatten()]).view_as(logits)
            values = draft.drafter.compare(logits, confidence, target, targets.tokens)[3]
            weights = batch.weights[texts.unsqueeze(1), (targets.rows % ids.shape[1])]
            weights = weights * targets.valid * (texts < real).unsqueeze(1)
            accepted += (values * weights).sum(0)
            counted += weights.sum(0)
        out[segment["name"]] = (accepted / counted.clamp_min(1)).tolist()
    return out


@torch.no_grad()
def drafted(
    draft: DraftRun, main: dict[str, Tensor], w: dict[str, Tensor], ids: Tensor, anchors: Tensor, temperature: float,
    numbers: Numbers,
) -> Drafted:  # fmt: skip
    """Draft behind one anchor of every text ids [B, T], and let the backbone judge the drafted tokens.

    temperature 1 samples, 0 takes the likeliest. The golden token, ids[anchor], is the text's own.
    """
    run, texts = draft.run, torch.arange(ids.shape[0], device=ids.device)
    features = run.model.forward(main, ids, numbers, select=True).features
    blocks = draft_blocks(draft.drafter, main, w, ids, features, texts, anchors, SLOTS, numbers)
    changed, previous = ids.clone(), ids[texts, anchors]
    proposals, scores = [], []
    for slot in range(SLOTS):
        step = type(blocks)(blocks.base[:, slot : slot + 1], blocks.hidden[:, slot : slot + 1], {})
        logits, confidence = draft.drafter.heads(w, step, previous.unsqueeze(1))
        logits = logits[:, 0]
        previous = pick(logits, temperature)
        proposals.append((logits, previous))
        scores.append(confidence[:, 0])
        changed[texts, anchors + 1 + slot] = previous
    normed = run.model.forward(main, changed, numbers, select=True).normed.unflatten(0, ids.shape)
    accepted = []
    for slot, (logits, token) in enumerate(proposals):
        target = run.model.vocabulary(main, normed[texts, anchors + slot])
        accepted.append(chance(logits, target, token, temperature))
    return Drafted(torch.stack(scores, 1), torch.stack(accepted, 1))


def pick(logits: Tensor, temperature: float) -> Tensor:
    return logits.argmax(-1) if temperature == 0 else torch.multinomial(logits.softmax(-1), 1).squeeze(1)


def chance(logits: Tensor, target: Tensor, token: Tensor, temperature: float) -> Tensor:
    """Chance that a draft is accepted: 0 or 1 where both take the likeliest token."""
    if temperature == 0:
        return (target.argmax(-1) == token).float()
    place = token.unsqueeze(1)
    log_ratio = target.log_softmax(-1).gather(1, place) - logits.log_softmax(-1).gather(1, place)
    return log_ratio.clamp(max=0).exp().squeeze(1)


def anchored_texts(
    part: Part, segment: dict[str, Any], rows: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random windows of a segment, and an anchor in each that leaves room for the block."""
    device = part.ids.device
    free = max(1, segment["stop"] - segment["start"] - length)
    starts = segment["start"] + (torch.rand(rows, generator=generator, device=device) * free).long()
    place = (starts.unsqueeze(1) + torch.arange(length, device=device)).clamp(max=part.ids.shape[0] - 1)
    low, high = min(32, length // 4), length - SLOTS - 1
    anchors = low + (torch.rand(rows, generator=generator, device=device) * (high - low)).long()
    return part.ids[place].long(), anchors


def measure_drafts(
    draft: DraftRun, main: dict[str, Tensor], w: dict[str, Tensor], part: Part, batches: int, temperature: float,
    length: int, numbers: Numbers,
) -> dict[str, Drafted]:  # fmt: skip
    """Drafts behind random anchors of every validation segment."""
    generator = torch.Generator(part.ids.device).manual_seed(SEED)
    rows = max(1, draft.run.tokens // length)
    out = {}
    for segment in part.segments:
        parts = []
        for _ in range(batches):
            ids, anchors = anchored_texts(part, segment, rows, length, generator)
            parts.append(drafted(draft, main, w, ids, anchors, temperature, numbers))
        out[segment["name"]] = Drafted(torch.cat([p.scores for p in parts]), torch.cat([p.accepted for p in parts]))
    return out


def mean_length(found: Drafted) -> float:
    """Mean tokens that a verify step commits: the golden one's successor and the accepted prefix."""
    return 1 + found.accepted.cumprod(1).sum(1).mean().item()


def calibration_error(predicted: Tensor, happened: Tensor) -> float:
    """Expected calibration error over `BINS` equal bins. predicted, happened [n] in 0 .. 1."""
    bins = (predicted * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, device=predicted.device).index_add_(0, bins, predicted - happened)
    return (gaps.abs().sum() / len(predicted)).item()


def sequential_temperatures(found: Drafted) -> list[float]:
    """T_k by grid, earlier ones fixed."""
    happened = found.accepted.cumprod(1)
    before = torch.ones_like(happened[:, 0])
    chosen = []
    for slot in range(found.scores.shape[1]):
        errors = [calibration_error(before * (found.scores[:, slot] / t).sigmoid(), happened[:, slot]) for t in GRID]
        best = GRID[min(range(len(GRID)), key=errors.__getitem__)]
        chosen.append(round(best, 2))
        before = before * (found.scores[:, slot] / best).sigmoid()
    return chosen


def cumulative_error(found: Drafted, temperatures: list[float]) -> float:
    """Calibration error of the cumulative product, over all slots."""
    divisor = torch.tensor(temperatures, device=found.scores.device)
    predicted = (found.scores / divisor).sigmoid().cumprod(1)
    return calibration_error(predicted.flatten(), found.accepted.cumprod(1).flatten())


def auroc(found: Drafted) -> float:
    """Chance that an accepted prefix has a higher product than a refused one; soft labels weigh as parts of both."""
    predicted = found.scores.sigmoid().cumprod(1).flatten()
    happened = found.accepted.cumprod(1).flatten()[predicted.argsort()].double()
    refused = (1 - happened).cumsum(0)
    return ((happened * refused).sum() / (happened.sum() * (1 - happened).sum())).item()


def halves(found: dict[str, Drafted]) -> Iterator[Drafted]:
    """Even rows of all segments, to choose temperatures; odd rows, to judge them."""
    for offset in (0, 1):
        scores = torch.cat([d.scores[offset::2] for d in found.values()])
        yield Drafted(scores, torch.cat([d.accepted[offset::2] for d in found.values()]))


def draft_report(
    draft: DraftRun, main: dict[str, Tensor], part: Part, batches: int, context: int, numbers: Numbers
) -> dict[str, Any]:
    """The "draft" part of train_log.json."""
    w = {name: value.detach() for name, value in serve(draft.run.weights, numbers, "draft").items()}
    draft.drafter = DraftModel(draft.run.model.plain())
    analytic = teacher_forced(draft, main, w, part, numbers)
    sampled = measure_drafts(draft, main, w, part, batches, 1.0, context, numbers)
    greedy = measure_drafts(draft, main, w, part, 1, 0.0, context, numbers)
    fit, check = halves(sampled)
    temperatures = sequential_temperatures(fit)
    return {
        "acceptance": analytic,
        "mean_accepted_length": {name: expected_length(rates) for name, rates in analytic.items()},
        "sampled_length": {name: mean_length(d) for name, d in sampled.items()},
        "greedy_length": {name: mean_length(d) for name, d in greedy.items()},
        "temperatures": temperatures,
        "calibration_error_before": cumulative_error(check, [1.0] * SLOTS),
        "calibration_error_after": cumulative_error(check, temperatures),
        "auroc": auroc(check),
        "anchors": len(check.scores) + len(fit.scores),
    }


def this_machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__}


def report(
    draft: DraftRun, part: Part, folder: Path, batches: int, context: int = CONTEXT, start: Path | None = None
) -> dict[str, Any]:
    """All of train_log.json. A backbone that was not trained here keeps the device of the log at `start`."""
    run, length, here = draft.run, draft.length, this_machine(draft.run.model.device)
    earlier = None
    if start is not None and run.clock.step == 0:
        log = json.loads((start / LOG).read_text(encoding="utf-8"))
        earlier = {key: log[key] for key in here}
    main, numbers = frozen(run), quick(run.model.device, True)
    validated = validation(run, main, part, length, numbers)
    loads = expert_loads(run, main, part, length, numbers)
    counts = count_parameters(run.model.config)
    return {
        "model": run.name,
        "parameters": counts.total - counts.vision,
        "active_parameters": counts.active_decode,
        **(earlier or here),
        "date": datetime.now(UTC).date().isoformat(),
        "seed": SEED,
        "data_sha256": data_sha256(folder),
        "stages": run.records,
        "validation": validated,
        "expert_load": loads,
        "draft": whole_record(draft.record)
        | {"device": here["device"]}
        | draft_report(draft, main, part, batches, context, numbers),
    }


def whole_record(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the steps and seconds of the run before it, if it continued one; that stays beside it."""
    earlier = record["earlier"] or {}
    return record | {key: record[key] + earlier.get(key, 0) for key in ("steps", "seconds", "sampled_tokens")}


def main() -> int:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--log", type=Path, required=True)
    extra.add_argument("--batches", type=int, default=4)
    own, rest = extra.parse_known_args()
    args = arguments(rest)
    args.seconds, args.steps = 1.0, None
    run = open_run(args)
    draft = make_draft_run(run, Clock(1.0))
    draft.load(torch.load(args.state, weights_only=False, map_location=args.device))
    part = Part.read(args.data, "valid", args.device)
    begun = time.monotonic()
    log = report(draft, part, args.data, own.batches)
    own.log.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: log[k] for k in ("validation", "expert_load", "draft")}, indent=1))
    print(f"measured in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
