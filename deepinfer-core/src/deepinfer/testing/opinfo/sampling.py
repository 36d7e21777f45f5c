"""Samples of the sampling ops that make a token: masks, distributions, draws."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepinfer.testing.opinfo import drafts, reported
from deepinfer.testing.opinfo.context import SampleContext, Trio, once
from deepinfer.testing.opinfo.distributions import filters_of, logits, logprobs, name_of, places, seeds, widths
from deepinfer.testing.opinfo.record import Args, Check, ErrorSample, OpInfo, Sample, by_rows, exactly
from deepinfer.testing.opinfo.strategies import rows_and_seeds
from deepinfer.testing.results import Failure

BITS = 32


# masks


def prepare(ctx: SampleContext, rows: int, width: int, masks: str, slow: bool = False) -> Sample:
    """masks: letters b (banned ids), p (pairs), a (bit masks)."""
    name = name_of(rows, width, f"masks {masks}" if masks else "no masks")
    ctx = ctx.at(name)

    def build(index: torch.Tensor) -> Args:
        x = logits(ctx, rows, width)
        x[1::7, 0], x[2::7, 0], x[3::7] = torch.nan, torch.inf, -torch.inf
        allowed = ctx.integers("allowed", -(2**31), 2**31, rows, -(-width // BITS)).to(torch.int32)
        allowed[4::7] = 0
        banned = torch.tensor(sorted({0, width - 1, width // 3}))
        pairs = torch.stack((torch.arange(len(index)), ctx.integers("pairs", 0, width, rows)[index]), 1)
        return (
            ctx.float32(x[index]), ctx.put(banned) if "b" in masks else None,
            ctx.put(pairs) if "p" in masks else None, ctx.put(allowed[index]) if "a" in masks else None,
        )  # fmt: skip

    return by_rows(name, rows, build, slow)


def prepare_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows, width in widths(ctx):
        yield prepare(ctx, rows, width, "bpa")
    for masks in ("", "b", "p", "a"):
        yield prepare(ctx, 9, 65, masks)
    yield prepare(ctx, 64, 129_280, "bpa", slow=True)


def prepare_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    words = once(lambda: ctx.put(torch.zeros(4, 1, dtype=torch.int32)))
    yield ErrorSample("too few bits", lambda: (ctx.float32(logits(ctx, 4, 100)), None, None, words()))


# best tokens


def keep_top(ctx: SampleContext, rows: int, width: int, k: int, ties: bool = False, slow: bool = False) -> Sample:
    name = name_of(rows, width, f"k = {k}", "ties" if ties else "")
    ctx = ctx.at(name)
    return by_rows(name, rows, lambda i: (ctx.float32(logits(ctx, rows, width, ties)[i]), k), slow)


def keep_top_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows, width in widths(ctx):
        yield keep_top(ctx, rows, width, min(7, width))
    yield keep_top(ctx, 5, 33, 100)
    for k in (1, 3, 32, 33):
        yield keep_top(ctx, 7, 33, k, ties=True)
    yield keep_top(ctx, 64, 129_280, 50, slow=True)


def greedy(ctx: SampleContext, rows: int, width: int, ties: bool = False, slow: bool = False) -> Sample:
    name = name_of(rows, width, "ties" if ties else "")
    ctx = ctx.at(name)
    return by_rows(name, rows, lambda i: (ctx.float32(logits(ctx, rows, width, ties)[i]),), slow)


def greedy_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows, width in widths(ctx):
        yield greedy(ctx, rows, width)
    yield greedy(ctx, 12, 33, ties=True)
    yield greedy(ctx, 64, 129_280, slow=True)
    yield Sample("rows beyond 2^31 bytes", lambda: (_expanded(ctx),), slow=True)


def _expanded(ctx: SampleContext) -> torch.Tensor:
    """Equal rows that take more than 2^31 bytes, one row of memory."""
    row = ctx.float32(logits(ctx.at("expanded"), 1, 129_280))
    return row.expand(4200, -1)


# distributions


def process(
    ctx: SampleContext, rows: int, width: int, filters: bool = True, ties: bool = False, slow: bool = False
) -> Sample:
    """Rows with every combination of temperature 0, cold, 1, hot and of top-p, top-k on and off."""
    name = name_of(rows, width, "" if filters else "no filters", "ties" if ties else "")
    ctx = ctx.at(name)

    def build(index: torch.Tensor) -> Args:
        settings = torch.tensor([1.0, 0.0, 0.3, 2.5, 0.7])[index % 5], *filters_of(index, width)
        temperature, top_p, top_k = settings
        operands = ctx.float32(logits(ctx, rows, width, ties)[index]), ctx.float32(temperature)
        return (*operands, ctx.float32(top_p), ctx.put(top_k)) if filters else (*operands, None, None)

    return by_rows(name, rows, build, slow)


def process_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows, width in widths(ctx):
        yield process(ctx, rows, width)
    yield process(ctx, 42, 65)
    yield process(ctx, 6, 65, filters=False)
    yield process(ctx, 42, 33, ties=True)
    yield process(ctx, 42, 129_280, slow=True)


def process_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    def args(rows: int, both: bool) -> Args:
        top_p, top_k = filters_of(torch.arange(4), 33)
        temperature = ctx.float32(torch.full((rows,), 0.5))
        return ctx.float32(logits(ctx, 4, 33)), temperature, ctx.float32(top_p), ctx.put(top_k) if both else None

    yield ErrorSample("temperatures of other rows", lambda: args(3, True))
    yield ErrorSample("top_p without top_k", lambda: args(4, False))


# draws


def draw(ctx: SampleContext, rows: int, width: int, purpose: int = 0, draft: int = 0, slow: bool = False) -> Sample:
    name = name_of(rows, width, f"purpose {purpose}", f"draft {draft}")
    ctx = ctx.at(name)
    made = once(lambda: logprobs(ctx, rows, width))

    def build(index: torch.Tensor) -> Args:
        numbers = made().clone()
        numbers[5::9], numbers[6::9, 0] = -torch.inf, torch.nan
        return (
            ctx.float32(numbers[index]),
            ctx.put(seeds(ctx, rows)[index]),
            ctx.put(places(ctx, rows)[index]),
            purpose,
            draft,
        )

    return by_rows(name, rows, build, slow)


def draw_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows, width in widths(ctx):
        yield draw(ctx, rows, width)
    for purpose, draft in ((1, 0), (2, 3), (3, 1)):
        yield draw(ctx, 33, 65, purpose, draft)
    yield draw(ctx, 64, 129_280, slow=True)


def draw_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    def args() -> Args:
        rows = ctx.put(torch.arange(3))
        return ctx.float32(logprobs(ctx, 4, 33)), rows, rows

    yield ErrorSample("seeds of other rows", args)


def frequencies(trio: Trio) -> str:
    """Over seeds, over positions, over draft indices: tokens come as often as their probabilities say."""
    ctx, count = trio.found, 8192
    p = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01])
    rows = ctx.float32(p.log().expand(count, -1).contiguous())
    running, fixed = ctx.put(torch.arange(count)), ctx.put(torch.full((count,), 7))
    spread = {
        "seeds": (running * 2**40 + 3, fixed),
        "positions": (fixed, running),
        "high positions": (fixed, running * 2**31),
    }
    worst = 0.0
    for label, (seed, position) in spread.items():
        ids = ctx.ops.sampling.draw(rows, seed, position).cpu()
        seen = torch.bincount(ids.clamp(min=0), minlength=len(p)).double()
        statistic = float(((seen - count * p) ** 2 / (count * p)).sum())
        worst = max(worst, statistic)
        if statistic > CHI_SQUARE:
            raise Failure(f"over {label} tokens come {seen.tolist()} times, expected {(count * p).tolist()} "
                          f"(chi-square {statistic:.1f}, at most {CHI_SQUARE})")  # fmt: skip
    return f"chi-square at most {worst:.1f}"


CHI_SQUARE = 45.1
"""Exceeded by one in a million of honest samplers with ten tokens (nine degrees of freedom)."""


def separate_streams(trio: Trio) -> None:
    """Purposes and draft indices at the same position draw independently, and the same draw always agrees."""
    ctx, count = trio.found, 4096
    rows = ctx.float32(torch.full((count, 64), 1 / 64).log())
    seed, position = ctx.put(torch.arange(count)), ctx.put(torch.arange(count) % 97)
    keys = [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (3, 1)]
    drawn = {key: ctx.ops.sampling.draw(rows, seed, position, *key).cpu() for key in keys}
    for i, first in enumerate(keys):
        for second in keys[i + 1 :]:
            share = float((drawn[first] == drawn[second]).double().mean())
            if share > 0.035:  # 1/64 of the draws agree by chance, 0.031 is eight standard deviations more
                raise Failure(
                    f"(purpose, draft index) {first} and {second} draw the same token in {share:.1%} of cases"
                )


EXACT = {"out": exactly}

INFOS = (
    OpInfo("sampling.prepare", prepare_samples, prepare_errors, outputs=("masked", "status"),
           judges={"masked": exactly}, aliases=frozenset({"masked"})),
    OpInfo("sampling.keep_top", keep_top_samples, strategy=rows_and_seeds(
        lambda ctx, rows: keep_top(ctx, rows, 2 * rows + 3, rows + 1, ties=rows % 2 == 1)), judges=EXACT),
    OpInfo("sampling.greedy", greedy_samples,
           strategy=rows_and_seeds(lambda ctx, rows: greedy(ctx, rows, 67, rows % 2 == 1))),
    OpInfo("sampling.process", process_samples, process_errors,
           rows_and_seeds(lambda ctx, rows: process(ctx, rows, 67, ties=rows % 3 == 1))),
    OpInfo("sampling.draw", draw_samples, draw_errors, rows_and_seeds(lambda ctx, rows: draw(ctx, rows, 67, rows % 4)),
           checks=(Check("frequencies", frequencies, level=2), Check("separate streams", separate_streams, level=2))),
    *reported.INFOS,
    *drafts.INFOS,
)  # fmt: skip
