"""Helpers: a vocabulary of single bytes and a few longer tokens, grammars compiled in this process, random walks, and
an engine over the stub executor whose samples obey the masks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
from stub_executor import StubExecutor, digest, make_config

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import ModelInfo
from deepinfer.errors import StructuredOutputError
from deepinfer.hub.tokenizer import Tokenizer
from deepinfer.runner.executor import LocalExecutor, WorkerThread
from deepinfer.structured.builder import GrammarBuilder, Limits, Ticket, check_size
from deepinfer.structured.grammar import Grammar, GrammarSpec, GrammarState
from deepinfer.structured.vocabulary import Vocabulary
from deepinfer.structured.xgrammar_engine import XGrammarCompiler

TOKENIZER = Tokenizer.byte_level(512)
THINK, END_THINK = TOKENIZER.token_id("<think>"), TOKENIZER.token_id("</think>")
EOS, SECOND_EOS = 1, TOKENIZER.token_id("<｜User｜>")
SIZE = 552
"""Rows of the head: 40 have no token."""
VOCABULARY = Vocabulary(Vocabulary.of(TOKENIZER, SIZE).tokens, (EOS, SECOND_EOS))
COMPILER = XGrammarCompiler(VOCABULARY)
MODEL = ModelInfo(SIZE, VOCABULARY.eos_ids)
LIMITS = Limits(seconds=20, num_bytes=1 << 18, depth=128, cache_bytes=1 << 26, processes=1)


def ids_of(text: str | bytes) -> list[int]:
    """One token a byte."""
    data = text if isinstance(text, bytes) else text.encode()
    return [VOCABULARY.tokens.index(bytes([byte])) for byte in data]


def bytes_of(ids: Sequence[int]) -> bytes:
    return b"".join(VOCABULARY.tokens[token] for token in ids)


def grammar_of(kind: str, source: object, whitespace: str = "bounded") -> Grammar:
    """A grammar compiled here."""
    return COMPILER.load(COMPILER.compile(GrammarSpec(kind, source, whitespace)))


def allowed(state: GrammarState) -> list[int]:
    """Tokens that may come next."""
    row = np.full(VOCABULARY.num_words, -1, dtype=np.int32)
    state.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def matches(grammar: Grammar, text: str | bytes) -> bool:
    """Whether a text is one of the grammar, byte by byte, masks and acceptance agreeing."""
    state = grammar.start()
    for token in ids_of(text):
        possible = token in allowed(state)
        assert state.accept(token) == possible
        if not possible:
            return False
    assert state.is_complete == (EOS in allowed(state))
    return state.is_complete


def walk(grammar: Grammar, source: random.Random, limit: int = 400, stop: float = 0.3) -> bytes | None:
    """A random text of a grammar, None if it did not end within `limit` tokens. Prefers tokens that are seldom
    right."""
    state, ids = grammar.start(), []
    special = set(ids_of('"\\\n\t\0}],'))
    for _ in range(limit):
        options = allowed(state)
        assert options, f"a dead end behind {bytes_of(ids)!r}"
        ends = [token for token in options if token in VOCABULARY.eos_ids]
        assert all(VOCABULARY.tokens[token] for token in options if token not in ends)
        if ends and (len(ends) == len(options) or source.random() < stop):
            assert state.accept(source.choice(ends)) and state.is_terminated
            return bytes_of(ids)
        options = [token for token in options if token not in ends]
        odd = [token for token in options if token in special]
        ids.append(source.choice(odd if odd and source.random() < 0.4 else options))
        assert state.accept(ids[-1])
    return None


class InstantBuilder(GrammarBuilder):
    """Compiles where it is asked, unless it is held: then answers come with `release`."""

    def __init__(self) -> None:
        super().__init__(lambda: VOCABULARY, LIMITS)
        self.held, self.cancelled = False, []
        self._asked: list[tuple[GrammarSpec, Ticket]] = []

    def submit(self, spec: GrammarSpec) -> Ticket:
        check_size(spec, self._limits)
        ticket = Ticket()
        self._asked.append((spec, ticket))
        if not self.held:
            self.release()
        return ticket

    def release(self) -> None:
        for spec, ticket in self._asked:
            try:
                grammar = self._cache.get(spec)
                if grammar is None:
                    grammar = COMPILER.load(COMPILER.compile(spec))
                    self._check_first(grammar)
                    self._cache.put(spec, grammar)
                ticket.grammar = grammar
            except StructuredOutputError as error:
                ticket.error = error
        self._asked.clear()

    def cancel(self, ticket: Ticket) -> None:
        self._asked = [(spec, asked) for spec, asked in self._asked if asked is not ticket]
        self.cancelled.append(ticket)


Preference = Callable[[Sequence[int], Sequence[int]], int | None]
"""(history, possible tokens) -> the token the model wants, None = chance decides"""


class FormExecutor(StubExecutor):
    """A stub with a head of `SIZE` rows and, if given, a preference; drafts are what the model would say next, without
    any mask, with errors."""

    def __init__(self, prefer: Preference | None = None, **arguments: object) -> None:
        arguments = {"num_blocks": 129, "vocab": SIZE, "eos": VOCABULARY.eos_ids, "script": drafts_of} | arguments
        super().__init__(**arguments)
        self.prefer = prefer

    def pick(self, history, stream, banned=(), allowed=None):
        options = range(512) if allowed is None else allowed
        options = [token for token in options if token not in banned]
        wish = None if self.prefer is None else self.prefer(history, options)
        return super().pick(history, stream, banned, options if wish is None else [wish])


def drafts_of(history: list[int], truth: list[int]) -> list[int]:
    """Right and wrong drafts in every pattern; the wrong ones are bytes, special tokens and ends."""
    number = digest(history, 17)
    wrong = [*ids_of('{"a1}'), EOS, THINK]
    return [t if number >> 2 * i & 3 else wrong[(number >> 8) % len(wrong)] for i, t in enumerate(truth)]


def threaded(executor: StubExecutor) -> LocalExecutor:
    """The stub behind a thread, as steps that are launched ahead need it to wait for their masks."""
    runtime = SimpleNamespace(capabilities=lambda: SimpleNamespace(asynchronous=True))
    worker = SimpleNamespace(
        runner=executor,
        run=executor.launch,
        capacity=executor.capacity,
        ops=SimpleNamespace(runtime=runtime),
        close=executor.close,
    )
    return LocalExecutor(worker, WorkerThread())


def form_engine(executor: StubExecutor | None = None, builder: GrammarBuilder | None = None, **arguments) -> Engine:
    """An engine in the current mode of the engine's tests."""
    executor, config = executor or FormExecutor(), make_config(**arguments)
    executor.num_drafts = config.num_draft_tokens
    runs_in = threaded(executor) if config.overlap else executor
    return Engine(config, runs_in, TOKENIZER, MODEL, grammars=builder or InstantBuilder())


def generate(
    engine: Engine, params: Sequence[SamplingParams], prompts: Sequence[list[int]] = ()
) -> list[RequestOutput]:
    """One result a set of parameters, in order; the engine goes on living."""
    prompts = prompts or [[0, 20 + i % 60, 30] for i in range(len(params))]
    llm = LLM.from_engine(engine)
    results = llm.generate(prompt_token_ids=prompts, sampling_params=list(params), use_tqdm=False)
    assert len(results) == len(params)
    return results


def form(kind: str, schema: object = None, *, max_tokens: int = 200, seed: int = 1, **options) -> SamplingParams:
    """Parameters with `so_args`; options that `so_args` knows go there."""
    own = {k: options.pop(k) for k in ("trigger_token_ids", "bound_token_id", "whitespace") if k in options}
    so_args = {"schema_type": kind, "schema": schema, **own}
    return SamplingParams(max_tokens=max_tokens, seq_seed=seed, so_args=so_args, **options)
