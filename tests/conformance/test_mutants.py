"""The kit finds subtle errors: each op below is wrong in one small way, and level 1 or 2 has to say which op and case.

Every class is a backend's op group with one override; everything else is core's. A mutant that no case catches means
that the kit has a hole.
"""

from __future__ import annotations

import importlib.metadata
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from deepinfer.hooks import CANONICAL, QuantTensor, RingRows, Weight, provides
from deepinfer.hooks.ops.attention import AttentionOps
from deepinfer.hooks.ops.cache import CacheOps
from deepinfer.hooks.ops.communicator import CommunicatorOps
from deepinfer.hooks.ops.engram import EngramConstants, EngramOps
from deepinfer.hooks.ops.experts import Dispatched, ExpertOps
from deepinfer.hooks.ops.gemm import GemmOps
from deepinfer.hooks.ops.residual import Pending, ResidualOps
from deepinfer.hooks.ops.runtime import RuntimeOps
from deepinfer.hooks.ops.sampling import SamplingOps
from deepinfer.hooks.ops.step_inputs import StepInputOps
from deepinfer.hooks.ops.vision import VisionOps
from deepinfer.reference import cache, experts, indexer, quant, residual, rope, vision
from deepinfer.testing.conformance import ops, properties
from deepinfer.testing.opinfo import op_infos
from deepinfer.testing.subject import load_groups, make_subject

KV = {"kv_cache": CANONICAL}
DENSE = {"dense_weight": CANONICAL}
EXPERTS = {"expert_weight": CANONICAL}
TABLE = {"engram_table": CANONICAL}

MUTANTS = {}
"""{name of the class: (class, op)}"""


def mutant(op):
    def register(klass):
        MUTANTS[klass.__name__] = (klass, op)
        return klass

    return register


# attention


@mutant("attention.rope")
class RopeTurnsHalves(AttentionOps):
    """Channel i turns with channel i + d / 2 instead of its neighbour."""

    @provides()
    def rope(self, x, positions, table, inverse=False):
        width = table.shape[-1]
        cos, sin = table[positions].view(-1, *[1] * (x.dim() - 2), width).chunk(2, -1)
        kept, turned = x.split((x.shape[-1] - width, width), -1)
        first, second = turned.float().chunk(2, -1)
        sin = -sin if inverse else sin
        return torch.cat(
            (kept, torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)), -1
        )


@mutant("attention.rope")
class InverseForgotten(AttentionOps):
    """The inverse rotation turns forward."""

    @provides()
    def rope(self, x, positions, table, inverse=False):
        return rope.apply_rope(x, positions, table, False)


@mutant("attention.cached")
class WindowOneShort(AttentionOps):
    """The oldest key of the window is never seen."""

    @provides(layouts=KV)
    def cached(self, q, cache, layer, source, selection, sink, step):
        step.plan = step.plan.clone()
        step.plan[:, 0] = False
        return AttentionOps.cached(self, q, cache, layer, source, selection, sink, step)


@mutant("attention.chunk")
class SinkDropped(AttentionOps):
    """The sink is missing in the denominator of the prefill form."""

    @provides(layouts=KV)
    def chunk(self, q, before, keys, cache, source, selection, sink, step):
        return AttentionOps.chunk(self, q, before, keys, cache, source, selection, torch.full_like(sink, -1e4), step)


@mutant("attention.plan")
class PrefillWindowOneShort(AttentionOps):
    """The prefill form's mask leaves out the oldest key of every window."""

    @provides()
    def plan(self, step):
        if step.in_ring:
            return AttentionOps.plan(self, step)
        lowest = torch.maximum(step.window_lo, step.positions - (self.traits.sliding_window - 2))
        return AttentionOps.plan(self, replace(step, window_lo=lowest))


@mutant("attention.latent")
class LastKeyNotStored(AttentionOps):
    """The fused block forgets to store the last key of a long step."""

    @provides(layouts=KV)
    def latent(self, q, kv, weights, cache, layer, source, selection, step):
        if not step.in_ring:
            ring = step.rings[cache.spec.ring]
            step = replace(step, rings={**step.rings, cache.spec.ring: RingRows(ring.rows[:-1], ring.physical[:-1])})
        return AttentionOps.latent(self, q, kv, weights, cache, layer, source, selection, step)


@mutant("attention.latent")
class NoInverseRope(AttentionOps):
    """The output keeps the rotation of the keys."""

    @provides(layouts=KV)
    def latent(self, q, kv, weights, cache, layer, source, selection, step):
        right = AttentionOps.latent(self, q, kv, weights, cache, layer, source, selection, step).values
        heads = right.view(len(right), self.traits.num_attention_heads, -1)
        turned = self.ops.attention.rope(heads, step.positions, weights.rope)
        return self.ops.gemm.quantize(turned.view(right.shape))


@mutant("attention.draft")
class DraftIsCausal(AttentionOps):
    """A draft sees the drafts before it only."""

    @provides(layouts=KV)
    def draft(self, q, kv, weights, cache, layer, step):
        parts = [
            AttentionOps.draft(self, q, kv * (torch.arange(len(kv)) % step.spans[0].q_len <= i).unsqueeze(1), weights,
                               cache, layer, step).values
            for i in range(step.spans[0].q_len)
        ]  # fmt: skip
        rows = torch.arange(len(q)) % step.spans[0].q_len
        return QuantTensor(torch.stack(parts)[rows, torch.arange(len(q))])


@mutant("attention.index_scores")
class ScoresWithoutRelu(AttentionOps):
    """Negative dot products count."""

    @provides(layouts=KV)
    def index_scores(self, q, weights, cache, source, span, step):
        positive = AttentionOps.index_scores(self, q, weights, cache, source, span, step)
        return positive - AttentionOps.index_scores(self, -q, weights, cache, source, span, step)


@mutant("attention.top_entries")
class TopEntriesUnsorted(AttentionOps):
    """The best entries, best first instead of ascending."""

    @provides()
    def top_entries(self, scores, lengths):
        found = AttentionOps.top_entries(self, scores, lengths)
        return found.flip(1).contiguous() if found.shape[1] > 1 else found


@mutant("attention.top_entries")
class TiesToTheHigherEntry(AttentionOps):
    """Of equal scores the later entry is taken."""

    @provides()
    def top_entries(self, scores, lengths):
        width = scores.shape[1]
        index = torch.arange(width)
        seen = (index < lengths.unsqueeze(1)) & (scores > -torch.inf)
        order = torch.sort(
            scores.masked_fill(~seen, -torch.inf).flip(1) + 0.0, dim=1, descending=True, stable=True
        ).indices
        order = width - 1 - order[:, : self.traits.index_topk]
        chosen = torch.where(seen.gather(1, order), order, width).sort(1).values
        return torch.where(chosen < width, chosen, -1)


@mutant("attention.candidate_blocks")
class LastBlockNotForced(AttentionOps):
    """The last visible block is a candidate only if its scores are good."""

    @provides()
    def candidate_blocks(self, scores, lengths):
        size, count = self.traits.candidate_block_size, self.traits.candidate_topk_blocks
        blocks = -(-scores.shape[1] // size)
        if blocks <= count:
            return None
        masked = scores.masked_fill(torch.arange(scores.shape[1]) >= lengths.unsqueeze(1), -torch.inf)
        masked = torch.nn.functional.pad(masked, (0, blocks * size - scores.shape[1]), value=-torch.inf)
        return indexer.top_entries(masked.unflatten(1, (blocks, size)).amax(-1), (lengths + size - 1) // size, count)


@mutant("attention.select")
class ChoosesOneEntryTooFew(AttentionOps):
    """The worst of the chosen entries is left out."""

    @provides(layouts=KV)
    def select(self, q, weights, cache, source, candidates, make_candidates, step):
        selection, blocks = AttentionOps.select(self, q, weights, cache, source, candidates, make_candidates, step)
        last = (selection.entries >= 0).sum(1, keepdim=True) - 1
        entries = (
            selection.entries.scatter(1, last.clamp(min=0), -1) if selection.entries.shape[1] else selection.entries
        )
        return type(selection)(entries, selection.ratio), blocks


@mutant("attention.encoder")
class ImagesSeeTheNextOne(AttentionOps):
    """Segments are merged in pairs."""

    @provides()
    def encoder(self, q, k, v, starts):
        kept = torch.cat((starts[:1], starts[2::2] if len(starts) % 2 else starts[2:-1:2], starts[-1:]))
        return AttentionOps.encoder(self, q, k, v, torch.unique(kept))


# gemm


@mutant("gemm.linear")
class ScalesOfTheOtherAxis(GemmOps):
    """Square FP8 weights are scaled by the transposed blocks."""

    @provides(layouts=DENSE)
    def linear(self, x, weight, out_dtype=None):
        if weight.format == "fp8_block32" and weight.values.shape[0] == weight.values.shape[1]:
            weight = Weight(weight.values, weight.scales.t().contiguous(), weight.format)
        return GemmOps.linear(self, x, weight, out_dtype)


@mutant("gemm.linear")
class SumsDependOnTheBatch(GemmOps):
    """Splits the sum in two for batches of more than four rows, and promises not to depend on the batch."""

    @provides(layouts=DENSE, batch_invariant=True)
    def linear(self, x, weight, out_dtype=None):
        values = x.dequantize() if isinstance(x, QuantTensor) else x
        dense = quant.dequantize_weight(weight.values, weight.scales, weight.format, torch.float32)
        half = dense.shape[1] // 2
        parts = ((values[..., :half], dense[:, :half]), (values[..., half:], dense[:, half:]))
        if values.shape[0] > 4:
            total = sum(a.float() @ b.T for a, b in parts)
        else:
            total = (values.double() @ dense.double().T).float()
        return total.to(out_dtype or self.numerics.activation_dtype)


@mutant("gemm.linear")
class LinearRoundsItsSums(GemmOps):
    """A float32 result went through bfloat16."""

    @provides(layouts=DENSE)
    def linear(self, x, weight, out_dtype=None):
        out = GemmOps.linear(self, x, weight, out_dtype)
        return out.bfloat16().to(out.dtype)


@mutant("gemm.block_diagonal_linear")
class GroupsShareTheirRows(GemmOps):
    """Group g takes every G-th row of the weight instead of a run of rows."""

    @provides(layouts=DENSE)
    def block_diagonal_linear(self, x, weight):
        groups = x.values.shape[1]
        dense = quant.dequantize_weight(weight.values, weight.scales, weight.format, torch.float32)
        mixed = dense.unflatten(0, (-1, groups)).transpose(0, 1)
        return self.ops.gemm.quantize(torch.einsum("qgk,gok->qgo", x.values.float(), mixed).flatten(1))


@mutant("gemm.grouped_linear")
class RowsOfTheNextExpert(GemmOps):
    """An expert without rows shifts those after it by one."""

    @provides(layouts=EXPERTS)
    def grouped_linear(self, x, weight, offsets):
        counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
        filled = torch.cat((counts[counts > 0], counts[counts == 0]))
        return GemmOps.grouped_linear(self, x, weight, filled.cumsum(0))


@mutant("gemm.prepare_weight")
class PaddedBlocksLost(GemmOps):
    """The last block row of an FP8 weight takes the scale before it."""

    @provides(layouts=DENSE)
    def prepare_weight(self, weight):
        if weight.format == "fp8_block32" and weight.values.shape[0] % 32:
            scales = weight.scales.clone()
            scales[-1] = scales[-2]
            return Weight(weight.values, scales, weight.format)
        return weight


@mutant("gemm.quantize")
class OneScaleARow(GemmOps):
    """One scale for a whole row instead of 32 channels."""

    @provides()
    def quantize(self, x):
        amax = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4)
        scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
        return QuantTensor(((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).bfloat16())


@mutant("gemm.rms_norm_quantize")
class QuantizationSkipped(GemmOps):
    """The quantized result is the plain one."""

    @provides()
    def rms_norm_quantize(self, x, weight, eps):
        normed = self.ops.gemm.rms_norm(x, weight, eps)
        return normed, QuantTensor(normed.clone())


@mutant("gemm.rms_norm")
class NormInPlace(GemmOps):
    """The input is normalised in place and returned."""

    @provides()
    def rms_norm(self, x, weight, eps):
        return x.copy_(GemmOps.rms_norm(self, x, weight, eps))


@mutant("gemm.rms_norm")
class WeightDrifts(GemmOps):
    """Every call changes the weight a little."""

    @provides()
    def rms_norm(self, x, weight, eps):
        out = GemmOps.rms_norm(self, x, weight, eps)
        weight.add_(0.0078125)
        return out


@mutant("gemm.swiglu")
class GateAndUpSwapped(GemmOps):
    @provides()
    def swiglu(self, gate_up, limit, row_weight=None):
        gate, up = gate_up.chunk(2, -1)
        return GemmOps.swiglu(self, torch.cat((up, gate), -1), limit, row_weight)


@mutant("gemm.swiglu")
class ClampMissing(GemmOps):
    """The limit is not applied."""

    @provides()
    def swiglu(self, gate_up, limit, row_weight=None):
        return GemmOps.swiglu(self, gate_up, 1e30, row_weight)


@mutant("gemm.swiglu")
class UpClampedOnOneSide(GemmOps):
    """up is clamped from above only, like gate."""

    @provides()
    def swiglu(self, gate_up, limit, row_weight=None):
        gate, up = gate_up.float().chunk(2, -1)
        gate = gate.clamp(max=limit)
        out = gate * torch.sigmoid(gate) * up.clamp(max=limit)
        return out if row_weight is None else out * row_weight.unsqueeze(-1)


# experts


@mutant("experts.ffn")
class WeightAfterTheDownProjection(ExpertOps):
    """The routing weight multiplies the result instead of what is quantized."""

    @provides(layouts=EXPERTS)
    def ffn(self, dispatched, w13, w2, limit):
        gate_up = self.ops.gemm.grouped_linear(dispatched.rows, w13, dispatched.offsets)
        inner = self.ops.gemm.swiglu_quantize(gate_up, limit, None)
        out = self.ops.gemm.grouped_linear(inner, w2, dispatched.offsets)
        return (out.float() * dispatched.row_weight.unsqueeze(1)).to(out.dtype)


@mutant("experts.route")
class BiasEntersTheWeights(ExpertOps):
    """Routing weights are made from the biased scores."""

    @provides(layouts=DENSE)
    def route(self, u, gate, bias, top_k, scaling, bias_vl=None, image_mask=None):
        logits = self.ops.gemm.linear(u, gate, torch.float32)
        ids, _ = experts.route(logits, bias, top_k, scaling, bias_vl, image_mask)
        chosen = (torch.nn.functional.softplus(logits, threshold=20.0).sqrt() + bias).gather(1, ids)
        return ids, chosen / chosen.sum(1, keepdim=True) * scaling


@mutant("experts.route")
class TextBiasForImages(ExpertOps):
    """Image rows use the bias of text rows."""

    @provides(layouts=DENSE)
    def route(self, u, gate, bias, top_k, scaling, bias_vl=None, image_mask=None):
        return ExpertOps.route(self, u, gate, bias, top_k, scaling)


@mutant("experts.dispatch")
class OrderWithinExpertsLost(ExpertOps):
    """Rows of one expert come last first."""

    @provides()
    def dispatch(self, x, ids, weights, num_experts):
        flat = ids.flatten()
        order = torch.argsort(flat.flip(0), stable=True)
        order = len(flat) - 1 - order
        offsets = torch.bincount(flat, minlength=num_experts).cumsum(0)
        position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order))).view(ids.shape)
        return Dispatched(x.take(order // ids.shape[1]), weights.flatten()[order], offsets, position)


@mutant("experts.combine")
class SharedExpertTooLoud(ExpertOps):
    """A hundredth of the shared result is added once more."""

    @provides()
    def combine(self, expert_rows, dispatched, shared):
        total = ExpertOps.combine(self, expert_rows, dispatched, shared)
        return (total.float() + shared.float() * 0.01).to(total.dtype)


@mutant("experts.moe")
class LastSlotForgotten(ExpertOps):
    """The weakest expert of every row is left out, the others are not scaled up."""

    @provides(layouts=DENSE | EXPERTS)
    def moe(self, u, x, weights, image_mask=None):
        ids, row_weights = self.ops.experts.route(
            u, weights.gate, weights.bias, weights.top_k, weights.scaling, weights.bias_vl, image_mask
        )
        kept = ids[:, :-1].contiguous(), row_weights[:, :-1].contiguous()
        sent = self.ops.experts.dispatch(x, *kept, weights.bias.shape[0])
        routed = self.ops.experts.ffn(sent, weights.w13, weights.w2, weights.limit)
        shared = self.ops.experts.shared(x, weights.shared_w13, weights.shared_w2, weights.limit)
        return self.ops.experts.combine(routed, sent, shared)


# cache


@mutant("cache.store_window")
class StaleRow(CacheOps):
    """The last row of a step keeps what an earlier owner left."""

    @provides(layouts=KV)
    def store_window(self, cache, layer, keys, step):
        ring = step.rings[cache.spec.ring]
        cache.storage.store_window(layer, keys, type(ring)(ring.rows[:-1], ring.physical[:-1]))
        return quant.decode_q8(*quant.encode_q8(keys))


@mutant("cache.store_index")
class WritesPastItsRows(CacheOps):
    """One row behind those of the step is overwritten, too."""

    @provides(layouts=KV)
    def store_index(self, cache, source, keys, step):
        physical = step.entries[cache.spec.index[source]].physical
        if len(physical):
            cache.storage.store_index(
                source, torch.ones_like(keys[-1:]), (physical[-1:] + 1).clamp(max=cache.num_blocks * 64 - 1)
            )
        cache.storage.store_index(source, keys, physical)


@mutant("cache.store_entries")
class CoarserScales(CacheOps):
    """Compressed entries are rounded in groups of 32 channels instead of 16."""

    @provides(layouts=KV)
    def store_entries(self, cache, source, entries, step):
        rounded = entries.float().unflatten(-1, (-1, 32))
        scale = (rounded.abs().amax(-1, keepdim=True) / 6).clamp(min=2**-9).to(torch.float8_e4m3fn).float()
        CacheOps.store_entries(self, cache, source, (quant.fake_q4u(rounded / scale) * scale).flatten(-2), step)


@mutant("cache.load_window")
class RingOffByOne(CacheOps):
    """Positions before the sequence read what is in the ring instead of zeros."""

    @provides(layouts=KV)
    def load_window(self, cache, layer, step, count):
        positions = (step.q_starts.unsqueeze(1) + torch.arange(-count, 0)) % cache.spec.ring
        return cache.storage.load_window(layer, step.slots.unsqueeze(1), positions)


@mutant("cache.load_index")
class SectionsMixedUp(CacheOps):
    """Index keys come out in reverse order inside their blocks."""

    @provides(layouts=KV)
    def load_index(self, cache, source, blocks):
        keys = CacheOps.load_index(self, cache, source, blocks)
        size = cache.spec.block_size // cache.spec.index[source]
        return keys.unflatten(1, (-1, size)).flip(2).flatten(1, 2) if keys.shape[1] else keys


@mutant("cache.compress")
class UnfinishedPairForgotten(CacheOps):
    """The first token of a pair that the next step finishes is not kept."""

    @provides(layouts=KV)
    def compress(self, cache, source, scores, latents, step):
        state = cache.storage.state[source]
        merged = cache_merge(scores, latents, state, step)
        ring = step.rings[state.shape[1]]
        odd = step.positions[ring.rows] % 2 == 1
        cache_keep(scores, latents, state, type(ring)(ring.rows[odd], ring.physical[odd]))
        return merged.to(self.numerics.activation_dtype)


def cache_merge(scores, latents, state, step):
    return cache.merge_pairs(scores, latents, state, step.entries[2].rows, step, torch.float32)


def cache_keep(scores, latents, state, ring):
    cache.keep_state(scores, latents, state, ring)


@mutant("cache.zero_slots")
class StateNotZeroed(CacheOps):
    """Compressor state survives into the next owner."""

    @provides(layouts=KV)
    def zero_slots(self, cache, slots):
        kept = {layer: state.clone() for layer, state in cache.storage.state.items()}
        CacheOps.zero_slots(self, cache, slots)
        for layer, state in kept.items():
            cache.storage.state[layer].copy_(state)


@mutant("cache.clone_blocks")
class IndexNotCopied(CacheOps):
    """Only the entries of a block are copied."""

    @provides(layouts=KV)
    def clone_blocks(self, cache, source, target):
        kept = {layer: table.bytes.clone() for layer, table in cache.storage.index.items()}
        CacheOps.clone_blocks(self, cache, source, target)
        for layer, memory in kept.items():
            cache.storage.index[layer].bytes.copy_(memory)


# residual


@mutant("residual.mix")
class SinkhornColumnsFirst(ResidualOps):
    """Sinkhorn ends with rows instead of columns."""

    @provides()
    def mix(self, streams, weights):
        pre, post, comb = ResidualOps.mix(self, streams, weights)
        return pre, post, comb / (comb.sum(-1, keepdim=True) + self.traits.hc_eps)


@mutant("residual.mix")
class SinkhornStopsEarly(ResidualOps):
    """Two rounds instead of the model's number."""

    @provides()
    def mix(self, streams, weights):
        t = self.traits
        return residual.mix(streams, weights.fn, weights.base, weights.scale, t.rms_norm_eps, t.hc_eps, 2)


@mutant("residual.write_back")
class StreamsTransposed(ResidualOps):
    """The stream matrix is read [to, from]."""

    @provides()
    def write_back(self, streams, pending):
        turned = Pending(pending.y, pending.post, pending.comb.transpose(1, 2).contiguous())
        return ResidualOps.write_back(self, streams, turned)


@mutant("residual.site")
class UnshiftedSite(ResidualOps):
    """Collapses with the site's own weights instead of the previous site's."""

    @provides()
    def site(self, streams, pending, pre_prev, weights, norm_weight):
        return ResidualOps.site(self, streams, pending, None, weights, norm_weight)


@mutant("residual.expand")
class StreamsAreViews(ResidualOps):
    """Streams share the embedding's memory."""

    @provides()
    def expand(self, embedding):
        return embedding.unsqueeze(1).expand(-1, self.traits.hc_mult, -1)


# engram


@mutant("engram.hash")
class OffsetOfTheNextPrime(EngramOps):
    """Every order and head begins where the next one should."""

    @provides()
    def hash(self, ngrams, constants, image_mask=None):
        wrong = EngramConstants(constants.multipliers, constants.primes, constants.primes.flatten().cumsum(0))
        return EngramOps.hash(self, ngrams, wrong, image_mask)


@mutant("engram.fetch")
class MissingRowNotZero(EngramOps):
    """-1 reads the first row of the table."""

    @provides(layouts=TABLE)
    def fetch(self, table, rows):
        return EngramOps.fetch(self, table, rows.clamp(min=0))


@mutant("engram.ngrams")
class LooksPastAGap(EngramOps):
    """What lies beyond an unknown token still counts."""

    @provides()
    def ngrams(self, token_ids, history, row_starts, sequence, positions, vocab_map, pad, image_mask=None):
        legal = torch.where((token_ids < 0) | (token_ids >= len(vocab_map)), pad, token_ids)
        return EngramOps.ngrams(self, legal, history, row_starts, sequence, positions, vocab_map, pad, image_mask)


@mutant("engram.inject")
class GateWithoutSign(EngramOps):
    """The gate forgets the sign of the match."""

    @provides()
    def inject(self, streams, kv, weight, image_mask=None):
        key = kv[:, :-1]
        match = (streams.float() * weight * key.float()).sum(-1, keepdim=True)
        turned = torch.cat((torch.where(match < 0, -key.float(), key.float()).to(kv.dtype), kv[:, -1:]), 1)
        return EngramOps.inject(self, streams, turned, weight, image_mask)


# sampling


@mutant("sampling.draw")
class PositionNotCounted(SamplingOps):
    """Random numbers depend on the low half of the position only."""

    @provides()
    def draw(self, logprobs, seeds, positions, purpose=0, draft_index=0):
        return SamplingOps.draw(self, logprobs, seeds, positions & 0xFFFFFFFF, purpose, draft_index)


@mutant("sampling.draw")
class PurposeAndIndexSwapped(SamplingOps):
    @provides()
    def draw(self, logprobs, seeds, positions, purpose=0, draft_index=0):
        return SamplingOps.draw(self, logprobs, seeds, positions, draft_index, purpose)


@mutant("sampling.process")
class TopPCutsTheLastToken(SamplingOps):
    """The token that reaches top_p is dropped as well."""

    @provides()
    def process(self, logits, temperature, top_p, top_k):
        return SamplingOps.process(self, logits, temperature, None if top_p is None else top_p * 0.93, top_k)


@mutant("sampling.greedy")
class GreedyTiesToTheHigherId(SamplingOps):
    @provides()
    def greedy(self, logits):
        return logits.shape[-1] - 1 - logits.flip(-1).argmax(-1)


@mutant("sampling.sum_smaller")
class OwnMassLeftOut(SamplingOps):
    """The token itself does not count."""

    @provides()
    def sum_smaller(self, logprobs, ids):
        own = logprobs.gather(-1, ids.unsqueeze(-1))[:, 0].exp()
        return SamplingOps.sum_smaller(self, logprobs, ids) - own


@mutant("sampling.verify")
class DraftAcceptedAfterARefusal(SamplingOps):
    """Counts the accepted drafts instead of the accepted prefix."""

    @provides()
    def verify(
        self, logprobs, draft_ids, row_starts, row_counts, seeds, positions, golden, draft_logprobs, rule="coupled"
    ):
        right = SamplingOps.verify(
            self, logprobs, draft_ids, row_starts, row_counts, seeds, positions, golden, draft_logprobs, rule
        )
        agrees = (right.token_ids == draft_ids).long()
        sequence = torch.arange(len(row_starts)).repeat_interleave(row_counts)
        return right._replace(accepted=torch.zeros_like(row_starts).index_add_(0, sequence, agrees))


@mutant("sampling.prepare")
class BannedTokenAllowed(SamplingOps):
    """The last banned id stays possible."""

    @provides()
    def prepare(self, logits, banned, pairs, allowed):
        return SamplingOps.prepare(self, logits, None if banned is None else banned[:-1], pairs, allowed)


# step inputs


@mutant("step_inputs.build")
class WindowBeginsOneLate(StepInputOps):
    @provides()
    def build(self, q_starts, q_lens, slots, block_table, data_lens, spec, truncation):
        views = StepInputOps.build(self, q_starts, q_lens, slots, block_table, data_lens, spec, truncation)
        views.encoder.window_lo.add_((views.encoder.window_lo > 0).long())
        return views


@mutant("step_inputs.build")
class RingKeepsOneRowLess(StepInputOps):
    @provides()
    def build(self, q_starts, q_lens, slots, block_table, data_lens, spec, truncation):
        views = StepInputOps.build(self, q_starts, q_lens, slots, block_table, data_lens, spec, truncation)
        for length, ring in views.encoder.rings.items():
            newest = views.encoder.positions[ring.rows] % length != 0
            views.encoder.rings[length] = type(ring)(ring.rows[newest], ring.physical[newest])
        return views


@mutant("step_inputs.build_ahead")
class AheadBelievesTheHost(StepInputOps):
    """Positions are the host's upper bounds."""

    @provides()
    def build_ahead(self, q_starts, latest, q_lens, slots, block_table, spec):
        believed = torch.from_numpy(latest).to(q_starts.device)
        return StepInputOps.build_ahead(self, believed, latest, q_lens, slots, block_table, spec)


@mutant("step_inputs.build_ahead")
class AheadStoresUnfinishedEntries(StepInputOps):
    """Every row's entry goes to its sequence's block, complete or not."""

    @provides()
    def build_ahead(self, q_starts, latest, q_lens, slots, block_table, spec):
        step = StepInputOps.build_ahead(self, q_starts, latest, q_lens, slots, block_table, spec)
        for ratio, entries in step.entries.items():
            per_block = spec.block_size // ratio
            blocks = step.block_table[step.sequence, entries.index // per_block]
            physical = blocks * per_block + entries.index % per_block
            step.entries[ratio] = type(entries)(entries.rows, entries.index, physical)
        return step


@mutant("step_inputs.build")
class BuildSharesTheHostArrays(StepInputOps):
    """Metadata on the host is the scheduler's own memory."""

    @provides()
    def build(self, q_starts, q_lens, slots, block_table, data_lens, spec, truncation):
        views = StepInputOps.build(self, q_starts, q_lens, slots, block_table, data_lens, spec, truncation)
        views.encoder.slots = torch.from_numpy(slots)
        return views


# vision


@mutant("vision.encode")
class ImageRopeTurnsNeighbours(VisionOps):
    """The tower's rope turns adjacent channels instead of halves."""

    @provides()
    def encode(self, patches, grids, weights, sizes):
        def interleaved(q, k, v, starts):
            return self.ops.attention.encoder(q, k, v, starts)

        halves = vision.rotate_halves
        try:
            vision.rotate_halves = neighbours
            return vision.encode(
                patches, grids, weights, sizes.num_attention_heads, sizes.rope_theta, self._rounding, interleaved
            )
        finally:
            vision.rotate_halves = halves


def neighbours(x, angles, rounding):
    """Turn channel 2 i with channel 2 i + 1."""
    cos, sin = angles.unsqueeze(1).cos(), angles.unsqueeze(1).sin()
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(rounding.activation)


@mutant("vision.downsample")
class PatchesJoinedColumnFirst(VisionOps):
    """dy and dx change places inside a feature."""

    @provides()
    def downsample(self, x, grids, ratio):
        joined = VisionOps.downsample(self, x, grids, ratio)
        return joined.unflatten(1, (-1, ratio, ratio)).transpose(2, 3).flatten(1)


@mutant("vision.merge")
class StartAndEndSwapped(VisionOps):
    @provides()
    def merge(self, embeddings, kinds, feature_rows, features, weights):
        swapped = weights.__class__(**{
            **{name: getattr(weights, name) for name in weights.__dataclass_fields__},
            "image_start": weights.image_end, "image_end": weights.image_start,
        })  # fmt: skip
        return VisionOps.merge(self, embeddings, kinds, feature_rows, features, swapped)


@mutant("vision.merge")
class MergeReturnsItsOperand(VisionOps):
    """Without an image the embeddings themselves are returned."""

    @provides()
    def merge(self, embeddings, kinds, feature_rows, features, weights):
        if not len(features):
            out = VisionOps.merge(self, embeddings, kinds, feature_rows, features, weights)
            return embeddings.copy_(out) if torch.equal(out, embeddings) else out
        return VisionOps.merge(self, embeddings, kinds, feature_rows, features, weights)


@mutant("vision.patchify")
class NormalizedInFloat(VisionOps):
    """Pixels are divided after the rounding to bfloat16."""

    @provides()
    def patchify(self, image, sizes):
        patches, geometry = VisionOps.patchify(self, image, sizes)
        return ((patches + 1) * 127.5 / 255 - 0.5) / 0.5, geometry


# runtime


@mutant("runtime.use_stream")
class StreamNotRestored(RuntimeOps):
    """An exception leaves the inner stream current."""

    @provides()
    def use_stream(self, stream):
        @contextmanager
        def scope():
            streams = self._device._streams
            before = streams.get()
            streams._local.stream = stream
            yield stream
            streams._local.stream = before

        return scope()


@mutant("runtime.copy")
class CopyIgnoresStrides(RuntimeOps):
    """A strided destination is filled in memory order."""

    @provides()
    def copy(self, destination, source):
        if destination.shape != source.shape:
            raise ValueError("shapes differ")
        flat = destination.as_strided((destination.numel(),), (1,))
        flat.copy_(source.reshape(-1))
        return destination


# communicator, alone


@mutant("communicator.all_reduce")
class UnknownReductionIsASum(CommunicatorOps):
    @provides()
    def all_reduce(self, x, group, reduce="sum"):
        return CommunicatorOps.all_reduce(self, x, group, reduce if reduce in ("sum", "max", "min") else "sum")


def failures(subject, infos, quick=True):
    """Failing cases of levels 1 and 2."""
    for level in (ops, properties):
        yield from (result for result in level.run(subject, infos, quick=quick, seed=7) if result.bad)


@pytest.mark.parametrize("name", MUTANTS)
def test_no_mutant_survives(name):
    klass, op = MUTANTS[name]
    subject = make_subject(load_groups(klass, name="mutant"), "micro")
    assert subject.ops.binding(op).provider.name == "mutant"
    assert subject.ops.binding(op).kind == "native"
    found = next(failures(subject, {op: op_infos()[op]}), None)
    assert found is not None, f"{name}: {klass.__doc__} No case of {op} notices"
    assert found.op == op
    assert found.case and found.detail
    print(f"{name} | {op} | level {found.level} | {found.case} | {found.detail.splitlines()[0][:100]}")


def test_every_group_that_computes_has_a_mutant():
    groups = {op.partition(".")[0] for _, op in MUTANTS.values()}
    assert groups == {name.partition(".")[0] for name in op_infos()}
    assert len(MUTANTS) >= 16


@pytest.mark.slow
def test_a_sum_over_processes_that_is_none(tmp_path, monkeypatch):
    """all_reduce takes the maximum: only several processes can tell, each of which opens the installed backend."""
    package = tmp_path / "deepinfer_mutant"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from deepinfer.hooks import Backend\n"
        "backend = Backend(name='mutant', api=(0, 1), device_type='cpu', plugin='deepinfer_mutant.plugin:Plugin')\n"
    )
    (package / "plugin.py").write_text(textwrap.dedent(
        """
        from deepinfer.hooks import hookimpl, provides
        from deepinfer.hooks.ops import CommunicatorOps

        class Maximum(CommunicatorOps):
            @provides()
            def all_reduce(self, x, group, reduce="sum"):
                return CommunicatorOps.all_reduce(self, x, group, "max" if reduce == "sum" else reduce)

        class Plugin:
            @hookimpl
            def deepinfer_create_communicator(self, context):
                return Maximum(context)
        """
    ))  # fmt: skip
    info = tmp_path / "deepinfer_mutant-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepinfer-mutant\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[deepinfer.backends]\nmutant = deepinfer_mutant:backend\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    importlib.metadata.distributions()  # forget what was looked up before
    try:
        subject = make_subject("mutant", "micro")
        found = list(failures(subject, {"communicator.all_reduce": op_infos()["communicator.all_reduce"]}, quick=False))
    finally:
        for module in [name for name in sys.modules if name.startswith("deepinfer_mutant")]:
            del sys.modules[module]
    assert [(r.op, r.case) for r in found] == [("communicator.all_reduce", f"{n} processes") for n in (2, 4)]
    assert "sum of torch.float32" in found[0].detail
