"""Level 3: the model's blocks with random weights, on the backend's ops against core's composition of references.

Attention (a window-only layer, a source with ratio 2, a layer that reuses it, ratio 1 with candidate blocks), mixture
of experts, hyper-connection sites, Engram, draft head. A backend that fuses across ops is found out here. Judged by the
tolerance rule of `compare.py`; discrete choices with margins (`bench.py`, `margins.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from deepinfer.hooks import KVCache, QuantTensor
from deepinfer.models.deepseek_v41.dspark import DSpark
from deepinfer.models.deepseek_v41.hyper import Site, Streams
from deepinfer.models.deepseek_v41.sizes import weight_bytes
from deepinfer.testing.conformance.attention_blocks import Parts, attention, attention_layers, close, selection
from deepinfer.testing.conformance.bench import Bench, Side
from deepinfer.testing.conformance.margins import routing_gaps
from deepinfer.testing.opinfo.record import OpInfo
from deepinfer.testing.opinfo.tree import dense
from deepinfer.testing.results import Case, CaseResult, Skip, Worst
from deepinfer.testing.subject import Subject

LEVEL = 3

ROWS = 40

LARGEST = 1 << 30
"""Bytes of weights up to which models are built."""

CLEAR = 1e-3
"""Gap of routing scores from which a choice of experts counts as clear, where all sides route equal inputs."""

Infos = Mapping[str, OpInfo]


def cases(subject: Subject, infos: Infos, quick: bool = False) -> Iterator[Case]:
    """The cases of level 3; `infos` changes nothing. quick leaves the second of similar cases out."""
    size = sum(weight_bytes(subject.config).values())
    if size > LARGEST:
        yield Case(LEVEL, None, "all blocks", lambda: _too_large(size))
        return
    made: list[Bench] = []

    def on(name: str, body: Callable[[Bench], Worst | str | None]) -> Case:
        def run() -> Worst | str | None:
            if not made:
                made.append(Bench.of(subject))
            with torch.inference_mode():
                return body(made[0].at(name))

        return Case(LEVEL, None, name, run)

    kinds = attention_layers(subject)
    for name, layers in kinds.items():
        yield on(f"attention, {name}", partial(attention, layers=layers))
    for name, layers in kinds.items():
        if layers[-1] in subject.config.topology.index_sources:
            yield on(f"selection, {name}", partial(selection, layers=layers))
    yield on("mixture of experts", partial(experts, images=False))
    yield on("hyper-connection sites", sites)
    yield on("engram", partial(engram, images=False))
    if not quick:
        yield on("mixture of experts, image rows", partial(experts, images=True))
        yield on("engram, image rows", partial(engram, images=True))
    yield on("draft features and attention", draft_attention)
    yield on("draft head", draft_head)


def _too_large(size: int) -> None:
    raise Skip(f"the model's weights take {size / 1e9:.0f} GB, and are made three times here; use a small --model")


def run(subject: Subject, infos: Infos, quick: bool = False) -> Iterator[CaseResult]:
    """Run them."""
    return (case.run() for case in cases(subject, infos, quick))


# --- the other blocks of a layer -------------------------------------------------------------------------------------


def experts(bench: Bench, images: bool) -> Worst | None:
    """The sub-layer of the first layer on rows whose experts are clear."""

    def block(side: Side) -> Parts:
        layer = side.model.layers[0]
        u = side.ctx.activation(side.ctx.normal("u", ROWS, side.config.text.hidden_size))
        return {"y": layer.moe(side.ops, u, side.ops.gemm.quantize(u), _image_rows(side, images))}

    return _routed(bench, block, CLEAR, rows_of_a_group=1)


def _routed(bench: Bench, block: Callable[[Side], Parts], gap: float, rows_of_a_group: int) -> Worst | None:
    """Compare a block that routes, without the groups of rows in which some choice of experts is a toss-up."""
    recorder = bench.ideal.recorder
    recorder.clear()
    ideal = block(bench.ideal)
    gaps = torch.stack([routing_gaps(bench.ideal.ops, call) for call in recorder.calls["experts.route"]]).amin(0)
    clear = (gaps > gap).view(-1, rows_of_a_group).all(1)
    if clear.sum() < 3:
        raise Skip(f"only {int(clear.sum())} of {clear.numel()} groups of rows have clear experts; try another --seed")
    kept = clear.repeat_interleave(rows_of_a_group)
    found, working = block(bench.found), block(bench.working)
    return close("clear rows", *(_rows(parts, kept) for parts in (found, working, ideal)))


def _rows(parts: Parts, kept: torch.Tensor) -> Parts:
    return {name: dense(value).cpu()[kept] for name, value in parts.items()}


def sites(bench: Bench) -> Worst | None:
    """Two sites in a row and the final collapse, with a random sub-layer output between them."""

    def block(side: Side) -> Parts:
        ops, ctx, width = side.ops, side.ctx, side.config.text.hidden_size
        layer = side.model.layers[1]
        streams = Streams.start(ops, ctx.activation(ctx.normal("embedding", ROWS, width)))
        parts: dict[str, torch.Tensor | QuantTensor] = {}
        for name, site in (("attention", layer.attn_site), ("ffn", layer.ffn_site)):
            out = site.enter(ops, streams)
            for field in ("streams", "pre", "post", "comb", "u", "x"):
                parts[f"{name} site, {field}"] = getattr(out, field)
            Site.leave(streams, out, ctx.activation(ctx.normal(f"y of {name}", ROWS, width)))
        return parts | {"hidden": streams.collapse(ops)}

    return close("two sites", *map(block, bench.all))


def engram(bench: Bench, images: bool) -> Worst | None:
    """N-grams, look-up and injection of the first Engram layer."""

    def block(side: Side) -> Parts:
        ctx, ops, text = side.ctx, side.ops, side.config.text
        layer = next((layer for layer in side.model.layers if layer.engram is not None), None)
        if layer is None or layer.engram is None:
            raise Skip("the configuration has no Engram layer")
        step = side.step(((3, 25), (0, 15), (0, 0)), side.new_cache())
        ids = ctx.put(ctx.integers("ids", 0, text.vocab_size, ROWS))
        history = ctx.put(ctx.integers("history", -1, text.vocab_size, 2, text.engram_max_ngram_size - 1))
        mask = _image_rows(side, images)
        ngrams = ops.engram.ngrams(
            ids, history, step.row_starts, step.sequence, step.positions, side.model.vocab_map,
            side.model.engram_pad, mask,
        )  # fmt: skip
        kv = layer.engram.fetch(ops, ngrams, mask)
        streams = ctx.activation(ctx.normal("streams", ROWS, text.hc_mult, text.hidden_size))
        return {"keys and values": kv, "streams": layer.engram.inject(ops, streams, kv, mask)}

    return close("engram", *map(block, bench.all))


def _image_rows(side: Side, images: bool) -> torch.Tensor | None:
    return side.ctx.put(side.ctx.uniform("image rows", ROWS) < 0.4) if images else None


# --- drafts ----------------------------------------------------------------------------------------------------------

DRAFTS = 5
"""Slots of a draft block."""

FED = (12, 3, 30, 7, 1, 25, 8, 40)
"""Tokens that the draft model has seen of each sequence."""


def _fed_drafts(side: Side) -> tuple[KVCache, DSpark]:
    """A cache whose draft rings hold main keys of random features."""
    dspark, cache, ctx = side.model.dspark, side.new_cache(), side.ctx
    if dspark is None:
        raise Skip("the configuration has no draft layers")
    step = side.step([(0, rows) for rows in FED], cache)
    width = len(dspark.targets) * side.config.text.hidden_size
    dspark.store_features(side.ops, ctx.activation(ctx.normal("features", step.num_rows, width)), step, cache)
    return cache, dspark


def draft_attention(bench: Bench) -> Worst | None:
    """Main keys of features in the draft rings, then the attention of a draft block that reads them."""

    def block(side: Side) -> Parts:
        cache, dspark = _fed_drafts(side)
        ctx, step = side.ctx, side.draft_step(FED, DRAFTS, cache)
        step.plan = side.ops.attention.plan(step)
        x = side.ops.gemm.quantize(ctx.activation(ctx.normal("x", step.num_rows, side.config.text.hidden_size)))
        return {
            f"layer {number}": layer.attention.draft(side.ops, x, dspark.first_ring + number, step, cache)
            for number, layer in enumerate(dspark.layers)
        }

    return close("draft block", *map(block, bench.all))


def draft_head(bench: Bench) -> Worst | None:
    """A whole draft pass: hidden states and base logits of the sequences whose experts are clear in every layer."""

    def block(side: Side) -> Parts:
        cache, _ = _fed_drafts(side)
        golden = side.ctx.put(side.ctx.integers("golden", 3, side.config.text.vocab_size, len(FED)))
        logits, hidden = side.model.draft(golden, DRAFTS, side.draft_step(FED, DRAFTS, cache), cache)
        return {"hidden": hidden.flatten(0, 1), "logits": logits.flatten(0, 1)}

    return _routed(bench, block, gap=1e-2, rows_of_a_group=DRAFTS)
