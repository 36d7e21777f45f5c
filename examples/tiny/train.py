"""Trains the backbone of one of the small models on token files, in stages, until a time budget is spent.

    python train.py --model v41-tiny-text --data FOLDER --vocab-map map.npy --state STATE.pt --seconds 600

Stage 1 attends densely to window and compressed entries while the indexers learn from the attention; stage 2 attends
to the indexers' choice; stage 3 also rounds weights, activations and keys to the checkpoint's formats. Stages and
learning rate follow the spent share of the budget. With `--start CHECKPOINT` training continues from a checkpoint that
`export.py` wrote, rounded all the way. STATE.pt is written every two minutes and at the end; if it exists,
training goes on from there. `draft_train.py`, `calibrate.py` and `export.py` read it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_config import OVERRIDES, tiny_config
from model_tiny import TinyModel
from model_weights import Weights, checkpoint_reader, initial, quick, serve
from train_data import Batch, Part, Windows
from train_state import Clock, Snapshots, Trainer

PEAK = 2e-3
WARMUP = 100
SEED = 41
LOG = "train_log.json"
"""Beside the weights in a checkpoint's folder."""
REAL_SHARE = {"v41-tiny-text": 0.45, "v41-tiny-ci": 0.2}
CONTINUED_REAL_SHARE = {"v41-tiny-text": 0.35, "v41-tiny-ci": 0.15}
LSE_WEIGHT = 1e-4
REPORT_STEPS = 50


@dataclass(frozen=True, slots=True)
class Stage:
    """Until which share of the budget, how long the texts are, and what is on."""

    name: str
    until: float
    length: int
    select: bool
    quantize: bool


STAGES = (
    Stage("1 dense", 0.52, 512, False, False),
    Stage("2 sparse", 0.74, 1024, True, False),
    Stage("3 quantized", 0.96, 1024, True, True),
    Stage("3 long", 1.0, 2048, True, True),
)
CONTINUED = (
    Stage("4 continued", 0.9, 1024, True, True),
    Stage("4 long", 1.0, 2048, True, True),
)
"""Stages of a run that starts from a checkpoint."""
TOY_STAGES = tuple(Stage(s.name, s.until, 16 * 2 ** min(i, 2), s.select, s.quantize) for i, s in enumerate(STAGES))
"""For tests: texts of 16 to 64 tokens."""


def stage_at(stages: tuple[Stage, ...], fraction: float) -> int:
    """Index of the stage that a share of the budget falls into."""
    return next((i for i, stage in enumerate(stages) if fraction < stage.until), len(stages) - 1)


@dataclass(slots=True)
class Run:
    """Everything a training run holds between steps."""

    name: str
    model: TinyModel
    weights: Weights
    trainer: Trainer
    windows: Windows
    clock: Clock
    tokens: int
    stages: tuple[Stage, ...]
    records: list[dict[str, Any]]
    earlier: int = 0
    """how many of the records are of the run that the start came from"""

    def state(self) -> dict[str, Any]:
        return {
            "banks": {key: bank.detach() for key, bank in self.weights.banks.items()},
            "trainer": self.trainer.state(),
            "generator": self.windows.generator.get_state(),
            "clock": (self.clock.spent, self.clock.step),
            "records": self.records,
        }

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for key, bank in self.weights.banks.items():
                bank.copy_(state["banks"][key])
        self.trainer.load(state["trainer"])
        self.windows.generator.set_state(state["generator"].cpu())
        self.clock.spent, self.clock.step = state["clock"]
        self.records = state["records"]


def make_run(
    name: str, classes: int, vocab_map: np.ndarray, part: Part, clock: Clock, tokens: int, device: str,
    stages: tuple[Stage, ...] = STAGES, seed: int = SEED, compiled: bool = False,
    overrides: dict[str, Any] | None = None, start: Path | None = None, peak: float = PEAK,
) -> Run:  # fmt: skip
    """A run at its beginning. `overrides` change the configuration's text part (tests); `start` is a checkpoint."""
    config = tiny_config(name, classes, overrides)
    reader = initial(config, seed) if start is None else checkpoint_reader(start, config)
    weights = Weights.read(config, reader, device)
    longest = max(stage.length for stage in stages)
    model = TinyModel(config, torch.from_numpy(vocab_map), device, longest, compiled)
    trainer = Trainer(weights, "main", peak, WARMUP)
    records = [] if start is None else json.loads((start / LOG).read_text(encoding="utf-8"))["stages"]
    shares = REAL_SHARE if start is None else CONTINUED_REAL_SHARE
    windows = Windows(part, shares[name], seed + len(records))
    return Run(name, model, weights, trainer, windows, clock, tokens, stages, records, len(records))


def losses(run: Run, batch: Batch, stage: Stage) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(what is minimised, weighted cross-entropy, expert loads) of a batch."""
    numbers = quick(run.model.device, stage.quantize)
    w = serve(run.weights, numbers, "main")
    result = run.model.forward(w, batch.inputs, numbers, stage.select, learn_index=True)
    nll, lse = run.model.kernels.token_losses(result.normed, w["head"], batch.targets.flatten())
    weights = batch.weights.flatten()
    entropy = (nll * weights).sum() / weights.sum().clamp_min(1)
    total = entropy + LSE_WEIGHT * lse.square().mean() + result.index_loss
    return total, torch.stack((entropy.detach(), result.index_loss.detach())), result.loads


def train_step(run: Run, stage: Stage) -> tuple[torch.Tensor, float]:
    """One optimization step; returns (cross-entropy, index loss) [2] and the learning rate."""
    batch = run.windows.draw(max(1, run.tokens // stage.length), stage.length)
    total, parts, loads = losses(run, batch, stage)
    total.backward()
    rate = run.trainer.learning_rate(run.clock.step, run.clock.fraction)
    run.trainer.step(rate)
    run.trainer.balance(loads)
    return parts, rate


def train(run: Run, snapshots: Snapshots, until: float = 1.0) -> None:
    """Step until the share `until` of the budget is spent."""
    run.clock.start()
    recent: list[torch.Tensor] = []
    while run.clock.fraction < until:
        stage = run.stages[stage_at(run.stages, run.clock.fraction)]
        if len(run.records) == run.earlier or run.records[-1]["name"] != stage.name:
            run.records.append(new_record(stage, run.tokens // stage.length))
            recent = []
        before = run.clock.spent
        parts, rate = train_step(run, stage)
        recent = [*recent[-49:], parts]
        report = run.clock.step % REPORT_STEPS == 0
        mean = torch.stack(recent).mean(0).tolist() if report else None  # waits for the device
        run.clock.tick()
        note_step(run.records[-1], run.clock.spent - before, rate, run.tokens // stage.length * stage.length, mean)
        if mean is not None:
            say(run, stage, mean, rate)
        if snapshots.due():
            snapshots.save(run.state())
            run.clock.start()
    run.records[-1]["loss"] = torch.stack(recent).mean(0).tolist()[0]
    snapshots.save(run.state())


def new_record(stage: Stage, rows: int) -> dict[str, Any]:
    return {
        "name": stage.name, "steps": 0, "tokens": 0, "rows": rows, "sequence": stage.length, "seconds": 0.0,
        "learning_rate": None, "quantized": stage.quantize, "loss": None, "curve": [],
    }  # fmt: skip


def note_step(record: dict[str, Any], seconds: float, rate: float, tokens: int, mean: list[float] | None) -> None:
    record["steps"] += 1
    record["tokens"] += tokens
    record["seconds"] += seconds
    record["learning_rate"] = [(record["learning_rate"] or [rate])[0], rate]
    record["tokens_per_second"] = record["tokens"] / max(record["seconds"], 1e-9)
    if mean is not None:
        record["loss"] = mean[0]
        record["curve"].append([record["tokens"], *mean])


def say(run: Run, stage: Stage, mean: list[float], rate: float) -> None:
    spent, speed = run.clock.spent, run.records[-1]["tokens_per_second"]
    print(
        f"{run.name} {stage.name} step {run.clock.step} {spent:.0f} s loss {mean[0]:.3f} index {mean[1]:.3f} "
        f"rate {rate:.2e} {speed:,.0f} tokens/s",
        flush=True,
    )


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(OVERRIDES), required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with token files")
    parser.add_argument("--vocab-map", type=Path, required=True, help="class of every token (`train_vocabulary.py`)")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--until", type=float, default=1.0, help="stop at this share of the budget")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--start", type=Path, help="checkpoint to continue from")
    parser.add_argument("--peak", type=float, default=PEAK, help="highest learning rate")
    parser.add_argument("--save-seconds", type=float, default=120)
    return parser.parse_args(argv)


def open_run(args: argparse.Namespace) -> Run:
    """The run that the arguments describe, at its beginning."""
    torch.set_float32_matmul_precision("high")
    described = json.loads((args.data / "data.json").read_text(encoding="utf-8"))
    part = Part.read(args.data, "train", args.device)
    clock = Clock(args.seconds, args.steps)
    vocab_map = np.load(args.vocab_map)
    return make_run(
        args.model, described["engram_compressed_vocab_size"], vocab_map, part, clock, args.tokens, args.device,
        STAGES if args.start is None else CONTINUED, compiled=args.compile, start=args.start, peak=args.peak,
    )  # fmt: skip


def data_sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "data.json").read_bytes()).hexdigest()


def main() -> int:
    args = arguments()
    run, snapshots = open_run(args), Snapshots(args.state, args.save_seconds, time.monotonic())
    state = snapshots.load()
    if state is not None:
        run.load(state)
        print(f"goes on after step {run.clock.step}")
    train(run, snapshots, args.until)
    return 0


if __name__ == "__main__":
    sys.exit(main())
