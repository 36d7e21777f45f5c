"""The attention blocks of level 3, and what its indexers select: see `blocks.py`, which makes cases of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from deepinfer.hooks import KVCache, QuantTensor
from deepinfer.models.deepseek_v41.indexer import Shared
from deepinfer.testing import compare
from deepinfer.testing.conformance.bench import Bench, Chunks, Side
from deepinfer.testing.conformance.judge import accept
from deepinfer.testing.conformance.margins import Scores, block_scores, entry_scores
from deepinfer.testing.opinfo.tree import dense
from deepinfer.testing.results import Failure, Worst, nearest
from deepinfer.testing.subject import Subject

STEPS: tuple[Chunks, ...] = (
    ((0, 140), (0, 33), (0, 7)),
    ((140, 21), (33, 40), (0, 0)),
    ((161, 1), (73, 1), (7, 1)),
    ((162, 1), (0, 0), (8, 1)),
)
"""Two prefill steps with ragged lengths, then two decode steps, one of them without the second sequence."""

Parts = Mapping[str, torch.Tensor | QuantTensor]
"""Results of a block by name."""


def close(label: str, found: Parts, working: Parts, ideal: Parts) -> Worst | None:
    """Hold the parts of a result to the tolerance rule; Failure names label and part."""
    return accept(
        (f"{label}, {name}", compare.close(dense(found[name]), dense(working[name]), dense(ideal[name])))
        for name in working
    )


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
            first = topology.candidate_source
            assert first is not None, "nobody selects among candidates without their source"
            kinds.setdefault(f"ratio {ratio}, selecting among candidates", (first, layer))
        elif source == layer:
            kinds.setdefault(f"ratio {ratio}, source", (layer,))
        else:
            sources = {kv for kv in (source, topology.index_source[layer]) if kv is not None}
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
            _same_kind(label, found.candidates, chosen.candidates)
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
        verdict = compare.same_selection(found[rows].cpu(), ideal, count, tolerance)
        verdicts.append((f"{label} of rows from {rows.start}", verdict))
    return accept(verdicts)


def _same_kind(label: str, found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    """Both restrict the candidates, or neither does."""
    if (found is None) != (expected is None):
        raise Failure(f"{label}: candidates are {_shape(found)}, expected {_shape(expected)}")


def _shape(candidates: torch.Tensor | None) -> str:
    return "None (every block)" if candidates is None else f"a list {list(candidates.shape)}"
