"""`forward_logits`: the model through the bound ops, without an engine. For parity tests and experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from deepinfer.config import EngineConfig
from deepinfer.hooks import KVCache, StepInputs
from deepinfer.hooks.ops.step_inputs import Truncation
from deepinfer.models.deepseek_v41.model import Model, ModelInputs
from deepinfer.models.deepseek_v41.weights import build_model
from deepinfer.runner import worker
from deepinfer.runner.model_files import open_model


class Harness:
    """A model with room for `sequences` sequences of `max_len` tokens, fed row by row.

    Blocks of a sequence are contiguous; slot and blocks of sequence s start after the null ones.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        numerics: str = "exact",
        truncation: str = "off",
        keep_tokens: int | None = None,
        max_len: int = 1024,
        sequences: int = 1,
        **arguments: object,
    ) -> None:
        settings = {"yoco_prefill_truncation_mode": truncation}
        if keep_tokens is not None:
            settings["yoco_prefill_keep_tokens"] = keep_tokens
        config = EngineConfig.create(
            model=str(checkpoint), numerics=numerics, max_model_len=max_len, **settings, **arguments
        )
        files = open_model(config)
        model_config = files.config
        config = config.resolve(model_config)
        self.truncation = worker.read_truncation(config, model_config)
        source, vocab_map = worker.tensor_source(config, files), worker.read_vocab_map(files)
        context, self.ops = worker.bind_ops(config, model_config)
        self.model: Model = build_model(model_config, source, self.ops, context, vocab_map)
        self.spec = model_config.cache_spec(worker.BLOCK_SIZE, config.settings.max_backtracking_tokens)
        self.blocks = -(-config.runtime_max_model_len // worker.BLOCK_SIZE)
        self.history = model_config.text.engram_max_ngram_size - 1
        self.sequences = sequences
        self.cache = self.new_cache()

    def new_cache(self) -> KVCache:
        """Empty caches."""
        return self.ops.cache.allocate(self.spec, self.sequences * self.blocks + 1, self.sequences + 1)

    def inputs(
        self,
        chunks: Sequence[tuple[int, Sequence[int], int, int]],
        truncation: Truncation | None = None,
    ) -> ModelInputs:
        """Inputs of one step; each chunk is (sequence, all its token ids, first position, end position)."""
        starts = np.array([start for _, _, start, _ in chunks])
        ends = np.array([end for *_, end in chunks])
        which = np.array([sequence for sequence, *_ in chunks])
        table = 1 + which[:, None] * self.blocks + np.arange(self.blocks)
        lengths = np.array([len(ids) for _, ids, *_ in chunks])
        steps = self.ops.step_inputs.build(
            starts, ends - starts, which + 1, table, lengths, self.spec, truncation or self.truncation
        )
        rows = [token for _, ids, start, end in chunks for token in ids[start:end]]
        history = [([-1] * self.history + list(ids[:start]))[-self.history :] for _, ids, start, _ in chunks]
        return ModelInputs(torch.tensor(rows), torch.tensor(history), steps)

    def draft_step(self, accepted: Sequence[tuple[int, int]], block: int) -> StepInputs:
        """A draft pass of `block` slots per sequence; each pair is (sequence, last accepted position)."""
        which = np.array([sequence for sequence, _ in accepted])
        starts = np.array([position + 1 for _, position in accepted])
        lengths = np.full(len(accepted), block)
        spec = replace(self.spec, compressed={}, index={}, state={})
        table = np.zeros((len(accepted), 1), dtype=np.int64)
        views = self.ops.step_inputs.build(starts, lengths, which + 1, table, starts, spec, Truncation())
        return views.encoder

    def logits(self, inputs: ModelInputs) -> torch.Tensor:
        """Logits [Q, V] float32; rows that truncation dropped are NaN."""
        hidden = self.model.forward(inputs, self.cache)
        logits = self.model.logits(hidden)
        kept = inputs.steps.kept_rows
        if kept is None:
            return logits
        full = logits.new_full((inputs.token_ids.shape[0], logits.shape[1]), float("nan"))
        full[kept] = logits
        return full


def forward_logits(
    checkpoint: str | Path,
    token_ids: Sequence[int],
    numerics: str = "exact",
    truncation: str = "off",
    keep_tokens: int | None = None,
) -> torch.Tensor:
    """Logits of every position of one prompt, run in one step through the bound ops.

    numerics    "exact" applies every quantizer of the checkpoint's formats, "smooth" runs in float32
    truncation  "off", "mask" or "compact" prefill truncation keeping `keep_tokens` prompt tokens
    returns     [n, V] float32; rows dropped by "compact" are NaN
    """
    harness = Harness(checkpoint, numerics, truncation, keep_tokens, max_len=len(token_ids) + 1)
    with torch.inference_mode():
        return harness.logits(harness.inputs([(0, list(token_ids), 0, len(token_ids))]))
