"""N-gram proposer: the text repeats itself. What followed the latest earlier occurrence of the last tokens is proposed.

Needs no draft layers and costs next to nothing, so it pays wherever outputs quote their prompt. The whole text of every
sequence is kept on the device (4 bytes a token), because the newest tokens are there before the host has them.
"""

from __future__ import annotations

import torch

from deepinfer.speculate.proposer import DraftParams, Proposal, ProposerContext, Standing

LONGEST, SHORTEST = 4, 2
"""Lengths of the n-grams that are looked for, the longest first."""

CONFIDENCE = {4: 0.9, 3: 0.75, 2: 0.5}
"""Prior belief in a continuation by the length of the match; corrected by what is accepted
(`confidence.Calibration`)."""


class NgramProposer:
    """See `Proposer`."""

    def __init__(self, context: ProposerContext) -> None:
        self.num_drafts = context.num_drafts
        shape = (context.cache.num_slots, context.max_positions)
        self._texts = torch.full(shape, -1, dtype=torch.int32, device=context.device)

    def observe(self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write the tokens where they stand; refused ones are overwritten by their successors."""
        self._texts[slots, positions.clamp(max=self._texts.shape[1] - 1)] = token_ids.to(torch.int32)

    def propose(self, standing: Standing, params: DraftParams) -> Proposal:
        """The continuation of the latest earlier match of the longest n-gram that has one."""
        texts = self._texts[standing.slots, : standing.longest]
        found, belief = self._latest_match(texts, standing.lengths)
        period = (standing.lengths - found).unsqueeze(1)  # a text that has repeated itself so far goes on to
        places = found.unsqueeze(1) + torch.arange(self.num_drafts, device=texts.device) % period
        tokens = texts.gather(1, places.clamp(min=0)).long()
        tokens = torch.where((found >= 0).unsqueeze(1), tokens, -1)
        return Proposal(tokens, torch.where(tokens >= 0, belief.unsqueeze(1), 0.0))

    def _latest_match(self, texts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Position [n] behind the latest earlier occurrence of the last tokens, -1 = none, and the belief in it [n]."""
        width = texts.shape[1]
        ends = torch.arange(1, width + 1, device=texts.device)  # an n-gram that ends before position `end`
        earlier = ends < lengths.unsqueeze(1)
        found = torch.full_like(lengths, -1)
        belief = torch.zeros(len(lengths), device=texts.device)
        matching = earlier
        for size in range(1, LONGEST + 1):
            last = texts.gather(1, (lengths - size).clamp(min=0).unsqueeze(1))
            shifted = torch.nn.functional.pad(texts, (size - 1, 0), value=-1)[:, :width]
            matching = matching & (shifted == last) & (last >= 0) & (lengths >= size).unsqueeze(1)
            if size >= SHORTEST:
                latest = torch.where(matching, ends, -1).amax(1)
                found = torch.where(latest >= 0, latest, found)
                belief = torch.where(latest >= 0, CONFIDENCE[size], belief)
        return found, belief
