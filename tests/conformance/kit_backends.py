"""Backends for tests of the kit: honest implementations, and the same with one planted mistake each."""

from __future__ import annotations

import torch

from deepinfer.hooks import CANONICAL, QuantTensor, provides
from deepinfer.hooks.ops import AttentionOps, CacheOps, ExpertOps, GemmOps, ResidualOps
from deepinfer.hooks.ops.residual import SiteOutput

DENSE, KV = {"dense_weight": CANONICAL}, {"kv_cache": CANONICAL}


class HonestGemm(GemmOps):
    """Sums in another order than core's bodies."""

    @provides(layouts=DENSE)
    def linear(self, x, weight, out_dtype=None):
        values = (x.dequantize() if isinstance(x, QuantTensor) else x).float()
        dense = self._dense(weight).float()
        parts = [values[..., i::4] @ dense[:, i::4].T for i in range(4)]
        return ((parts[3] + parts[2]) + (parts[1] + parts[0])).to(out_dtype or self.numerics.activation_dtype)

    @provides()
    def rms_norm(self, x, weight, eps):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        return (x.float() * scale * weight.float()).to(self.numerics.activation_dtype)

    @provides()
    def swiglu(self, gate_up, limit, row_weight=None):
        gate, up = gate_up.float().chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out = gate * torch.sigmoid(gate) * up
        return out if row_weight is None else out * row_weight.unsqueeze(1)


class HonestAttention(AttentionOps):
    """Returns bfloat16 where the contract leaves the choice."""

    @provides(layouts=KV)
    def cached(self, q, cache, layer, source, selection, sink, step):
        return super().cached(q, cache, layer, source, selection, sink, step).bfloat16()

    @provides(layouts=KV)
    def chunk(self, q, before, keys, cache, source, selection, sink, step):
        return super().chunk(q, before, keys, cache, source, selection, sink, step).bfloat16()


class HonestResidual(ResidualOps):
    """Core's numbers, moved by a few units in the last place."""

    @provides()
    def mix(self, streams, weights):
        pre, post, comb = super().mix(streams, weights)
        return pre * (1 + 1e-7), post * (1 - 1e-7), comb * (1 + 1e-7)

    @provides()
    def collapse(self, streams, pre):
        return (streams.float() * pre.unsqueeze(-1)).flip(1).sum(1).to(streams.dtype)


class HonestExperts(ExpertOps):
    """Adds the slots up in another order."""

    @provides()
    def combine(self, expert_rows, dispatched, shared):
        rows = expert_rows.float()[dispatched.position]
        return (rows.flip(1).sum(1) + shared.float()).to(shared.dtype)


HONEST = (HonestGemm, HonestAttention, HonestResidual, HonestExperts)


class WrongSwiglu(HonestGemm):
    """Forgets the clamp and halves the result."""

    @provides()
    def swiglu(self, gate_up, limit, row_weight=None):
        return super().swiglu(gate_up, limit, row_weight) * 0.5


class WrongNorm(HonestGemm):
    """One channel is too large by one."""

    @provides()
    def rms_norm(self, x, weight, eps):
        y = super().rms_norm(x, weight, eps)
        y[..., 3] += 1
        return y


class WrongSink(HonestAttention):
    """The decode form takes the sink for much larger than it is."""

    @provides(layouts=KV)
    def cached(self, q, cache, layer, source, selection, sink, step):
        return super().cached(q, cache, layer, source, selection, sink + 3, step)


class WrongLatent(AttentionOps):
    """A fused block that leaves the inverse rope out."""

    @provides(layouts=KV)
    def latent(self, q, kv, weights, cache, layer, source, selection, step):
        out = super().latent(q, kv, weights, cache, layer, source, selection, step)
        return out if step.num_rows % 2 else QuantTensor(out.values.roll(1, -1))


class WrongSite(ResidualOps):
    """A fused site that collapses with its own weights instead of the previous site's."""

    @provides()
    def site(self, streams, pending, pre_prev, weights, norm_weight):
        out = super().site(streams, pending, None, weights, norm_weight)
        return SiteOutput(out.streams, out.pre, out.post, out.comb, out.u, out.x)


class WrongSelect(AttentionOps):
    """The indexer forgets the newest entry of every row."""

    @provides(layouts=KV)
    def select(self, q, weights, cache, source, candidates, make_candidates, step):
        selection, blocks = super().select(q, weights, cache, source, candidates, make_candidates, step)
        entries = selection.entries.clone()
        entries[:, : entries.shape[1] // 2] = (entries[:, : entries.shape[1] // 2] - 1).clamp(min=-1)
        return type(selection)(entries.sort(-1, descending=False).values, selection.ratio), blocks


PRIVATE = "planes_v1"


def _everything_of(base, layout):
    """A class that overrides every op of a cache contract in a private layout, with core's bodies."""

    def override(name):
        def method(self, *args):
            return getattr(base, name)(self, *args)

        original = getattr(base, name)
        namespace = {"method": method}
        parameters = original.__code__.co_varnames[1 : original.__code__.co_argcount]
        source = f"def {name}(self, {', '.join(parameters)}):\n    return method(self, {', '.join(parameters)})\n"
        exec(source, namespace)
        return provides(layouts={"kv_cache": layout})(namespace[name])

    return type("PrivateCache", (base,), {name: override(name) for name in base.op_specs})


PrivateCache = _everything_of(CacheOps, PRIVATE)
"""All cache ops, in a layout that only this provider knows (by name; the bytes are core's)."""


class WrongPrivateCache(PrivateCache):
    """Window keys come back three places too late."""

    @provides(layouts={"kv_cache": PRIVATE})
    def load_window(self, cache, layer, step, count):
        return super().load_window(cache, layer, step, count).roll(3, 1)
