"""The sampler: logits of the rows that yield a token in, tokens and their logprobs out.

The model runner calls `Sampler.sample` (or `launch`, which does not wait) once a step. It knows neither requests nor
how logits are made, and has no random numbers of its own: every draw is a function of (seed, position), done by the
bound `sampling` ops.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from deepinfer.errors import ConfigError
from deepinfer.reference.sampling import STATUS_EMPTY, STATUS_MASKED
from deepinfer.reference.speculation import RULES, accepted_prefix
from deepinfer.sample.ahead import VerifyRows, forbid_ahead, golden_ahead
from deepinfer.sample.banned import check_ids, parse_blacklist
from deepinfer.sample.pending import PendingRows
from deepinfer.sample.rows import SampledRows, SamplingBatch
from deepinfer.sampling_params import GREEDY_TEMPERATURE
from deepinfer.speculate.proposer import DraftParams

__all__ = ["PendingRows", "SampledRows", "Sampler", "SamplingBatch"]


class Sampler:
    """Chooses tokens through the bound `sampling` ops. Immutable after construction, so one serves all steps.

    ops          bound op table
    vocab_size   V, rows of the head
    device       where the logits are
    eos_ids      end tokens, impossible in rows with `forbid_eos`
    blacklist    text of `DEEPINFER_DECODE_TOKEN_BLACKLIST`
    banned_ids   further ids that are never sampled, e.g. head rows the tokenizer has no token for
    force_topk   `DEEPINFER_SAMPLER_FORCE_TOPK`: keep only that many largest logits before anything else; 0 = off
    sum_smaller  also compute `SampledRows.sum_smaller` (`DEEPINFER_COMPUTE_SUM_SMALLER_PROBS`)
    rule         how drafts are verified: "coupled" or "rejection", see `sampling.verify`

    Raises `ConfigError` for ids outside the vocabulary and for bans that leave nothing.
    """

    def __init__(
        self,
        ops: Any,
        vocab_size: int,
        device: torch.device | str = "cpu",
        eos_ids: Iterable[int] = (),
        blacklist: str = "",
        banned_ids: Iterable[int] = (),
        force_topk: int = 0,
        sum_smaller: bool = False,
        rule: str = "coupled",
    ) -> None:
        if force_topk < 0:
            raise ConfigError(f"DEEPINFER_SAMPLER_FORCE_TOPK={force_topk}, expected 0 (off) or more")
        if rule not in RULES:
            raise ConfigError(f"verification rule {rule!r}, expected one of {', '.join(RULES)}")
        self.rule = rule
        self.ops, self.vocab_size, self.device = ops.sampling, vocab_size, torch.device(device)
        self.force_topk, self.sum_smaller = force_topk, sum_smaller
        self._eos_ids = np.array(check_ids("eos_ids", eos_ids, vocab_size), np.int64)
        banned = {*parse_blacklist(blacklist, vocab_size), *check_ids("banned_ids", banned_ids, vocab_size)}
        if len(banned) == vocab_size:
            raise ConfigError(f"all {vocab_size} token ids are banned from sampling; leave some out of the blacklist")
        self._banned = torch.tensor(sorted(banned), device=self.device) if banned else None

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledRows:
        """Sample and wait. logits [R, V] float32, row r belonging to entry r of `batch`."""
        return self.launch(logits, batch).result()

    def launch(self, logits: torch.Tensor, batch: SamplingBatch, verify: VerifyRows | None = None) -> PendingRows:
        """Issue the sampling of R rows without waiting for the device. logits [R, V] float32.

        verify  the rows' drafts and positions, needed where the batch has `ahead` rules

        Greedy rows report logprobs of the unscaled distribution (temperature 1), since a one-hot says nothing.
        """
        if logits.shape != (batch.num_rows, self.vocab_size):
            raise ValueError(f"logits {list(logits.shape)} for {batch.num_rows} rows of {self.vocab_size} tokens")
        masked, status = self._masked(logits, batch, verify)
        is_greedy = batch.temperature <= GREEDY_TEMPERATURE
        count = min(int(batch.num_top_logprobs.max(initial=0)), self.vocab_size)
        temperature = self._tensor(np.where(is_greedy, np.float32(1), batch.temperature))
        distribution = None
        if count or self.sum_smaller or not is_greedy.all():
            distribution = self.ops.process(masked, temperature, *self._filters(batch, is_greedy))
        golden = self._golden(batch, verify)
        if verify is not None and verify.verifies:
            token_ids, accepted = self._verify(masked, distribution, batch, is_greedy, golden, verify)
        else:
            token_ids = self._choose(masked, distribution, batch, is_greedy, verify)
            token_ids = token_ids if golden is None else torch.where(golden >= 0, golden, token_ids)
            accepted = None if verify is None else torch.zeros_like(verify.starts)
        if distribution is None:
            logprobs = self.ops.score(masked, token_ids, temperature)
        else:
            logprobs = self.ops.token_logprobs(distribution, token_ids)
        return PendingRows(
            token_ids=token_ids,
            logprobs=logprobs,
            status=status,
            top=self.ops.top_logprobs(distribution, count) if count else None,
            sum_smaller=self.ops.sum_smaller(distribution, token_ids) if self.sum_smaller else None,
            batch=batch,
            vocab_size=self.vocab_size,
            accepted=accepted,
            positions=None if verify is None else verify.positions,
        )

    def draft_params(self, batch: SamplingBatch, rows: np.ndarray) -> DraftParams:
        """How drafts are drawn for the sequences that `rows` [n] of a batch belong to."""
        is_greedy = batch.temperature <= GREEDY_TEMPERATURE
        top_p, top_k = self._filters(batch, is_greedy)
        index = self._tensor(rows)
        return DraftParams(
            temperature=self._tensor(np.where(is_greedy, np.float32(0), batch.temperature)[rows]),
            top_p=None if top_p is None else top_p[index],
            top_k=None if top_k is None else top_k[index],
            seeds=self._tensor(batch.seed[rows].view(np.int64)),
            coupled=self.rule == "coupled",
        )

    def _masked(
        self, logits: torch.Tensor, batch: SamplingBatch, verify: VerifyRows | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R, V] after every mask, and the rows' status [R]."""
        allowed = logits
        if batch.ahead is not None:
            assert verify is not None, "rules that depend on positions need the rows' positions"
            allowed = forbid_ahead(logits, batch.ahead, verify, self._eos_ids)
        masked, status = self.ops.prepare(allowed, self._banned, self._pairs(batch), self._mask(batch))
        if allowed is not logits:  # nothing left because of the rules is not the model's fault
            status = status.masked_fill((status == STATUS_EMPTY) & (logits.amax(-1) > -torch.inf), STATUS_MASKED)
        if self.force_topk:
            masked = self.ops.keep_top(masked, self.force_topk)
        return masked, status

    def _choose(
        self,
        masked: torch.Tensor,
        distribution: torch.Tensor | None,
        batch: SamplingBatch,
        is_greedy: np.ndarray,
        verify: VerifyRows | None,
    ) -> torch.Tensor:
        """Arg-max for greedy rows, a draw for the others; [R] int64."""
        if is_greedy.all():
            return self.ops.greedy(masked)
        positions = self._tensor(batch.position) if verify is None else verify.positions
        drawn = self.ops.draw(distribution, self._tensor(batch.seed.view(np.int64)), positions)
        if not is_greedy.any():
            return drawn
        return torch.where(self._tensor(is_greedy), self.ops.greedy(masked), drawn)

    def _verify(
        self,
        masked: torch.Tensor,
        distribution: torch.Tensor | None,
        batch: SamplingBatch,
        is_greedy: np.ndarray,
        golden: torch.Tensor | None,
        rows: VerifyRows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [R] and accepted drafts [n]. To a greedy row its best token is a forced one, whatever the rule."""
        forced = torch.full_like(rows.draft_ids, -1) if golden is None else golden
        if is_greedy.any():
            best = torch.where(self._tensor(is_greedy), self.ops.greedy(masked), -1)
            forced = torch.where(forced >= 0, forced, best)
        counts = self._tensor(rows.counts)
        if is_greedy.all():
            has_draft = torch.arange(len(forced), device=forced.device) < (rows.starts + counts - 1)[rows.sequence]
            agrees = has_draft & (forced == rows.draft_ids)
            return forced, accepted_prefix(agrees, rows.sequence, rows.starts)
        first = np.cumsum(rows.counts) - rows.counts
        seeds = self._tensor(batch.seed[first].view(np.int64))
        found = self.ops.verify(
            distribution, rows.draft_ids, rows.starts, counts, seeds, rows.positions[rows.starts], forced,
            rows.draft_logprobs if self.rule == "rejection" else None, self.rule,
        )  # fmt: skip
        return found.token_ids, found.accepted

    def _golden(self, batch: SamplingBatch, verify: VerifyRows | None) -> torch.Tensor | None:
        """Forced tokens [R], -1 = free; those outside the vocabulary become an error of their row. None without any."""
        if batch.ahead is not None:
            assert verify is not None
            return golden_ahead(batch.ahead, verify)
        forced = (batch.golden >= 0) & (batch.golden < self.vocab_size)
        return self._tensor(np.where(forced, batch.golden, -1).astype(np.int64)) if forced.any() else None

    def _filters(self, batch: SamplingBatch, is_greedy: np.ndarray) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """top_p and top_k on the device, (None, None) if no row is filtered."""
        top_p, top_k = np.where(is_greedy, np.float32(1), batch.top_p), np.where(is_greedy, -1, batch.top_k)
        if not ((top_p < 1) | (top_k > 0)).any():
            return None, None
        return self._tensor(top_p), self._tensor(top_k.astype(np.int64))

    def _pairs(self, batch: SamplingBatch) -> torch.Tensor | None:
        """(row, id) pairs [m, 2] that are impossible: end tokens of `forbid_eos` rows and `forbidden`."""
        pairs = []
        if batch.forbidden is not None:  # ids without a row of the head cannot be sampled anyway
            pairs.append(batch.forbidden[batch.forbidden[:, 1] < self.vocab_size])
        if len(self._eos_ids) and batch.forbid_eos.any():
            rows = np.flatnonzero(batch.forbid_eos)
            pairs.append(np.stack([np.repeat(rows, len(self._eos_ids)), np.tile(self._eos_ids, len(rows))], axis=1))
        return self._tensor(np.concatenate(pairs).astype(np.int64)) if pairs else None

    def _mask(self, batch: SamplingBatch) -> torch.Tensor | None:
        """The grammar's bit masks on the device."""
        return None if batch.allowed_mask is None else self._tensor(batch.allowed_mask)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
