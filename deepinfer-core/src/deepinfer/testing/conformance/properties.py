"""Level 2: what holds of an op beyond single numbers - repeatable, the same in any batch, on any stream, in a graph.

Everything here is compared bit for bit. Which properties an op has stands in its record; which of them a provider
promises (`@provides`) decides whether it is held to them. Batch invariance is tried on the table that
`DEEPINFER_BATCH_INVARIANT=1` gives, where every op must have it, and on native ops that promise it in any run. `run` is
called by the kit's runner and by a backend's own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from deepinfer.errors import DeepInferError
from deepinfer.hooks import KVCache
from deepinfer.hooks.api import provides_of
from deepinfer.testing.conformance.judge import observed, outcome, run_op
from deepinfer.testing.conformance.ops import checks, parameters, records
from deepinfer.testing.opinfo.context import SampleContext, Trio
from deepinfer.testing.opinfo.memory import contents
from deepinfer.testing.opinfo.record import (
    BATCH_INVARIANT,
    CANARY,
    GRAPH,
    REPEATABLE,
    STREAM,
    Args,
    Batch,
    OpInfo,
    Sample,
)  # fmt: skip
from deepinfer.testing.opinfo.streams import busy
from deepinfer.testing.opinfo.tree import same_bits, tensors
from deepinfer.testing.results import SKIP, CaseResult, Failure, Skip, run_case
from deepinfer.testing.subject import Subject

LEVEL = 2
REPEATS = 10
ALONE = 4
"""Parts of a batch that a quick run tries alone."""

Property = Callable[[OpInfo, Trio, int], None]
"""(record, contexts, number of the sample); raises `Failure` or `Skip`."""


def run(
    subject: Subject, infos: Mapping[str, OpInfo] | Iterable[OpInfo], quick: bool = False, seed: int | None = None
) -> Iterator[CaseResult]:
    """Every case of level 2 of these ops. seed: of all random operands; None takes the subject's."""
    trio = Trio.of(subject, seed)
    invariant, refused = _invariant_twin(subject, trio.found.seed)
    if refused is not None:
        yield CaseResult(LEVEL, None, BATCH_INVARIANT, SKIP, refused)
    graphs = subject.ops.runtime.capabilities().supports_graphs
    if not graphs:
        yield CaseResult(LEVEL, None, GRAPH, SKIP, "the runtime has no device graphs")
    for info in records(infos):
        yield from _cases(info, trio, graphs, quick)
        if invariant is not None:
            yield from _invariant_cases(info, invariant, quick)
        yield from checks(info, trio, LEVEL, quick)


def _invariant_twin(subject: Subject, seed: int) -> tuple[Trio | None, str | None]:
    """Contexts of the same backend in a batch-invariant run, or why there is none."""
    numerics = replace(subject.context.numerics, order_free=True)
    try:
        return Trio.of(subject.rebound(numerics=numerics, batch_invariant=True), seed), None
    except DeepInferError as error:
        return None, f"the backend cannot be bound with DEEPINFER_BATCH_INVARIANT=1: {error}"


def _cases(info: OpInfo, trio: Trio, graphs: bool, quick: bool) -> Iterator[CaseResult]:
    binding = trio.found.ops.binding(info.name)
    declared = provides_of(binding.function) if binding.kind == "native" else None
    tried: list[tuple[str, Property]] = [(REPEATABLE, repeatable), (STREAM, side_stream), (CANARY, canary)]
    if graphs and declared is not None and declared.graph_safe:
        tried.append((GRAPH, graph_replay))
    if declared is not None and declared.batch_invariant:
        tried.append((BATCH_INVARIANT, batch_invariant if quick else thoroughly_invariant))
    for name, test in tried:
        if name in info.properties:
            yield from _on_samples(info, trio, name, test, quick)


def _invariant_cases(info: OpInfo, trio: Trio, quick: bool) -> Iterator[CaseResult]:
    """Batch invariance, and the checks that are about it, in a batch-invariant run."""
    if BATCH_INVARIANT in info.properties:
        test = batch_invariant if quick else thoroughly_invariant
        yield from _on_samples(info, trio, f"{BATCH_INVARIANT}, order-free sums", test, quick)
    for check in info.checks:
        if check.invariant and not (quick and check.slow):
            scoped = trio.at(f"{info.name}/{check.name}")
            name = f"{check.name}, order-free sums"
            yield run_case(LEVEL, info.name, name, lambda: check.run(scoped))  # noqa: B023


def _on_samples(info: OpInfo, trio: Trio, name: str, test: Property, quick: bool) -> Iterator[CaseResult]:
    """A property on the samples that can show it; a quick run takes one of them."""
    samples = list(info.samples(trio.found, quick=True))
    numbers = [i for i, sample in enumerate(samples) if "variant" not in name or _divisible(sample)]
    for number in numbers[len(numbers) // 2 :][:1] if quick else numbers:
        case = f"{name}: {samples[number].name}"
        yield run_case(LEVEL, info.name, case, lambda: _seeded(test, info, trio, number))  # noqa: B023


def _divisible(sample: Sample) -> bool:
    return sample.batch is not None and sample.batch.parts > 1


def _seeded(test: Property, info: OpInfo, trio: Trio, number: int) -> None:
    """The test; a failure names the seed that brings it back."""
    try:
        test(info, trio, number)
    except Failure as failure:
        raise Failure(f"{failure} [seed {trio.found.seed}]", failure.worst) from None


def sample_of(info: OpInfo, ctx: SampleContext, number: int) -> Sample:
    """A sample by its place among those of a quick run."""
    return list(info.samples(ctx, quick=True))[number]


def require_same(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    """Raise `Failure` unless two observed results have the same bits."""
    for name, leaf in expected.items():
        other = found.get(name)
        same = (
            same_bits(other, leaf)
            if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor)
            else other == leaf
        )
        if not same:
            raise Failure(f"{name}: {what}{_difference(other, leaf)}")


def _difference(found: Any, expected: Any) -> str:
    """Where two tensors differ first, in words."""
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor) or found.shape != expected.shape:
        return ""
    differs = (found != expected).reshape(-1)
    if not bool(differs.any()):
        return " (in NaN or the sign of zero)"
    place = int(differs.int().argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), found.shape)] if found.dim() else []
    values = found.reshape(-1)[place].item(), expected.reshape(-1)[place].item()
    return f" ({int(differs.sum())} of {differs.numel()} elements; {values[0]!r} against {values[1]!r} at {index})"


def _require_deterministic(info: OpInfo, ctx: SampleContext) -> None:
    binding = ctx.ops.binding(info.name)
    declared = provides_of(binding.function) if binding.kind == "native" else None
    if declared is not None and not declared.deterministic:
        raise Skip("not declared deterministic")


# the properties


def repeatable(info: OpInfo, trio: Trio, number: int) -> None:
    """Ten calls with equal operands in new memory."""
    ctx = trio.found
    _require_deterministic(info, ctx)
    sample = sample_of(info, ctx, number)
    first = outcome(info, ctx, sample)
    for turn in range(2, REPEATS + 1):
        require_same(
            outcome(info, ctx, sample), first, f"call {turn} with equal operands gives other bits than the first"
        )


def batch_invariant(info: OpInfo, trio: Trio, number: int, alone: int = ALONE) -> None:
    """Parts alone, in another order, and among fewer neighbours, against the same parts in the whole batch."""
    ctx = trio.found
    batch = sample_of(info, ctx, number).batch
    assert batch is not None
    parts = list(range(batch.parts))
    whole = _parts(info, ctx, batch, parts)
    step = max(1, len(parts) // alone)
    orders = [("alone", [i]) for i in parts[::step]]
    orders += [
        ("in another order", parts[::-1]),
        ("among other neighbours", parts[1::2]),
        ("rotated", parts[1:] + parts[:1]),
    ]
    for what, order in orders:
        for i, found in zip(order, _parts(info, ctx, batch, order), strict=True):
            require_same(found, whole[i], f"part {i} {what} gives other bits than in the whole batch")


def thoroughly_invariant(info: OpInfo, trio: Trio, number: int) -> None:
    """`batch_invariant` with every part alone."""
    batch_invariant(info, trio, number, alone=1 << 30)


def _parts(info: OpInfo, ctx: SampleContext, batch: Batch, order: list[int]) -> list[dict[str, torch.Tensor]]:
    """What each part of a batch gets, by name of the tensor."""
    args = batch.take(order)
    seen = observed(info, ctx, args, run_op(info, ctx, args))
    kept = {name: leaf for name, leaf in seen.items() if _by_row(info, name) and isinstance(leaf, torch.Tensor)}
    return [{name: leaf[rows] for name, leaf in kept.items()} for rows in batch.rows(order)]


def _by_row(info: OpInfo, name: str) -> bool:
    return info.by_row is None or name in info.by_row


def side_stream(info: OpInfo, trio: Trio, number: int) -> None:
    """A call on a stream of its own whose operands arrive there late, behind other work."""
    ctx, runtime = trio.found, trio.found.ops.runtime
    _require_deterministic(info, ctx)
    sample = sample_of(info, ctx, number)
    expected, args = outcome(info, ctx, sample), sample.fresh()
    late = [(x, x.clone()) for _, x in tensors(args) if x.is_floating_point() and x.element_size() > 1 and x.numel()]
    for x, _ in late:
        x.fill_(torch.nan)
    runtime.synchronize()
    with runtime.use_stream(runtime.new_stream()), torch.no_grad():
        busy(ctx)
        for x, value in late:
            x.copy_(value)
        result = info.function(ctx.ops)(*args)
    runtime.synchronize()
    require_same(observed(info, ctx, args, result), expected, "on a side stream the op does not wait for its operands")


def canary(info: OpInfo, trio: Trio, number: int) -> None:
    """Rows of all caches that the reference leaves alone keep their bits."""
    kept = _rows_kept(info, trio.working, sample_of(info, trio.working, number))
    ctx = trio.found
    args = sample_of(info, ctx, number).fresh()
    cache = _cache_of(info, ctx, args)
    before = _contents(ctx, cache)
    run_op(info, ctx, args)
    for name, now in _contents(ctx, cache).items():
        touched = [row for row in kept[name].nonzero().flatten().tolist() if not same_bits(now[row], before[name][row])]
        if touched:
            raise Failure(f"{name}: the call changed row {touched[0]} and {len(touched) - 1} more that it does not own")


def _rows_kept(info: OpInfo, ctx: SampleContext, sample: Sample) -> dict[str, torch.Tensor]:
    """{cache: [rows] bool} rows that core's own body leaves as they are."""
    args = sample.fresh()
    cache = _cache_of(info, ctx, args)
    before = _contents(ctx, cache)
    run_op(info, ctx, args)
    return {name: (now == before[name]).all(-1) for name, now in _contents(ctx, cache).items()}


def _cache_of(info: OpInfo, ctx: SampleContext, args: Args) -> KVCache:
    return args[parameters(info, ctx).index("cache")]


def _contents(ctx: SampleContext, cache: KVCache) -> dict[str, torch.Tensor]:
    """Everything in the caches, on the host."""
    with torch.no_grad():
        seen = contents(ctx, cache, "window", "entries", "index", "state")
    return {name: rows.cpu().clone() for name, rows in seen.items()}


def graph_replay(info: OpInfo, trio: Trio, number: int) -> None:
    """A captured call, replayed twice: on the operands it was captured with, and on others written over them."""
    ctx, runtime = trio.found, trio.found.ops.runtime
    _require_deterministic(info, ctx)
    args = sample_of(info, ctx, number).fresh()
    run_op(info, ctx, args)  # one-time initialisation does not belong into a graph
    with torch.no_grad():
        graph = runtime.capture(lambda: info.function(ctx.ops)(*args), runtime.new_graph_pool())
    try:
        for turn, other in enumerate((ctx, ctx.reseeded(ctx.seed + 1))):
            sample = sample_of(info, other, number)
            _overwrite(args, sample.fresh())
            result = graph.replay()
            runtime.synchronize()
            expected = outcome(info, other, sample)
            what = "replayed, the call gives other bits than a plain one"
            require_same(observed(info, other, args, result), expected, what + (" on changed operands" if turn else ""))
    finally:
        graph.destroy()


def _overwrite(args: Args, source: Args) -> None:
    """Write the numbers of other operands into these, in place."""
    for (name, target), (_, values) in zip(tensors(args), tensors(source), strict=True):
        if target.shape != values.shape:
            raise Skip(f"operand {name} has other shapes with other numbers")
        target.copy_(values)
