"""Trains the DSpark draft layers and heads of a backbone that `train.py` has finished.

    python draft_train.py --model v41-tiny-text --data FOLDER --vocab-map map.npy --state STATE.pt --seconds 150

Backbone, embedding and head stay as they are and compute as they will be served (rounded). Part of the texts can be
the model's own: rows sampled from it (`--sample-seconds`), because its own text is what a drafter sees. Weights of the
draft layers are rounded in the last part of the run. The result goes back into STATE.pt.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from draft_model import DraftModel, draft_loss, expected_length
from model_tiny import Result
from model_weights import quick, serve
from train import SEED, Run, arguments, open_run
from train_state import Clock, Snapshots, Trainer

PEAK = 1.5e-3
WARMUP = 50
ROUNDED_FROM = 0.5
"""Share of the budget after which the draft's own numbers are rounded too; from the beginning where a run continues."""
LENGTH = 1024
SLOTS = 5
ANCHOR_SHARE = 8
"""One anchor in this many positions."""
PREFIX, SAMPLED_LENGTH, SAMPLED_ROWS = 32, 256, 256
SAMPLED_SHARE = 0.25
"""Share of the steps that learn from sampled texts, where there are any."""


@dataclass(slots=True)
class DraftRun:
    """A draft run between steps. `record` is the "draft" part of train_log.json."""

    run: Run
    drafter: DraftModel
    trainer: Trainer
    clock: Clock
    length: int
    record: dict[str, Any] = field(default_factory=dict)
    sampled: torch.Tensor | None = None
    kept: list[tuple[torch.Tensor, Result]] = field(default_factory=list)
    """texts and what the backbone made of them, where `keep_results` computed that once for all steps"""

    def state(self) -> dict[str, Any]:
        state = self.run.state() | {"draft_trainer": self.trainer.state(), "draft_record": self.record}
        return state | {"draft_clock": (self.clock.spent, self.clock.step), "sampled": self.sampled}

    def load(self, state: dict[str, Any]) -> None:
        self.run.load(state)
        if "draft_trainer" in state:
            self.trainer.load(state["draft_trainer"])
            self.clock.spent, self.clock.step = state["draft_clock"]
            self.record, self.sampled = state["draft_record"], state["sampled"]


def make_draft_run(run: Run, clock: Clock, length: int = LENGTH, earlier: dict[str, Any] | None = None) -> DraftRun:
    """A draft run at its beginning; `earlier` is the record of the run that the start came from."""
    trainer = Trainer(run.weights, "draft", PEAK, WARMUP, decay=False)
    record = {"steps": 0, "seconds": 0.0, "loss": None, "curve": [], "sampled_tokens": 0, "earlier": earlier}
    return DraftRun(run, DraftModel(run.model), trainer, clock, length, record)


@torch.no_grad()
def frozen(run: Run) -> dict[str, torch.Tensor]:
    """The backbone as it is served."""
    return {name: value.detach() for name, value in serve(run.weights, quick(run.model.device, True), "main").items()}


def anchors_of(rows: int, length: int, slots: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(text, position) of blocks: a random `1 / ANCHOR_SHARE` of the positions that have something to predict."""
    device = generator.device
    count = max(1, length // ANCHOR_SHARE)
    noise = torch.rand(rows, length - 1, generator=generator, device=device)
    anchors = noise.argsort(1)[:, :count]
    texts = torch.arange(rows, device=device).unsqueeze(1).expand_as(anchors)
    return texts.flatten(), anchors.flatten()


def draft_step(draft: DraftRun, main: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimization step; returns (loss, acceptance of each slot [N])."""
    run = draft.run
    rounded = draft.run.earlier > 0 or draft.clock.fraction >= ROUNDED_FROM
    ids, result = texts_and_results(draft, main)
    numbers = quick(run.model.device, rounded)
    w = serve(run.weights, numbers, "draft")
    texts, anchors = anchors_of(*ids.shape, SLOTS, run.windows.generator)
    loss, accepted, counted, loads = draft_loss(draft.drafter, main, w, ids, result, texts, anchors, SLOTS, numbers)
    loss.backward()
    draft.trainer.step(draft.trainer.learning_rate(draft.clock.step, draft.clock.fraction))
    draft.trainer.balance(loads)
    return loss.detach(), accepted / counted.clamp_min(1)


@torch.no_grad()
def texts_and_results(draft: DraftRun, main: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Result]:
    """Texts [B, T] of the next step and the backbone's results."""
    if draft.kept:
        place = torch.randint(
            len(draft.kept), (1,), generator=draft.run.windows.generator, device=draft.run.model.device
        )
        return draft.kept[int(place)]
    ids = next_texts(draft)
    return ids, draft.run.model.forward(main, ids, quick(ids.device, True), select=True)


@torch.no_grad()
def keep_results(draft: DraftRun, main: dict[str, torch.Tensor], tokens: int) -> None:
    """Run the backbone over about `tokens` tokens, once for all steps: worth it where the backbone is the slow part."""
    while len(draft.kept) * draft.run.tokens < tokens:
        ids = next_texts(draft)
        draft.kept.append((ids, draft.run.model.forward(main, ids, quick(ids.device, True), select=True)))


def next_texts(draft: DraftRun) -> torch.Tensor:
    """Texts [B, T] of the next step: rows of the training part, or sampled ones."""
    run, turn = draft.run, draft.clock.step
    if draft.sampled is not None and turn % round(1 / SAMPLED_SHARE) == 0:
        rows = run.tokens // draft.sampled.shape[1]
        chosen = torch.randint(
            len(draft.sampled), (rows,), generator=run.windows.generator, device=draft.sampled.device
        )
        return draft.sampled[chosen]
    return run.windows.draw(max(1, run.tokens // draft.length), draft.length).inputs


def sample_texts(run: Run, main: dict[str, torch.Tensor], rows: int, length: int) -> torch.Tensor:
    """Texts [rows, length] int64 that begin like documents of the training part and are sampled from there on.

    Every step runs the whole text again: there is no cache to be wrong, and texts are short.
    """
    batch = run.windows.draw(rows, length)
    ids = batch.inputs.clone()
    temperature = torch.where(torch.arange(rows, device=ids.device) % 2 == 0, 1.0, 0.7).unsqueeze(1)
    for position in range(PREFIX, length):
        normed = run.model.forward(main, ids, quick(ids.device, True), select=True).normed.unflatten(0, ids.shape)
        logits = run.model.vocabulary(main, normed[:, position - 1]) / temperature
        noise = torch.empty_like(logits).exponential_(generator=run.windows.generator)
        ids[:, position] = (logits.softmax(-1) / noise).argmax(-1)
    return ids


def add_samples(draft: DraftRun, main: dict[str, torch.Tensor], seconds: float) -> None:
    """Sample texts for about `seconds`."""
    begun, parts = time.monotonic(), []
    with torch.no_grad():
        while time.monotonic() - begun < seconds:
            parts.append(sample_texts(draft.run, main, SAMPLED_ROWS, SAMPLED_LENGTH))
            torch.cuda.synchronize() if parts[-1].is_cuda else None
    if parts:
        draft.sampled = torch.cat(parts)
        draft.record["sampled_tokens"] = draft.sampled.shape[0] * (SAMPLED_LENGTH - PREFIX)
        print(f"sampled {draft.record['sampled_tokens']:,} tokens in {time.monotonic() - begun:.0f} s", flush=True)


def train_draft(draft: DraftRun, snapshots: Snapshots, until: float = 1.0) -> None:
    """Step until the share `until` of the budget is spent."""
    main = frozen(draft.run)
    draft.clock.start()
    recent: list[tuple[torch.Tensor, torch.Tensor]] = []
    while draft.clock.fraction < until:
        recent = [*recent[-49:], draft_step(draft, main)]
        report = draft.clock.step % 50 == 0
        summary = list(means(recent)) if report else None
        draft.clock.tick()
        draft.record["steps"], draft.record["seconds"] = draft.clock.step, draft.clock.spent
        if summary is not None:
            loss, acceptance = summary
            draft.record["curve"].append([draft.clock.step, loss, acceptance])
            rates = " ".join(f"{a:.3f}" for a in acceptance)
            print(
                f"{draft.run.name} draft step {draft.clock.step} {draft.clock.spent:.0f} s loss {loss:.3f} "
                f"acceptance {rates} length {expected_length(acceptance):.2f}", flush=True,
            )  # fmt: skip
        if snapshots.due():
            snapshots.save(draft.state())
            draft.clock.start()
    draft.record["loss"], _ = means(recent)
    snapshots.save(draft.state())


def means(recent: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Any]:
    """Mean loss, and mean acceptance of every slot."""
    yield torch.stack([loss for loss, _ in recent]).mean().item()
    yield torch.stack([accepted for _, accepted in recent]).mean(0).tolist()


def draft_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--sample-seconds", type=float, default=0.0)
    extra.add_argument("--length", type=int, default=LENGTH)
    own, rest = extra.parse_known_args(argv)
    return argparse.Namespace(**vars(arguments(rest)), **vars(own))


def main() -> int:
    args = draft_arguments()
    seconds, steps = args.seconds, args.steps
    args.seconds, args.steps = (1.0, None) if steps is None else (None, 1)  # the backbone's clock does not run here
    run, snapshots = open_run(args), Snapshots(args.state, args.save_seconds, time.monotonic())
    torch.manual_seed(SEED)
    draft = make_draft_run(run, Clock(seconds, steps), args.length)
    state = snapshots.load()
    if state is None:
        raise FileNotFoundError(f"{args.state}: found no trained backbone, expected one that `train.py` wrote")
    draft.load(state)
    if args.sample_seconds and draft.sampled is None:
        add_samples(draft, frozen(run), args.sample_seconds)
    train_draft(draft, snapshots, args.until)
    return 0


if __name__ == "__main__":
    sys.exit(main())
