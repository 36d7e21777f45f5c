"""What the kit knows of an op: `OpInfo`, and the samples, error samples and checks in it.

One module a group of ops fills these records in (`opinfo/gemm.py`, ...); levels 1 and 2, the speed level, capture and
a backend's own tests read them. A record never knows who implements the op: samples are made for whatever table a
`SampleContext` carries, so that operands have that table's private layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from deepinfer.testing.compare import Verdict, equal
from deepinfer.testing.opinfo.tree import tensors

if TYPE_CHECKING:
    from deepinfer.testing.opinfo.context import SampleContext, Trio

REPEATABLE = "repeatable"
"""Equal operands give equal bits, ten times over."""
BATCH_INVARIANT = "batch invariant"
"""A part of a batch gives the bits it gives alone; judged where the implementation declares it."""
GRAPH = "graph replay"
"""A captured call, replayed with changed operands, gives the bits of a plain one."""
STREAM = "side stream"
"""On a stream that is not the default one the op waits for its operands."""
CANARY = "canary"
"""Cache rows that the call does not own keep their bytes."""

PURE = frozenset({REPEATABLE, BATCH_INVARIANT, GRAPH, STREAM})
"""Properties of ops that compute something from tensors."""

OPERAND_ERRORS: tuple[type[Exception], ...] = (ValueError, RuntimeError, IndexError, TypeError)
"""What an op may raise for operands of wrong shape where its contract names no error."""

Args = tuple[Any, ...]
Judge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Verdict]
"""(found, working, ideal) of one tensor of a result."""
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call takes at least: floating operations, and bytes that have to be read or written once."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Batch:
    """How a sample falls into parts (rows, sequences) that must not influence each other.

    parts  how many
    take   operands of a batch of these parts, in this order; parts may repeat
    rows   where each part's rows are in every tensor of that batch's result
    """

    parts: int
    take: Callable[[Sequence[int]], Args]
    rows: Callable[[Sequence[int]], list[slice]]


@dataclass(frozen=True)
class Sample:
    """One set of operands. `fresh()` makes them anew: equal values, memory of their own, caches built again.

    flops, nbytes  for `OpInfo.cost`; None: one operation an element, the bytes of all operands
    """

    name: str
    fresh: Callable[[], Args]
    slow: bool = False
    batch: Batch | None = None
    flops: float | None = None
    nbytes: float | None = None

    @property
    def args(self) -> Args:
        """Fresh operands."""
        return self.fresh()


@dataclass(frozen=True)
class ErrorSample:
    """Operands that break the contract; every implementation raises one of `raises`."""

    name: str
    fresh: Callable[[], Args]
    raises: tuple[type[Exception], ...] = OPERAND_ERRORS


@dataclass(frozen=True)
class Check:
    """A test of behaviour that no comparison of single results shows.

    run        raises `results.Failure` (or anything) if the subject breaks the contract, `results.Skip` where it cannot
               run
    level      1 or 2
    invariant  level 2 runs it in a batch-invariant run, too, where it compares bits
    """

    name: str
    run: Callable[[Trio], str | None]
    level: int = 1
    slow: bool = False
    invariant: bool = False


def exactly(found: torch.Tensor, working: torch.Tensor, ideal: torch.Tensor) -> Verdict:
    """For numbers that follow from the operands without a choice: equal to the reference's."""
    return equal(found, working)


def no_samples(ctx: SampleContext) -> Iterable[Any]:
    return ()


def no_strategy(ctx: SampleContext) -> Any:
    return None


def unchanged(ctx: SampleContext, args: Args, result: Any) -> Any:
    return result


@dataclass(frozen=True)
class OpInfo:
    """One op.

    make        samples for a context; use `samples`
    make_errors error samples; use `errors`
    strategy    Hypothesis strategy of further samples (None without): shapes and index patterns; see `strategies.py`
    outputs     names of the result's parts; a single result is one part
    observe     what is compared, as a nest of tensors: the result itself by default. Opaque results are looked at
                through other ops of the same table; in-place ops add what they changed.
    judges      {part or tensor: rule} where it is not `compare.close` for floats, `compare.equal` for the rest
    judge_all   rule for the whole result instead, yielding (tensor, verdict)
    opaque      the result is private to its provider: nothing but `observe` looks at it
    by_row      which of the observed tensors have a row for each row of a batch; None: all
    changes     operands that the op may change, by parameter name
    aliases     parts of the result that may be an operand itself, as the contract says
    wider       tensors that a provider may return in bfloat16 instead of float32
    properties  what level 2 tries
    checks      further tests
    """

    name: str
    make: Callable[[SampleContext], Iterable[Sample]] = no_samples
    make_errors: Callable[[SampleContext], Iterable[ErrorSample]] = no_samples
    strategy: Callable[[SampleContext], Any] = no_strategy
    outputs: tuple[str, ...] = ("out",)
    observe: Callable[[SampleContext, Args, Any], Any] = unchanged
    judges: Mapping[str, Judge] = field(default_factory=dict)
    judge_all: Callable[[Tensors, Tensors, Tensors], Iterator[tuple[str, Verdict]]] | None = None
    opaque: bool = False
    by_row: tuple[str, ...] | None = None
    changes: frozenset[str] = frozenset()
    aliases: frozenset[str] = frozenset()
    wider: frozenset[str] = frozenset()
    properties: frozenset[str] = PURE
    checks: tuple[Check, ...] = ()

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]

    @property
    def method(self) -> str:
        return self.name.partition(".")[2]

    def function(self, ops: Any) -> Callable[..., Any]:
        """The bound op of a table."""
        return getattr(getattr(ops, self.group), self.method)

    def samples(self, ctx: SampleContext, quick: bool = False) -> Iterator[Sample]:
        """Samples for a context, equal in name and value in every context of the same seed. quick: no slow ones."""
        return (sample for sample in self.make(ctx.at(self.name)) if not (quick and sample.slow))

    def errors(self, ctx: SampleContext) -> Iterator[ErrorSample]:
        """Operands that must raise."""
        return iter(self.make_errors(ctx.at(self.name)))

    def cost(self, sample: Sample) -> Cost:
        """Operations and bytes of one call."""
        if sample.flops is not None and sample.nbytes is not None:
            return Cost(sample.flops, sample.nbytes)
        operands = [tensor for _, tensor in tensors(sample.fresh())]
        flops = sum(x.numel() for x in operands) if sample.flops is None else sample.flops
        return Cost(float(flops), float(sum(x.nbytes for x in operands)) if sample.nbytes is None else sample.nbytes)


def by_rows(
    name: str,
    count: int,
    build: Callable[[torch.Tensor], Args],
    slow: bool = False,
    flops: float | None = None,
    nbytes: float | None = None,
) -> Sample:
    """A sample of `count` rows that do not influence each other.

    build  operands of the rows index [R] int64 (host), in memory of their own
    """

    def take(order: Sequence[int]) -> Args:
        return build(torch.tensor(list(order), dtype=torch.int64))

    def rows(order: Sequence[int]) -> list[slice]:
        return [slice(i, i + 1) for i in range(len(order))]

    return Sample(name, lambda: take(range(count)), slow, Batch(count, take, rows), flops, nbytes)


def by_sequences(
    name: str, counts: Sequence[int], take: Callable[[Sequence[int]], Args], slow: bool = False,
    flops: float | None = None, nbytes: float | None = None,
) -> Sample:  # fmt: skip
    """A sample of sequences with counts[i] rows each; `take` as in `Batch`."""

    def rows(order: Sequence[int]) -> list[slice]:
        ends = list(itertools.accumulate(counts[i] for i in order))
        return [slice(end - counts[i], end) for i, end in zip(order, ends, strict=True)]

    batch = Batch(len(counts), take, rows)
    return Sample(name, lambda: take(range(len(counts))), slow, batch, flops, nbytes)
