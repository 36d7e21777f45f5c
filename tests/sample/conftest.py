"""Fixtures of the sampler's tests: core's own sampling ops, and a batch builder."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer.hooks.api import OpContext
from deepinfer.hooks.ops.sampling import SamplingOps
from deepinfer.hooks.types import Numerics
from deepinfer.sample.sampler import SamplingBatch
from deepinfer.sampling_params import SamplingParams


@pytest.fixture
def ops():
    """An op table with core's bodies in its only group."""
    group = SamplingOps(OpContext(torch.device("cpu"), Numerics(), None))
    group.ops = SimpleNamespace(sampling=group)
    return group.ops


@pytest.fixture
def make_batch():
    """make_batch([params or dict of parameters, ...], seeds=, positions=, outputs=) -> SamplingBatch."""

    def make(params, seeds=None, positions=None, outputs=None) -> SamplingBatch:
        params = [SamplingParams(**p) if isinstance(p, dict) else p for p in params]
        count = len(params)
        return SamplingBatch.of(
            params,
            seeds=range(count) if seeds is None else seeds,
            positions=np.full(count, 10) if positions is None else positions,
            output_indices=np.full(count, 3) if outputs is None else outputs,
        )

    return make
