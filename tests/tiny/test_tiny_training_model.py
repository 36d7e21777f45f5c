"""What is trained is what is served: the training forward against core's model, on random and on trained weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from draft_model import DraftBlocks, DraftModel, compare, draft_blocks, expected_length, targets_of
from model_tiny import Kernels, TinyModel
from model_weights import EXACT, SMOOTH, VISION, Numbers, Weights, checkpoint_reader, entries, rounded, serve
from train_data import Part, validation_windows

from deepinfer.hub.tensor_spec import SCALE
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.manifest import manifest
from deepinfer.reference import quant
from deepinfer.reference.experts import route
from deepinfer.reference.speculation import confidence, markov_logits
from deepinfer.testing.logits import Harness

SLOTS = 5
NUMBERS = {"smooth": SMOOTH, "exact": EXACT}
TRAINED = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "checkpoints" / "v41-tiny-ci"


@dataclass(slots=True)
class Pair:
    """Core's results and the training forward's, for one text and one draft block behind it."""

    core_logits: torch.Tensor
    core_base: torch.Tensor
    core_hidden: torch.Tensor
    logits: torch.Tensor
    drafts: DraftBlocks
    harness: Harness
    drafter: DraftModel
    served: dict[str, torch.Tensor]


def run_both(checkpoint: Path, mode: str, ids: list[int], golden: int = 77) -> Pair:
    config, numbers = ModelConfig.from_directory(checkpoint), NUMBERS[mode]
    harness = Harness(checkpoint, mode, max_len=512)
    with torch.inference_mode():
        core = harness.logits(harness.inputs([(0, ids, 0, len(ids))]))
        step = harness.draft_step([(0, len(ids) - 1)], SLOTS)
        base, hidden = harness.model.draft(torch.tensor([golden]), SLOTS, step, harness.cache)
    weights = Weights.read(config, checkpoint_reader(checkpoint, config))
    model = TinyModel(config, harness.model.vocab_map, "cpu", 512)
    drafter, text = DraftModel(model), torch.tensor([[*ids, golden]])
    with torch.no_grad():
        main, draft = serve(weights, numbers, "main"), serve(weights, numbers, "draft")
        result = model.run(main, text, numbers)
        place = torch.tensor([0]), torch.tensor([len(ids)])
        drafts = draft_blocks(drafter, main, draft, text, result.features, *place, SLOTS, numbers)
        logits = model.vocabulary(main, result.normed)[: len(ids)]
    return Pair(core, base, hidden, logits, drafts, harness, drafter, draft)


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS difference as a share of the standard deviation."""
    return ((found - expected).float().square().mean().sqrt() / expected.float().std()).item()


def random_text(length: int, vocab: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return [0, *torch.randint(3, vocab - 20, (length - 1,), generator=generator).tolist()]


@pytest.mark.parametrize("length", [7, 150])
def test_smooth_forward_is_cores(checkpoints, length):
    """150 positions of the micro model prune candidates, restrict re-indexing layers and fill several windows."""
    pair = run_both(checkpoints("micro"), "smooth", random_text(length, 512))
    assert gap(pair.logits, pair.core_logits) < 1e-5
    assert gap(pair.drafts.base, pair.core_base) < 1e-5
    assert gap(pair.drafts.hidden, pair.core_hidden) < 1e-5


def test_exact_forward_is_cores_bit_for_bit_on_a_short_text(checkpoints):
    """Nothing is re-ordered that a rounding could show: every quantizer sits where core has it."""
    pair = run_both(checkpoints("micro"), "exact", random_text(5, 512))
    assert torch.equal(pair.logits, pair.core_logits)
    assert torch.equal(pair.drafts.base, pair.core_base)
    assert torch.equal(pair.drafts.hidden, pair.core_hidden)


def test_exact_differs_from_smooth(checkpoints):
    exact, smooth = (run_both(checkpoints("micro"), mode, random_text(5, 512)) for mode in ("exact", "smooth"))
    assert gap(exact.logits, smooth.logits) > 0.05


def test_heads_are_cores(checkpoints):
    pair = run_both(checkpoints("micro"), "smooth", random_text(7, 512))
    previous = torch.tensor([[77, 3, 9, 200, 5]])
    logits, scores = pair.drafter.heads(pair.served, pair.drafts, previous)
    spark, one = pair.harness.model.dspark, torch.ones(())
    for slot in range(SLOTS):
        expected, embedding = markov_logits(
            pair.core_base[:, slot], previous[:, slot], spark.markov_embed, spark.markov_head
        )
        assert torch.allclose(logits[:, slot], expected, atol=1e-5)
        chance = confidence(pair.core_hidden[:, slot], embedding, spark.confidence, one)
        assert torch.allclose(scores[:, slot].sigmoid(), chance, atol=1e-5)


@pytest.mark.parametrize("mode", ["smooth", "exact"])
def test_trained_weights_serve_as_they_train(mode):
    """The shipped checkpoint, on a text of its own kind: same losses, same favourite tokens."""
    ids = [0, *(64 + byte for byte in b"Text: Paul is 9 years old, lives near the forest and owns cup, kite, ball.")]
    pair = run_both(TRAINED, mode, ids)
    targets = torch.tensor(ids[1:])
    losses = [torch.nn.functional.cross_entropy(x[:-1], targets).item() for x in (pair.logits, pair.core_logits)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4 if mode == "smooth" else 0.1)
    same = (pair.logits.argmax(-1) == pair.core_logits.argmax(-1)).float().mean().item()
    assert same > (0.99 if mode == "smooth" else 0.85)
    assert gap(pair.logits, pair.core_logits) < (1e-5 if mode == "smooth" else 0.25)


def test_every_published_tensor_is_trained_once(checkpoints):
    config = ModelConfig.from_directory(checkpoints("micro"))
    parts = [part for entry in entries(config) for part in entry.parts]
    specs = manifest(config)
    assert sorted(parts) == sorted(n for n, s in specs.items() if s.kind != SCALE and not n.startswith(VISION))
    weights = Weights.read(config, checkpoint_reader(checkpoints("micro"), config))
    reader = checkpoint_reader(checkpoints("micro"), config)
    assert all(torch.equal(values, reader(name)) for name, values in weights.published())


@pytest.mark.parametrize("kind", ["fp8_block32", "fp8_row32", "mxfp4_row32"])
def test_rounding_in_training_is_the_writers(kind):
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 1, 96).unsqueeze(1)
    quantize = {
        "fp8_block32": quant.quantize_weight_fp8_block32,
        "fp8_row32": quant.quantize_rows_fp8,
        "mxfp4_row32": quant.quantize_weight_mxfp4,
    }[kind]
    stored = quant.dequantize_weight(*quantize(weight), kind, torch.float32)
    assert torch.equal(rounded(weight, kind).float(), stored)


def test_rounded_weights_pass_gradients_through(checkpoints):
    config = ModelConfig.from_directory(checkpoints("micro"))
    weights = Weights.read(config, checkpoint_reader(checkpoints("micro"), config))
    for bank in weights.banks.values():
        bank.requires_grad_()
    served = serve(weights, Numbers(torch.bfloat16, torch.float32, True), "main")
    sum(value.float().sum() for value in served.values()).backward()
    main = weights.part("main")
    assert all(torch.equal(bank.grad, torch.ones_like(bank)) for bank in main.values())


def test_router_is_the_references():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 8, generator=generator)
    logits[1] = 0.5  # a tie: the lower expert wins
    bias = torch.randn(8, generator=generator)
    ids, weights = Kernels(False).choose_experts(logits, bias, 3, 1.5)
    expected_ids, expected = route(logits, bias, 3, 1.5)
    assert torch.equal(ids, expected_ids) and torch.allclose(weights, expected)


def test_draft_targets_follow_the_anchor():
    ids = torch.arange(10).repeat(2, 1) + torch.tensor([[0], [100]])
    found = targets_of(ids, torch.tensor([0, 1]), torch.tensor([2, 7]), 3)
    assert found.previous.tolist() == [[2, 3, 4], [107, 108, 109]]
    assert found.tokens[0].tolist() == [3, 4, 5] and found.tokens[1, :2].tolist() == [108, 109]
    assert found.valid.tolist() == [[True] * 3, [True, True, False]]
    assert found.rows.tolist() == [[2, 3, 4], [17, 18, 19]]


def test_acceptance_is_the_overlap_of_two_distributions():
    draft, target = torch.tensor([[[0.5, 0.5, 0.0]]]), torch.tensor([[[0.25, 0.25, 0.5]]])
    cross, distance, error, accepted = compare(
        draft.clamp_min(1e-30).log(), torch.zeros(1, 1), target.log(), torch.tensor([[0]])
    )
    assert accepted.item() == pytest.approx(0.5) and distance.item() == pytest.approx(1.0)
    assert cross.item() == pytest.approx(0.6931, abs=1e-3) and error.item() == pytest.approx(0.6931, abs=1e-3)
    assert expected_length([0.5, 0.5]) == 1.75


def test_validation_windows_predict_every_token_once():
    part = Part(torch.arange(1, 24, dtype=torch.int32), torch.full((23,), 100, dtype=torch.uint8), [])
    batch = validation_windows(part, {"start": 0, "stop": 23}, 8)
    predicted = batch.targets[batch.weights > 0]
    assert predicted.tolist() == list(range(2, 24))
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
