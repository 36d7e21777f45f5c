"""Hyper-connections: the four residual streams and how a sub-layer is wrapped ("shifted" mHC).

A sub-layer's output is not added at once: it travels as `pending` and is written back by the next site, so that a
backend can fuse write-back, mixing, collapse, norm and quantization into one kernel. `pre` always comes from the site
before. Used by every backbone and draft layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.hooks import OpTable
from deepinfer.hooks.ops.residual import Pending, SiteOutput, SiteWeights


@dataclass(slots=True)
class Streams:
    """Residual state between sub-layers.

    values   [Q, hc_mult, H] activation dtype
    pre      [Q, hc_mult] float32, collapse weights of the previous site
    pending  last sub-layer's output not yet written back, or None
    """

    values: torch.Tensor
    pre: torch.Tensor
    pending: Pending | None = None

    @classmethod
    def start(cls, ops: OpTable, embedding: torch.Tensor) -> Streams:
        """Four equal streams from embeddings [Q, H]; the first site collapses stream 0 alone."""
        values = ops.residual.expand(embedding)
        pre = torch.zeros(values.shape[:2], dtype=torch.float32, device=values.device)
        pre[:, 0] = 1
        return cls(values, pre)

    def settle(self, ops: OpTable) -> torch.Tensor:
        """Write the pending output back now, for readers that need the streams themselves; returns them."""
        if self.pending is not None:
            self.values = ops.residual.write_back(self.values, self.pending)
            self.pending = None
        return self.values

    def collapse(self, ops: OpTable) -> torch.Tensor:
        """Hidden state [Q, H] after the last site."""
        return ops.residual.collapse(self.settle(ops), self.pre)

    def take(self, rows: torch.Tensor) -> Streams:
        """The streams of some rows; nothing is pending inside a sub-layer."""
        assert self.pending is None
        return Streams(self.values[rows], self.pre[rows])


@dataclass(frozen=True, slots=True)
class Site:
    """One hyper-connection site and the norm in front of its sub-layer."""

    weights: SiteWeights
    norm: torch.Tensor

    def enter(self, ops: OpTable, streams: Streams) -> SiteOutput:
        """Write back, mix, collapse with the previous `pre`, norm and quantize."""
        out = ops.residual.site(streams.values, streams.pending, streams.pre, self.weights, self.norm)
        streams.values, streams.pending = out.streams, None
        return out

    @staticmethod
    def take(out: SiteOutput, rows: torch.Tensor) -> SiteOutput:
        """A site's output for some rows."""
        return SiteOutput(
            out.streams[rows], out.pre[rows], out.post[rows], out.comb[rows], out.u[rows], out.x.take(rows)
        )

    @staticmethod
    def leave(streams: Streams, out: SiteOutput, y: torch.Tensor) -> None:
        """Hand the sub-layer's output [Q, H] and this site's `pre` on to the next site."""
        streams.pending = Pending(y, out.post, out.comb)
        streams.pre = out.pre
