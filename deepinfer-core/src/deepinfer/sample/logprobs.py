"""Prompt logprobs: how likely the model finds each next token of a prompt, a bounded number of rows at a time.

Called by the model runner for the prefill rows of requests with `prompt_logprobs`. It is given hidden rows and the
head as a function, because logits of a whole prompt (4 bytes x vocabulary x tokens) would not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.reference.sampling import LOGPROB_FLOOR, STATUS_OK
from deepinfer.sampling_params import GREEDY_TEMPERATURE

CHUNK_ROWS = 1024


@dataclass(slots=True)
class PromptRows:
    """Sampling parameters of Q prompt rows; None means that no row asks for it.

    temperature [Q] float32 (greedy rows are scored at temperature 1), top_p [Q] float32, top_k [Q] int64, on the
    device of the logits
    """

    temperature: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None

    def __getitem__(self, rows: slice) -> PromptRows:
        return PromptRows(*(None if t is None else t[rows] for t in (self.temperature, self.top_p, self.top_k)))


def prompt_logprobs(
    ops: Any,
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    params: PromptRows | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> torch.Tensor:
    """Logprob of the next prompt token at each row, under the request's temperature, top-p and top-k.

    ops      bound op table
    head     hidden rows [r, H] -> logits [r, V] float32; the final head
    hidden   [Q, H] rows to score
    targets  [Q] int64 next token of the prompt. Ids that are no token (image placeholders, -1) score the floor
    params   per-row parameters, None = raw log-softmax for all rows
    returns  [Q] float32, floor -9999; NaN for rows whose logits are not finite

    Masks of generation (blacklist, grammar, end tokens) do not apply to text the user wrote.
    """
    params = params or PromptRows()
    scores = torch.empty(len(targets), dtype=torch.float32, device=targets.device)
    for start in range(0, len(targets), chunk_rows):
        rows = slice(start, start + chunk_rows)
        scores[rows] = _score(ops.sampling, head(hidden[rows]), targets[rows], params[rows])
    return scores


def _score(sampling: Any, logits: torch.Tensor, targets: torch.Tensor, params: PromptRows) -> torch.Tensor:
    """One chunk: logits [r, V], targets [r]; returns [r] float32."""
    logits, status = sampling.prepare(logits, None, None, None)
    is_token = (targets >= 0) & (targets < logits.shape[-1])
    ids = torch.where(is_token, targets, 0)
    temperature = params.temperature
    temperature = torch.ones(len(ids), device=logits.device) if temperature is None else temperature
    is_greedy = temperature <= GREEDY_TEMPERATURE
    temperature = torch.where(is_greedy, 1.0, temperature)
    if params.top_p is None or params.top_k is None:
        scores = sampling.score(logits, ids, temperature)
    else:
        top_p, top_k = torch.where(is_greedy, 1.0, params.top_p), torch.where(is_greedy, -1, params.top_k)
        scores = sampling.token_logprobs(sampling.process(logits, temperature, top_p, top_k), ids)
    scores = scores.masked_fill(~is_token, LOGPROB_FLOOR)
    return scores.masked_fill(status != STATUS_OK, torch.nan)
