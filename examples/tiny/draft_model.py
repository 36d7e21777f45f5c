"""The DSpark draft layers and heads on many blocks at once, and the loss they are trained with.

A block begins at an anchor a of a text: slot 0 reads the true token x_a, the other slots read noise, and slot k
proposes x_{a+1+k}. The draft layers see main keys of the `window` positions before a, made from features of the frozen
backbone, and all slots of the block. Loss of the DSpark paper, section 3.3, with the slot weights exp(-k / 4) that
DeepSpec publishes:

    0.1 cross-entropy + 0.9 |p - q|_1 + BCE(confidence, 1 - |p - q|_1 / 2)

p the draft's distribution, q the backbone's at the same place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from model_blocks import linear, rms_norm
from model_tiny import Result, Served, TinyModel, compiled
from model_weights import Numbers
from torch.nn import functional

Tensor = torch.Tensor
DECAY = 4.0


@dataclass(slots=True)
class DraftBlocks:
    """n blocks of N slots. base [n, N, V] float32 logits before the Markov step, hidden [n, N, H] before the norm."""

    base: Tensor
    hidden: Tensor
    loads: dict[str, Tensor]


class DraftModel:
    """Draft layers of a backbone; holds no weights."""

    def __init__(self, model: TinyModel) -> None:
        self.model, self.text = model, model.text
        self.layers = [f"mtp.{index}" for index in range(self.text.num_nextn_predict_layers)]
        self.last = self.layers[-1]
        self.compare = compiled(compare) if model.kernels.compiled else compare

    def main_keys(self, w: Served, features: Tensor, positions: Tensor, numbers: Numbers) -> list[Tensor]:
        """Each draft layer's keys [Q, d] of features [Q, targets * H]."""
        kernels, eps, model = self.model.kernels, self.text.rms_norm_eps, self.model
        x = model.kernels.maybe_q8(features, numbers.quantize, features.dtype)
        g = rms_norm(linear(x, w["mtp.0.main_proj"]), w["mtp.0.main_norm"], eps)
        g = kernels.maybe_q8(g, numbers.quantize, g.dtype)
        return [
            kernels.main_keys(
                g, w[f"{prefix}.attn.wqa_wkv"][self.text.q_lora_rank :], w[f"{prefix}.attn.kv_norm"], positions,
                model.base_rope, eps, numbers.quantize,
            )
            for prefix in self.layers
        ]  # fmt: skip

    def blocks(
        self, main: Served, w: Served, ids: Tensor, keys: list[Tensor], rows: Tensor, anchors: Tensor, slots: int,
        numbers: Numbers,
    ) -> DraftBlocks:  # fmt: skip
        """Draft the blocks at positions anchors [n] of texts rows [n] of ids [B, T]; keys [B, T, d] of each layer."""
        model, window = self.model, self.text.sliding_window
        inputs = torch.full((anchors.shape[0], slots), self.text.dspark_noise_token_id, device=ids.device)
        inputs[:, 0] = ids[rows, anchors]
        positions = (anchors.unsqueeze(1) + torch.arange(slots, device=ids.device)).flatten()
        before = anchors.unsqueeze(1) - torch.arange(window, 0, -1, device=ids.device)  # [n, W]
        visible = before >= 0
        streams = model.start(functional.embedding(inputs.flatten(), main["embed"]))
        loads = {}
        for prefix, layer_keys in zip(self.layers, keys, strict=True):
            u, x = model.enter(w, prefix, "attn", streams, numbers)
            q, key, _ = model.project(w, prefix, x, positions, model.base_rope, numbers)
            shape = (anchors.shape[0], slots)
            past = layer_keys[rows.unsqueeze(1), before.clamp(min=0)]
            out = model.kernels.attend_draft(
                q.unflatten(0, shape), key.unflatten(0, shape), past, visible, w[f"{prefix}.attn.attn_sink"].view(-1),
                numbers.logits,
            )  # fmt: skip
            model.leave(streams, model.output(w, prefix, out.flatten(0, 1), positions, model.base_rope, numbers))
            u, x = model.enter(w, prefix, "ffn", streams, numbers)
            top_k = self.text.dspark_num_experts_per_tok
            y, loads[f"{prefix}.ffn.gate.bias"] = model.moe(w, prefix, u, x, numbers, top_k)
            model.leave(streams, y)
        hidden, normed = model.kernels.leave(
            streams.values, streams.pending, streams.pre, w[f"{self.last}.norm"], self.text.rms_norm_eps
        )
        base = model.vocabulary(main, normed).unflatten(0, (-1, slots))
        return DraftBlocks(base, hidden.unflatten(0, (-1, slots)), loads)

    def heads(self, w: Served, drafts: DraftBlocks, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, N, V] after the Markov step, confidence logits [n, N]; previous [n, N] token before each slot."""
        embedding = functional.embedding(previous, w[f"{self.last}.markov_head.embed"])
        logits = drafts.base + linear(embedding, w[f"{self.last}.markov_head.head"], out_dtype=torch.float32)
        features = torch.cat((drafts.hidden, embedding), -1).float()
        return logits, features @ w[f"{self.last}.confidence_head.proj"].float().flatten()


@dataclass(slots=True)
class DraftTargets:
    """What blocks are held against. tokens [n, N] and valid [n, N] bool; previous [n, N]; hidden rows [n, N] of the
    backbone's results that predict the same tokens."""

    tokens: Tensor
    previous: Tensor
    valid: Tensor
    rows: Tensor


def targets_of(ids: Tensor, rows: Tensor, anchors: Tensor, slots: int) -> DraftTargets:
    """Targets of the blocks at anchors [n] of texts rows [n] of ids [B, T]."""
    length = ids.shape[1]
    place = anchors.unsqueeze(1) + torch.arange(slots, device=ids.device)
    valid = place + 1 < length
    now, following = place.clamp(max=length - 1), (place + 1).clamp(max=length - 1)
    text = rows.unsqueeze(1)
    return DraftTargets(ids[text, following], ids[text, now], valid, text * length + now)


def slot_weights(slots: int, device: torch.device) -> Tensor:
    return torch.exp(-torch.arange(slots, device=device) / DECAY)


def compare(
    logits: Tensor, confidence: Tensor, target_logits: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per slot [n, N]: cross-entropy, |p - q|_1, confidence loss, and acceptance 1 - |p - q|_1 / 2."""
    log_p = logits.log_softmax(-1)
    distance = (log_p.exp() - target_logits.softmax(-1)).abs().sum(-1)
    cross = -log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    accepted = (1 - 0.5 * distance).detach()
    error = functional.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    return cross, distance, error, accepted


def draft_blocks(
    drafter: DraftModel, main: Served, w: Served, ids: Tensor, features: Tensor, rows: Tensor, anchors: Tensor,
    slots: int, numbers: Numbers,
) -> DraftBlocks:  # fmt: skip
    """The blocks at anchors [n] of texts rows [n], from the features [B * T, ..] of texts ids [B, T]."""
    positions = torch.arange(ids.shape[1], device=ids.device).repeat(ids.shape[0])
    keys = [key.unflatten(0, ids.shape) for key in drafter.main_keys(w, features, positions, numbers)]
    return drafter.blocks(main, w, ids, keys, rows, anchors, slots, numbers)


def draft_loss(
    drafter: DraftModel, main: Served, w: Served, ids: Tensor, result: Result, rows: Tensor, anchors: Tensor,
    slots: int, numbers: Numbers,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """(loss, acceptance summed per slot [N], blocks counted per slot [N], expert loads) of blocks of frozen results."""
    drafts = draft_blocks(drafter, main, w, ids, result.features, rows, anchors, slots, numbers)
    targets = targets_of(ids, rows, anchors, slots)
    logits, confidence = drafter.heads(w, drafts, targets.previous)
    target_logits = drafter.model.vocabulary(main, result.normed[targets.rows.flatten()]).view_as(logits)
    cross, distance, error, accepted = drafter.compare(logits, confidence, target_logits, targets.tokens)
    weights = slot_weights(slots, ids.device) * targets.valid
    total = weights.sum()
    loss = ((0.1 * cross + 0.9 * distance + error) * weights).sum() / total
    return loss, (accepted * targets.valid).sum(0), targets.valid.sum(0), drafts.loads


def expected_length(acceptance: list[float]) -> float:
    """Tokens a verify step commits on average, from each slot's chance given the one before: 1 + a0 + a0 a1 + ..."""
    return 1 + sum(math.prod(acceptance[: k + 1]) for k in range(len(acceptance)))
