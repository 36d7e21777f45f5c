"""The smooth model is differentiable: every parameter gets a gradient, except those that only choose.

Index scores and router biases decide selections, which are constants of the derivative. One directional derivative is
held against finite differences (with the tiny model, whose short texts leave nothing to select).
"""

from __future__ import annotations

import re
import statistics

import pytest
import torch

from deepinfer.config import EngineConfig
from deepinfer.hub.safetensors import Checkpoint
from deepinfer.models.deepseek_v41.manifest import manifest
from deepinfer.models.deepseek_v41.weights import build_model
from deepinfer.reference.quant import dequantize_weight
from deepinfer.runner import worker
from deepinfer.runner.model_files import open_model
from deepinfer.testing.logits import Harness

CHOOSERS = re.compile(r"\.indexer\.|\.gate\.bias")
IDS = [0, 30, 31, 30, 31, 7, 90, 200, 30, 31, 30, 7, 8, 9, 300, 301, 12, 13, 14, 15, 16, 5, 6]


class Parameters:
    """Float32 leaves made from a checkpoint, one per weight."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.leaves = checkpoint, {}

    def read(self, name):
        if name not in self.leaves:
            self.leaves[name] = self._make(name).requires_grad_()
        return self.leaves[name]

    map_rows = read

    def _make(self, name):
        values = self.checkpoint.read(name)
        scale = name.removesuffix(".weight") + ".scale"
        if name.endswith(".weight") and scale in self.checkpoint.names:
            rows = ".engram.embed." in name
            packed = "mxfp4_row32" if values.dtype == torch.uint8 else "fp8_row32" if rows else "fp8_block32"
            return dequantize_weight(values, self.checkpoint.read(scale), packed, torch.float32)
        return values.float()


@pytest.fixture(scope="module")
def trained(checkpoints):
    harness = Harness(checkpoints("tiny"), "smooth", max_len=64)
    config = EngineConfig.create(model=str(checkpoints("tiny")), numerics="smooth", max_model_len=64)
    files = open_model(config)
    config = config.resolve(files.config)
    source = Parameters(Checkpoint.open(files.directory))
    context, ops = worker.bind_ops(config, files.config)
    harness.ops = ops
    harness.model = build_model(files.config, source, ops, context, worker.read_vocab_map(files))
    return harness, source, files.config


def loss_of(harness):
    harness.cache = harness.new_cache()
    inputs = harness.inputs([(0, IDS, 0, len(IDS))])
    logits = harness.logits(inputs)
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(IDS[1:]))
    # A draft pass behind the text, so that draft layers and heads take part.
    step = harness.draft_step([(0, len(IDS) - 1)], 3)
    base, hidden = harness.model.draft(torch.tensor([9]), 3, step, harness.cache)
    draft = harness.model.dspark
    markov = draft.markov_embed[torch.tensor([9, 10, 11])] @ draft.markov_head.T
    confidence = torch.cat((hidden[0], draft.markov_embed[torch.tensor([9, 10, 11])]), -1) @ draft.confidence
    draft_loss = torch.nn.functional.cross_entropy(base[0] + markov, torch.tensor([10, 11, 12]))
    return loss + draft_loss + confidence.sigmoid().mean()


def test_every_parameter_but_the_choosers_gets_a_gradient(trained):
    harness, source, config = trained
    loss_of(harness).backward()
    expected = {name for name in manifest(config) if not name.endswith(".scale") or ".hc_" in name}
    expected = {name for name in expected if not name.startswith(("vision.", "aligner.", "image_"))}
    with_gradient = {n for n, leaf in source.leaves.items() if leaf.grad is not None and leaf.grad.abs().max() > 0}
    finite = all(leaf.grad is None or torch.isfinite(leaf.grad).all() for leaf in source.leaves.values())
    assert finite
    missing = {n for n in expected - with_gradient if not CHOOSERS.search(n)}
    # An expert that no token chose has no gradient; nor does the second site mix that nobody reads.
    missing = {n for n in missing if not re.search(r"\.experts\.\d+\.", n)}
    assert missing == set()
    assert not {n for n in with_gradient if CHOOSERS.search(n)}
    chosen = {n for n in with_gradient if re.search(r"\.experts\.\d+\.w2", n)}
    assert len(chosen) > 40


def test_directional_derivative_matches_finite_differences(trained):
    harness, source, _ = trained
    for leaf in source.leaves.values():
        leaf.grad = None
    harness.model = rebuild(harness, source)  # the first backward has freed the fusions' graph
    loss_of(harness).backward()
    torch.manual_seed(0)
    names = [
        "layers.4.attn.compressor.wkv.weight", "layers.5.attn.compressor.wkv.weight", "layers.5.attn.wkv.weight",
        "head.weight", "mtp.1.attn.wq_b.weight", "mtp.0.main_proj.weight",
    ]  # fmt: skip
    for name in names:
        leaf = source.leaves[name]
        direction = torch.randn_like(leaf) * leaf.detach().abs().mean()
        slope = (leaf.grad * direction).sum().item()
        # Now and then a step flips a router choice, which no derivative knows; the median of three is not moved by it.
        measured = statistics.median(finite_difference(harness, source, leaf, direction, h) for h in (3e-3, 2e-3, 1e-3))
        assert measured == pytest.approx(slope, rel=0.05, abs=5e-4), name


def finite_difference(harness, source, leaf, direction, size):
    losses = []
    with torch.no_grad():
        for step in (size, -size):
            leaf.add_(direction, alpha=step)
            harness.model = rebuild(harness, source)
            losses.append(loss_of(harness).double().item())
            leaf.add_(direction, alpha=-step)
    return (losses[0] - losses[1]) / (2 * size)


def rebuild(harness, source):
    """Fused weights are copies of the leaves, so a changed leaf needs a new model."""
    config = EngineConfig.create(model=str(source.checkpoint.directory), numerics="smooth", max_model_len=64)
    files = open_model(config)
    config = config.resolve(files.config)
    context, _ = worker.bind_ops(config, files.config)
    return build_model(files.config, source, harness.ops, context, worker.read_vocab_map(files))
