"""Level 2 checks of ops with caches: fed in pieces, in other blocks and slots, in another order - the same numbers.

A prompt cut anywhere must leave what the whole prompt leaves and return the same rows. Bit for bit where the
implementation promises that a row does not depend on its batch (`promises_invariance`), within the tolerance rule
against float64 otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepinfer.hooks import KVCache, OpTable
from deepinfer.hooks.api import provides_of
from deepinfer.testing.compare import close
from deepinfer.testing.opinfo.context import SampleContext, Trio
from deepinfer.testing.opinfo.memory import SOURCES
from deepinfer.testing.opinfo.steps import Scene
from deepinfer.testing.opinfo.tree import same_bits
from deepinfer.testing.results import Failure

SPANS = ((0, 21), (0, 9))
"""Two prompts, longer than a small model's window ring."""

Run = Callable[[Scene, KVCache], torch.Tensor]
"""Feed a scene's step through an op; returns [rows, ...], on the host."""


def promises_invariance(ops: OpTable, op: str) -> bool:
    """Whether a part of a batch gives the bits it gives alone.

    A native implementation says so itself. Core's bodies do with order-free sums, provided that everything they call
    does; which ops those are is not known here, so all numeric ones count.
    """
    binding = ops.binding(op)
    if binding.kind == "native":
        return _declares(binding.function)
    return all(_invariant(other) for other in ops.bindings) if binding.kind == "decomposed" else _invariant(binding)


def _declares(function: object) -> bool:
    declared = provides_of(function)
    return declared is not None and declared.batch_invariant


def _invariant(binding: object) -> bool:
    owner = binding.function.__self__  # type: ignore[attr-defined]
    if not type(owner).numeric:
        return True
    if binding.kind == "native":  # type: ignore[attr-defined]
        return _declares(binding.function)  # type: ignore[attr-defined]
    return bool(owner.numerics.order_free)


def compress(trio: Trio) -> None:
    """`cache.compress` of prompts cut at every place, the first part possibly empty."""

    def run(scene: Scene, cache: KVCache) -> torch.Tensor:
        scores, latents = scene.pairs()
        return scene.ctx.ops.cache.compress(cache, SOURCES[2], scores, latents, scene.step()).cpu()

    def rows(scene: Scene) -> list[int]:
        return [(start + new) // 2 - start // 2 for start, new in scene.spans]

    everywhere_cut(trio, "cache.compress", ("state",), run, rows)


def everywhere_cut(
    trio: Trio, op: str, kinds: Sequence[str], run: Run, rows: Callable[[Scene], list[int]], cuts: Sequence[int] = ()
) -> None:
    """Compare the pieces with the whole for each cut of the longest prompt (all of them by default)."""
    longest = max(new for _, new in SPANS)
    exact = promises_invariance(trio.found.ops, op)
    whole = _whole(trio.found, kinds, run)
    working, ideal = (_whole(ctx, kinds, run) for ctx in (trio.working, trio.ideal))
    for cut in cuts or range(1, longest):
        found = _pieces(trio.found, cut, kinds, run, rows)
        if exact and not same_bits(found, whole):
            raise Failure(f"prompts cut at {cut} do not give the bits of the whole [seed {trio.found.seed}]")
        verdict = close(found, working, ideal)
        if not verdict.ok:
            raise Failure(f"prompts cut at {cut}: {verdict.detail} [seed {trio.found.seed}]", verdict.worst)


def _whole(ctx: SampleContext, kinds: Sequence[str], run: Run) -> torch.Tensor:
    scene = Scene.of(ctx, SPANS)
    return run(scene, scene.cache(*kinds))


def _pieces(
    ctx: SampleContext, cut: int, kinds: Sequence[str], run: Run, rows: Callable[[Scene], list[int]]
) -> torch.Tensor:
    """Results of the prompts in two steps, put together sequence by sequence."""
    scene = Scene.of(ctx, SPANS)
    cache = scene.cache(*kinds)
    cuts = [min(cut, new - 1) for _, new in SPANS]
    first = scene.piece([0] * len(cuts), cuts)
    second = scene.piece(cuts, [new for _, new in SPANS])
    parts = [list(run(part, cache).split(rows(part))) for part in (first, second)]
    return torch.cat([piece for pair in zip(*parts, strict=True) for piece in pair])


def other_places(trio: Trio, run: Run, kinds: Sequence[str], spans: Sequence[tuple[int, int]]) -> None:
    """The same sequences in other blocks and slots: the same bits."""
    results = []
    for placement in range(3):
        scene = Scene.of(trio.found, spans, placement=placement * 7)
        results.append(run(scene, scene.cache(*kinds)))
    for placement, result in enumerate(results[1:], 1):
        if not same_bits(result, results[0]):
            raise Failure(f"the result depends on which blocks and slots sequences have [placement {placement * 7}]")
