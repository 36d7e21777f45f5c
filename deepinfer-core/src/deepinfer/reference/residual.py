"""Hyper-connections: several residual streams per token, mixed at every sub-layer (mHC, model specification 3.3).

Called by `hooks/ops/residual.py`. Q rows, m streams, H channels; a `mix` has m pre weights (how a sub-layer's input
collapses the streams), m post weights (how its output is added to them) and an m x m stream-to-stream matrix.
`accumulate` is the dtype everything is computed in before the single rounding of each result.
"""

from __future__ import annotations

import torch

from deepinfer.reference.gemm import linear
from deepinfer.reference.norm import reciprocal_rms

POST_MULTIPLIER = 2.0


def expand(embedding: torch.Tensor, streams: int) -> torch.Tensor:
    """[Q, H] -> [Q, m, H], every stream a copy."""
    return embedding.unsqueeze(1).repeat(1, streams, 1)


def mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    accumulate: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mix of a site from the streams before it.

    streams  [Q, m, H]
    fn       [(2 + m) m, m H] float32    the norm's weight is already folded in
    base     [(2 + m) m] float32
    scale    [3] float32                 of the pre, post and stream-to-stream parts
    returns  pre [Q, m], post [Q, m], comb [Q, m (from), m (to)], all float32
    """
    m = streams.shape[1]
    parts = torch.cat([part.expand(size) for part, size in zip(scale.split(1), (m, m, m * m), strict=True)])
    logits = _normed_projection(streams, fn, norm_eps, accumulate) * parts.to(accumulate) + base.to(accumulate)
    pre, post, comb = logits.split((m, m, m * m), -1)
    pre = pre.sigmoid() + eps
    post = post.sigmoid() * POST_MULTIPLIER
    comb = sinkhorn(comb.unflatten(-1, (m, m)), iterations, eps)
    return pre.float(), post.float(), comb.float()


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Softmax over the last dimension, then `iterations` rounds that make columns and rows sum to nearly one.

    logits [Q, m, m] -> [Q, m, m] in the same dtype.
    """
    matrix = (logits.softmax(-1) + eps).permute(1, 2, 0).contiguous()  # rows of the step last: long vectors
    matrix = matrix / (matrix.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(0, keepdim=True) + eps)
    return matrix.permute(2, 0, 1).contiguous()


def collapse(streams: torch.Tensor, pre: torch.Tensor, accumulate: torch.dtype = torch.float32) -> torch.Tensor:
    """Weighted sum over streams. streams [Q, m, H], pre [Q, m] float32 -> [Q, H] in the streams' dtype."""
    weights = pre.to(accumulate).unsqueeze(1)
    return torch.bmm(weights, streams.to(accumulate)).squeeze(1).to(streams.dtype)


def write_back(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    accumulate: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Streams after a sub-layer: post[k] * y + sum over j of comb[j, k] * streams[j].

    streams [Q, m, H], y [Q, H], post [Q, m] float32, comb [Q, m, m] float32 -> [Q, m, H] in the streams' dtype.
    """
    carried = torch.bmm(comb.to(accumulate).transpose(1, 2), streams.to(accumulate))
    return (y.to(accumulate).unsqueeze(1) * post.to(accumulate).unsqueeze(-1) + carried).to(streams.dtype)


def stream_mean(streams: torch.Tensor, accumulate: torch.dtype = torch.float32) -> torch.Tensor:
    """[Q, m, H] -> [Q, H] in the streams' dtype."""
    return streams.to(accumulate).mean(1).to(streams.dtype)


def head_weights(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
    accumulate: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Weights of the last collapse of the unshifted form. fn [m, m H], base [m], scale [1] -> [Q, m] float32."""
    logits = _normed_projection(streams, fn, norm_eps, accumulate) * scale.to(accumulate) + base.to(accumulate)
    return (logits.sigmoid() + eps).float()


def _normed_projection(
    streams: torch.Tensor, fn: torch.Tensor, norm_eps: float, accumulate: torch.dtype
) -> torch.Tensor:
    """RMS-normalised streams, one norm over all m H values, times fn -> [Q, n] in `accumulate`."""
    flat = streams.flatten(1).to(accumulate)
    return linear(flat, fn, accumulate, accumulate) * reciprocal_rms(flat, norm_eps).unsqueeze(-1)
