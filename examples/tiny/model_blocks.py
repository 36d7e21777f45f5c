"""The blocks of the model on Q rows (or B texts of T tokens) at once, differentiable and made for large batches.

Same mathematics as the ops of core, in the order of its formulas; other grouping. Hyper-connections are sums of four
terms instead of batches of tiny products, every expert computes every row and unchosen ones weigh nothing, the sliding
window is read in blocks, a selection of entries is a mask. Each function may be compiled; none knows a layer.

Q rows, H hidden size, m streams, h heads, d head size, E entries, V vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from deepinfer.reference.activation import swiglu
from deepinfer.reference.attention import sink_softmax
from deepinfer.reference.gemm import block_diagonal_linear, linear
from deepinfer.reference.norm import reciprocal_rms, rms_norm
from deepinfer.reference.quant import fake_q4e, fake_q4u, fake_q8
from deepinfer.reference.residual import POST_MULTIPLIER
from deepinfer.reference.rope import apply_rope

Tensor = torch.Tensor


def maybe_q8(x: Tensor, quantize: bool, dtype: torch.dtype) -> Tensor:
    """Q8 of an activation, or the activation, in `dtype`."""
    return fake_q8(x, dtype) if quantize else x.to(dtype)


def write_back(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams [Q, m, H] after a sub-layer's output y [Q, H]: post[k] y + sum over j of comb[j, k] streams[j]."""
    wide = streams.float()
    carried = sum(comb[:, j].unsqueeze(-1) * wide[:, j].unsqueeze(1) for j in range(streams.shape[1]))
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + carried).to(streams.dtype)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Sum of pre[k] streams[k]. [Q, m, H], [Q, m] float32 -> [Q, H]."""
    return sum(pre[:, k].unsqueeze(-1) * streams[:, k].float() for k in range(streams.shape[1])).to(streams.dtype)


def enter(
    streams: Tensor, pending: tuple[Tensor, Tensor, Tensor] | None, pre_before: Tensor, fn: Tensor, base: Tensor,
    scale: Tensor, norm: Tensor, eps: float, hc_eps: float, quantize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """A hyper-connection site: (streams, pre, post, comb logits [Q, m, m], u, x = u quantized)."""
    if pending is not None:
        streams = write_back(streams, *pending)
    m = streams.shape[1]
    flat = streams.flatten(1).float()
    logits = functional.linear(flat, fn) * reciprocal_rms(flat, eps).unsqueeze(-1)
    pre, post, comb = logits.split((m, m, m * m), -1)
    pre = (pre * scale[0] + base[:m]).sigmoid() + hc_eps
    post = (post * scale[1] + base[m : 2 * m]).sigmoid() * POST_MULTIPLIER
    comb = (comb * scale[2] + base[2 * m :]).unflatten(-1, (m, m))
    u = rms_norm(collapse(streams, pre_before), norm, eps)
    return streams, pre, post, comb, u, maybe_q8(u, quantize, u.dtype)


def project(
    x: Tensor, wqa_wkv: Tensor, q_norm: Tensor, wq_b: Tensor, kv_norm: Tensor, positions: Tensor, rope: Tensor,
    heads: int, eps: float, quantize: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Query [Q, h, d] and window key [Q, d] after rope, low-rank query [Q, r] normed (and quantized)."""
    low = linear(x, wqa_wkv)
    rank = q_norm.shape[0]
    qr = rms_norm(low[:, :rank], q_norm, eps)
    qr = maybe_q8(qr, quantize, qr.dtype)
    q = linear(qr, wq_b).unflatten(-1, (heads, -1))
    key = apply_rope(rms_norm(low[:, rank:], kv_norm, eps), positions, rope)
    return apply_rope(q, positions, rope), maybe_q8(key, quantize, key.dtype), qr


def main_keys(
    g: Tensor, wkv: Tensor, kv_norm: Tensor, positions: Tensor, rope: Tensor, eps: float, quantize: bool
) -> Tensor:
    """Keys [Q, d] of a draft layer from features g [Q, H]."""
    key = apply_rope(rms_norm(linear(g, wkv), kv_norm, eps), positions, rope)
    return maybe_q8(key, quantize, key.dtype)


def compress(u: Tensor, wkv: Tensor, wgate: Tensor | None, norm: Tensor, eps: float) -> Tensor:
    """Latents [E', d] of compressed entries from rows u [Q, H]: one a row, or one a pair of rows with `wgate`."""
    if wgate is None:
        return rms_norm(linear(u, wkv), norm, eps)
    scores = linear(u, wgate, out_dtype=torch.float32).unflatten(0, (-1, 2))
    values = linear(u, wkv, out_dtype=torch.float32).unflatten(0, (-1, 2))
    weight = torch.sigmoid(scores[:, 0] - scores[:, 1])  # softmax over the two tokens
    entry = weight * values[:, 0] + (1 - weight) * values[:, 1]
    return rms_norm(entry.to(u.dtype), norm, eps)


def entry_keys(latents: Tensor, positions: Tensor, rope: Tensor, quantize: bool) -> Tensor:
    """Compressed keys from latents [E', d]; `positions` of each entry's first token."""
    keys = apply_rope(latents, positions, rope)
    return fake_q4e(keys, keys.dtype) if quantize else keys


def index_keys(
    latents: Tensor, wk: Tensor, norm: Tensor, positions: Tensor, rope: Tensor, eps: float, quantize: bool
) -> Tensor:
    """Index keys [E', 128] from latents."""
    keys = apply_rope(rms_norm(linear(latents, wk), norm, eps), positions, rope)
    return fake_q4u(keys, keys.dtype) if quantize else keys


def index_queries(
    u: Tensor,
    qr: Tensor,
    wq_b: Tensor,
    weights_proj: Tensor,
    positions: Tensor,
    rope: Tensor,
    heads: int,
    quantize: bool,
) -> tuple[Tensor, Tensor]:
    """Index queries [Q, hi, 128] and head weights [Q, hi]."""
    q = apply_rope(linear(qr, wq_b).unflatten(-1, (heads, -1)), positions, rope)
    return (fake_q4u(q, q.dtype) if quantize else q), linear(u, weights_proj)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, logits: torch.dtype) -> Tensor:
    """Scores [B, T, E] in the dtype of q; q [B, T, hi, 128], weights [B, T, hi], keys [B, E, 128]."""
    batch, length, heads, dim = q.shape
    products = torch.matmul(q.to(logits).reshape(batch, length * heads, dim), keys.to(logits).transpose(1, 2))
    products = products.view(batch, length, heads, -1).float().relu()
    return sum(products[:, :, i] * weights[:, :, i, None].float() for i in range(heads)).to(q.dtype)


def visible_entries(length: int, entries: int, ratio: int, device: torch.device) -> Tensor:
    """[T, E] bool: entry j is visible to position p iff j < (p + 1) // ratio."""
    lengths = (torch.arange(length, device=device) + 1) // ratio
    return torch.arange(entries, device=device) < lengths.unsqueeze(1)


def index_loss(scores: Tensor, mass: Tensor, allowed: Tensor) -> Tensor:
    """KL(attention over entries || softmax of the scores), mean over rows that see an entry.

    scores, mass [B, T, E]; allowed [B, T, E] or [T, E] bool: the entries both range over
    """
    mass = mass.detach().float() * allowed
    total = mass.sum(-1, keepdim=True)
    target = mass / total.clamp_min(1e-20)
    log_model = scores.float().masked_fill(~allowed, -1e30).log_softmax(-1)
    rows = (total > 0).squeeze(-1)
    divergence = (target * (target.clamp_min(1e-20).log() - log_model)).masked_fill(~allowed, 0).sum(-1)
    return (divergence * rows).sum() / rows.sum().clamp_min(1)


def window_blocks(x: Tensor, block: int) -> Tensor:
    """x [B, T, d] as the keys of blocks of rows: the block before and the block itself, [B, T / block, 2 block, d]."""
    blocks = x.unflatten(1, (-1, block))
    before = torch.cat((torch.zeros_like(blocks[:, :1]), blocks[:, :-1]), 1)
    return torch.cat((before, blocks), 2)


def attend(
    q: Tensor, keys: Tensor, sink: Tensor, entries: Tensor | None, selected: Tensor | None, window: int, ratio: int,
    logits: torch.dtype, want_mass: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention over the sliding window and compressed entries.

    q [B, T, h, d], keys [B, T, d], entries [B, E, d] or None, selected [B, T, E] bool or None (all visible ones)
    returns out [B, T, h, d] (bfloat16 logits) or float32, and the attention mass of entries [B, T, E] summed over heads
    T is a multiple of the window, or at most the window.
    """
    batch, length, heads, dim = q.shape
    block = min(window, length)
    scale = dim**-0.5
    near_keys = window_blocks(keys, block).to(logits)  # [B, n, 2 W, d]
    rows = q.to(logits).reshape(batch, -1, block * heads, dim)
    near = torch.matmul(rows, near_keys.transpose(2, 3)).view(batch, length, heads, 2 * block)
    near = (near.float() * scale).masked_fill(~_near_visible(length, block, window, q.device), float("-inf"))
    if entries is None:
        weights = sink_softmax(near, sink).to(logits).view(batch, -1, block * heads, 2 * block)
        return torch.matmul(weights, near_keys).view(q.shape), None
    entries = entries.to(logits)
    far = torch.matmul(q.to(logits).reshape(batch, length * heads, dim), entries.transpose(1, 2))
    allowed = visible_entries(length, entries.shape[1], ratio, q.device) if selected is None else selected
    far = (far.view(batch, length, heads, -1).float() * scale).masked_fill(~allowed.unsqueeze(-2), float("-inf"))
    weights = sink_softmax(torch.cat((near, far), -1), sink).to(logits)
    near, far = weights.split((2 * block, entries.shape[1]), -1)
    out = torch.matmul(near.reshape(batch, -1, block * heads, 2 * block), near_keys).view(q.shape)
    out = out + torch.matmul(far.reshape(batch, length * heads, -1), entries).view(q.shape)
    return out, far.detach().float().sum(2).to(logits) if want_mass else None


def _near_visible(length: int, block: int, window: int, device: torch.device) -> Tensor:
    """[T, 1, 2 block] bool: which of its block's keys a row sees (see `window_blocks`)."""
    row = torch.arange(length, device=device).unsqueeze(1)
    key = (row // block - 1) * block + torch.arange(2 * block, device=device)
    return ((key <= row) & (key > row - window) & (key >= 0)).unsqueeze(1)


def attend_draft(q: Tensor, keys: Tensor, before: Tensor, visible: Tensor, sink: Tensor, logits: torch.dtype) -> Tensor:
    """Draft blocks: q [n, B, h, d], their own keys [n, B, d], main keys before [n, W, d], visible [n, W] bool."""
    count, block, heads, dim = q.shape
    joint = torch.cat((before, keys), 1).to(logits)
    seen = functional.pad(visible, (0, block), value=True)
    raw = torch.matmul(q.to(logits).view(count, block * heads, dim), joint.transpose(1, 2)).float() * dim**-0.5
    raw = raw.view(count, block, heads, -1).masked_fill(~seen.view(count, 1, 1, -1), float("-inf"))
    weights = sink_softmax(raw, sink).to(logits).view(count, block * heads, -1)
    return torch.matmul(weights, joint).view(q.shape)


def attention_output(
    out: Tensor, wo_a: Tensor, wo_b: Tensor, positions: Tensor, rope: Tensor, groups: int, quantize: bool
) -> Tensor:
    """Inverse rope and the grouped low-rank output. out [Q, h, d] -> [Q, H] in the dtype of the weights."""
    dtype = wo_b.dtype
    out = apply_rope(out, positions, rope, inverse=True)
    grouped = maybe_q8(out.reshape(out.shape[0], groups, -1), quantize, dtype)
    middle = block_diagonal_linear(grouped, wo_a, out_dtype=torch.float32 if out.dtype == torch.float32 else dtype)
    return linear(maybe_q8(middle, quantize, dtype), wo_b)


def choose_experts(logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """ids [Q, k], best first, ties to the lower expert; weights [Q, k] float32. As `reference.experts.route`."""
    scores = functional.softplus(logits, threshold=20.0).sqrt()
    open_scores = scores.detach() + bias
    picked = []
    for _ in range(top_k):
        best = open_scores.argmax(-1, keepdim=True)
        picked.append(best)
        open_scores = open_scores.scatter(-1, best, float("-inf"))
    ids = torch.cat(picked, -1)
    chosen = scores.gather(-1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling


def moe(
    u: Tensor, x: Tensor, gate: Tensor, bias: Tensor, w13: Tensor, w2: Tensor, shared_w13: Tensor, shared_w2: Tensor,
    top_k: int, scaling: float, limit: float, quantize: bool, logits: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Router, all experts on all rows, shared expert. Returns y [Q, H] and how many rows chose each expert [e]."""
    experts, hidden, width = w2.shape
    ids, chosen = choose_experts(linear(u, gate, out_dtype=torch.float32), bias, top_k, scaling)
    picks = ids.unsqueeze(-1) == torch.arange(experts, device=u.device)  # [Q, k, e]
    weights = (chosen.unsqueeze(-1) * picks).sum(1)
    weights = torch.cat((weights, torch.ones_like(weights[:, :1])), -1)  # the shared expert comes last
    gate_up = linear(x, torch.cat((w13.flatten(0, 1), shared_w13))).unflatten(-1, (experts + 1, 2 * width))
    inner = maybe_q8(swiglu(gate_up, limit) * weights.unsqueeze(-1), quantize, x.dtype)
    load = picks.sum((0, 1)).float()
    if logits == torch.float32:
        return _expert_sums(inner, ids, w2, shared_w2), load
    down = torch.cat((w2.transpose(0, 1).reshape(hidden, -1), shared_w2), 1)
    return linear(inner.flatten(1), down), load


def _expert_sums(inner: Tensor, ids: Tensor, w2: Tensor, shared_w2: Tensor) -> Tensor:
    """Every expert's result rounded, then shared first and routed ones in slot order, as core adds them."""
    results = torch.stack([linear(inner[:, e], w2[e]) for e in range(w2.shape[0])], 1)
    total = linear(inner[:, -1], shared_w2).float()
    for slot in ids.unbind(1):
        total = total + results.gather(1, slot.view(-1, 1, 1).expand(-1, 1, results.shape[-1]))[:, 0].float()
    return total.to(inner.dtype)


def inject(streams: Tensor, rows: Tensor, wkv: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Engram: table rows [Q, T 256], projected, gated and added to the streams [Q, m, H]. gate [m, H] float32."""
    m, hidden = streams.shape[1:]
    key, value = linear(rows, wkv).unflatten(-1, (m + 1, hidden)).float().split((m, 1), 1)
    x = streams.float()
    dot = (x * gate * key).sum(-1) * reciprocal_rms(x, eps) * reciprocal_rms(key, eps) * hidden**-0.5
    strength = (dot.abs().clamp_min(1e-6).sqrt() * dot.sign()).sigmoid()
    return (x + strength.unsqueeze(-1) * value).to(streams.dtype)


def leave(
    streams: Tensor, pending: tuple[Tensor, Tensor, Tensor], pre: Tensor, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Hidden state [Q, H] after the last site, and the same normed."""
    hidden = collapse(write_back(streams, *pending), pre)
    return hidden, rms_norm(hidden, norm, eps)


def settle(streams: Tensor, pending: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Streams after the write-back, and their mean."""
    streams = write_back(streams, *pending)
    return streams, streams.float().mean(1).to(streams.dtype)


def token_losses(z: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood [Q] and log-sum-exp [Q] of targets [Q] under z [Q, H]."""
    logits = linear(z, head).float()
    lse = logits.logsumexp(-1)
    return lse - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1), lse
