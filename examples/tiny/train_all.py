"""Trains, calibrates and exports one of the small models in one go: what made the shipped checkpoints.

    python train_all.py --model v41-tiny-text --data FOLDER --vocab-map map.npy --state STATE.pt --compile \
        --seconds 650 --draft-seconds 140 --sample-seconds 15 --tokenizer FOLDER --out CHECKPOINT --log train_log.json

Backbone (`train.py`), draft head (`draft_train.py`), measurement (`calibrate.py`), checkpoint (`export.py`). After an
interruption the same command goes on from STATE.pt.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import torch
from calibrate import report
from draft_train import add_samples, frozen, keep_results, make_draft_run, train_draft
from export import TOKENIZER_FILES, write
from train import LOG, arguments, open_run, train
from train_data import Part
from train_state import Clock, Snapshots


def more_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--draft-seconds", type=float)
    parser.add_argument("--draft-steps", type=int)
    parser.add_argument("--draft-length", type=int, default=1024)
    parser.add_argument("--sample-seconds", type=float, default=0.0)
    parser.add_argument("--keep-tokens", type=int, default=0, help="run the backbone once over that many tokens")
    parser.add_argument("--batches", type=int, default=4, help="batches of anchors a segment in the calibration")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer files go into the checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    own, rest = parser.parse_known_args(argv)
    return argparse.Namespace(**vars(arguments(rest)), **vars(own))


def main(argv: list[str] | None = None) -> int:
    args = more_arguments(argv)
    run, snapshots = open_run(args), Snapshots(args.state, args.save_seconds, time.monotonic())
    earlier = None if args.start is None else json.loads((args.start / LOG).read_text(encoding="utf-8"))["draft"]
    draft = make_draft_run(run, Clock(args.draft_seconds, args.draft_steps), args.draft_length, earlier)
    state = snapshots.load()
    if state is not None:
        draft.load(state)
        print(f"goes on after step {run.clock.step} and draft step {draft.clock.step}", flush=True)
    if run.clock.fraction < 1:
        train(run, snapshots)
    if args.sample_seconds and draft.sampled is None:
        add_samples(draft, frozen(run), args.sample_seconds)
    if args.keep_tokens:
        keep_results(draft, frozen(run), args.keep_tokens)
    if draft.clock.fraction < 1:
        train_draft(draft, snapshots)
    write(run.weights, run.model.config, args.out)
    for name in TOKENIZER_FILES if args.tokenizer else ():
        shutil.copyfile(args.tokenizer / name, args.out / name)
    with torch.no_grad():
        log = report(draft, Part.read(args.data, "valid", args.device), args.data, args.batches, start=args.start)
    args.log.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {args.out} and {args.log}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
