"""Optimizer, learning rates, clipping, clock, and the files from which training goes on after an interruption."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from model_weights import Weights

LEARNING_RATE = {"matrix": 1.0, "vector": 1.0, "indexer": 1.0, "embedding": 2.0, "table": 2.5}
"""Factor on the peak learning rate by role; router biases are not trained by gradients."""
DECAY = {"matrix": 0.1}
BIAS_STEP = 1e-3
FLOOR = 0.05
"""Last learning rate as a share of the peak."""


class Clock:
    """How far a run has come, from 0 to 1: by seconds, or by steps where a run must be repeatable."""

    def __init__(self, seconds: float | None = None, steps: int | None = None) -> None:
        if (seconds is None) == (steps is None):
            raise ValueError("a clock counts either seconds or steps")
        self.seconds, self.steps = seconds, steps
        self.spent, self.step = 0.0, 0
        self._since: float | None = None

    def tick(self) -> None:
        """One step is over."""
        self.step += 1
        now = time.monotonic()
        self.spent += 0 if self._since is None else now - self._since
        self._since = now

    def pause(self) -> None:
        """What follows until the next `tick` does not count."""
        self._since = None

    def start(self) -> None:
        self._since = time.monotonic()

    @property
    def fraction(self) -> float:
        if self.steps is not None:
            return self.step / self.steps if self.steps else 1.0
        running = 0 if self._since is None else time.monotonic() - self._since
        return (self.spent + running) / self.seconds


class Trainer:
    """The banks of one half ("main" or "draft") under AdamW."""

    def __init__(self, weights: Weights, half: str, peak: float, warmup: int, decay: bool = True) -> None:
        self.weights, self.half, self.peak, self.warmup = weights, half, peak, warmup
        self.banks = {key: bank for key, bank in weights.part(half).items() if "/bias/" not in key}
        groups = []
        for key, bank in self.banks.items():
            bank.requires_grad_()
            role = key.split("/")[1]
            wanted = DECAY.get(role, 0.0) if decay else 0.0
            groups.append({"params": [bank], "factor": LEARNING_RATE[role], "weight_decay": wanted})
        fused = next(iter(self.banks.values())).is_cuda
        self.optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=fused)
        self.biases = weights.all_views()  # views: updates reach the bank

    def learning_rate(self, step: int, fraction: float) -> float:
        """Warm-up by steps, then a cosine by fraction, down to `FLOOR`."""
        cosine = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction)))
        return self.peak * cosine * min(1.0, (step + 1) / self.warmup)

    def step(self, rate: float) -> torch.Tensor:
        """Clip, apply the gradients, forget them; returns their norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        index = [bank for key, bank in self.banks.items() if "/indexer/" in key]
        rest = [bank for key, bank in self.banks.items() if "/indexer/" not in key]
        norm = torch.nn.utils.clip_grad_norm_(rest, 1.0)
        if index and index[0].grad is not None:
            torch.nn.utils.clip_grad_norm_(index, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @torch.no_grad()
    def balance(self, loads: dict[str, torch.Tensor]) -> None:
        """Make busy experts less attractive: bias + BIAS_STEP * sign(mean load - load)."""
        for name, load in loads.items():
            self.biases[name].add_(BIAS_STEP * torch.sign(load.mean() - load))

    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


@dataclass(slots=True)
class Snapshots:
    """Writes the whole state every `seconds`, in one piece or not at all."""

    path: Path
    seconds: float
    last: float = 0.0

    def due(self) -> bool:
        return time.monotonic() - self.last >= self.seconds

    def save(self, state: dict[str, Any]) -> None:
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.path)
        self.last = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        return torch.load(self.path, weights_only=False) if self.path.exists() else None
