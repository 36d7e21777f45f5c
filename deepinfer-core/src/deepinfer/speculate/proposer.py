"""`Proposer`: suggests tokens for the next step of a sequence. The interface, and how one is found by its name.

The model runner calls `observe` for every token that enters a sequence and `propose` after each sampling; both work on
device tensors and wait for nothing. Verification makes the output independent of what is proposed, so a proposer can
only change speed.

A package adds one with the entry point group `deepinfer.proposers` (name = "module:factory");
`proposer="module:factory"` as engine argument needs no entry point. The factory takes a `ProposerContext`; it may have
an attribute `check(num_drafts, config)` that raises ConfigError or UnsupportedError before any weight is read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deepinfer.environ import Settings
from deepinfer.errors import ConfigError
from deepinfer.hooks import KVCache
from deepinfer.variables import closest

if TYPE_CHECKING:
    from deepinfer.models.deepseek_v41.config import ModelConfig
    from deepinfer.models.deepseek_v41.model import Model

GROUP = "deepinfer.proposers"
"""Entry points of installed proposers."""

BUILTIN = {
    "dspark": "deepinfer.speculate.dspark:DSparkProposer",
    "ngram": "deepinfer.speculate.ngram:NgramProposer",
}
"""Proposers of core; "none" stands for no speculation."""


@dataclass(frozen=True, slots=True)
class DraftParams:
    """How drafts are drawn for n sequences, on the device.

    temperature  [n] float32, 0 = greedy
    top_p, top_k [n] float32 and int64, or both None where no sequence filters
    seeds        [n] int64
    coupled      drafts use the randomness the target will use at their position; False: independent randomness
    """

    temperature: torch.Tensor
    top_p: torch.Tensor | None
    top_k: torch.Tensor | None
    seeds: torch.Tensor
    coupled: bool


@dataclass(frozen=True, slots=True)
class Standing:
    """Where n sequences stand after a step, on the device.

    slots    [n] int64  state slot
    newest   [n] int64  newest token, not fed to the model yet
    lengths  [n] int64  tokens, the newest included
    longest  upper bound of `lengths`, host data
    """

    slots: torch.Tensor
    newest: torch.Tensor
    lengths: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of n sequences, N each.

    token_ids    [n, N] int64      -1 = none from here on
    confidences  [n, N] float32    predicted chance of acceptance if the drafts before are accepted, 0 .. 1
    logprobs     [n, N, V] float32 distributions the drafts were drawn from; None: each draft was certain
    """

    token_ids: torch.Tensor
    confidences: torch.Tensor
    logprobs: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a factory gets.

    num_drafts     N, drafts of every proposal
    max_positions  exclusive bound of every position at run time
    device         where tensors of steps are
    """

    num_drafts: int
    config: ModelConfig
    model: Model
    cache: KVCache
    settings: Settings
    max_positions: int
    device: torch.device


class Proposer(Protocol):
    """One per worker. `num_drafts` is N."""

    num_drafts: int

    def observe(self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Tokens have entered sequences; all [Q] int64. Positions beyond a sequence's length may hold refused
        tokens."""
        ...

    def propose(self, standing: Standing, params: DraftParams) -> Proposal:
        """Drafts for the positions `lengths`, `lengths + 1`, ... of n sequences."""
        ...


Factory = Callable[[ProposerContext], Proposer]


def find_factory(name: str) -> Factory:
    """The factory behind a name of core, of an entry point, or "module:factory"; ConfigError if there is none."""
    installed = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    target = BUILTIN.get(name) or installed.get(name) or (name if ":" in name else None)
    if target is None:
        known = ["none", *BUILTIN, *installed]
        raise ConfigError(
            f"proposer={name!r}: expected one of {', '.join(known)}, or module:factory.{closest(name, known)}"
        )
    try:
        if target is name:
            module, _, attribute = name.partition(":")
            return getattr(importlib.import_module(module), attribute)
        return EntryPoint(name, target, GROUP).load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"proposer={name!r}: {target} cannot be loaded ({error})") from error


def check_proposer(name: str, num_drafts: int, config: ModelConfig) -> None:
    """Raise what the proposer has to say against a model and a number of drafts. Reads no weight."""
    check: Any = getattr(find_factory(name), "check", None)
    if check is not None:
        check(num_drafts, config)
