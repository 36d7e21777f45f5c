"""Level 5: how long every op takes, against core's reference and against an earlier report; what a bound call costs.

Numbers, not verdicts: on a busy machine times mean little, so nothing fails unless `--check-speed` asks for it. With
it, a native op that is slower than core's body, and an op that became slower since the last report, fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from deepinfer.hooks import Contribution, OpContext, OpGroup, Provider, op, provides
from deepinfer.hooks.bind import bind
from deepinfer.testing.conformance.judge import run_op
from deepinfer.testing.opinfo import OpInfo, Sample, SampleContext, Trio
from deepinfer.testing.results import CaseResult, Failure, Skip, run_case
from deepinfer.testing.subject import Subject

LEVEL = 5

SECONDS = 0.2
"""Time spent on one sample of one op."""

SLOWER = 1.25
"""Times slower that counts as slower."""

OVERHEAD = 1.5
"""A bound call costs at most this many times a call of the method itself."""

Infos = Mapping[str, OpInfo]
Timings = Mapping[str, Mapping[str, float]]


def run(
    subject: Subject, infos: Infos, quick: bool = False, check: bool = False, last: Timings | None = None
) -> Iterator[CaseResult]:
    """Times of every op's largest sample. quick: the largest that is not slow.

    check  times may fail;  last  `timings` of an earlier report
    """
    yield run_case(LEVEL, None, "overhead of a bound call", lambda: overhead(check))
    trio = Trio.of(subject)
    for info in infos.values():
        yield _timed(info, trio, quick, check, last or {})


def _timed(info: OpInfo, trio: Trio, quick: bool, check: bool, last: Timings) -> CaseResult:
    samples = {sample.name: sample for sample in info.samples(trio.found, quick)}
    if not samples:
        return run_case(LEVEL, info.name, "time", lambda: _skip("the kit has no sample to time it with"))
    name = max(samples, key=lambda name: info.cost(samples[name]).flops)
    figures: dict[str, float] = {}

    def body() -> str:
        figures.update(measure(info, trio, samples[name], quick))
        return judged(info, trio.found, figures, check, last.get(f"{info.name}: {name}"))

    result = run_case(LEVEL, info.name, name, body)
    return replace(result, figures=figures or None)


def _skip(reason: str) -> str:
    raise Skip(reason)


def measure(info: OpInfo, trio: Trio, found: Sample, quick: bool) -> dict[str, float]:
    """Seconds of a call of the subject's and the reference's op, and what the subject's makes of the sample's cost."""
    working = next(sample for sample in info.samples(trio.working, quick) if sample.name == found.name)
    seconds, reference = _seconds(info, trio.found, found), _seconds(info, trio.working, working)
    cost = info.cost(found)
    return {
        "seconds": seconds,
        "reference_seconds": reference,
        "flops_per_second": cost.flops / seconds,
        "bytes_per_second": cost.bytes / seconds,
    }


def _seconds(info: OpInfo, ctx: SampleContext, sample: Sample) -> float:
    """The quickest of the calls that fit into `SECONDS`; operands are made anew, outside the time, for each."""
    best, end = float("inf"), time.perf_counter() + SECONDS
    while True:
        args = sample.fresh()
        ctx.ops.runtime.synchronize()
        start = time.perf_counter()
        run_op(info, ctx, args)
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return max(best, 1e-9)


def judged(
    info: OpInfo, ctx: SampleContext, figures: Mapping[str, float], check: bool, last: Mapping[str, float] | None
) -> str:
    """The times in words; Failure for a slow one if `check`."""
    seconds, reference = figures["seconds"], figures["reference_seconds"]
    native = ctx.ops.binding(info.name).kind == "native"
    text = f"{seconds * 1e6:.1f} us"
    if native:
        text += f", core's body {reference * 1e6:.1f} us ({reference / seconds:.2f} times as long)"
    if last is not None:
        text += f", last report {last['seconds'] * 1e6:.1f} us"
    if check and native and seconds > SLOWER * reference:
        raise Failure(f"slower than core's own body: {text}")
    if check and last is not None and seconds > SLOWER * last["seconds"]:
        raise Failure(f"slower than before: {text}")
    return text


# --- overhead ---------------------------------------------------------------------------------------------------------


class _Nothing(OpGroup):
    """A group with one op that does nothing, to time the way to it."""

    group = "nothing"

    @op()
    def nothing(self, a: object, b: object, c: object, d: object) -> object:
        """Returns its first operand."""
        return a


class _NativeNothing(_Nothing):
    @provides()
    def nothing(self, a: object, b: object, c: object, d: object) -> object:
        return a


def overhead(check: bool) -> str:
    """Cost of a call through the table as a multiple of one of the bound method itself."""
    provider = Contribution(Provider("nothing", "deepinfer-core", "0"), {"nothing": _NativeNothing})
    context = OpContext(torch.device("cpu"), numerics=None, traits=None)  # type: ignore[arg-type]  # nobody asks
    ops = bind((provider,), context, contracts=(_Nothing,))
    method = ops.binding("nothing.nothing").function
    through = _per_call(lambda count: _through_table(ops, count))
    ratio = through / _per_call(lambda count: _directly(method, count))
    if check and ratio > OVERHEAD:
        raise Failure(f"a bound call takes {ratio:.2f} times a direct one, allowed {OVERHEAD}")
    return f"{ratio:.2f} times a direct call, {through * 1e9:.0f} ns"


def _through_table(ops: object, count: int) -> None:
    for _ in range(count):
        ops.nothing.nothing(1, 2, 3, 4)  # type: ignore[attr-defined]


def _directly(method: Callable[..., object], count: int) -> None:
    for _ in range(count):
        method(1, 2, 3, 4)


def _per_call(calls: Callable[[int], None], count: int = 20_000, repeats: int = 15) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        calls(count)
        best = min(best, time.perf_counter() - start)
    return best / count
