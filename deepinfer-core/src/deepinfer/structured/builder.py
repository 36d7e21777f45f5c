"""`GrammarBuilder`: grammars for requests, compiled beside the step loop.

The engine asks for a grammar with `submit` and looks at the ticket it gets between steps; nothing here makes it wait. A
few threads, each with a `CompileProcess`, work through what is asked; equal asks share one compilation, finished
grammars are kept, least recently used first to go. A grammar is ready once it has been loaded and a first token is
possible in it. Knows no request.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deepinfer.environ import Settings
from deepinfer.errors import StructuredOutputError
from deepinfer.structured.grammar import Grammar, GrammarCompiler, GrammarSpec, find_compiler
from deepinfer.structured.process import CompileProcess
from deepinfer.structured.vocabulary import Vocabulary

logger = logging.getLogger("deepinfer.structured")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a grammar may cost.

    seconds     to compile
    num_bytes   length of its source
    depth       brackets within brackets in its source
    cache_bytes finished grammars that are kept, 0 = none
    processes   that compile at the same time
    """

    seconds: float
    num_bytes: int
    depth: int
    cache_bytes: int
    processes: int

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """From the settings; a cache that keeps nothing is a warning."""
        cached = settings.xgrammar_cache_limit_bytes
        if cached <= 0 and not settings.xgrammar_disable_cache:
            logger.warning(
                "DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES=%d: no compiled grammar is kept, every request compiles its own; "
                "say so with DEEPINFER_XGRAMMAR_DISABLE_CACHE=1, or give a size",
                cached,
            )
        return cls(
            seconds=settings.xgrammar_timeout,
            num_bytes=settings.so_max_schema_bytes,
            depth=settings.so_max_schema_depth,
            cache_bytes=0 if settings.xgrammar_disable_cache else max(0, cached),
            processes=min(settings.so_builder_cpus, os.cpu_count() or 1),
        )


class Ticket:
    """One ask. Once `done`, either `grammar` or `error` is set."""

    __slots__ = ("_job", "error", "grammar")

    def __init__(self, job: _Job | None = None, grammar: Grammar | None = None) -> None:
        self._job = job
        self.grammar = grammar
        self.error: StructuredOutputError | None = None

    @property
    def done(self) -> bool:
        """True once there is an answer."""
        return self.grammar is not None or self.error is not None


class _Job:
    """One compilation and the tickets that wait for it."""

    __slots__ = ("process", "spec", "tickets")

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.tickets: list[Ticket] = []
        self.process: CompileProcess | None = None


class GrammarBuilder:
    """Grammars for one engine.

    vocabulary  made when the first grammar is asked for
    engine      name of the grammar engine, see `grammar.find_compiler`
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: Limits, engine: str = "xgrammar") -> None:
        self._make_vocabulary, self._limits, self._engine = vocabulary, limits, engine
        self._factory = find_compiler(engine)
        self._compiler: GrammarCompiler | None = None
        self._vocabulary: Vocabulary | None = None
        self._cache = GrammarCache(limits.cache_bytes)
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._jobs: dict[GrammarSpec, _Job] = {}
        self._threads: list[threading.Thread] = []
        self._processes: list[CompileProcess] = []
        self._num_idle = 0
        self._closed = False

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens the grammars are for."""
        with self._changed:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def submit(self, spec: GrammarSpec) -> Ticket:
        """Ask for a grammar. Raises StructuredOutputError for what can be refused at once."""
        check_size(spec, self._limits)
        self._opened().require()
        with self._changed:
            if (grammar := self._cache.get(spec)) is not None:
                return Ticket(grammar=grammar)
            job = self._jobs.get(spec)
            if job is None:
                job = self._jobs[spec] = _Job(spec)
                self._queue.append(job)
                self._employ()
            ticket = Ticket(job)
            job.tickets.append(ticket)
            return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this ticket any more. A compilation that nobody else waits for ends at once."""
        with self._changed:  # also around the kill: until the job is settled its process works on nothing else
            job, ticket._job = ticket._job, None
            if job is None or ticket not in job.tickets:
                return
            job.tickets.remove(ticket)
            if not job.tickets:
                self._forget(job)
                if job.process is not None:
                    job.process.kill()

    def wait(self, seconds: float) -> None:
        """Until some ticket is done, at most so long. Between the look at the tickets and this call one may be done
        already, so `seconds` should be short."""
        with self._changed:
            self._changed.wait(seconds)

    def close(self) -> None:
        """Kill all processes and end all threads; every ticket gets an error. Idempotent."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            for job in list(self._jobs.values()):
                self._settle(job, None, StructuredOutputError("the engine is closed"))
            self._cache.clear()
            self._changed.notify_all()
        for process in self._processes:
            process.close()
        for thread in self._threads:
            thread.join()

    @property
    def pids(self) -> list[int]:
        """The processes that live now."""
        return [pid for process in self._processes if (pid := process.pid) is not None]

    def _opened(self) -> GrammarCompiler:
        vocabulary = self.vocabulary
        with self._changed:
            if self._compiler is None:
                self._compiler = self._factory(vocabulary)
            return self._compiler

    # --- the threads -------------------------------------------------------------------------------------------------

    def _employ(self) -> None:
        """One more thread if none is free for the queue and there may be more. Under the lock."""
        if self._closed or self._num_idle >= len(self._queue) or len(self._threads) >= self._limits.processes:
            self._changed.notify_all()
            return
        assert self._vocabulary is not None
        process = CompileProcess(self._engine, self._vocabulary)
        self._processes.append(process)
        name = f"deepinfer-grammar-{len(self._threads)}"
        thread = threading.Thread(target=self._work, args=(process,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, process: CompileProcess) -> None:
        while (job := self._next(process)) is not None:
            try:
                grammar = self._build(job.spec, process)
            except StructuredOutputError as error:
                self._finish(job, None, error)
            except Exception as error:
                logger.warning("compiling a grammar failed", exc_info=True)
                self._finish(job, None, StructuredOutputError(f"so_args: {type(error).__name__}: {error}"))
            else:
                self._finish(job, grammar, None)
        process.reap()

    def _next(self, process: CompileProcess) -> _Job | None:
        """The next job, None when it is time to end."""
        with self._changed:
            self._num_idle += 1
            while not self._queue and not self._closed:
                self._changed.wait()
            self._num_idle -= 1
            if self._closed:
                return None
            job = self._queue.popleft()
            job.process = process
            return job

    def _build(self, spec: GrammarSpec, process: CompileProcess) -> Grammar:
        data = process.compile(spec, self._limits.seconds)
        grammar = self._opened().load(data)
        self._check_first(grammar)
        return grammar

    def _check_first(self, grammar: Grammar) -> None:
        """A grammar must have a text; this sees whether one can begin."""
        first = np.zeros(self.vocabulary.num_words, dtype=np.int32)
        grammar.start().fill_mask(first)
        if not first.any():
            raise StructuredOutputError("so_args['schema'] allows nothing: no token can begin a text of this grammar")

    def _finish(self, job: _Job, grammar: Grammar | None, error: StructuredOutputError | None) -> None:
        with self._changed:
            if grammar is not None and not self._closed:
                self._cache.put(job.spec, grammar)
            self._settle(job, grammar, error)

    def _settle(self, job: _Job, grammar: Grammar | None, error: StructuredOutputError | None) -> None:
        """Answer everyone who waits for a job. Under the lock."""
        for ticket in job.tickets:
            ticket.grammar, ticket.error, ticket._job = grammar, error, None
        job.tickets = []
        self._forget(job)
        self._changed.notify_all()

    def _forget(self, job: _Job) -> None:
        if self._jobs.get(job.spec) is job:
            del self._jobs[job.spec]
        if job in self._queue:
            self._queue.remove(job)


class GrammarCache:
    """Finished grammars up to a number of bytes; the one that was not used for longest goes first."""

    def __init__(self, limit: int) -> None:
        self._limit, self._num_bytes = limit, 0
        self._grammars: OrderedDict[GrammarSpec, tuple[Grammar, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._grammars)

    @property
    def num_bytes(self) -> int:
        """Of all that are kept, with their sources."""
        return self._num_bytes

    def get(self, spec: GrammarSpec) -> Grammar | None:
        """The grammar of a spec, if it is kept."""
        if spec not in self._grammars:
            return None
        self._grammars.move_to_end(spec)
        return self._grammars[spec][0]

    def put(self, spec: GrammarSpec, grammar: Grammar) -> None:
        """Keep a grammar if it fits at all."""
        size = grammar.num_bytes + _source_bytes(spec)
        if size > self._limit or spec in self._grammars:
            return
        self._grammars[spec] = (grammar, size)
        self._num_bytes += size
        while self._num_bytes > self._limit:
            _, (_, size) = self._grammars.popitem(last=False)
            self._num_bytes -= size

    def clear(self) -> None:
        """Keep none."""
        self._grammars.clear()
        self._num_bytes = 0


def check_size(spec: GrammarSpec, limits: Limits) -> None:
    """Refuse sources that are too long or too deep. Raises StructuredOutputError naming found and allowed."""
    size = _source_bytes(spec)
    if size > limits.num_bytes:
        raise StructuredOutputError(
            f"so_args['schema'] has {size} bytes, at most {limits.num_bytes} are allowed "
            "(DEEPINFER_SO_MAX_SCHEMA_BYTES)"
        )
    depth = nesting_depth(spec.source) if isinstance(spec.source, str) else 0
    if depth > limits.depth:
        raise StructuredOutputError(
            f"so_args['schema'] is {depth} brackets deep, at most {limits.depth} are allowed "
            "(DEEPINFER_SO_MAX_SCHEMA_DEPTH)"
        )


def nesting_depth(text: str) -> int:
    """The most brackets of any kind that are open at a place, escaped ones left out. Brackets within quotes count, too:
    an upper bound."""
    depth = deepest = 0
    skip = False
    for character in text:
        if skip:
            skip = False
        elif character == "\\":
            skip = True
        elif character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _source_bytes(spec: GrammarSpec) -> int:
    texts = spec.source if isinstance(spec.source, tuple) else (spec.source or "",)
    return sum(len(text.encode()) for text in texts)
