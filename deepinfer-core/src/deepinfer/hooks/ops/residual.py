"""Residual ops: the hyper-connection site around every sub-layer, and its parts.

The model calls `site` once per sub-layer; its default body composes the parts through the bound table, so a backend
may fuse write-back, mix, collapse, norm and quantization in one kernel or take any part alone. Mathematics:
`deepinfer.reference.residual`. Q rows, m = traits.hc_mult streams, H channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.hooks.api import OpGroup, op
from deepinfer.hooks.types import QuantTensor
from deepinfer.reference import residual as reference


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """Mixing parameters of one site, float32.

    fn     [(2 + m) m, m H]   projects the normalised streams onto m pre, m post and m * m comb logits
    base   [(2 + m) m]        added to the logits
    scale  [3]                of the pre, post and comb logits
    """

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """A sub-layer's output that the next site writes back.

    y     [Q, H] activation dtype
    post  [Q, m] float32          how much of y each stream receives
    comb  [Q, m, m] float32       stream-to-stream matrix, [from, to]
    """

    y: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


@dataclass(frozen=True, slots=True)
class SiteOutput:
    """What a site hands to its sub-layer and to the next site.

    streams    [Q, m, H] activation dtype, after the write-back; the site's operand itself where nothing was pending
    pre        [Q, m] float32, collapse weights for the next site
    post, comb as in `Pending`, for this sub-layer's output
    u          [Q, H] activation dtype, normalised sub-layer input
    x          [Q, H] u quantized
    """

    streams: torch.Tensor
    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    u: torch.Tensor
    x: QuantTensor


class ResidualOps(OpGroup):
    """Hyper-connections. Eps and iteration counts come from the model's traits."""

    group = "residual"

    @op(version=1, level="optional", status="beta", grain="kernel")
    def expand(self, embedding: torch.Tensor) -> torch.Tensor:
        """Equal streams from embeddings. embedding [Q, H] -> [Q, m, H] activation dtype."""
        return reference.expand(embedding.to(self.numerics.activation_dtype), self.traits.hc_mult)

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def mix(self, streams: torch.Tensor, weights: SiteWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The site's weights from its streams.

        streams  [Q, m, H] activation dtype
        returns  pre [Q, m], post [Q, m], comb [Q, m, m], float32: sigmoid + hc_eps, 2 * sigmoid, Sinkhorn matrix
        """
        traits = self.traits
        return reference.mix(
            streams, weights.fn, weights.base, weights.scale, traits.rms_norm_eps, traits.hc_eps,
            traits.hc_sinkhorn_iters, self.numerics.accumulate_dtype,
        )  # fmt: skip

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def collapse(self, streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        """Sum of pre[k] * streams[k], rounded once. [Q, m, H], [Q, m] float32 -> [Q, H] activation dtype."""
        return reference.collapse(streams, pre, self.numerics.accumulate_dtype)

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def write_back(self, streams: torch.Tensor, pending: Pending) -> torch.Tensor:
        """New stream k = post[k] * y + sum over j of comb[j, k] * streams[j], rounded once.

        streams [Q, m, H] -> [Q, m, H], activation dtype
        """
        return reference.write_back(streams, pending.y, pending.post, pending.comb, self.numerics.accumulate_dtype)

    @op(version=1, level="recommended", status="beta", grain="block")
    def site(
        self,
        streams: torch.Tensor,
        pending: Pending | None,
        pre_prev: torch.Tensor | None,
        weights: SiteWeights,
        norm_weight: torch.Tensor,
    ) -> SiteOutput:
        """Write the pending output back, mix, collapse with the previous site's weights, norm and quantize.

        streams      [Q, m, H] activation dtype
        pending      output of the sub-layer before, or None when the streams are up to date
        pre_prev     [Q, m] float32, `pre` of the previous site; None = unshifted, the site's own
        norm_weight  [H] weight of the norm in front of the sub-layer
        """
        residual = self.ops.residual
        if pending is not None:
            streams = residual.write_back(streams, pending)
        pre, post, comb = residual.mix(streams, weights)
        hidden = residual.collapse(streams, pre if pre_prev is None else pre_prev)
        u, x = self.ops.gemm.rms_norm_quantize(hidden, norm_weight, self.traits.rms_norm_eps)
        return SiteOutput(streams, pre, post, comb, u, x)

    @op(version=1, level="optional", status="beta", grain="kernel")
    def stream_mean(self, streams: torch.Tensor) -> torch.Tensor:
        """Mean over streams, the draft model's feature. [Q, m, H] -> [Q, H] activation dtype."""
        return reference.stream_mean(streams, self.numerics.accumulate_dtype)

    @op(version=1, level="optional", status="beta", grain="block")
    def head(self, streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Last collapse of the unshifted form, with weights of its own: sigmoid(mix * scale + base) + hc_eps.

        streams [Q, m, H], fn [m, m H], base [m], scale [1] float32 -> [Q, H] activation dtype
        """
        pre = reference.head_weights(
            streams, fn, base, scale, self.traits.rms_norm_eps, self.traits.hc_eps, self.numerics.accumulate_dtype
        )
        return self.ops.residual.collapse(streams, pre)
