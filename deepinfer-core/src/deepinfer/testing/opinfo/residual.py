"""Samples of the residual ops: hyper-connection sites and their parts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepinfer.hooks.ops.residual import Pending, SiteWeights
from deepinfer.testing.opinfo.context import SampleContext, once
from deepinfer.testing.opinfo.record import Args, ErrorSample, OpInfo, Sample, by_rows, exactly
from deepinfer.testing.opinfo.strategies import rows_and_seeds

ROWS = (1, 0, 19)


def name_of(rows: int, extreme: bool, width: int | None = None) -> str:
    """Name of a sample."""
    return f"{rows} rows{'' if width is None else f' of {width}'}{', extreme' if extreme else ''}"


class Operands:
    """Numbers of one sample; every method gives the rows `index` in memory of their own."""

    def __init__(self, ctx: SampleContext, rows: int, extreme: bool = False, width: int | None = None) -> None:
        self.ctx, self.rows, self.streams_of = ctx, rows, ctx.traits.hc_mult
        self.width = width or ctx.traits.hidden_size
        m = self.streams_of
        self._streams = once(
            lambda: (
                ctx.extreme("streams", rows, m, self.width) if extreme else ctx.normal("streams", rows, m, self.width)
            )
        )
        self.site = once(self._site)

    def streams(self, index: torch.Tensor) -> torch.Tensor:
        """[R, m, H]"""
        return self.ctx.activation(self._streams()[index])

    def one(self, index: torch.Tensor) -> torch.Tensor:
        """[R, H]"""
        return self.ctx.activation(self.ctx.normal("one", self.rows, self.width)[index])

    def pre(self, index: torch.Tensor) -> torch.Tensor:
        """[R, m] float32"""
        return self.ctx.float32(self.ctx.uniform("pre", self.rows, self.streams_of)[index])

    def pending(self, index: torch.Tensor) -> Pending:
        ctx, m = self.ctx, self.streams_of
        post, comb = ctx.uniform("post", self.rows, m) * 2, ctx.uniform("comb", self.rows, m, m)
        return Pending(self.one(index), ctx.float32(post[index]), ctx.float32(comb[index]))

    def _site(self) -> SiteWeights:
        ctx, m = self.ctx, self.streams_of
        size = (2 + m) * m
        fn = ctx.normal("fn", size, m * self.width, scale=2 / (m * self.width) ** 0.5)
        scale = torch.tensor([1.0, 0.5, 2.0])
        return SiteWeights(ctx.float32(fn), ctx.float32(ctx.normal("base", size)), ctx.float32(scale))

    def norm(self) -> torch.Tensor:
        """[H]"""
        return self.ctx.activation(self.ctx.normal("norm", self.width) + 1)


def _sample(
    ctx: SampleContext, op: str, rows: int, extreme: bool = False, slow: bool = False, width: int | None = None
) -> Sample:
    """A sample of one of the ops by name."""
    name = name_of(rows, extreme, width)
    data = Operands(ctx.at(name), rows, extreme, width)
    m = data.streams_of
    builds = {
        "expand": lambda i: (data.one(i),),
        "mix": lambda i: (data.streams(i), data.site()),
        "collapse": lambda i: (data.streams(i), data.pre(i)),
        "write_back": lambda i: (data.streams(i), data.pending(i)),
        "stream_mean": lambda i: (data.streams(i),),
        "head": lambda i: (data.streams(i), data.site().fn[:m], data.site().base[:m], data.site().scale[:1]),
    }
    flops = {"mix": 2.0 * rows * (2 + m) * m * m * data.width, "write_back": 2.0 * rows * m * (m + 1) * data.width}
    return by_rows(name, rows, builds[op], slow, flops.get(op))


def _samples(op: str) -> object:
    def make(ctx: SampleContext) -> Iterator[Sample]:
        for rows in ROWS:
            yield _sample(ctx, op, rows)
        if op != "expand":
            yield _sample(ctx, op, 12, extreme=True)
        yield _sample(ctx, op, 257, slow=True)

    return make


def site(ctx: SampleContext, rows: int, pending: bool = True, shifted: bool = True, extreme: bool = False,
         slow: bool = False) -> Sample:  # fmt: skip
    """shifted: collapse with the previous site's weights; pending: there is an output to write back."""
    name = f"{name_of(rows, extreme)}{'' if pending else ', nothing pending'}{'' if shifted else ', unshifted'}"
    data = Operands(ctx.at(name), rows, extreme)
    norm = once(data.norm)

    def build(index: torch.Tensor) -> Args:
        waiting, previous = data.pending(index) if pending else None, data.pre(index) if shifted else None
        return data.streams(index), waiting, previous, data.site(), norm()

    return by_rows(name, rows, build, slow)


def site_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows in ROWS:
        yield site(ctx, rows)
    yield site(ctx, 5, pending=False)
    yield site(ctx, 5, shifted=False)
    yield site(ctx, 12, extreme=True)
    yield site(ctx, 257, slow=True)


def collapse_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    data = Operands(ctx, 4)
    three, four = torch.arange(3), torch.arange(4)
    yield ErrorSample("weights of other rows", lambda: (data.streams(four), data.pre(three)))
    yield ErrorSample("weights of other streams", lambda: (data.streams(four), data.pre(four)[:, :3].contiguous()))


def mix_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    wide, narrow = Operands(ctx, 4), Operands(ctx, 4, width=ctx.traits.hidden_size // 2)
    yield ErrorSample("weights of another width", lambda: (narrow.streams(torch.arange(4)), wide.site()))


def write_back_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    wide, narrow, rows = Operands(ctx, 4), Operands(ctx, 4, width=ctx.traits.hidden_size // 2), torch.arange(4)
    yield ErrorSample("output of another width", lambda: (wide.streams(rows), narrow.pending(rows)))
    yield ErrorSample("output of other rows", lambda: (wide.streams(rows), wide.pending(rows[:3])))


def _strategy(op: str) -> object:
    return rows_and_seeds(lambda ctx, rows: _sample(ctx, op, rows, extreme=rows % 2 == 1))


INFOS = (
    OpInfo("residual.expand", _samples("expand"), judges={"out": exactly}),
    OpInfo("residual.mix", _samples("mix"), mix_errors, _strategy("mix"), ("pre", "post", "comb")),
    OpInfo("residual.collapse", _samples("collapse"), collapse_errors, _strategy("collapse")),
    OpInfo("residual.write_back", _samples("write_back"), write_back_errors, _strategy("write_back")),
    OpInfo("residual.site", site_samples, strategy=rows_and_seeds(site), aliases=frozenset({"out.streams"})),
    OpInfo("residual.stream_mean", _samples("stream_mean"), strategy=_strategy("stream_mean")),
    OpInfo("residual.head", _samples("head"), strategy=_strategy("head")),
)
