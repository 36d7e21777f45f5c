"""Samples of the sampling ops that report numbers: scores, logprobs of tokens and of the best, ascending mass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deepinfer.testing.opinfo.context import SampleContext, once
from deepinfer.testing.opinfo.distributions import logits, logprobs, name_of, widths
from deepinfer.testing.opinfo.record import Args, ErrorSample, OpInfo, Sample, by_rows, exactly


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


EXACT = {"out": exactly}

INFOS = (
    OpInfo("sampling.score", _reported("score"), _reported_errors("score")),
    OpInfo("sampling.token_logprobs", _reported("token_logprobs"), _reported_errors("token_logprobs"), judges=EXACT),
    OpInfo("sampling.top_logprobs", _reported("top_logprobs"), outputs=("ids", "logprobs"),
           judges={"logprobs": exactly}),
    OpInfo("sampling.sum_smaller", _reported("sum_smaller"), _reported_errors("sum_smaller")),
)  # fmt: skip
