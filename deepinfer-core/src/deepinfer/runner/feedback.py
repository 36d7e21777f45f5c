"""`StepFeedback`: what a step leaves on the device for the next one, so that no host has to know it in between.

The model runner reads it when it builds a decode step's rows and writes it when tokens have been sampled. One row per
state slot; a slot's row is rewritten by the last prefill step of every new owner. Steps run in launch order, so the
next step of a sequence finds what its last one wrote, whether or not the host has seen any of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.runner.inputs import HISTORY, StepBatch
from deepinfer.speculate.proposer import Proposal


@dataclass(slots=True)
class StepFeedback:
    """Device tensors over `S` state slots; `N` drafts a sequence.

    recent          [S, 4] int64    the last four tokens, newest last, -1 = before the beginning
    length          [S] int64       tokens of the sequence, the newest included: it is fed at position length - 1
    drafts          [S, N] int64    proposed tokens behind the newest one, -1 = none
    confidences     [S, N] float32  predicted chance of acceptance of each
    draft_logprobs  [S, N, V] float32 distributions they were drawn from; None unless the verification rule needs them
    """

    recent: torch.Tensor
    length: torch.Tensor
    drafts: torch.Tensor
    confidences: torch.Tensor
    draft_logprobs: torch.Tensor | None = None

    @classmethod
    def allocate(cls, num_slots: int, num_drafts: int, device: torch.device, logprobs_width: int = 0) -> StepFeedback:
        """Empty feedback; `logprobs_width` = V where draft distributions are kept."""

        def integers(*shape: int) -> torch.Tensor:
            return torch.full((num_slots, *shape), -1, dtype=torch.int64, device=device)

        shape = (num_slots, num_drafts, logprobs_width)
        return cls(
            recent=integers(HISTORY + 1),
            length=integers(),
            drafts=integers(num_drafts),
            confidences=torch.zeros(num_slots, num_drafts, device=device),
            draft_logprobs=torch.zeros(shape, device=device) if logprobs_width and num_drafts else None,
        )

    def begin(self, slots: torch.Tensor, tails: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor) -> None:
        """The prompts of these slots are done. [in-place]

        slots [s]; tails [s, 3] last prompt tokens, nearest last; lengths [s] of the prompts; tokens [s] sampled after
        them
        """
        self.recent[slots] = torch.cat((tails, tokens.unsqueeze(1)), 1)
        self.length[slots] = lengths + 1
        self.drafts[slots] = -1

    def advance(
        self, slots: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, accepted: torch.Tensor, most: int
    ) -> None:
        """A decode step has sampled. [in-place]

        slots [n]; tokens [R] sampled rows; starts [n] first row of each sequence; accepted [n] accepted drafts, at
        most `most` (host data)
        """
        places = torch.arange(most + 1, device=tokens.device)
        emitted = tokens[(starts.unsqueeze(1) + places).clamp(max=len(tokens) - 1)]
        known = torch.cat((self.recent[slots], emitted), 1)
        last = accepted.unsqueeze(1) + 1 + torch.arange(HISTORY + 1, device=tokens.device)
        self.recent[slots] = known.gather(1, last)
        self.length[slots] += accepted + 1

    def propose(self, slots: torch.Tensor, proposal: Proposal) -> None:
        """Drafts for the next step of these slots [n]. [in-place]"""
        self.drafts[slots] = proposal.token_ids
        self.confidences[slots] = torch.where(proposal.token_ids >= 0, proposal.confidences, 0.0)
        if self.draft_logprobs is None:
            return
        if proposal.logprobs is None:  # certain drafts: all probability on the token
            certain = torch.full_like(self.draft_logprobs[slots], -torch.inf)
            certain.scatter_(-1, proposal.token_ids.clamp(min=0).unsqueeze(-1), 0.0)
            self.draft_logprobs[slots] = certain
        else:
            self.draft_logprobs[slots] = proposal.logprobs


def prompt_tails(batch: StepBatch) -> np.ndarray:
    """int64 [s, 3]: the last tokens of each sampled prompt of a prefill step, nearest last."""
    ends = np.cumsum(batch.q_lens)
    tails = []
    for index in np.flatnonzero(batch.sampled).tolist():
        end, count = int(ends[index]), min(HISTORY, int(batch.q_lens[index]))
        tails.append(np.concatenate((batch.history[index], batch.token_ids[end - count : end]))[-HISTORY:])
    return np.stack(tails)
