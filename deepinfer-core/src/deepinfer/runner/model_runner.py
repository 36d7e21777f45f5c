"""One step on one worker: batch in, forward, logits of the rows that need them, sampling, drafts, result out.

Called by the executor, in the order of the steps. It turns host arrays and the feedback of the step before into the
model's inputs and owns the caches; it knows no request. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from deepinfer.hooks import KVCache, OpTable, StepInputs, StepViews
from deepinfer.hooks.ops.step_inputs import Truncation
from deepinfer.models.deepseek_v41.model import Model, ModelInputs
from deepinfer.runner.feedback import StepFeedback, prompt_tails
from deepinfer.runner.inputs import DraftRows, StepBatch, StepResult
from deepinfer.runner.readback import PendingStep, Readback
from deepinfer.runner.snapshots import begin_snapshots, copy_slots
from deepinfer.sample.ahead import VerifyRows
from deepinfer.sample.logprobs import prompt_logprobs
from deepinfer.sample.pending import PendingRows
from deepinfer.sample.rows import SamplingBatch
from deepinfer.sample.sampler import Sampler
from deepinfer.speculate.proposer import Proposer, Standing

NO_TRUNCATION = Truncation()


@dataclass(slots=True)
class DecodeRows:
    """Rows of a decode step: the model's inputs, the first row [n] of each sequence, and what there is to verify."""

    inputs: ModelInputs
    starts: torch.Tensor
    verify: VerifyRows | None


@dataclass(slots=True)
class StepParts:
    """What a step leaves for the host, as tensors that are on their way there.

    counts  int64 [n] rows of each sequence where they may be several
    drafts  token ids and confidences [s, N]
    """

    rows: PendingRows | None
    prompt_logprobs: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: np.ndarray | None = None
    drafts: tuple[torch.Tensor, torch.Tensor] | None = None

    def result(self) -> StepResult:
        """The result, once the device is done."""
        assert self.rows is not None
        accepted = self.rows.accepted
        return StepResult(
            rows=self.rows.result(),
            prompt_logprobs={index: scores.numpy() for index, scores in self.prompt_logprobs.items()},
            accepted=None if accepted is None or self.counts is None else accepted.numpy(),
            counts=self.counts,
            drafts=None if self.drafts is None else DraftRows(*(tensor.numpy() for tensor in self.drafts)),
        )


class ModelRunner:
    """Model, caches, sampler and feedback of one worker.

    truncation  applied to prefill steps
    history     tokens before a step's first row that n-grams look at
    proposer    what suggests tokens for the next step; None without speculation
    keep_distributions  the verification rule needs the drafts' distributions
    num_slots   slots that sequences run in; the others of the cache are snapshots (None = all run)
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        sampler: Sampler,
        truncation: Truncation,
        history: int,
        proposer: Proposer | None = None,
        keep_distributions: bool = False,
        num_slots: int | None = None,
    ) -> None:
        self.model, self.cache, self.sampler = model, cache, sampler
        self.truncation, self.history, self.proposer = truncation, history, proposer
        self.ops: OpTable = model.ops
        self.device = model.embed.device
        drafts = 0 if proposer is None else proposer.num_drafts
        width = model.embed.shape[0] if keep_distributions else 0
        self.feedback = StepFeedback.allocate(num_slots or cache.num_slots, drafts, self.device, width)
        self._readback = Readback(self.ops)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> PendingStep:
        """Issue a step; the handle waits for its result."""
        started = self._readback.begin()
        slots = self._tensor(batch.slots)
        run = self._prefill if batch.kind == "prefill" else self._decode
        parts = run(batch, slots)
        return self._readback.end(started, parts.result)

    def _prefill(self, batch: StepBatch, slots: torch.Tensor) -> StepParts:
        """Chunks of prompts; the last row of a finished prompt yields a token."""
        inputs = self._prefill_inputs(batch)
        if batch.snapshots:
            begin_snapshots(self.ops, self.cache, batch, inputs.steps, self._tensor)
        hidden = self.model.forward(inputs, self.cache)
        parts = StepParts(None, {i: self._fetch(t) for i, t in self._prompt_logprobs(batch, hidden).items()})
        sampled = np.flatnonzero(batch.sampled)
        if self.proposer is not None:
            steps = inputs.steps.encoder
            self._observe_prefixes(batch)
            self.proposer.observe(slots[steps.sequence], steps.positions, inputs.token_ids)
        rows = last_rows(inputs.steps.decoder)[self._tensor(sampled)]
        pending = self.sampler.launch(self.model.logits(hidden[rows]), self._masked(batch))
        parts.rows = pending.fetched(self._fetch)
        if len(sampled):
            lengths = batch.q_starts[sampled] + batch.q_lens[sampled]
            owners = slots[self._tensor(sampled)]
            tails = self._tensor(prompt_tails(batch))
            ends = self._tensor(lengths)
            self.feedback.begin(owners, tails, ends, pending.token_ids)
            if self.proposer is not None:
                self.proposer.observe(owners, ends, pending.token_ids)
                self._propose(batch, owners, int(lengths.max()) + 1, parts)
        return parts

    def _observe_prefixes(self, batch: StepBatch) -> None:
        """Tokens that other sequences have computed for these are new to the proposer, too."""
        assert self.proposer is not None
        for index, tokens in batch.prefixes.items():
            owner = self._tensor(np.full(len(tokens), batch.slots[index]))
            self.proposer.observe(owner, self._tensor(np.arange(len(tokens))), self._tensor(tokens))

    def _decode(self, batch: StepBatch, slots: torch.Tensor) -> StepParts:
        """The newest token of every sequence and the drafts behind it; every row yields a token."""
        if batch.choose is not None:
            chosen = 1 + batch.choose(self.feedback.confidences[slots].cpu().numpy())
            batch = batch.narrowed(np.minimum(chosen, batch.q_lens)) if (chosen < batch.q_lens).any() else batch
        rows = self._decode_rows(batch, slots)
        hidden = self.model.forward(rows.inputs, self.cache)
        pending = self.sampler.launch(self.model.logits(hidden), self._masked(batch), rows.verify)
        parts = StepParts(pending.fetched(self._fetch), {}, batch.q_lens if batch.optimistic else None)
        accepted = pending.accepted
        accepted = torch.zeros_like(rows.starts) if accepted is None else accepted
        most = int(batch.q_lens.max()) - 1
        self.feedback.advance(slots, pending.token_ids, rows.starts, accepted, most)
        if self.proposer is not None:
            positions = rows.inputs.steps.encoder.positions + 1
            owners = slots if rows.verify is None else slots[rows.verify.sequence]
            self.proposer.observe(owners, positions, pending.token_ids)
            self._propose(batch, slots, int((batch.q_starts + batch.q_lens).max()) + 1, parts)
        return parts

    def _decode_rows(self, batch: StepBatch, slots: torch.Tensor) -> DecodeRows:
        """Rows of a decode step, from the host's plan and the feedback of the step before."""
        counts, feedback = batch.q_lens, self.feedback
        recent = feedback.recent[slots]
        starts = self._tensor(np.cumsum(counts) - counts)
        if not batch.optimistic:
            steps = self._build_steps(batch, NO_TRUNCATION)
            inputs = ModelInputs(recent[:, -1], self._history(recent), steps)
            return DecodeRows(inputs, starts, None)
        places = np.arange(len(batch.token_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        sequence, place = self._tensor(np.repeat(np.arange(len(counts)), counts)), self._tensor(places)
        fed = torch.cat((recent[:, -1:], feedback.drafts[slots]), 1)
        draft_ids = torch.cat((feedback.drafts[slots], torch.full_like(starts, -1).unsqueeze(1)), 1)[sequence, place]
        draft_ids[starts + self._tensor(counts) - 1] = -1  # the last row of a sequence scores no draft
        q_starts = feedback.length[slots] - 1
        step = self.ops.step_inputs.build_ahead(
            q_starts, batch.q_starts, counts, slots, batch.block_table, self.cache.spec
        )
        inputs = ModelInputs(fed[sequence, place].clamp(min=0), self._history(recent), StepViews(step, step, None))
        distributions = feedback.draft_logprobs
        if distributions is not None:
            distributions = distributions[slots[sequence], place.clamp(max=distributions.shape[1] - 1)]
        verify = VerifyRows(counts, starts, sequence, step.positions + 1, draft_ids, distributions)
        return DecodeRows(inputs, starts, verify)

    def _propose(self, batch: StepBatch, slots: torch.Tensor, longest: int, parts: StepParts) -> None:
        """Drafts for the next step of these sequences, into the feedback and the step's result."""
        assert self.proposer is not None
        if not batch.draft:
            return
        counts = np.ones(batch.sampling.num_rows, np.int64) if batch.kind == "prefill" else batch.q_lens
        params = self.sampler.draft_params(batch.sampling, np.cumsum(counts) - counts)
        standing = Standing(slots, self.feedback.recent[slots, -1], self.feedback.length[slots], longest)
        proposal = self.proposer.propose(standing, params)
        self.feedback.propose(slots, proposal)
        parts.drafts = (self._fetch(proposal.token_ids), self._fetch(proposal.confidences))

    def _masked(self, batch: StepBatch) -> SamplingBatch:
        """The step's sampling parameters; a grammar's masks have to be waited for."""
        if batch.masks is not None:
            batch.sampling.allowed_mask = batch.masks.result()
        return batch.sampling

    def _prefill_inputs(self, batch: StepBatch) -> ModelInputs:
        """The model's view of chunks of prompts, on device."""
        steps = self._build_steps(batch, self.truncation)
        history = batch.history[:, batch.history.shape[1] - self.history :]
        return ModelInputs(self._tensor(batch.token_ids), self._tensor(history), steps)

    def _build_steps(self, batch: StepBatch, truncation: Truncation) -> StepViews:
        return self.ops.step_inputs.build(
            batch.q_starts, batch.q_lens, batch.slots, batch.block_table, batch.data_lens, self.cache.spec, truncation
        )

    def _history(self, recent: torch.Tensor) -> torch.Tensor:
        """Tokens [n, history] before the newest, of the last tokens [n, 4]."""
        return recent[:, recent.shape[1] - 1 - self.history : -1]

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._readback.fetch(tensor)

    def zero_slots(self, slots: list[int]) -> None:
        """Reset state slots before their next owner's first step."""
        self.ops.cache.zero_slots(self.cache, self._tensor(np.asarray(slots)))

    @torch.inference_mode()
    def copy_slots(self, pairs: list[tuple[int, int]]) -> None:
        """Copy state slots (from, to): a snapshot is taken or gone on from."""
        copy_slots(self.ops, self.cache, pairs, self._tensor)

    def _prompt_logprobs(self, batch: StepBatch, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
        """Log-probabilities of the prompt tokens that follow the rows of sequences that asked for them."""
        if not batch.prompt_logprobs.any():
            return {}
        assert hidden.shape[0] == batch.num_rows, "truncated prefill scores no prompt"
        starts = np.cumsum(batch.q_lens) - batch.q_lens
        results = {}
        for index in np.flatnonzero(batch.prompt_logprobs).tolist():
            rows = slice(int(starts[index]), int(starts[index] + batch.q_lens[index]))
            targets = self._tensor(batch.prompt_targets[rows])
            results[index] = prompt_logprobs(self.ops, self.model.logits, hidden[rows], targets)
        return results

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.device, non_blocking=True)


def last_rows(step: StepInputs) -> torch.Tensor:
    """Row index [n] of each sequence's last row."""
    ends = torch.cat((step.row_starts[1:], step.row_starts.new_tensor([step.num_rows])))
    return ends - 1
