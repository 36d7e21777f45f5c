"""How clear the reference's discrete choices are: scores behind selections, and gaps behind routing decisions.

A backend may choose differently where two scores differ by less than rounding does. Level 3 compares selections with
the yardstick's scores, and leaves rows out whose experts are a toss-up. Reads what `bench.Recorder` kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepinfer.hooks import OpTable

Call = Mapping[str, Any]
"""Operands of one call, by name."""

Scores = tuple[torch.Tensor, torch.Tensor]
"""Working and ideal scores of the same rows."""


def entry_scores(call: Call) -> torch.Tensor:
    """Scores [R, K] float64 of a call of `attention.top_entries`; -inf = not visible."""
    scores, lengths = call["scores"].double(), call["lengths"]
    return scores.masked_fill(torch.arange(scores.shape[1]) >= lengths.unsqueeze(1), -torch.inf)


def block_scores(block: int) -> Callable[[Call], torch.Tensor]:
    """For calls of `attention.candidate_blocks`: the best score [R, B] float64 in every block of `block` entries.

    -inf = not visible; the last visible block always counts, so its score is far above all others
    """

    def scores(call: Call) -> torch.Tensor:
        entries, lengths = entry_scores(call), call["lengths"]
        blocks = -(-entries.shape[1] // block)
        padded = torch.nn.functional.pad(entries, (0, blocks * block - entries.shape[1]), value=-torch.inf)
        best = padded.view(-1, blocks, block).amax(-1)
        last = ((lengths + block - 1) // block - 1).unsqueeze(1)
        forced = torch.where(last >= 0, FORCED, -torch.inf).to(best.dtype)
        return best.scatter(1, last.clamp(min=0), forced)

    return scores


FORCED = 1e6
"""Score of a block that always counts."""


def routing_gaps(ops: OpTable, call: Call) -> torch.Tensor:
    """Gap [Q] between the worst expert chosen and the best one left out, of a call of `experts.route`."""
    logits = ops.gemm.linear(call["u"], call["gate"], torch.float32).double()
    bias = call["bias"].double()
    mask = call.get("image_mask")
    if mask is not None:
        bias = torch.where(mask.unsqueeze(1), call["bias_vl"].double(), bias)
    scores = torch.nn.functional.softplus(logits).sqrt() + bias
    top_k = call["top_k"]
    if top_k == scores.shape[1]:
        return torch.full((scores.shape[0],), torch.inf)
    best = scores.topk(top_k + 1, -1).values
    return best[:, top_k - 1] - best[:, top_k]
