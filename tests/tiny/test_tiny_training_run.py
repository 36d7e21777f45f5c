"""Training at toy size: it lowers the loss, goes on after an interruption, and what it exports is what it had."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from calibrate import (
    Drafted,
    calibration_error,
    drafted,
    expert_loads,
    mean_length,
    sequential_temperatures,
    validation,
)
from draft_train import DraftRun, draft_step, frozen, keep_results, make_draft_run, sample_texts, train_draft
from export import write
from model_weights import SMOOTH, Weights, checkpoint_reader, quick, rounded, serve
from train import LOG, TOY_STAGES, Run, losses, make_run, stage_at, train, train_step
from train_data import Part, Windows
from train_state import Clock, Snapshots

from deepinfer.hub.safetensors import Checkpoint
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.manifest import manifest

SMALL = {
    "vocab_size": 256, "sliding_window": 8, "index_topk": 8, "candidate_topk_blocks": 8, "engram_vocab_size": 61,
    "hc_sinkhorn_iters": 3,
}  # fmt: skip
CLASSES = 200
BORDER = 800


def toy_part() -> Part:
    """Two halves, "real" and "generated", of documents that repeat a short pattern."""
    rng = np.random.default_rng(0)
    documents = []
    while sum(map(len, documents)) < 2 * BORDER:
        pattern = rng.integers(70, 250, rng.integers(2, 5))
        documents.append([0, *np.tile(pattern, 6).tolist(), 1])
    ids = np.concatenate(documents)[: 2 * BORDER].astype(np.int32)
    segments = [
        {"name": "real/x", "kind": "real", "start": 0, "stop": BORDER},
        {"name": "generated", "kind": "generated", "start": BORDER, "stop": 2 * BORDER},
    ]
    return Part(torch.from_numpy(ids), torch.full((len(ids),), 100, dtype=torch.uint8), segments)


def toy_run(steps: int = 8, stages=TOY_STAGES) -> Run:
    vocab_map = np.arange(SMALL["vocab_size"]) % CLASSES
    return make_run(
        "v41-tiny-ci", CLASSES, vocab_map, toy_part(), Clock(steps=steps), 64, "cpu", stages, overrides=SMALL
    )


def snapshots(path: Path) -> Snapshots:
    return Snapshots(path, seconds=1e9, last=1e18)


def test_a_step_lowers_the_loss_of_its_batch():
    run = toy_run()
    run.trainer.warmup = 1
    for stage in (TOY_STAGES[0], TOY_STAGES[2]):
        batch = run.windows.draw(4, stage.length)
        before, _, loads = losses(run, batch, stage)
        before.backward()
        run.trainer.step(1e-3)
        after = losses(run, batch, stage)[0]
        assert after.item() < before.item() - 0.01
        assert all(load.sum() == 4 * stage.length * 2 for load in loads.values())


def test_indexer_learns_from_its_own_loss_alone():
    run = toy_run()
    batch = run.windows.draw(4, 16)
    w = serve(run.weights, SMOOTH, "main")
    result = run.model.forward(w, batch.inputs, SMOOTH, select=False, learn_index=True)
    result.index_loss.backward()
    reached = {key for key, bank in run.weights.banks.items() if bank.grad is not None and bank.grad.abs().sum() > 0}
    assert reached and all("/indexer/" in key for key in reached)


def test_interrupted_training_ends_where_an_unbroken_one_does(tmp_path):
    unbroken = toy_run(4)
    train(unbroken, snapshots(tmp_path / "a.pt"))
    first = toy_run(4)
    train(first, snapshots(tmp_path / "b.pt"), until=0.5)
    assert first.clock.step == 2
    second = toy_run(4)
    second.load(snapshots(tmp_path / "b.pt").load())
    train(second, snapshots(tmp_path / "b.pt"))
    assert second.clock.step == 4
    for key, bank in unbroken.weights.banks.items():
        assert torch.equal(bank, second.weights.banks[key]), key
    assert sum(r["tokens"] for r in second.records) == sum(r["tokens"] for r in unbroken.records)


def test_drafts_train_sample_and_resume(tmp_path):
    draft = make_draft_run(toy_run(), Clock(steps=4), 32)
    main = frozen(draft.run)
    untouched = {key: bank.detach().clone() for key, bank in draft.run.weights.part("main").items()}
    draft.sampled = sample_texts(draft.run, main, 2, 40)
    assert draft.sampled.shape == (2, 40) and int(draft.sampled.max()) < SMALL["vocab_size"]
    keep_results(draft, main, 256)
    draft.trainer.warmup = 1
    first, _ = draft_step(draft, main)
    train_draft(draft, snapshots(tmp_path / "d.pt"))
    assert draft.record["loss"] < first.item()
    assert all(torch.equal(bank, draft.run.weights.banks[key]) for key, bank in untouched.items())
    other = make_draft_run(toy_run(), Clock(steps=4), 32)
    other.load(snapshots(tmp_path / "d.pt").load())
    assert other.clock.step == 4 and other.record == draft.record
    assert all(torch.equal(bank, other.run.weights.banks[key]) for key, bank in draft.run.weights.banks.items())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[DraftRun, Path]:
    """A run after one step of each half, and its checkpoint."""
    run = toy_run()
    train_step(run, TOY_STAGES[2])
    draft = make_draft_run(run, Clock(steps=2), 32)
    draft_step(draft, frozen(run))
    return draft, write(run.weights, run.model.config, tmp_path_factory.mktemp("export"))


def test_export_and_back(exported):
    draft, folder = exported
    config = ModelConfig.from_directory(folder)
    Checkpoint.open(folder).validate(manifest(config))
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(names) == 3
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name for name, file in index.items() if file == names[-1]} == {n for n in index if ".engram.embed." in n}
    read = Weights.read(config, checkpoint_reader(folder, config))
    for key, bank in draft.run.weights.banks.items():
        kind = key.split("/")[2]
        if "/bias/" not in key:
            assert torch.equal(read.banks[key], bank.detach() if kind == "f32" else rounded(bank, kind).float()), key
    views = read.all_views()
    assert all(torch.equal(views[n], views[f"{n}_vl"]) for n in views if n.endswith(".gate.bias"))


def test_export_refuses_weights_of_another_shape(exported, tmp_path):
    draft, _ = exported
    other = toy_run().model.config
    raw = {**other.raw, "text_config": {**other.raw["text_config"], "dspark_markov_rank": 32}}
    with pytest.raises(ValueError, match="markov_head"):
        write(draft.run.weights, ModelConfig.from_dict(raw), tmp_path)


def test_a_run_continues_from_a_checkpoint(exported):
    _, folder = exported
    (folder / LOG).write_text(json.dumps({"stages": [{"name": "1 dense"}]}))
    run = make_run(
        "v41-tiny-ci", CLASSES, np.arange(256) % CLASSES, toy_part(), Clock(steps=1), 128, "cpu", TOY_STAGES[2:3],
        overrides=SMALL, start=folder,
    )  # fmt: skip
    train(run, snapshots(folder / "state.pt"))
    assert [record["name"] for record in run.records] == ["1 dense", TOY_STAGES[2].name]


def test_measures_of_a_run(exported):
    draft, _ = exported
    run, part = draft.run, toy_part()
    main, numbers = frozen(run), quick("cpu", True)
    found = validation(run, main, part, 32, numbers)
    targets = part.ids[1:BORDER]
    assert found["real/x"]["tokens"] == int((targets != 0).sum())
    assert 3 < found["real/x"]["nats_per_token"] < 7
    assert all(1 <= load <= 2 for load in expert_loads(run, main, part, 32, numbers).values())  # 2 of 4 experts
    w = serve(run.weights, numbers, "draft")
    ids, anchors = part.ids[:96].long().view(4, 24), torch.tensor([9, 3, 14, 7])
    for temperature in (0.0, 1.0):
        drafts = drafted(draft, main, w, ids, anchors, temperature, numbers)
        assert drafts.accepted.shape == (4, 5) and bool(((drafts.accepted >= 0) & (drafts.accepted <= 1)).all())
    assert mean_length(Drafted(torch.zeros(1, 2), torch.tensor([[0.5, 0.5]]))) == 1.75


def test_temperatures_are_found_again():
    """Confidences that are too sure by a factor of 2 and of 1.25."""
    generator = torch.Generator().manual_seed(0)
    true_logits = torch.randn(40_000, 2, generator=generator) * 1.5 + 0.5
    accepted = true_logits.sigmoid()
    found = Drafted(true_logits * torch.tensor([2.0, 1.25]), accepted)
    assert sequential_temperatures(found) == [2.0, 1.25]
    assert calibration_error(torch.full((1000,), 0.9), torch.full((1000,), 0.6)) == pytest.approx(0.3, abs=1e-5)


def test_windows_mix_and_begin_at_documents():
    part = toy_part()
    windows = Windows(part, real_share=0.25, seed=3)
    starts = windows.starts(4000, 16)
    assert (starts < BORDER).float().mean().item() == pytest.approx(0.25, abs=0.03)
    begins = (part.ids[starts] == 0).float().mean().item()
    assert begins == pytest.approx(0.5 + 0.5 * (part.ids == 0).float().mean().item(), abs=0.04)
    batch = windows.draw(3, 16)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


def test_clock_and_stages():
    assert [stage_at(TOY_STAGES, f) for f in (0.0, 0.6, 0.8, 0.97, 1.0)] == [0, 1, 2, 3, 3]
    clock = Clock(steps=4)
    clock.tick()
    assert clock.fraction == 0.25
    with pytest.raises(ValueError, match="either seconds or steps"):
        Clock(1.0, 1)
