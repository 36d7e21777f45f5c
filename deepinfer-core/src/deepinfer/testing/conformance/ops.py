"""Level 1: every op on every sample against the reference, and what its contract says of operands and results.

For each sample: the numbers (`compare.py`), shape, dtype, device and contiguity of results, memory of their own,
operands unchanged, and all that while new memory is full of junk; then operands that must raise, the checks of
behaviour that an op's record brings along and, unless in a hurry, samples that Hypothesis draws. `run` is called by the
kit's runner and by a backend's own tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from deepinfer.errors import BackendError
from deepinfer.hooks import QuantTensor
from deepinfer.testing.conformance.judge import judge, observed, off_grid, outcome, run_op
from deepinfer.testing.opinfo.context import SampleContext, Trio
from deepinfer.testing.opinfo.record import Args, ErrorSample, OpInfo, Sample, no_strategy
from deepinfer.testing.opinfo.tree import memory, named, same_bits, snapshot, tensors, values
from deepinfer.testing.results import CaseResult, Failure, Skip, Worst, run_case
from deepinfer.testing.subject import Subject

LEVEL = 1
DRAWN = 20
"""Samples that Hypothesis draws of every op with a strategy."""


def run(
    subject: Subject, infos: Mapping[str, OpInfo] | Iterable[OpInfo], quick: bool = False, seed: int | None = None
) -> Iterator[CaseResult]:
    """Every case of level 1 of these ops. seed: of all random operands; None takes the subject's."""
    trio = Trio.of(subject, seed)
    for info in records(infos):
        yield from samples(info, trio, quick)
        yield from errors(info, trio.found)
        yield from checks(info, trio, LEVEL, quick)
        if not quick:
            yield from drawn(info, trio)


def records(infos: Mapping[str, OpInfo] | Iterable[OpInfo]) -> Iterable[OpInfo]:
    """The records of a registry or of a list."""
    return infos.values() if isinstance(infos, Mapping) else infos


def samples(info: OpInfo, trio: Trio, quick: bool) -> Iterator[CaseResult]:
    """Each sample against the reference; the message of a failure ends with the seed that brings it back."""
    made = (info.samples(ctx, quick) for ctx in trio.all)
    for found, working, ideal in zip(*made, strict=True):
        yield run_case(LEVEL, info.name, found.name, lambda: compare_sample(info, trio, found, working, ideal))  # noqa: B023


def drawn(info: OpInfo, trio: Trio) -> Iterator[CaseResult]:
    """Samples of the op's strategy; a failure is about the smallest one that Hypothesis finds."""
    if info.strategy is not no_strategy:
        yield run_case(LEVEL, info.name, f"{DRAWN} drawn samples", lambda: _draw_samples(info, trio))


def _draw_samples(info: OpInfo, trio: Trio) -> None:
    try:
        import hypothesis
    except ImportError:
        raise Skip("hypothesis is not installed: pip install 'deepinfer-core[test]'") from None

    @hypothesis.settings(
        max_examples=DRAWN, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.seed(trio.found.seed)
    @hypothesis.given(info.strategy(trio.found))
    def holds(recipe: Callable[[SampleContext], Sample]) -> None:
        made = [recipe(ctx.at(info.name)) for ctx in trio.all]
        try:
            compare_sample(info, trio, *made)
        except Failure as failure:
            raise Failure(f"{made[0].name}: {failure}", failure.worst) from None

    holds()


def compare_sample(info: OpInfo, trio: Trio, found: Sample, working: Sample, ideal: Sample) -> Worst | None:
    """Raise `Failure` if the subject's result on a sample breaks the contract."""
    try:
        core, references = _references(info, trio, working, ideal)
        ctx, args = trio.found, found.fresh()
        before = _operands(info, ctx, args)
        with poisoned_memory():
            result = run_op(info, ctx, args)
        check_operands(before)
        if not info.opaque:
            check_result(info, ctx, args, result, core)
        return judge(info, observed(info, ctx, args, result), *references)
    except Failure as failure:
        raise Failure(f"{failure} [seed {trio.found.seed}]", failure.worst) from None


def _references(info: OpInfo, trio: Trio, working: Sample, ideal: Sample) -> tuple[Any, tuple[dict[str, Any], ...]]:
    """Core's own result, and what is compared of it and of the yardstick's; their operands are let go of at once."""
    args = working.fresh()
    core = run_op(info, trio.working, args)
    seen = observed(info, trio.working, args, core)
    del args
    return core, (seen, outcome(info, trio.ideal, ideal))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors of torch start as NaN, or as the largest integer, instead of as whatever was there.

    Torch ties this to its deterministic mode, whose warnings about single ops are of no use here.
    """
    enabled, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    companion: Any = torch.utils.deterministic
    fill = companion.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    companion.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn)
        companion.fill_uninitialized_memory = fill


def _operands(info: OpInfo, ctx: SampleContext, args: Args) -> dict[str, Any]:
    """Copies of the operands that the op may not change."""
    fixed = {name: arg for name, arg in zip(parameters(info, ctx), args, strict=False) if name not in info.changes}
    return {"args": fixed, "copies": snapshot(fixed)}


def parameters(info: OpInfo, ctx: SampleContext) -> tuple[str, ...]:
    """Names of an op's operands, in order."""
    spec = ctx.ops.binding(info.name).spec
    return spec.function.__code__.co_varnames[1 : spec.function.__code__.co_argcount]


def check_operands(before: Mapping[str, Any]) -> None:
    """Operands are as they were, bit for bit."""
    for name, now in tensors(before["args"]):
        if name in before["copies"] and not same_bits(now, before["copies"][name]):
            raise Failure(f"the op changed its operand {name}")


def check_result(info: OpInfo, ctx: SampleContext, args: Args, result: Any, core: Any) -> None:
    """Form and memory of a result; `core` is the reference's, for the form."""
    parts, wanted = named(result, info.outputs), named(core, info.outputs)
    check_form(info, ctx, parts, wanted)
    for problem in off_grid(parts) if ctx.numerics.quantize else ():
        raise Failure(problem)
    owned = memory(args)
    for name, tensor in tensors(parts):
        whole = name.partition(".")[0]
        shared = owned.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if shared is not None and not {name, whole} & info.aliases and ctx.numerics.quantize:
            raise Failure(f"{name} shares memory with the operand {_operand_name(info, ctx, shared)}")


def _operand_name(info: OpInfo, ctx: SampleContext, path: str) -> str:
    number, dot, rest = path.partition(".")
    return f"{parameters(info, ctx)[int(number)]}{dot}{rest}"


def check_form(info: OpInfo, ctx: SampleContext, parts: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Same parts as the reference's result, each with its shape, dtype, device and contiguity."""
    found = dict(leaf for part, value in parts.items() for leaf in values(value, part))
    model = dict(leaf for part, value in wanted.items() for leaf in values(value, part))
    if found.keys() != model.keys():
        raise Failure(f"the result has the parts {', '.join(found)}, expected {', '.join(model)}")
    for name, leaf in found.items():
        check_leaf(info, ctx, name, leaf, model[name])


def check_leaf(info: OpInfo, ctx: SampleContext, name: str, leaf: Any, model: Any) -> None:
    """One leaf of a result against the reference's."""
    for kind in (QuantTensor, torch.Tensor):
        if isinstance(model, kind) != isinstance(leaf, kind):
            raise Failure(f"{name} is a {type(leaf).__name__}, expected a {type(model).__name__}")
    if isinstance(model, QuantTensor):
        leaf, model = leaf.dequantize(), model.dequantize()
    if not isinstance(model, torch.Tensor):
        return
    dtypes = {model.dtype, torch.bfloat16} if name in info.wider else {model.dtype}
    if leaf.shape != model.shape:
        raise Failure(f"{name} has the shape {list(leaf.shape)}, expected {list(model.shape)}")
    if leaf.dtype not in dtypes:
        raise Failure(f"{name} has the dtype {leaf.dtype}, expected {' or '.join(sorted(map(str, dtypes)))}")
    if leaf.device.type != ctx.device.type:
        raise Failure(f"{name} is on {leaf.device}, expected {ctx.device}")
    if not leaf.is_contiguous():
        raise Failure(f"{name} is not contiguous: shape {list(leaf.shape)}, strides {list(leaf.stride())}")


def errors(info: OpInfo, ctx: SampleContext) -> Iterator[CaseResult]:
    """Operands that break the contract raise what the record says; all of it can be seen without the device."""
    for sample in info.errors(ctx):
        yield run_case(LEVEL, info.name, f"error: {sample.name}", lambda: expect_error(info, ctx, sample))  # noqa: B023
        _require_alive(ctx, f"{info.name}, error: {sample.name}")


def expect_error(info: OpInfo, ctx: SampleContext, sample: ErrorSample) -> str:
    """Raise `Failure` unless the call raises one of the sample's exceptions."""
    args = sample.fresh()
    names = " or ".join(kind.__name__ for kind in sample.raises)
    try:
        run_op(info, ctx, args)
    except sample.raises as error:
        return f"raised {type(error).__name__}"
    except Exception as error:
        raise Failure(f"raised {type(error).__name__}: {error}; expected {names}") from error
    raise Failure(f"accepted operands that break the contract; expected {names}")


def _require_alive(ctx: SampleContext, after: str) -> None:
    """Raise `BackendError` if the device takes no more work, which nothing later in this process would survive."""
    try:
        torch.zeros(1, device=ctx.device).cpu()
    except RuntimeError as error:
        raise BackendError(f"the device is unusable after {after}; the op has to look at shapes first") from error


def checks(info: OpInfo, trio: Trio, level: int, quick: bool) -> Iterator[CaseResult]:
    """The further tests of a record at one level."""
    for check in info.checks:
        if check.level == level and not (quick and check.slow):
            scoped = trio.at(f"{info.name}/{check.name}")
            yield run_case(level, info.name, check.name, lambda: check.run(scoped))  # noqa: B023
