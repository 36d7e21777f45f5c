"""Samples of the sampling ops: masks, distributions, draws, reported numbers, verification, drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from deepinfer.reference import sampling as reference
from deepinfer.testing.opinfo.context import SampleContext, Trio, once
from deepinfer.testing.opinfo.gemm import exactly
from deepinfer.testing.opinfo.record import Args, Check, ErrorSample, OpInfo, Sample, by_rows, by_sequences
from deepinfer.testing.opinfo.strategies import rows_and_seeds
from deepinfer.testing.results import Failure

RANK = 32
"""Rank of the Markov head of the draft samples."""
BITS = 32


def logits(ctx: SampleContext, rows: int, width: int, ties: bool = False) -> torch.Tensor:
    """[rows, width] float32; ties: few distinct values, many -inf, a row with one token left."""
    x = ctx.normal("logits", rows, width, scale=3.0)
    if ties:
        x = x.round()
        x[:, 3::5] = -torch.inf
        x[1::6] = -torch.inf
        x[1::6, width // 2] = 0.25
    return x


def name_of(rows: int, width: int, *more: str) -> str:
    return ", ".join([f"{rows} x {width}", *(part for part in more if part)])


def widths(ctx: SampleContext) -> Iterator[tuple[int, int]]:
    """(rows, vocabulary) of the usual samples."""
    vocabulary = ctx.traits.vocab_size
    yield from ((1, vocabulary), (0, vocabulary), (13, vocabulary), (5, 33), (3, 1))


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


def process(ctx: SampleContext, rows: int, width: int, filters: bool = True, ties: bool = False, slow: bool = False) -> Sample:
    """Rows with every combination of temperature 0, cold, 1, hot and of top-p, top-k on and off."""
    name = name_of(rows, width, "" if filters else "no filters", "ties" if ties else "")
    ctx = ctx.at(name)

    def build(index: torch.Tensor) -> Args:
        settings = torch.tensor([1.0, 0.0, 0.3, 2.5, 0.7])[index % 5], *filters_of(index, width)
        temperature, top_p, top_k = settings
        operands = ctx.float32(logits(ctx, rows, width, ties)[index]), ctx.float32(temperature)
        return (*operands, ctx.float32(top_p), ctx.put(top_k)) if filters else (*operands, None, None)

    return by_rows(name, rows, build, slow)


def filters_of(index: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """top_p [R] float32 and top_k [R] int64 of some rows: off, and on at several strengths."""
    top_p = torch.tensor([1.0, 0.9, 0.35, 1.0, 0.7371, 0.0])[index % 6]
    top_k = torch.tensor([0, 3, width + 5, 1, -1, 7, 2])[index % 7]
    return top_p, top_k


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


def logprobs(ctx: SampleContext, rows: int, width: int, label: str = "") -> torch.Tensor:
    """Processed distributions [rows, width] float32 on the host, the same numbers for everybody."""
    index = torch.arange(rows)
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0])[index % 4]
    return reference.process(logits(ctx.at(label), rows, width), temperature, *filters_of(index, width))


# draws


def draw(ctx: SampleContext, rows: int, width: int, purpose: int = 0, draft: int = 0, slow: bool = False) -> Sample:
    name = name_of(rows, width, f"purpose {purpose}", f"draft {draft}")
    ctx = ctx.at(name)
    made = once(lambda: logprobs(ctx, rows, width))

    def build(index: torch.Tensor) -> Args:
        numbers = made().clone()
        numbers[5::9], numbers[6::9, 0] = -torch.inf, torch.nan
        return ctx.float32(numbers[index]), ctx.put(seeds(ctx, rows)[index]), ctx.put(places(ctx, rows)[index]), purpose, draft

    return by_rows(name, rows, build, slow)


def seeds(ctx: SampleContext, rows: int) -> torch.Tensor:
    """[rows] int64 of all 64 bits."""
    return ctx.integers("seeds", -(2**63), 2**63 - 1, rows)


def places(ctx: SampleContext, rows: int) -> torch.Tensor:
    """Positions [rows] int64, some beyond 32 bits."""
    return ctx.integers("positions", 0, 5000, rows) + (torch.arange(rows) % 4 == 3) * 2**35


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
    spread = {"seeds": (running * 2**40 + 3, fixed), "positions": (fixed, running), "high positions": (fixed, running * 2**31)}
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
                raise Failure(f"(purpose, draft index) {first} and {second} draw the same token in {share:.1%} of cases")


# reported numbers


def reported(ctx: SampleContext, op: str, rows: int, width: int, k: int = 0, slow: bool = False) -> Sample:
    name = name_of(rows, width, f"k = {k}" if k else "")
    ctx = ctx.at(name)
    made = once(lambda: logprobs(ctx, rows, width))
    ids = once(lambda: ctx.integers("ids", 0, width, rows))

    def build(index: torch.Tensor) -> Args:
        numbers = ctx.float32(made()[index])
        if op == "top_logprobs":
            return numbers, k
        if op == "score":
            temperature = torch.tensor([1.0, 0.0, 0.4, 3.0])[index % 4]
            return ctx.float32(logits(ctx, rows, width)[index]), ctx.put(ids()[index]), ctx.float32(temperature)
        return numbers, ctx.put(ids()[index])

    return by_rows(name, rows, build, slow)


def _reported(op: str) -> Any:
    def samples(ctx: SampleContext) -> Iterator[Sample]:
        for rows, width in widths(ctx):
            yield reported(ctx, op, rows, width, k=min(5, width))
        if op == "top_logprobs":
            yield reported(ctx, op, 4, 33, k=33)
            yield reported(ctx, op, 4, 33, k=1)
        yield reported(ctx, op, 64, 129_280, k=20, slow=True)

    return samples


def _reported_errors(op: str) -> Any:
    def errors(ctx: SampleContext) -> Iterator[ErrorSample]:
        def args() -> Args:
            operands = list(reported(ctx, op, 4, 33).fresh())
            operands[1] = torch.cat((operands[1], operands[1]))
            return tuple(operands)

        yield ErrorSample("ids of other rows", args)

    return errors


# drafts


def verify(ctx: SampleContext, drafts: Sequence[int], rule: str, width: int = 65, slow: bool = False) -> Sample:
    """drafts: number of drafts of every sequence."""
    each = ", ".join(map(str, drafts)) if len(drafts) < 9 else f"of {len(drafts)} sequences"
    name = f"{rule}, drafts {each}, {width} tokens"
    ctx = ctx.at(name)
    counts = [n + 1 for n in drafts]
    total, n = sum(counts), len(drafts)
    target, proposal = (once(lambda label=label: logprobs(ctx, total, width, label)) for label in ("target", "proposal"))
    starts = torch.tensor([sum(counts[:i]) for i in range(n)], dtype=torch.int64)

    def take(order: Sequence[int]) -> Args:
        rows = torch.cat([torch.arange(int(starts[i]), int(starts[i]) + counts[i]) for i in order])
        which = torch.tensor(list(order), dtype=torch.int64)
        many = torch.tensor([counts[i] for i in order])
        return (
            ctx.float32(target()[rows]), ctx.put(_drafts(ctx, target(), counts)[rows]), ctx.put(many.cumsum(0) - many),
            ctx.put(many), ctx.put(seeds(ctx, n)[which]), ctx.put(places(ctx, n)[which]),
            ctx.put(_golden(ctx, total, width)[rows]), None if rule == "coupled" else ctx.float32(proposal()[rows]), rule,
        )  # fmt: skip

    return by_sequences(name, counts, take, slow)


def _drafts(ctx: SampleContext, target: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The token each row scores: likely ones, so that some are accepted, and -1 in every sequence's last row."""
    ids = torch.where(ctx.uniform("likely", len(target)) < 0.8, target.argmax(-1), ctx.integers("d", 0, 9, len(target)))
    ids[torch.tensor(counts).cumsum(0) - 1] = -1
    return ids


def _golden(ctx: SampleContext, rows: int, width: int) -> torch.Tensor:
    forced = ctx.uniform("forced", rows) < 0.2
    return torch.where(forced, ctx.integers("golden", 0, width, rows), -1)


def verify_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rule in ("coupled", "rejection"):
        yield verify(ctx, (0,), rule)
        yield verify(ctx, (5, 0, 2, 5, 1), rule)
        yield verify(ctx, (5,) * 64, rule, 4000, slow=True)


def verify_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    def args(rule: str) -> Args:
        return (*verify(ctx, (2, 1), "coupled").fresh()[:-1], rule)

    yield ErrorSample("unknown rule", lambda: args("greedy"), (ValueError,))
    yield ErrorSample("rejection without the drafts' distributions", lambda: args("rejection"), (ValueError,))


def verified(ctx: SampleContext, args: Args, result: Any) -> dict[str, Any]:
    """Tokens and acceptance a row: the number of accepted drafts is spread over its sequence."""
    counts = args[3]
    seen = {"token_ids": result.token_ids, "accepted": result.accepted.repeat_interleave(counts)}
    drafted = args[1] >= 0  # the estimate of rows without a draft means nothing
    if result.accept_probability is not None:
        seen["accept_probability"] = result.accept_probability.masked_fill(~drafted, 0)
    return seen


def draft_block(ctx: SampleContext, n: int, block: int, filters: bool = True, coupled: bool = True, slow: bool = False) -> Sample:
    name = f"{n} x {block} drafts{'' if filters else ', no filters'}{'' if coupled else ', independent'}"
    ctx = ctx.at(name)
    width, hidden = ctx.traits.vocab_size, ctx.traits.hidden_size
    shared = once(lambda: (
        ctx.activation(ctx.normal("embed", width, RANK)), ctx.activation(ctx.normal("head", width, RANK, scale=0.2)),
        ctx.activation(ctx.normal("confidence", hidden + RANK, scale=0.1)), ctx.float32(ctx.uniform("t", block) + 0.5),
    ))  # fmt: skip

    def build(index: torch.Tensor) -> Args:
        temperature = torch.tensor([1.0, 0.0, 0.6])[index % 3]
        top_p, top_k = filters_of(index, width)
        rows = [
            ctx.float32(ctx.normal("base", n, block, width, scale=2.0)[index]),
            ctx.activation(ctx.normal("hidden", n, block, hidden)[index]),
            ctx.put(ctx.integers("golden", 0, width, n)[index]),
        ]
        settings = [ctx.float32(top_p), ctx.put(top_k)] if filters else [None, None]
        keys = [ctx.put(seeds(ctx, n)[index]), ctx.put(places(ctx, n)[index])]
        return (*rows, *shared(), ctx.float32(temperature), *settings, *keys, coupled)

    return by_rows(name, n, build, slow)


def draft_samples(ctx: SampleContext) -> Iterator[Sample]:
    yield draft_block(ctx, 1, 5)
    yield draft_block(ctx, 7, 5)
    yield draft_block(ctx, 3, 1, filters=False)
    yield draft_block(ctx, 5, 4, coupled=False)
    yield draft_block(ctx, 64, 5, slow=True)


EXACT = {"out": exactly}

INFOS = (
    OpInfo("sampling.prepare", prepare_samples, prepare_errors, outputs=("masked", "status"),
           judges={"masked": exactly}, aliases=frozenset({"masked"})),
    OpInfo("sampling.keep_top", keep_top_samples, strategy=rows_and_seeds(
        lambda ctx, rows: keep_top(ctx, rows, 2 * rows + 3, rows + 1, ties=rows % 2 == 1)), judges=EXACT),
    OpInfo("sampling.greedy", greedy_samples, strategy=rows_and_seeds(lambda ctx, rows: greedy(ctx, rows, 67, rows % 2 == 1))),
    OpInfo("sampling.process", process_samples, process_errors,
           rows_and_seeds(lambda ctx, rows: process(ctx, rows, 67, ties=rows % 3 == 1))),
    OpInfo("sampling.draw", draw_samples, draw_errors, rows_and_seeds(lambda ctx, rows: draw(ctx, rows, 67, rows % 4)),
           checks=(Check("frequencies", frequencies, level=2), Check("separate streams", separate_streams, level=2))),
    OpInfo("sampling.score", _reported("score"), _reported_errors("score")),
    OpInfo("sampling.token_logprobs", _reported("token_logprobs"), _reported_errors("token_logprobs"), judges=EXACT),
    OpInfo("sampling.top_logprobs", _reported("top_logprobs"), outputs=("ids", "logprobs"), judges={"logprobs": exactly}),
    OpInfo("sampling.sum_smaller", _reported("sum_smaller"), _reported_errors("sum_smaller")),
    OpInfo("sampling.verify", verify_samples, verify_errors, observe=verified),
    OpInfo("sampling.draft_block", draft_samples),
)  # fmt: skip
