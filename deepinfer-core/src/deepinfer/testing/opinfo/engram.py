"""Samples of the engram ops: n-grams, hashes, table look-up, gated injection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from deepinfer.hooks import Weight
from deepinfer.hooks.ops.engram import EngramConstants
from deepinfer.reference.engram import derive_constants
from deepinfer.testing.opinfo.context import SampleContext, once, random_weight
from deepinfer.testing.opinfo.record import (
    REPEATABLE,
    Args,
    ErrorSample,
    OpInfo,
    Sample,
    by_rows,
    by_sequences,
    exactly,
)
from deepinfer.testing.opinfo.strategies import rows_and_seeds

VOCABULARY = 211
"""Token ids of the n-gram samples; about a third share a compressed id."""
COMPRESSED = 140
PAD = 2
FIRST_PRIME = 997

# n-grams


def ngrams(ctx: SampleContext, lengths: Sequence[tuple[int, int]], images: bool = False, slow: bool = False) -> Sample:
    """lengths: (tokens before, new tokens) of every sequence."""
    name = f"{len(lengths)} sequences, {sum(new for _, new in lengths)} rows{', images' if images else ''}"
    ctx = ctx.at(name)
    back = ctx.traits.engram_max_ngram_size - 1
    texts = once(lambda: [_text(ctx, number, before + new) for number, (before, new) in enumerate(lengths)])
    mapping = once(lambda: ctx.integers("map", 0, COMPRESSED, VOCABULARY).to(torch.int32))

    def take(order: Sequence[int]) -> Args:
        chosen = [(texts()[i], *lengths[i]) for i in order]
        counts = torch.tensor([new for *_, new in chosen], dtype=torch.int64)
        starts = torch.tensor([before for _, before, _ in chosen], dtype=torch.int64)
        row_starts = counts.cumsum(0) - counts
        sequence = torch.arange(len(order)).repeat_interleave(counts)
        positions = torch.arange(int(counts.sum())) - row_starts[sequence] + starts[sequence]
        history = torch.stack([_history(text[:before], back) for text, before, _ in chosen])
        rows = torch.cat([text[before:] for text, before, _ in chosen])
        image = (rows % 7 == 0,) if images else ()
        operands = (rows, history, row_starts, sequence, positions, mapping())
        return (*map(ctx.put, operands), PAD, *map(ctx.put, image))

    return by_sequences(name, [new for _, new in lengths], take, slow)


def _text(ctx: SampleContext, number: int, length: int) -> torch.Tensor:
    """Token ids, every eleventh outside the vocabulary on either side."""
    ids = ctx.integers(f"text {number}", 0, VOCABULARY, length)
    ids[5::11] = VOCABULARY + 3
    ids[9::22] = -5
    return ids


def _history(before: torch.Tensor, back: int) -> torch.Tensor:
    return torch.cat((torch.full((back,), -1, dtype=torch.int64), before))[-back:]


def ngram_samples(ctx: SampleContext) -> Iterator[Sample]:
    yield ngrams(ctx, [(0, 1)])
    yield ngrams(ctx, [(1, 1), (2, 1), (50, 1), (0, 1)])
    yield ngrams(ctx, [(0, 23), (17, 1), (2, 9), (1, 2)])
    yield ngrams(ctx, [(0, 23), (17, 1), (2, 9), (1, 2)], images=True)
    yield ngrams(ctx, [(0, 1000), (13, 1), (999, 300)], slow=True)


def ngram_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    whole = once(lambda: ngrams(ctx, [(0, 5), (3, 4)]).fresh())

    def without_a_row(place: int) -> Args:
        args = list(whole())
        args[place] = args[place][:-1]
        return tuple(args)

    yield ErrorSample("positions of fewer rows", lambda: without_a_row(4))
    yield ErrorSample("sequences of fewer rows", lambda: without_a_row(3))


# hashes


def constants(ctx: SampleContext) -> EngramConstants:
    """Hash constants of the second of two layers, so that its primes are not the first ones."""
    t = ctx.traits
    made = derive_constants([1, 4], FIRST_PRIME, t.engram_max_ngram_size, t.engram_n_heads, COMPRESSED)[4]
    return made.to(ctx.device)


def hash_rows(ctx: SampleContext, rows: int, images: bool = False, slow: bool = False) -> Sample:
    name = f"{rows} rows{', images' if images else ''}"
    ctx = ctx.at(name)
    ids = once(lambda: ctx.integers("ids", 0, COMPRESSED, rows, ctx.traits.engram_max_ngram_size))
    made = once(lambda: constants(ctx))
    image = torch.arange(rows) % 3 == 1

    def build(index: torch.Tensor) -> Args:
        args = (ctx.put(ids()[index]), made())
        return (*args, ctx.put(image[index])) if images else args

    return by_rows(name, rows, build, slow)


def hash_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows in (1, 0, 37):
        yield hash_rows(ctx, rows)
    yield hash_rows(ctx, 7, images=True)
    yield hash_rows(ctx, 4096, slow=True)


def hash_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    orders = ctx.traits.engram_max_ngram_size
    yield ErrorSample(
        "n-grams of another length", lambda: (ctx.put(ctx.integers("ids", 0, 99, 3, orders + 1)), constants(ctx))
    )


# tables

TABLE_ROWS = 311
HUGE_ROWS = 9_000_000
"""Rows of a table of more than 2^31 bytes; only the rows that are read are ever touched."""


def table(ctx: SampleContext, kind: str) -> Weight:
    """A table as the checkpoint stores it."""
    return ctx.place(random_weight(ctx.generator("table"), (TABLE_ROWS, ctx.traits.engram_head_dim), kind))


def huge_table(ctx: SampleContext) -> Weight:
    """An fp8 table of `HUGE_ROWS` rows, of which the first and last `TABLE_ROWS` hold numbers."""
    width = ctx.traits.engram_head_dim
    small = random_weight(ctx.generator("table"), (2 * TABLE_ROWS, width), "fp8_row32")
    assert small.scales is not None
    values = torch.empty(HUGE_ROWS, width, dtype=torch.uint8, device=ctx.device)
    scales = torch.empty(HUGE_ROWS, width // 32, dtype=torch.uint8, device=ctx.device)
    for target, source in ((values, small.values.view(torch.uint8)), (scales, small.scales)):
        target[:TABLE_ROWS], target[-TABLE_ROWS:] = ctx.put(source[:TABLE_ROWS]), ctx.put(source[TABLE_ROWS:])
    return Weight(values.view(torch.float8_e4m3fn), scales, "fp8_row32")


def fetch(ctx: SampleContext, rows: int, kind: str = "fp8_row32", pattern: str = "mixed", slow: bool = False) -> Sample:
    """pattern: mixed (repeated rows and -1), none (all -1), huge (rows beyond 2^31 bytes)."""
    name = f"{kind}, {rows} rows, {pattern}"
    ctx = ctx.at(name)
    per_token = (ctx.traits.engram_max_ngram_size - 1) * ctx.traits.engram_n_heads
    prepared = once(lambda: ctx.ops.engram.prepare_table(huge_table(ctx) if pattern == "huge" else table(ctx, kind)))

    def places() -> torch.Tensor:
        places = ctx.integers("rows", 0, TABLE_ROWS, rows, per_token)
        places[::3, 1:] = places[::3, :1]
        if pattern == "huge":
            places[::2] += HUGE_ROWS - TABLE_ROWS
        places[1::4] = -1
        places[2::4, -1] = -1
        return torch.full_like(places, -1) if pattern == "none" else places

    return by_rows(name, rows, lambda index: (prepared(), ctx.put(places()[index])), slow, 0.0,
                   float(rows * per_token * ctx.traits.engram_head_dim * 3))  # fmt: skip


def fetch_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows in (1, 0, 37):
        yield fetch(ctx, rows)
    yield fetch(ctx, 3, pattern="none")
    if not ctx.numerics.quantize:  # rows in training; exact numerics read published tables only
        yield fetch(ctx, 7, "bf16")
        yield fetch(ctx, 7, "f32")
    yield fetch(ctx, 9, pattern="huge", slow=True)


def prepare_samples(ctx: SampleContext) -> Iterator[Sample]:
    for kind in ("fp8_row32",) if ctx.numerics.quantize else ("fp8_row32", "bf16", "f32"):
        inner = ctx.at(kind)
        yield Sample(kind, lambda inner=inner, kind=kind: (table(inner, kind),))


def read_table(ctx: SampleContext, args: Args, prepared: object) -> torch.Tensor:
    """Rows of a prepared table."""
    rows = ctx.put(torch.tensor([[0, TABLE_ROWS - 1], [5, -1]]))
    return ctx.ops.engram.fetch(prepared, rows).dequantize()


# injection


def inject(ctx: SampleContext, rows: int, images: bool = False, extreme: bool = False, slow: bool = False) -> Sample:
    t = ctx.traits
    name = f"{rows} rows{', images' if images else ''}{', extreme' if extreme else ''}"
    ctx = ctx.at(name)
    m, hidden = t.hc_mult, t.hidden_size
    streams = once(lambda: ctx.extreme("x", rows, m, hidden) if extreme else ctx.normal("x", rows, m, hidden))
    kv = once(lambda: ctx.normal("kv", rows, m + 1, hidden))
    weight = once(lambda: ctx.float32(ctx.normal("weight", m, hidden) + 1))
    image = torch.arange(rows) % 2 == 1

    def build(index: torch.Tensor) -> Args:
        args = (ctx.activation(streams()[index]), ctx.activation(kv()[index]), weight())
        return (*args, ctx.put(image[index])) if images else args

    return by_rows(name, rows, build, slow, 6.0 * rows * m * hidden)


def inject_samples(ctx: SampleContext) -> Iterator[Sample]:
    for rows in (1, 0, 19):
        yield inject(ctx, rows)
    yield inject(ctx, 6, images=True)
    yield inject(ctx, 12, extreme=True)
    yield inject(ctx, 257, slow=True)


def inject_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    t = ctx.traits

    def args(vectors: int, width: int) -> Args:
        shape = (3, vectors, t.hidden_size)
        weight = ctx.float32(ctx.normal("w", t.hc_mult, width))
        return (
            ctx.activation(ctx.normal("x", 3, t.hc_mult, t.hidden_size)),
            ctx.activation(ctx.normal("kv", *shape)),
            weight,
        )

    yield ErrorSample("a key too few", lambda: args(t.hc_mult, t.hidden_size))
    yield ErrorSample("weight of another width", lambda: args(t.hc_mult + 1, t.hidden_size // 2))


INFOS = (
    OpInfo("engram.ngrams", ngram_samples, ngram_errors,
           rows_and_seeds(lambda ctx, rows: ngrams(ctx, [(rows // 3, rows + 1), (0, 2), (rows, 1)], rows % 2 == 1))),
    OpInfo("engram.hash", hash_samples, hash_errors, rows_and_seeds(hash_rows)),
    OpInfo("engram.prepare_table", prepare_samples, observe=read_table, opaque=True,
           properties=frozenset({REPEATABLE}), judges={"out": exactly}),
    OpInfo("engram.fetch", fetch_samples, strategy=rows_and_seeds(fetch), judges={"out": exactly}),
    OpInfo("engram.inject", inject_samples, inject_errors, rows_and_seeds(inject)),
)  # fmt: skip
