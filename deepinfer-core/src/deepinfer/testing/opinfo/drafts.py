"""Samples of the sampling ops of speculation: verification and draft blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from deepinfer.testing.opinfo.context import SampleContext, once
from deepinfer.testing.opinfo.distributions import filters_of, logprobs, places, seeds
from deepinfer.testing.opinfo.record import Args, ErrorSample, OpInfo, Sample, by_rows, by_sequences

RANK = 32
"""Rank of the Markov head."""


def verify(ctx: SampleContext, drafts: Sequence[int], rule: str, width: int = 65, slow: bool = False) -> Sample:
    """drafts: number of drafts of every sequence."""
    each = ", ".join(map(str, drafts)) if len(drafts) < 9 else f"of {len(drafts)} sequences"
    name = f"{rule}, drafts {each}, {width} tokens"
    ctx = ctx.at(name)
    counts = [n + 1 for n in drafts]
    total, n = sum(counts), len(drafts)
    target, proposal = (
        once(lambda label=label: logprobs(ctx, total, width, label)) for label in ("target", "proposal")
    )
    starts = torch.tensor([sum(counts[:i]) for i in range(n)], dtype=torch.int64)

    def take(order: Sequence[int]) -> Args:
        rows = torch.cat([torch.arange(int(starts[i]), int(starts[i]) + counts[i]) for i in order])
        which = torch.tensor(list(order), dtype=torch.int64)
        many = torch.tensor([counts[i] for i in order])
        return (
            ctx.float32(target()[rows]), ctx.put(_drafts(ctx, target(), counts)[rows]), ctx.put(many.cumsum(0) - many),
            ctx.put(many), ctx.put(seeds(ctx, n)[which]), ctx.put(places(ctx, n)[which]),
            ctx.put(_golden(ctx, total, width)[rows]),
            None if rule == "coupled" else ctx.float32(proposal()[rows]), rule,
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


def draft_block(
    ctx: SampleContext, n: int, block: int, filters: bool = True, coupled: bool = True, slow: bool = False
) -> Sample:
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


INFOS = (
    OpInfo("sampling.verify", verify_samples, verify_errors, observe=verified),
    OpInfo("sampling.draft_block", draft_samples),
)  # fmt: skip
