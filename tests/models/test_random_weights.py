"""Random weights depend on seed, name and place alone, fit the manifest, and are what a live model needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.errors import CheckpointError
from deepinfer.hub.tensor_spec import TensorSpec
from deepinfer.models.deepseek_v41 import random_weights
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.manifest import manifest
from deepinfer.models.deepseek_v41.random_weights import SyntheticCheckpoint, random_chunks, random_tensor
from deepinfer.reference.quant import dequantize_weight

SPECS = manifest(ModelConfig.builtin("tiny"))
SOURCE = SyntheticCheckpoint(SPECS, seed=1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("name", [name for name in SPECS if "layers." not in name and "vision.blocks" not in name])
def test_shapes_and_dtypes_fit_the_manifest(name: str) -> None:
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
    tensor = SOURCE.read(name)
    assert tuple(tensor.shape) == SPECS[name].shape
    assert tensor.dtype == dtypes.get(SPECS[name].dtype, torch.uint8)


def test_seed_and_name_decide() -> None:
    spec = SPECS["layers.0.attn.wkv.weight"]
    values, scales = random_tensor("a.weight", spec, 0)
    again, scales_again = random_tensor("a.weight", spec, 0)
    assert torch.equal(as_bytes(values), as_bytes(again))
    assert torch.equal(scales, scales_again)
    for name, seed in (("b.weight", 0), ("a.weight", 1)):
        assert not torch.equal(as_bytes(values), as_bytes(random_tensor(name, spec, seed)[0]))


@pytest.mark.parametrize("name", ["layers.1.engram.embed.weight", "layers.0.attn.wo_a.weight", "embed.weight"])
def test_rows_do_not_depend_on_how_many_are_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(random_weights, "CHUNK_VALUES", 40_000)
    whole = SOURCE.read(name)
    assert len(list(random_chunks(name, SPECS[name], 1))) > 1
    for start, stop in ((0, 1), (100, 231), (whole.shape[0] - 1, whole.shape[0]), (5, 5)):
        assert torch.equal(as_bytes(SOURCE.read_rows(name, start, stop)), as_bytes(whole[start:stop]))
        assert torch.equal(as_bytes(SOURCE.map_rows(name, start, stop)), as_bytes(whole[start:stop]))


@pytest.mark.parametrize("name", ["layers.1.engram.embed.scale", "layers.0.attn.wo_a.scale"])
def test_scales_belong_to_their_weight(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(random_weights, "CHUNK_VALUES", 40_000)
    weight = name.removesuffix("scale") + "weight"
    _, scales = random_tensor(weight, SPECS[weight], 1)
    assert torch.equal(SOURCE.read(name), scales)
    assert torch.equal(SOURCE.read_rows(name, 1, 3), scales[1:3])


@pytest.mark.parametrize("name", ["layers.3.attn.wq_b", "layers.3.ffn.experts.2.w1", "layers.4.engram.embed"])
def test_quantized_weights_have_the_spread_of_the_recipe(name: str) -> None:
    spec = SPECS[f"{name}.weight"]
    dense = dequantize_weight(SOURCE.read(f"{name}.weight"), SOURCE.read(f"{name}.scale"), spec.kind)
    assert dense.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert dense.float().mean().item() == pytest.approx(0, abs=0.001)


def test_norms_sinks_and_biases() -> None:
    assert SOURCE.read("layers.0.attn_norm.weight").float().mean().item() == pytest.approx(1, abs=0.05)
    assert SOURCE.read("layers.1.engram.q_weight").float().mean().item() == pytest.approx(1, abs=0.05)
    assert SOURCE.read("vision.blocks.0.norm1.weight").float().mean().item() == pytest.approx(1, abs=0.05)
    sinks = torch.cat([SOURCE.read(f"layers.{layer}.attn.attn_sink") for layer in range(8)])
    assert sinks.std().item() == pytest.approx(1, abs=0.3)
    assert SOURCE.read("layers.0.ffn.gate.bias").abs().max().item() < 0.1


def test_hyper_connections_start_as_in_training() -> None:
    base = SOURCE.read("layers.1.hc_ffn_base")
    assert (base[:4] > 2).tolist() == [False, False, False, True]
    assert base[:3].max() < -2
    assert base[4:8].abs().max() < 1
    between = base[8:].view(4, 4)
    assert torch.equal(between > 0, torch.eye(4, dtype=torch.bool))
    assert SOURCE.read("layers.1.hc_ffn_scale").tolist() == pytest.approx([0.01] * 3)
    fn = SOURCE.read("layers.1.hc_ffn_fn")
    streams = torch.randn(64, fn.shape[1], generator=torch.Generator().manual_seed(0))
    assert (0.01 * streams @ fn.T).std().item() == pytest.approx(0.3, rel=0.1)


def test_read_into_given_memory() -> None:
    out = torch.empty(SPECS["norm.weight"].shape, dtype=torch.bfloat16)
    assert SOURCE.read("norm.weight", out=out) is out
    assert torch.equal(out, SOURCE.read("norm.weight"))


def test_unknown_names() -> None:
    with pytest.raises(CheckpointError, match="have no tensor 'x'"):
        SOURCE.read("x")


def test_memory_of_a_huge_table_stays_at_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in the middle of a table of 100 GB: only their chunk is generated."""
    made: list[tuple[Any, ...]] = []
    real = random_weights._noise
    monkeypatch.setattr(random_weights, "_noise", lambda key, shape: made.append(shape) or real(key, shape))
    spec = TensorSpec((384_006_168, 256), "F8_E4M3", "fp8_row32")
    source = SyntheticCheckpoint({"layers.1.engram.embed.weight": spec})
    assert source.read_rows("layers.1.engram.embed.weight", 200_000_000, 200_000_002).shape == (2, 256)
    assert len(made) == 1
    assert made[0][0] * made[0][1] <= random_weights.CHUNK_VALUES
