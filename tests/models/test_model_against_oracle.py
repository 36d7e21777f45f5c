"""The model through the bound ops against an independent implementation that shares no code with it (`oracle.py`).

Smooth mode: equal within float32 noise of a float64 computation. Exact mode with order-free sums: the same bits on
short texts; the two may round a sum differently once in some hundred thousand values, so long texts are held to an RMS
bound far below the size of the quantization itself.
"""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch

from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.testing.checkpoint import write_checkpoint
from deepinfer.testing.logits import Harness

from .oracle import Oracle

MODES = [("off", None), ("mask", 40), ("compact", 40)]


def text(length, seed=0):
    generator = random.Random(seed * 1000 + length)
    return [generator.randrange(0, 512) for _ in range(length)]


def product(directory, ids, numerics, truncation="off", keep=None):
    harness = Harness(directory, numerics, truncation, keep, max_len=len(ids) + 8, batch_invariant=numerics == "exact")
    with torch.inference_mode():
        return harness, harness.logits(harness.inputs([(0, ids, 0, len(ids))])).double()


def same(a, b):
    """RMS of the difference over the rows both have, relative to the logits' standard deviation."""
    assert torch.equal(torch.isnan(a), torch.isnan(b))
    a, b = a[~torch.isnan(a)], b[~torch.isnan(b)]
    return float((a - b).square().mean().sqrt() / b.std())


@pytest.mark.parametrize(("truncation", "keep"), MODES)
@pytest.mark.parametrize("length", [1, 2, 9, 41, 70, 131])
@pytest.mark.parametrize("config", ["tiny", "micro"])
def test_smooth_logits(checkpoints, config, length, truncation, keep):
    ids = text(length)
    _, mine = product(checkpoints(config), ids, "smooth", truncation, keep)
    theirs = Oracle(checkpoints(config), "smooth").logits(ids, truncation, keep)
    assert same(mine, theirs) < 1e-5


@pytest.mark.parametrize(("length", "bound"), [(1, 0), (2, 0), (7, 0), (8, 0), (40, 0), (90, 0.02)])
@pytest.mark.parametrize("config", ["tiny", "micro"])
def test_exact_logits(checkpoints, config, length, bound):
    ids = text(length, 1)
    _, mine = product(checkpoints(config), ids, "exact")
    theirs = Oracle(checkpoints(config), "exact").logits(ids)
    assert same(mine, theirs) <= bound
    smooth = Oracle(checkpoints(config), "smooth").logits(ids)
    assert same(mine, smooth) > 2e-3, "exact mode must differ from smooth mode, or nothing is quantized"


@pytest.mark.parametrize("numerics", ["smooth", "exact"])
@pytest.mark.parametrize(("length", "golden"), [(1, 5), (6, 77), (50, 400), (101, 0)])
@pytest.mark.parametrize("config", ["tiny", "micro"])
def test_draft_block(checkpoints, config, length, golden, numerics):
    """One DSpark pass after a text: base logits, hidden states, greedy Markov chain, confidences."""
    ids, block = text(length, 2), 5
    harness, _ = product(checkpoints(config), ids, numerics)
    step = harness.draft_step([(0, length - 1)], block)
    model, draft = harness.model, harness.model.dspark
    with torch.inference_mode():
        base, hidden = model.draft(torch.tensor([golden]), block, step, harness.cache)
        chain = harness.ops.sampling.draft_block(
            base, hidden, torch.tensor([golden]), draft.markov_embed, draft.markov_head, draft.confidence,
            torch.ones(block), torch.zeros(1), None, None, torch.zeros(1, dtype=torch.int64),
            torch.tensor([length + 1]),
        )  # fmt: skip
    oracle = Oracle(checkpoints(config), numerics)
    their_base, their_hidden = oracle.draft(ids, golden, block)
    theirs = oracle.draft_chain(their_base, their_hidden, golden)
    bound = 2e-5 if numerics == "smooth" else 0.02
    assert same(base[0].double(), their_base) < bound
    assert same(hidden[0].double(), their_hidden) < bound
    assert chain.token_ids[0].tolist() == theirs.tokens
    assert torch.allclose(chain.confidences[0].double(), torch.from_numpy(theirs.confidences), atol=bound)


VARIANTS = {
    "index keys of their own": {"index_k_source_layer_ids": [2, 4, 5, 6]},
    "FP8 entries": {"use_fp4_sparse_kv": False},
    "no rope scaling": {"rope_scaling": None},
    "no candidates": {"candidate_source_layer_id": None},
    "blocks of 16": {"candidate_block_size": 16},
    "tight SwiGLU": {"swiglu_limit": 0.05},
    "other Sinkhorn": {"hc_sinkhorn_iters": 3},
}


@pytest.mark.parametrize("numerics", ["smooth", "exact"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_config(tmp_path, variant, numerics):
    raw = json.loads(json.dumps(ModelConfig.builtin("micro").raw))
    raw["text_config"].update(VARIANTS[variant])
    directory = write_checkpoint(ModelConfig.from_dict(raw), tmp_path / "variant")
    ids = text(75, 3)
    _, mine = product(directory, ids, numerics)
    theirs = Oracle(directory, numerics).logits(ids)
    shutil.rmtree(directory)
    assert same(mine, theirs) < (1e-5 if numerics == "smooth" else 0.02)
