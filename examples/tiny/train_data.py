"""Token files on a device: random windows for training, contiguous ones for validation. Format: TOKENS.md."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

BOS = 0


@dataclass(slots=True)
class Part:
    """One part of a token folder: ids [n] int32, weights [n] uint8 (loss weight * 100), and its segments."""

    ids: torch.Tensor
    weights: torch.Tensor
    segments: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: str | Path, name: str, device: torch.device | str) -> Part:
        """Raises ValueError where the tokens are not those that data.json describes."""
        folder = Path(folder)
        described = json.loads((folder / "data.json").read_text(encoding="utf-8"))["parts"][name]
        raw = {}
        for what in ("tokens", "weights"):
            with lzma.open(folder / f"{name}.{what}.xz") as file:
                raw[what] = file.read()
            found = hashlib.sha256(raw[what]).hexdigest()
            expected = described[f"sha256_{what}"]
            if found != expected:
                raise ValueError(f"{folder}/{name}.{what}.xz: found SHA-256 {found}, expected {expected}")
        ids = torch.from_numpy(np.frombuffer(raw["tokens"], "<u2").astype(np.int32))
        weights = torch.from_numpy(np.frombuffer(raw["weights"], np.uint8).copy())
        return cls(ids.to(device), weights.to(device), described["segments"])


@dataclass(slots=True)
class Batch:
    """inputs, targets [B, T] int64; weights [B, T] float32 of predicting each target."""

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


class Windows:
    """Random windows of the training part. Half of them begin at the start of a document.

    real_share: how many windows come from real text; the rest from generated documents.
    """

    def __init__(self, part: Part, real_share: float, seed: int) -> None:
        self.part, self.real_share = part, real_share
        device = part.ids.device
        self.generator = torch.Generator(device).manual_seed(seed)
        border = next(s["start"] for s in part.segments if s["kind"] == "generated")
        starts = torch.nonzero(part.ids == BOS).squeeze(1)
        self.border = border
        self.begins = starts
        self.real_begins = int((starts < border).sum())

    def _random(self, rows: int) -> torch.Tensor:
        return torch.rand(rows, generator=self.generator, device=self.part.ids.device, dtype=torch.float64)

    def starts(self, rows: int, length: int) -> torch.Tensor:
        """First token of every window, [rows] int64."""
        real = self._random(rows) < self.real_share
        place, aligned = self._random(rows), self._random(rows) < 0.5
        total = self.part.ids.shape[0]
        low, high = torch.where(real, 0, self.border), torch.where(real, self.border, total)
        free = (low + place * (high - low)).long()
        first, last = torch.where(real, 0, self.real_begins), torch.where(real, self.real_begins, len(self.begins))
        begin = self.begins[(first + place * (last - first)).long()]
        return torch.where(aligned, begin, free).clamp(max=total - length - 1)

    def draw(self, rows: int, length: int) -> Batch:
        """Windows of `length` inputs."""
        place = self.starts(rows, length).unsqueeze(1) + torch.arange(length + 1, device=self.part.ids.device)
        ids = self.part.ids[place].long()
        weights = self.part.weights[place[:, 1:]].float() / 100
        return Batch(ids[:, :-1], ids[:, 1:], weights)


def validation_windows(part: Part, segment: dict[str, Any], length: int) -> Batch:
    """A segment cut into windows; weights are 1 but for BOS targets and padding."""
    ids = part.ids[segment["start"] : segment["stop"]].long()
    rows = -(-(ids.shape[0] - 1) // length)
    padded = torch.nn.functional.pad(ids, (0, rows * length + 1 - ids.shape[0]), value=BOS)
    targets = padded[1:].view(rows, length)
    return Batch(padded[:-1].view(rows, length), targets, (targets != BOS).float())


def in_rows(batch: Batch, rows: int) -> Iterator[tuple[Batch, int]]:
    """Pieces of exactly `rows` windows, the last one filled up with windows of weight 0; and how many are real."""
    for first in range(0, batch.inputs.shape[0], rows):
        piece = [x[first : first + rows] for x in (batch.inputs, batch.targets, batch.weights)]
        count = piece[0].shape[0]
        yield Batch(*(torch.nn.functional.pad(x, (0, 0, 0, rows - count)) for x in piece)), count
