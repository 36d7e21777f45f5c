"""Naive oracle of the whole text model: one forward of one sequence, token by token, in numpy float64.

Used by tests that compare the product with code that shares nothing with it. It follows the specification of the
blocks literally: no caches, no chunks, no batches. Every key a query may see is listed explicitly, a key that must not
be read is NaN, and each intermediate value is kept under a name (`intermediate`, `intermediates`), so that the first
layer where two implementations part can be found.

Symbols: n tokens, H hidden size, m = 4 streams, h heads, p absolute position of a query, j index of a compressed entry.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from .oracle_checkpoint import EngramConstants, Tensors, compressed_vocabulary
from .oracle_numbers import Numbers, base_inv_freq, sigmoid, softmax, softplus, yarn_inv_freq

BF16_MAX = float(torch.finfo(torch.bfloat16).max)
IMAGE_IDS = 5
"""Ids V .. V+4 stand for image positions."""

Selection = dict[int, np.ndarray]
"""Query position -> ascending indices of the compressed entries (or blocks) it may read."""


@dataclass(frozen=True)
class DraftChain:
    """Greedy draft: tokens [B], confidences [B], final logits [B, V]."""

    tokens: list[int]
    confidences: np.ndarray
    logits: np.ndarray


class Oracle:
    """The text model of a checkpoint directory.

    mode             "smooth" (float64, no rounding) or "exact" (every quantizer and bf16 rounding)
    vocabulary       token id -> class for Engram, default computed from `tokenizer.json`
    output_rounding  which optional bf16 roundings of the output projection exact mode applies, a subset of
                     {"attention", "lora"}; none is the literal formula
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        mode: str = "smooth",
        vocabulary: Sequence[int] | None = None,
        output_rounding: Sequence[str] = (),
    ) -> None:
        directory = Path(checkpoint_dir)
        self.config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.text = SimpleNamespace(**self.config["text_config"])
        self.numbers = Numbers(mode)
        self.weights = Tensors(directory)
        self.output_rounding = frozenset(output_rounding)
        self._topology()
        self._rope_tables()
        if vocabulary is None:
            vocabulary = compressed_vocabulary(directory / "tokenizer.json")
        self.vocabulary = np.asarray(vocabulary)
        self.engram = EngramConstants(
            self.text.engram_layer_ids,
            self.text.engram_max_ngram_size,
            self.text.engram_n_heads,
            self.text.engram_vocab_size,
            int(self.vocabulary.max()) + 1,
        )
        self._trace: dict[str, object] = {}

    def logits(self, token_ids: Sequence[int], truncation: str = "off", keep: int | None = None) -> torch.Tensor:
        """One forward of the whole text from an empty state. float64 [n, V]; rows that "compact" drops are NaN."""
        return torch.from_numpy(_Forward(self, token_ids, truncation, keep).run())

    def draft(
        self, token_ids: Sequence[int], golden: int, block: int, truncation: str = "off", keep: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft `block` tokens after token_ids + [golden]: base logits [B, V] and hidden before the norm [B, H]."""
        forward = _Forward(self, token_ids, truncation, keep)
        forward.run()
        base, hidden = forward.draft(golden, block)
        return torch.from_numpy(base), torch.from_numpy(hidden)

    def draft_chain(
        self, base: torch.Tensor, hidden: torch.Tensor, golden: int, temperature: float | Sequence[float] = 1.0
    ) -> DraftChain:
        """Walk the Markov head greedily (lowest id on ties) over the result of `draft`."""
        f32, weights = self.numbers.f32, self.weights
        base, hidden = base.numpy(), hidden.numpy()
        head = f"mtp.{self.text.num_nextn_predict_layers - 1}"
        embed, out = weights[f"{head}.markov_head.embed.weight"], weights[f"{head}.markov_head.head.weight"]
        project = weights[f"{head}.confidence_head.proj.weight"][0]  # [H + rank]
        temperatures = np.broadcast_to(temperature, len(base))
        previous, tokens, confidences, rows = golden, [], [], []
        for i in range(len(base)):
            markov = embed[previous]
            rows.append(f32(base[i] + out @ markov))
            score = np.concatenate([hidden[i], markov]) @ project / temperatures[i]
            confidences.append(f32(sigmoid(np.clip(score, -60, 60))))
            previous = int(rows[-1].argmax())
            tokens.append(previous)
        return DraftChain(tokens, np.array(confidences), np.array(rows))

    def intermediate(self, name: str) -> object:
        """A value of the last forward; `intermediates()` lists the names."""
        return self._trace[name]

    def intermediates(self) -> list[str]:
        """Names recorded by the last forward, in the order of computation."""
        return list(self._trace)

    def _topology(self) -> None:
        text = self.text
        self.ratios = text.compress_ratios
        self.boundary = self.ratios.index(1)
        self.kv_sources = sorted(text.kv_source_layer_ids)
        self.index_sources = sorted(text.index_source_layer_ids)
        self.index_k_sources = sorted(getattr(text, "index_k_source_layer_ids", None) or self.kv_sources)
        self.fp4_compressed = getattr(text, "use_fp4_sparse_kv", True)

    def _rope_tables(self) -> None:
        text = self.text
        self.base_freq = base_inv_freq(text.rope_theta)
        scaling = text.rope_scaling
        if scaling is None:
            self.compressed_freq = base_inv_freq(text.compress_rope_theta)
        else:
            self.compressed_freq = yarn_inv_freq(
                text.compress_rope_theta,
                scaling["factor"],
                scaling["beta_fast"],
                scaling["beta_slow"],
                scaling["original_max_position_embeddings"],
            )

    def inv_freq(self, layer: int) -> np.ndarray:
        """Rope frequencies [32] of a backbone layer."""
        return self.compressed_freq if self.ratios[layer] else self.base_freq


def source(sources: Sequence[int], layer: int) -> int:
    """The last source at or before a layer."""
    return max(s for s in sources if s <= layer)


def largest(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest scores, ascending; of equal scores the lower indices."""
    order = np.argsort(-scores, kind="stable")
    return np.sort(order[:count])


class _Forward:
    """One forward. `positions` are the rows being computed: all of the text, after compact truncation the kept ones."""

    def __init__(self, oracle: Oracle, token_ids: Sequence[int], truncation: str, keep: int | None) -> None:
        self.o, self.text, self.num, self.w = oracle, oracle.text, oracle.numbers, oracle.weights
        self.eps = self.text.rms_norm_eps
        self.ids = [int(token) for token in token_ids]
        self.n = len(self.ids)
        if truncation not in ("off", "mask", "compact"):
            raise ValueError(f"truncation: found {truncation!r}, expected off, mask or compact")
        if (truncation == "off") != (keep is None):
            raise ValueError("keep belongs to mask and compact")
        self.truncation = truncation
        self.first_visible = 0 if keep is None else self.n - keep  # decoder windows start here; may be negative
        self.first_kept = min(max(self.first_visible, 0), self.n - 1) if truncation == "compact" else 0
        self.positions = np.arange(self.n)
        self.window: dict[int, np.ndarray] = {}  # layer -> keys by position [n, 512], NaN where not written
        self.latent: dict[int, np.ndarray] = {}  # KV source -> latents before rope [entries, 512]
        self.compressed: dict[int, np.ndarray] = {}  # KV source -> keys [entries, 512]
        self.index_keys: dict[int, np.ndarray] = {}  # index-K source -> keys [entries, 128]
        self.selected: dict[int, Selection] = {}  # index source -> entries
        self.candidates: Selection = {}  # blocks, from the candidate source
        self.features: dict[int, np.ndarray] = {}  # DSpark target layer -> [n, H], NaN where dropped
        oracle._trace = self.trace = {}

    # Whole model

    def run(self) -> np.ndarray:
        """Logits [n, V]."""
        self.streams = self._embed(self.ids)
        self.pre = self._first_stream(self.n)
        for layer in range(self.text.num_hidden_layers):
            self._layer(layer)
            self.trace[f"layers.{layer}.streams"] = self.streams
            self.trace[f"layers.{layer}.positions"] = self.positions
        hidden = self._collapse(self.streams, self.pre)
        self.trace["hidden"] = hidden
        z = self.num.rms_norm(hidden, self.w["norm.weight"], self.eps)
        logits = np.full((self.n, self.text.vocab_size), np.nan)
        logits[self.positions] = self.num.f32(z @ self.w["head.weight"].T)
        return logits

    def _layer(self, layer: int) -> None:
        name = f"layers.{layer}"
        if layer in self.text.engram_layer_ids:
            self.streams = self._engram(layer)
            self.trace[f"{name}.engram"] = self.streams
        if layer in self.text.dspark_target_layer_ids:
            self.features[layer] = self._by_position(self.num.bf16(self.streams.mean(1)))
        pre, post, comb = self._mix(f"{name}.hc_attn", self.streams)
        u = self.num.rms_norm(self._collapse(self.streams, self.pre), self.w[f"{name}.attn_norm.weight"], self.eps)
        self.trace[f"{name}.attn_input"] = u
        if layer in self.o.kv_sources:
            self._compress(layer, u)
        if layer in self.o.index_k_sources:
            self._index_keys(layer)
        if layer == self.o.boundary and self.first_kept > 0:
            kept = self.positions >= self.first_kept
            self.positions, self.streams, u = self.positions[kept], self.streams[kept], u[kept]
            pre, post, comb = pre[kept], post[kept], comb[kept]
        y = self._attention(layer, u)
        self.trace[f"{name}.attn_output"] = y
        self.streams, self.pre = self._write_back(self.streams, y, post, comb), pre
        self.streams, self.pre = self._ffn_site(name, self.streams, self.pre, self._images())

    def _ffn_site(
        self, name: str, streams: np.ndarray, pre: np.ndarray, images: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The MoE sub-layer with its hyper-connection: new streams and the pre for the next site."""
        own_pre, post, comb = self._mix(f"{name}.hc_ffn", streams)
        u = self.num.rms_norm(self._collapse(streams, pre), self.w[f"{name}.ffn_norm.weight"], self.eps)
        self.trace[f"{name}.ffn_input"] = u
        y = self._moe(name, u, images)
        self.trace[f"{name}.ffn_output"] = y
        return self._write_back(streams, y, post, comb), own_pre

    def _embed(self, ids: Sequence[int]) -> np.ndarray:
        """Four equal streams [n, 4, H]; an id outside the vocabulary is a zero row."""
        table = self.w["embed.weight"]
        rows = [table[token] if 0 <= token < len(table) else np.zeros(table.shape[1]) for token in ids]
        return np.repeat(np.array(rows)[:, None], self.text.hc_mult, axis=1)

    def _first_stream(self, rows: int) -> np.ndarray:
        """The pre of a model's first site [rows, 4]."""
        pre = np.zeros((rows, self.text.hc_mult))
        pre[:, 0] = 1
        return pre

    def _images(self) -> np.ndarray:
        """Which of the computed rows are image positions, bool."""
        size = self.text.vocab_size
        return np.array([size <= self.ids[p] < size + IMAGE_IDS for p in self.positions])

    def _by_position(self, rows: np.ndarray) -> np.ndarray:
        """Values of the computed rows at their absolute positions, NaN elsewhere."""
        out = np.full((self.n, *rows.shape[1:]), np.nan)
        out[self.positions] = rows
        return out

    # Hyper-connections

    def _mix(self, name: str, streams: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """pre [n, 4], post [n, 4], comb [n, 4(j), 4(k)] of a site from its streams."""
        m = self.text.hc_mult
        flat = streams.reshape(len(streams), -1)  # stream-major
        mix = flat @ self.w[f"{name}_fn"].T / np.sqrt((flat**2).mean(1, keepdims=True) + self.eps)
        mix = mix * np.repeat(self.w[f"{name}_scale"], [m, m, m * m]) + self.w[f"{name}_base"]
        pre = sigmoid(mix[:, :m]) + self.text.hc_eps
        post = 2 * sigmoid(mix[:, m : 2 * m])
        comb = self._sinkhorn(mix[:, 2 * m :].reshape(-1, m, m))
        return self.num.f32(pre), self.num.f32(post), self.num.f32(comb)

    def _sinkhorn(self, a: np.ndarray) -> np.ndarray:
        eps = self.text.hc_eps
        a = softmax(a, axis=2) + eps
        a = a / (a.sum(1, keepdims=True) + eps)
        for _ in range(self.text.hc_sinkhorn_iters - 1):
            a = a / (a.sum(2, keepdims=True) + eps)
            a = a / (a.sum(1, keepdims=True) + eps)
        return a

    def _collapse(self, streams: np.ndarray, pre: np.ndarray) -> np.ndarray:
        """Input of a sub-layer [n, H]."""
        return self.num.bf16((pre[:, :, None] * streams).sum(1))

    def _write_back(self, streams: np.ndarray, y: np.ndarray, post: np.ndarray, comb: np.ndarray) -> np.ndarray:
        """New streams [n, 4, H]: X'[k] = post[k] y + sum_j comb[j, k] X[j]."""
        return self.num.bf16(post[:, :, None] * y[:, None] + np.einsum("njk,njc->nkc", comb, streams))

    # Attention

    def _attention(self, layer: int, u: np.ndarray) -> np.ndarray:
        """Sub-layer output [n, H] of a backbone layer; u [n, H] is the normed input."""
        name, freq = f"layers.{layer}.attn", self.o.inv_freq(layer)
        latent_query, q = self._queries(name, u, self.positions, freq)
        self.window[layer] = self._by_position(self._window_keys(name, u, self.positions, freq))
        if layer in self.o.index_sources:
            self.selected[layer] = self._select(layer, u, latent_query)
            self.trace[f"layers.{layer}.selected"] = self.selected[layer]
        sink, out = self.w[f"{name}.attn_sink"], np.empty_like(q)
        for row, p in enumerate(self.positions):
            keys = [self.window[layer][self._window_start(layer, p) : p + 1]]
            if self.o.ratios[layer]:
                entries = self.selected[source(self.o.index_sources, layer)][p]
                keys.append(self.compressed[source(self.o.kv_sources, layer)][entries])
            out[row] = self._attend(q[row], np.concatenate(keys), sink)
        self.trace[f"layers.{layer}.attn_values"] = out
        return self._project_output(name, out, self.positions, freq)

    def _window_start(self, layer: int, p: int) -> int:
        start = p - self.text.sliding_window + 1
        if self.truncation != "off" and layer >= self.o.boundary:
            start = max(start, self.first_visible)
        return min(max(start, 0), p + 1)

    def _queries(
        self, name: str, u: np.ndarray, positions: np.ndarray, freq: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The normed low-rank query [n, rank], which feeds the indexer too, and the heads' queries [n, h, 512]."""
        low = self.num.lin8(u, self.w[f"{name}.wq_a.weight"])
        latent = self.num.rms_norm(low, self.w[f"{name}.q_norm.weight"], self.eps)
        q = self.num.lin8(latent, self.w[f"{name}.wq_b.weight"])
        q = q.reshape(len(u), self.text.num_attention_heads, self.text.head_dim)
        return latent, self.num.bf16(self.num.rope(q, positions, freq))

    def _window_keys(self, name: str, u: np.ndarray, positions: np.ndarray, freq: np.ndarray) -> np.ndarray:
        """Keys (which are the values as well) of positions, after the cache quantizer [n, 512]."""
        kv = self.num.lin8(u, self.w[f"{name}.wkv.weight"])
        kv = self.num.rms_norm(kv, self.w[f"{name}.kv_norm.weight"], self.eps)
        return self.num.q8(self.num.bf16(self.num.rope(kv, positions, freq)))

    def _attend(self, q: np.ndarray, keys: np.ndarray, sink: np.ndarray) -> np.ndarray:
        """Softmax attention of one query with a sink in the denominator: q [h, 512], keys [K, 512] -> [h, 512]."""
        if len(keys) == 0:
            return np.zeros_like(q)
        scores = q @ keys.T * self.text.head_dim**-0.5  # [h, K]
        top = np.maximum(scores.max(1), sink)
        weights = np.exp(scores - top[:, None])
        return self.num.f32(weights @ keys / (weights.sum(1) + np.exp(sink - top))[:, None])

    def _project_output(self, name: str, out: np.ndarray, positions: np.ndarray, freq: np.ndarray) -> np.ndarray:
        """Inverse rope, grouped projection to the low rank, projection to H. out [n, h, 512] -> [n, H]."""
        groups, rounding = self.text.o_groups, self.o.output_rounding
        if "attention" in rounding:
            out = self.num.bf16(out)
        out = self.num.f32(self.num.rope(out, positions, freq, inverse=True))
        if "attention" in rounding:
            out = self.num.bf16(out)
        g = self.num.q8(out.reshape(len(out), groups, -1))
        wo_a = self.w[f"{name}.wo_a.weight"].reshape(groups, -1, g.shape[-1])  # [groups, rank, h/groups * 512]
        low = self.num.f32(np.stack([g[:, i] @ wo_a[i].T for i in range(groups)], axis=1))
        if "lora" in rounding:
            low = self.num.bf16(low)
        return self.num.lin8(low.reshape(len(out), -1), self.w[f"{name}.wo_b.weight"])

    # Compressed entries and their selection

    def _compress(self, layer: int, u: np.ndarray) -> None:
        """Latents and keys of all complete groups of tokens. u is of the whole text."""
        assert len(u) == self.n, "a KV source after the truncation is outside the oracle"
        name, ratio = f"layers.{layer}.attn.compressor", self.o.ratios[layer]
        values = self.num.f32(u @ self.w[f"{name}.wkv.weight"].T)  # [n, 512]
        count = self.n // ratio
        if ratio == 1:
            entries = self.num.bf16(values)
        else:
            gates = self.num.f32(u @ self.w[f"{name}.wgate.weight"].T)
            gates, values = (x[: count * ratio].reshape(count, ratio, x.shape[1]) for x in (gates, values))
            entries = self.num.bf16((softmax(gates, axis=1) * values).sum(1))
        latent = self.num.rms_norm(entries, self.w[f"{name}.norm.weight"], self.eps)
        rotated = self.num.bf16(self.num.rope(latent, np.arange(count) * ratio, self.o.inv_freq(layer)))
        self.latent[layer] = latent
        self.compressed[layer] = self.num.q4e(rotated) if self.o.fp4_compressed else self.num.q8(rotated)
        self.trace[f"layers.{layer}.latent"] = latent
        self.trace[f"layers.{layer}.compressed"] = self.compressed[layer]

    def _index_keys(self, layer: int) -> None:
        name = f"layers.{layer}.attn.indexer"
        latent = self.latent[source(self.o.kv_sources, layer)]
        keys = self.num.lin16(latent, self.w[f"{name}.wk.weight"])
        keys = self.num.rms_norm(keys, self.w[f"{name}.k_norm.weight"], self.eps)
        positions = np.arange(len(latent)) * self.o.ratios[layer]
        self.index_keys[layer] = self.num.q4u(self.num.bf16(self.num.rope(keys, positions, self.o.inv_freq(layer))))

    def _select(self, layer: int, u: np.ndarray, latent_query: np.ndarray) -> Selection:
        """Compressed entries that each computed row reads in this layer and in those that reuse its list."""
        scores = self._index_scores(layer, u, latent_query)
        is_source = layer == self.text.candidate_source_layer_id
        if is_source:
            self.candidates = {p: self._candidate_blocks(scores[p]) for p in scores}
            self.trace["candidates"] = self.candidates
        restricted = self.text.candidate_source_layer_id is not None and layer > self.text.candidate_source_layer_id
        selected = {}
        for p, row in scores.items():
            entries = np.arange(len(row))
            if restricted:
                entries = entries[np.isin(entries // self.text.candidate_block_size, self.candidates[p])]
            selected[p] = entries[largest(row[entries], self.text.index_topk)]
        return selected

    def _index_scores(self, layer: int, u: np.ndarray, latent_query: np.ndarray) -> dict[int, np.ndarray]:
        """Query position -> scores of all entries whose tokens are at or before it."""
        name, ratio = f"layers.{layer}.attn.indexer", self.o.ratios[layer]
        q = self.num.lin8(latent_query, self.w[f"{name}.wq_b.weight"])
        q = q.reshape(len(u), self.text.index_n_heads, self.text.index_head_dim)
        q = self.num.q4u(self.num.bf16(self.num.rope(q, self.positions, self.o.inv_freq(layer))))
        head_weights = self.num.lin16(u, self.w[f"{name}.weights_proj.weight"])  # [n, heads]
        keys = self.index_keys[source(self.o.index_k_sources, layer)]
        scores = {}
        for row, p in enumerate(self.positions):
            dots = q[row] @ keys[: (p + 1) // ratio].T  # [heads, entries]
            scores[int(p)] = self.num.bf16(head_weights[row] @ np.maximum(dots, 0))
        self.trace[f"layers.{layer}.index_scores"] = scores
        return scores

    def _candidate_blocks(self, scores: np.ndarray) -> np.ndarray:
        """Blocks of entries a query keeps for later index sources, ascending; the last one is always kept."""
        size = self.text.candidate_block_size
        best = [min(scores[i : i + size].max(), BF16_MAX) for i in range(0, len(scores), size)]
        if best:
            best[-1] = np.inf
        return largest(np.array(best), self.text.candidate_topk_blocks)

    # Experts

    def _moe(self, name: str, u: np.ndarray, images: np.ndarray) -> np.ndarray:
        """Shared expert plus the routed ones, each token with its own choice. u [n, H] -> [n, H]."""
        draft = name.startswith("mtp")
        top = self.text.dspark_num_experts_per_tok if draft else self.text.num_experts_per_tok
        scores = self.num.f32(np.sqrt(softplus(self.num.f32(u @ self.w[f"{name}.ffn.gate.weight"].T))))
        bias = np.where(images[:, None], self.w[f"{name}.ffn.gate.bias_vl"], self.w[f"{name}.ffn.gate.bias"])
        chosen = np.argsort(-self.num.f32(scores + bias), axis=1, kind="stable")[:, :top]
        weights = np.take_along_axis(scores, chosen, axis=1)
        weights = self.num.f32(weights / (weights.sum(1, keepdims=True) + 1e-20) * self.text.routed_scaling_factor)
        self.trace[f"{name}.router_scores"], self.trace[f"{name}.experts"] = scores, chosen
        total = self._expert(f"{name}.ffn.shared_experts", u, np.ones((len(u), 1)))
        routed = np.empty((*chosen.shape, u.shape[1]))  # [n, top, H]
        for expert in np.unique(chosen):
            rows, slots = np.nonzero(chosen == expert)
            routed[rows, slots] = self._expert(f"{name}.ffn.experts.{expert}", u[rows], weights[rows, slots][:, None])
        for slot in range(top):
            total = self.num.f32(total + routed[:, slot])
        return self.num.bf16(total)

    def _expert(self, name: str, u: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """SwiGLU expert; the routing weight [n, 1] multiplies before the down projection."""
        limit = self.text.swiglu_limit
        gate = np.minimum(self.num.lin8(u, self.w[f"{name}.w1.weight"]), limit)
        up = np.clip(self.num.lin8(u, self.w[f"{name}.w3.weight"]), -limit, limit)
        return self.num.lin8(self.num.f32(gate * sigmoid(gate) * up * weight), self.w[f"{name}.w2.weight"])

    # Engram

    def _engram(self, layer: int) -> np.ndarray:
        """Streams with the n-gram memory added [n, 4, H]."""
        name, m = f"layers.{layer}.engram", self.text.hc_mult
        rows = [self._engram_rows(layer, int(p)) for p in self.positions]
        self.trace[f"{name}.rows"] = rows
        table = self.w[f"{name}.embed.weight"]
        rows_per_token = (self.text.engram_max_ngram_size - 1) * self.text.engram_n_heads
        memory = np.zeros((len(rows), rows_per_token * self.text.engram_head_dim))
        for i, row in enumerate(rows):
            if row is not None:
                memory[i] = table[row].reshape(-1)
        kv = self.num.bf16(memory @ self.w[f"{name}.wkv.weight"].T).reshape(len(rows), m + 1, -1)
        key, value = kv[:, :m], kv[:, m:]  # [n, 4, H], [n, 1, H]

        def rstd(x: np.ndarray) -> np.ndarray:
            return 1 / np.sqrt((x**2).mean(-1) + self.eps)

        weight = self.w[f"{name}.q_weight"] * self.w[f"{name}.k_weight"]
        d = (self.streams * key * weight).sum(-1) * rstd(self.streams) * rstd(key) * self.text.hidden_size**-0.5
        gate = self.num.f32(sigmoid(np.sign(d) * np.sqrt(np.maximum(np.abs(d), 1e-6))))  # [n, 4]
        added = self.num.bf16(self.streams + gate[:, :, None] * value)
        is_text = np.array([row is not None for row in rows])
        return np.where(is_text[:, None, None], added, self.streams)

    def _engram_rows(self, layer: int, p: int) -> list[int] | None:
        """Table rows of the token at p, from it and the tokens before it; None for an image position."""
        pad = int(self.o.vocabulary[self.text.engram_pad_token_id])
        if not self._is_text(self.ids[p]):
            return None
        classes: list[int] = []
        for back in range(self.text.engram_max_ngram_size):
            if p - back < 0 or not self._is_text(self.ids[p - back]):
                break
            classes.append(int(self.o.vocabulary[self.ids[p - back]]))
        classes += [pad] * (self.text.engram_max_ngram_size - len(classes))
        return self.o.engram.rows(layer, classes)

    def _is_text(self, token: int) -> bool:
        return 0 <= token < self.text.vocab_size

    # Draft head

    def draft(self, golden: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Base logits [B, V] and hidden before the norm [B, H] of a block after the text and one golden token."""
        features = np.concatenate([self.features[layer] for layer in self.text.dspark_target_layer_ids], axis=1)
        main = self.num.lin8(features[self.positions], self.w["mtp.0.main_proj.weight"])
        main = self.num.rms_norm(main, self.w["mtp.0.main_norm.weight"], self.eps)  # [rows, H]
        positions = self.n + np.arange(block)
        streams = self._embed([golden] + [self.text.dspark_noise_token_id] * (block - 1))
        pre = self._first_stream(block)
        for layer in range(self.text.num_nextn_predict_layers):
            streams, pre = self._draft_layer(f"mtp.{layer}", streams, pre, positions, main)
            self.trace[f"mtp.{layer}.streams"] = streams
        hidden = self._collapse(streams, pre)
        last = f"mtp.{self.text.num_nextn_predict_layers - 1}"
        z = self.num.rms_norm(hidden, self.w[f"{last}.norm.weight"], self.eps)
        return self.num.f32(z @ self.w["head.weight"].T), hidden

    def _draft_layer(
        self, name: str, streams: np.ndarray, pre: np.ndarray, positions: np.ndarray, main: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Every row of the block sees the window before the block and all rows of the block."""
        freq = self.o.base_freq
        ring = self._by_position(self._window_keys(f"{name}.attn", main, self.positions, freq))
        before = ring[max(0, self.n - self.text.sliding_window, self.first_kept) :]  # a-W+1 .. a, where a = n-1
        own_pre, post, comb = self._mix(f"{name}.hc_attn", streams)
        u = self.num.rms_norm(self._collapse(streams, pre), self.w[f"{name}.attn_norm.weight"], self.eps)
        keys = np.concatenate([before, self._window_keys(f"{name}.attn", u, positions, freq)])
        _, q = self._queries(f"{name}.attn", u, positions, freq)
        sink = self.w[f"{name}.attn.attn_sink"]
        out = np.stack([self._attend(row, keys, sink) for row in q])
        y = self._project_output(f"{name}.attn", out, positions, freq)
        streams = self._write_back(streams, y, post, comb)
        no_images = np.zeros(len(streams), dtype=bool)
        return self._ffn_site(name, streams, own_pre, no_images)
