"""One step on one worker: batch in, forward, logits of the rows that need them, sampling, result out.

Called by the executor. It turns host arrays into the model's inputs and owns the caches; it knows no request.
"""

from __future__ import annotations

import numpy as np
import torch

from deepinfer.hooks import KVCache, OpTable, StepInputs
from deepinfer.hooks.ops.step_inputs import Truncation
from deepinfer.models.deepseek_v41.model import Model, ModelInputs
from deepinfer.runner.inputs import StepBatch, StepResult
from deepinfer.sample.logprobs import prompt_logprobs
from deepinfer.sample.sampler import Sampler

NO_TRUNCATION = Truncation()


class ModelRunner:
    """Model, caches and sampler of one worker.

    truncation  applied to prefill steps
    history     tokens before a step's first row that n-grams look at
    """

    def __init__(self, model: Model, cache: KVCache, sampler: Sampler, truncation: Truncation, history: int) -> None:
        self.model, self.cache, self.sampler = model, cache, sampler
        self.truncation, self.history = truncation, history
        self.ops: OpTable = model.ops
        self.device = model.embed.device

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResult:
        """Run a step to its end."""
        inputs = self.model_inputs(batch)
        hidden = self.model.forward(inputs, self.cache)
        last = last_rows(inputs.steps.decoder)
        sampled = torch.from_numpy(np.flatnonzero(batch.sampled)).to(self.device)
        logits = self.model.logits(hidden[last[sampled]])
        rows = self.sampler.sample(logits, batch.sampling)
        return StepResult(rows, self._prompt_logprobs(batch, hidden))

    def model_inputs(self, batch: StepBatch) -> ModelInputs:
        """The model's view of a batch, on device."""
        truncation = self.truncation if batch.kind == "prefill" else NO_TRUNCATION
        steps = self.ops.step_inputs.build(
            batch.q_starts, batch.q_lens, batch.slots, batch.block_table, batch.data_lens, self.cache.spec, truncation
        )
        history = batch.history[:, batch.history.shape[1] - self.history :]
        return ModelInputs(self._tensor(batch.token_ids), self._tensor(history), steps)

    def zero_slots(self, slots: list[int]) -> None:
        """Reset state slots before their next owner's first step."""
        self.ops.cache.zero_slots(self.cache, self._tensor(np.asarray(slots)))

    def _prompt_logprobs(self, batch: StepBatch, hidden: torch.Tensor) -> dict[int, np.ndarray]:
        """Log-probabilities of the prompt tokens that follow the rows of sequences that asked for them."""
        if not batch.prompt_logprobs.any():
            return {}
        assert hidden.shape[0] == batch.num_rows, "truncated prefill scores no prompt"
        starts = np.cumsum(batch.q_lens) - batch.q_lens
        results = {}
        for index in np.flatnonzero(batch.prompt_logprobs).tolist():
            rows = slice(int(starts[index]), int(starts[index] + batch.q_lens[index]))
            targets = self._tensor(batch.prompt_targets[rows])
            scores = prompt_logprobs(self.ops, self.model.logits, hidden[rows], targets)
            results[index] = scores.cpu().numpy()
        return results

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.device, non_blocking=True)


def last_rows(step: StepInputs) -> torch.Tensor:
    """Row index [n] of each sequence's last row."""
    ends = torch.cat((step.row_starts[1:], step.row_starts.new_tensor([step.num_rows])))
    return ends - 1
