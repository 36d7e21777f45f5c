"""DSpark: the checkpoint's own draft layers. One pass over a block of draft slots, then the Markov head draws the
tokens.

Every main forward has stored the draft layers' keys already (`models/deepseek_v41/dspark.py`), prompts included, so the
first drafts can follow the first token. Model specification 3.14.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from deepinfer.errors import ConfigError, UnsupportedError
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.speculate.proposer import DraftParams, Proposal, ProposerContext, Standing


class DSparkProposer:
    """See `Proposer`."""

    def __init__(self, context: ProposerContext) -> None:
        self.num_drafts = context.num_drafts
        self._model, self._cache, self._ops = context.model, context.cache, context.model.ops
        self._device = context.device
        self._spec = replace(context.cache.spec, compressed={}, index={}, state={})  # window rings only
        values = context.settings.dflash_confidence_head_temperature
        values = values * self.num_drafts if len(values) == 1 else values
        self._temperature = torch.tensor(values, dtype=torch.float32, device=context.device)

    @staticmethod
    def check(num_drafts: int, config: ModelConfig) -> None:
        """Refuse checkpoints without draft layers and more drafts than the block they were trained on."""
        text = config.text
        if not text.num_nextn_predict_layers:
            raise UnsupportedError(
                f"DEEPINFER_USE_NEXTN_DECODE={num_drafts}: the checkpoint has no draft layers "
                "(num_nextn_predict_layers is 0); use 0, or another proposer such as ngram"
            )
        if num_drafts > text.dspark_block_size:
            raise ConfigError(
                f"DEEPINFER_USE_NEXTN_DECODE={num_drafts}: the draft layers were trained on blocks of "
                f"dspark_block_size={text.dspark_block_size}; use at most that"
            )

    def observe(self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """The main forward keeps what the draft layers need."""

    def propose(self, standing: Standing, params: DraftParams) -> Proposal:
        """One draft pass; the block sits at the newest token's position and behind it."""
        count, block = len(standing.slots), self.num_drafts
        step = self._ops.step_inputs.build_ahead(
            standing.lengths - 1,
            np.full(count, standing.longest - 1),
            np.full(count, block),
            standing.slots,
            np.zeros((count, 1), dtype=np.int64),
            self._spec,
        )
        dspark = self._model.dspark
        base, hidden = self._model.draft(standing.newest, block, step, self._cache)
        drafts = self._ops.sampling.draft_block(
            base, hidden, standing.newest, dspark.markov_embed, dspark.markov_head, dspark.confidence,
            self._temperature, params.temperature, params.top_p, params.top_k, params.seeds,
            standing.lengths, params.coupled,
        )  # fmt: skip
        return Proposal(drafts.token_ids, drafts.confidences, drafts.logprobs)
