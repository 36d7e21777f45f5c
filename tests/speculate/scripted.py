"""A proposer that knows the future: it proposes the tokens a run without drafts produced, with errors where a script
wants them. For tests that hold speculation to the output without it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepinfer import LLM
from deepinfer.speculate.proposer import DraftParams, Proposal, Standing

Wrong = Callable[[int, int], bool]
"""(length of the text so far, draft index) -> the draft is to be wrong"""


class ScriptedProposer:
    """See `Proposer`. texts: whole texts (prompt and output) to follow; wrong: where to err."""

    def __init__(self, num_drafts: int, num_slots: int, max_positions: int, vocab_size: int) -> None:
        self.num_drafts, self._vocab = num_drafts, vocab_size
        self.texts: list[list[int]] = []
        self.wrong: Wrong = lambda length, index: False
        self.seen = torch.full((num_slots, max_positions), -1, dtype=torch.int64)

    def observe(self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        self.seen[slots, positions] = token_ids

    def propose(self, standing: Standing, params: DraftParams) -> Proposal:
        drafts = [self._drafts(*pair) for pair in zip(standing.slots.tolist(), standing.lengths.tolist(), strict=True)]
        tokens = torch.tensor(drafts)
        logprobs = torch.full((*tokens.shape, self._vocab), -torch.inf)
        logprobs.scatter_(-1, tokens.clamp(min=0).unsqueeze(-1), 0.0)
        return Proposal(tokens, torch.full(tokens.shape, 0.5), logprobs)

    def _drafts(self, slot: int, length: int) -> list[int]:
        known = self.seen[slot, :length].tolist()
        following = next((text[length:] for text in self.texts if text[:length] == known), [])
        drafts = (following + [-1] * self.num_drafts)[: self.num_drafts]
        return [
            (token + 1) % self._vocab if token >= 0 and self.wrong(length, index) else token
            for index, token in enumerate(drafts)
        ]


def install(llm: LLM) -> ScriptedProposer:
    """Exchange the proposer of an LLM that was made with drafts."""
    engine = llm._driver._engine
    runner = engine._executor.worker.runner
    proposer = ScriptedProposer(
        runner.proposer.num_drafts,
        runner.cache.num_slots,
        engine.config.runtime_max_model_len + 1,
        runner.model.embed.shape[0],
    )
    runner.proposer = proposer
    return proposer


class Widths:
    """A schedule that verifies `width` drafts, or what a function of the step's number says."""

    def __init__(self, width: int | Callable[[int], int]) -> None:
        self.width, self.steps = width, 0

    def choose(self, choice):
        self.steps += 1
        width = self.width if isinstance(self.width, int) else self.width(self.steps)
        return choice.limits.clip(max=width)

    def draft_next(self) -> bool:
        return True

    def observe(self, outcome) -> None:
        pass


def set_widths(llm: LLM, width: int | Callable[[int], int]) -> None:
    """Let the engine verify that many drafts a step."""
    llm._driver._engine.scheduler.schedule = Widths(width)
