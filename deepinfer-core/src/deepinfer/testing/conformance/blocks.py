"""Level 3: the model's blocks with random weights, on the backend's ops against core's composition of references.

Attention (a window-only layer, a source with ratio 2, a layer that reuses it, ratio 1 with candidate blocks), mixture
of experts, hyper-connection sites, Engram, draft head. A backend that fuses across ops is found out here. Judged by the
tolerance rule of `compare.py`; discrete choices with margins (`bench.py`, `margins.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from deepinfer.hooks import KVCache, QuantTensor
from deepinfer.models.deepseek_v41.dspark import DSpark
from deepinfer.models.deepseek_v41.hyper import Site, Streams
from deepinfer.models.deepseek_v41.indexer import Shared
from deepinfer.models.deepseek_v41.sizes import weight_bytes
from deepinfer.testing import compare
from deepinfer.testing.conformance.bench import Bench, Chunks, Side
from deepinfer.testing.conformance.judge import accept
from deepinfer.testing.conformance.margins import Scores, block_scores, entry_scores, routing_gaps
from deepinfer.testing.opinfo.record import OpInfo
from deepinfer.testing.opinfo.tree import dense
from deepinfer.testing.results import Case, CaseResult, Failure, Skip, Worst, nearest
from deepinfer.testing.subject import Subject

LEVEL = 3

STEPS: tuple[Chunks, ...] = (
    ((0, 140), (0, 33), (0, 7)),
    ((140, 21), (33, 40), (0, 0)),
    ((161, 1), (73, 1), (7, 1)),
    ((162, 1), (0, 0), (8, 1)),
)
"""Two prefill steps with ragged lengths, then two decode steps, one of them without the second sequence."""

ROWS = 40

LARGEST = 1 << 30
"""Bytes of weights up to which models are built."""

CLEAR = 1e-3
"""Gap of routing scores from which a choice of experts counts as clear, where all sides route equal inputs."""

Infos = Mapping[str, OpInfo]
Parts = Mapping[str, torch.Tensor | QuantTensor]


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
        yield on(f"attention, {name}", lambda bench, layers=layers: attention(bench, layers))
    for name, layers in kinds.items():
        if layers[-1] in subject.config.topology.index_sources:
            yield on(f"selection, {name}", lambda bench, layers=layers: selection(bench, layers))
    yield on("mixture of experts", lambda bench: experts(bench, images=False))
    yield on("hyper-connection sites", sites)
    yield on("engram", lambda bench: engram(bench, images=False))
    if not quick:
        yield on("mixture of experts, image rows", lambda bench: experts(bench, images=True))
        yield on("engram, image rows", lambda bench: engram(bench, images=True))
    yield on("draft features and attention", draft_attention)
    yield on("draft head", draft_head)


def _too_large(size: int) -> None:
    raise Skip(f"the model's weights take {size / 1e9:.0f} GB, and this level makes them three times; use a small --model")


def run(subject: Subject, infos: Infos, quick: bool = False) -> Iterator[CaseResult]:
    """Run them."""
    return (case.run() for case in cases(subject, infos, quick))


def close(label: str, found: Parts, working: Parts, ideal: Parts) -> Worst | None:
    """Hold the parts of a result to the tolerance rule; Failure names label and part."""
    return accept(
        (f"{label}, {name}", compare.close(dense(found[name]), dense(working[name]), dense(ideal[name])))
        for name in working
    )


# --- attention -------------------------------------------------------------------------------------------------------


def attention_layers(subject: Subject) -> dict[str, tuple[int, ...]]:
    """{kind of attention: layers to run, the one that shows it last}."""
    topology = subject.config.topology
    kinds: dict[str, tuple[int, ...]] = {}
    for layer in range(topology.num_layers):
        source, ratio = topology.kv_source[layer], topology.ratio(layer)
        if ratio == 0:
            kinds.setdefault("window only", (layer,))
        elif layer == topology.candidate_source:
            kinds.setdefault(f"ratio {ratio}, source of candidates", (layer,))
        elif layer in topology.index_sources and topology.selects_in_candidates(layer):
            kinds.setdefault(f"ratio {ratio}, selecting among candidates", (topology.candidate_source, layer))
        elif source == layer:
            kinds.setdefault(f"ratio {ratio}, source", (layer,))
        else:
            sources = {source, topology.index_source[layer]}
            kinds.setdefault(f"ratio {ratio}, reusing a source", (*sorted(sources), layer))
    return kinds


def attention(bench: Bench, layers: tuple[int, ...]) -> Worst | None:
    """Outputs of every step of the last layer, all sides attending to what the working reference selects."""
    caches = [side.new_cache() for side in bench.all]
    worst = []
    for number, chunks in enumerate(STEPS):
        label = f"step {number}"
        working, chosen = attend(bench.working, caches[1], layers, chunks, label)
        found, _ = attend(bench.found, caches[0], layers, chunks, label, chosen)
        ideal, _ = attend(bench.ideal, caches[2], layers, chunks, label, chosen)
        worst.append(close(label, {"y": found}, {"y": working}, {"y": ideal}))
    return nearest(worst)


def attend(
    side: Side,
    cache: KVCache,
    layers: tuple[int, ...],
    chunks: Chunks,
    label: str,
    fed: Shared | None = None,
    last_selects: bool = False,
) -> tuple[torch.Tensor, Shared]:
    """One step of some layers, each with an input of its own: the last one's output [Q, H], and what was selected.

    fed           selections of another side, used instead of those of the layers' own indexers
    last_selects  the last layer's indexer runs all the same
    """
    step = side.step(chunks, cache)
    shared = Shared({}) if fed is None else side.shared(fed)
    y = torch.empty(0)
    for layer in layers:
        block = side.model.layers[layer].attention
        u = side.ctx.activation(side.ctx.normal(f"{label}/{layer}", step.num_rows, side.config.text.hidden_size))
        block.store_entries(side.ops, u, step, cache, shared)
        if fed is not None and not (last_selects and layer == layers[-1]):
            block = replace(block, indexer=None)
        y = block(side.ops, u, side.ops.gemm.quantize(u), step, cache, shared)
    return y, shared


def selection(bench: Bench, layers: tuple[int, ...]) -> Worst | None:
    """What the subject's indexer of the last layer chooses, held against the yardstick's scores."""
    caches, last, worst = [side.new_cache() for side in bench.all], layers[-1], []
    traits = bench.working.ctx.traits
    for number, chunks in enumerate(STEPS):
        label = f"step {number}"
        bench.clear_records()
        _, chosen = attend(bench.working, caches[1], layers, chunks, label)
        _, found = attend(bench.found, caches[0], layers, chunks, label, chosen, last_selects=True)
        attend(bench.ideal, caches[2], layers, chunks, label, chosen, last_selects=True)
        entries = bench.scored("attention.top_entries", entry_scores)
        worst += [_chosen(f"{label}, entries", found.selections[last].entries, entries, traits.index_topk)]
        if last == bench.found.config.topology.candidate_source:
            if (found.candidates is None) != (chosen.candidates is None):
                raise Failure(f"{label}: candidates are {_shape(found.candidates)}, expected {_shape(chosen.candidates)}")
            blocks = bench.scored("attention.candidate_blocks", block_scores(traits.candidate_block_size))
            worst += [_chosen(f"{label}, candidate blocks", found.candidates, blocks, traits.candidate_topk_blocks)]
    return nearest(worst)


def _chosen(label: str, found: torch.Tensor | None, scored: list[Scores], count: int) -> Worst | None:
    """Each row's choice [R, T] against scores: what is left out may be better by as much as rounding moves scores."""
    row, verdicts = 0, []
    for working, ideal in scored:
        rows = slice(row, row + len(ideal))
        row = rows.stop
        if found is None or ideal.shape[1] <= count:
            continue  # everything is chosen, and how that is written down is the op's business (level 1)
        known = torch.isfinite(working) & torch.isfinite(ideal)
        moved = float((working - ideal)[known].abs().max())
        tolerance = compare.Tolerance(compare.FACTOR * moved + 1e-3, 0.0)
        verdicts.append((f"{label} of rows from {rows.start}", compare.same_selection(found[rows].cpu(), ideal, count, tolerance)))
    return accept(verdicts)


def _shape(candidates: torch.Tensor | None) -> str:
    return "None (every block)" if candidates is None else f"a list {list(candidates.shape)}"


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
        raise Skip(f"only {int(clear.sum())} of {clear.numel()} groups of rows have clear experts; choose another --seed")
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
            fields = {"streams": out.streams, "pre": out.pre, "post": out.post, "comb": out.comb, "u": out.u, "x": out.x}
            parts |= {f"{name} site, {field}": value for field, value in fields.items()}
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
