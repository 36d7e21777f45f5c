"""Trainable float32 weights in banks, and what the forward computes with.

Thousands of small tensors make a slow optimizer step, so tensors that are treated alike lie below one another in one
parameter, a bank: same storage format, same number of columns, same role. A tensor here may be several of the
checkpoint's, joined by rows (`wq_a` over `wkv`, all experts of a layer); `published` takes them apart again.

`serve` turns the banks into the numbers a server would compute with: cast to bfloat16, or rounded to the checkpoint's
formats with straight-through gradients, or the float32 numbers themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from deepinfer.hub.safetensors import Checkpoint
from deepinfer.hub.tensor_spec import SCALE, TensorSpec, scale_name
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.manifest import manifest
from deepinfer.reference import quant

VISION = ("vision.", "aligner.", "image_")
"""Beginnings of the names that text training leaves at their random values."""
EXPERT_MATRICES = {"w13": ("w1", "w3"), "w2": ("w2",)}


class Reader(Protocol):
    """Float32 numbers of a published name."""

    def __call__(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the forward: `parts` are the published names that it joins by rows, `shape` is without packing."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str
    role: str

    @property
    def columns(self) -> int:
        """Numbers in a row; 1 for vectors, which share banks whatever their length."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def rows(self) -> int:
        return math.prod(self.shape) // self.columns

    @property
    def bank(self) -> str:
        """Entries with the same key lie in one parameter."""
        half = "draft" if self.name.startswith("mtp.") else "main"
        return f"{half}/{self.role}/{self.kind}/{self.columns}"


def role_of(name: str) -> str:
    """How the optimizer treats a tensor: matrix, embedding, table, indexer, vector or bias (router biases)."""
    if re.search(r"\.gate\.bias(_vl)?$", name):
        return "bias"
    if ".indexer." in name:
        return "indexer"
    if name == "embed.weight" or name.endswith("markov_head.embed.weight"):
        return "embedding"
    if ".engram.embed." in name:
        return "table"
    if re.search(r"norm\.weight$|attn_sink$|\.[qk]_weight$|\.hc_\w+$", name):
        return "vector"
    return "matrix"


def entries(config: ModelConfig) -> list[Entry]:
    """All trained tensors of a configuration, in the order in which they fill their banks."""
    specs = {n: s for n, s in manifest(config).items() if s.kind != SCALE and not n.startswith(VISION)}
    out: list[Entry] = []
    seen: set[str] = set()
    for name in specs:
        if name not in seen:
            joined, parts, lead = _joined(name, specs)
            seen.update(parts)
            out.append(_entry(joined, parts, lead, specs))
    return out


def _entry(name: str, parts: tuple[str, ...], lead: tuple[int, ...], specs: Mapping[str, TensorSpec]) -> Entry:
    first = specs[parts[0]]
    if len(first.shape) == 1:
        shape = first.shape
    else:
        columns = first.shape[-1] * (2 if first.kind == "mxfp4_row32" else 1)
        rows = sum(math.prod(specs[part].shape[:-1]) for part in parts)
        shape = (*lead, rows // math.prod(lead), columns)
    return Entry(name, parts, shape, first.kind, role_of(parts[0]))


def _joined(name: str, specs: Mapping[str, TensorSpec]) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """Name, published names and leading dimensions of the entry that a published name begins."""
    if match := re.fullmatch(r"(.+\.ffn)\.experts\.0\.w1\.weight", name):
        return _experts(match[1], "w13", specs)
    if match := re.fullmatch(r"(.+\.ffn)\.experts\.\d+\.w2\.weight", name):
        return _experts(match[1], "w2", specs)
    if match := re.fullmatch(r"(.+\.shared_experts)\.w1\.weight", name):
        return f"{match[1]}.w13", (name, f"{match[1]}.w3.weight"), ()
    if match := re.fullmatch(r"(.+\.attn)\.wq_a\.weight", name):
        return f"{match[1]}.wqa_wkv", (name, f"{match[1]}.wkv.weight"), ()
    return name.removesuffix(".weight"), (name,), ()


def _experts(ffn: str, which: str, specs: Mapping[str, TensorSpec]) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    count = sum(name.startswith(f"{ffn}.experts.") and name.endswith(".w2.weight") for name in specs)
    parts = tuple(f"{ffn}.experts.{e}.{m}.weight" for e in range(count) for m in EXPERT_MATRICES[which])
    return f"{ffn}.experts.{which}", parts, (count,)


@dataclass(slots=True)
class Weights:
    """Banks by key, and which entry lies where. `banks[key]` is [rows, columns] float32."""

    banks: dict[str, torch.Tensor]
    members: dict[str, list[Entry]] = field(default_factory=dict)

    @classmethod
    def read(cls, config: ModelConfig, reader: Reader, device: torch.device | str = "cpu") -> Weights:
        """Fill the banks from float32 numbers by published name."""
        members: dict[str, list[Entry]] = {}
        for entry in entries(config):
            members.setdefault(entry.bank, []).append(entry)
        banks = {}
        for key, group in members.items():
            rows = [reader(part).float().reshape(-1, entry.columns) for entry in group for part in entry.parts]
            banks[key] = torch.cat(rows).to(device)
        return cls(banks, members)

    def part(self, half: str) -> dict[str, torch.Tensor]:
        """The banks of one half, "main" or "draft"."""
        return {key: bank for key, bank in self.banks.items() if key.startswith(half + "/")}

    def views(self, key: str, bank: torch.Tensor) -> dict[str, torch.Tensor]:
        """The entries of a bank's numbers, by name."""
        group = self.members[key]
        rows = torch.split(bank, [entry.rows for entry in group])
        return {entry.name: piece.view(entry.shape) for entry, piece in zip(group, rows, strict=True)}

    def all_views(self) -> dict[str, torch.Tensor]:
        """All entries as float32 views; writing into one writes into its bank."""
        return {name: view for key, bank in self.banks.items() for name, view in self.views(key, bank.detach()).items()}

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(published name, float32 numbers) of everything."""
        for key, group in self.members.items():
            views = self.views(key, self.banks[key].detach())
            for entry in group:
                pieces = views[entry.name].reshape(-1, entry.columns).chunk(len(entry.parts))
                if entry.name.endswith("wqa_wkv"):
                    pieces = self._query_and_key(views[entry.name])
                for part, piece in zip(entry.parts, pieces, strict=True):
                    yield part, piece.view(-1) if len(entry.shape) == 1 else piece

    @staticmethod
    def _query_and_key(joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rank = joined.shape[0] - 512  # the key has the format's fixed 512 rows
        return joined[:rank], joined[rank:]


def initial(config: ModelConfig, seed: int) -> Reader:
    """Training start. Matrices N(0, 1 / 2 sqrt(in)), outputs of sub-layers a quarter of that, everything else neutral.

    Hyper-connections start at the published values: stream `site % 4` is read, streams stay mostly apart.
    """
    specs = manifest(config)

    def read(name: str) -> torch.Tensor:
        spec = specs[name]
        shape = (*spec.shape[:-1], spec.shape[-1] * 2) if spec.kind == "mxfp4_row32" else spec.shape
        generator = torch.Generator().manual_seed(
            seed * 1_000_003 + sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**40
        )
        noise = torch.randn(shape, generator=generator)
        return _start(name, noise)

    return read


def checkpoint_reader(directory: str | Path, config: ModelConfig) -> Reader:
    """The numbers of a checkpoint in the published format."""
    checkpoint, specs = Checkpoint.open(directory), manifest(config)

    def read(name: str) -> torch.Tensor:
        values, kind = checkpoint.read(name), specs[name].kind
        scales = (
            checkpoint.read(scale_name(name)) if scale_name(name) in specs and kind not in ("bf16", "f32") else None
        )
        return quant.dequantize_weight(values, scales, kind, torch.float32)

    return read


def _start(name: str, noise: torch.Tensor) -> torch.Tensor:
    role = role_of(name)
    if ".hc_" in name:
        return _hyper_start(name, noise)
    if role == "bias" or name.endswith("attn_sink"):
        return torch.zeros_like(noise)
    if name.endswith(("norm.weight", ".q_weight", ".k_weight")):
        return torch.ones_like(noise)
    if role == "embedding":
        return noise * 0.2
    if role == "table":
        return noise * 0.1
    if name.startswith("head.") or name.endswith(("markov_head.head.weight", "confidence_head.proj.weight")):
        return noise * 0.02
    gain = 0.125 if re.search(r"\.(wo_b|w2|weights_proj)\.weight$|engram\.wkv", name) else 0.5
    return noise * gain * noise.shape[-1] ** -0.5


def _hyper_start(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith("_scale"):
        return torch.full_like(noise, 0.01)
    if name.endswith("_fn"):
        return noise * noise.shape[-1] ** -0.5
    site = 2 * int(name.split(".")[1]) + ("hc_ffn" in name)
    pre = torch.full((4,), -3.0)
    pre[site % 4] = 3.0
    return torch.cat([pre, torch.zeros(4), (6 * torch.eye(4) - 3).flatten()])


@dataclass(frozen=True, slots=True)
class Numbers:
    """How the forward computes.

    activation  dtype between products
    logits      dtype of attention logits and expert sums; float32 follows core to the letter, bfloat16 is quick
    quantize    round weights, activations and keys to the checkpoint's formats
    """

    activation: torch.dtype = torch.float32
    logits: torch.dtype = torch.float32
    quantize: bool = False


SMOOTH = Numbers()
EXACT = Numbers(torch.bfloat16, torch.float32, True)
FAST = Numbers(torch.bfloat16, torch.bfloat16, False)
FAST_QUANTIZED = Numbers(torch.bfloat16, torch.bfloat16, True)
WIDE_QUANTIZED = Numbers(torch.float32, torch.float32, True)


def quick(device: torch.device | str, quantize: bool) -> Numbers:
    """What trains quickest: bfloat16, but float32 on a CPU, where bfloat16 products are slow."""
    if torch.device(device).type == "cpu":
        return WIDE_QUANTIZED if quantize else SMOOTH
    return FAST_QUANTIZED if quantize else FAST


def served_bank(bank: torch.Tensor, kind: str, role: str, numbers: Numbers) -> torch.Tensor:
    """A bank's numbers as the forward multiplies with them. bank [rows, columns] float32."""
    if kind == "f32":
        return bank
    if numbers.activation == torch.float32 and not numbers.quantize:
        return bank
    if not numbers.quantize or kind == "bf16":
        return bank.to(torch.bfloat16).to(numbers.activation)
    return quant.straight_through(bank, rounded(bank, kind).to(numbers.activation))


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The nearest numbers of a storage format, bfloat16. weight [rows, columns]."""
    weight = weight.detach()
    if kind == "fp8_block32":
        return _rounded_blocks(weight)
    if kind == "fp8_row32":
        return quant.fake_q8(weight)
    if kind == "mxfp4_row32":
        return quant.fake_q4u(weight)
    return weight.to(torch.bfloat16)


def _rounded_blocks(weight: torch.Tensor) -> torch.Tensor:
    """32 x 32 blocks share a scale: as rows of 1024 numbers, scaled by the power of two that the format takes."""
    values, scales = quant.quantize_weight_fp8_block32(weight)
    wide = quant.scale_values(scales).repeat_interleave(32, 0)[: weight.shape[0]].repeat_interleave(32, 1)
    return values.to(torch.bfloat16) * wide[:, : weight.shape[1]]


def serve(weights: Weights, numbers: Numbers, half: str) -> dict[str, torch.Tensor]:
    """Every entry of one half ("main" or "draft") by name, gradients reaching the banks."""
    out: dict[str, torch.Tensor] = {}
    for key, bank in weights.part(half).items():
        _, role, kind, _ = key.split("/")
        out.update(weights.views(key, served_bank(bank, kind, role, numbers)))
    return out
