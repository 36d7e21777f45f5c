"""The process that compiles grammars: `python -m deepinfer.structured.worker FD`.

Started and, if need be, killed by `process.CompileProcess`, with which it shares a socket. It is told the grammar
engine and the vocabulary once, then it answers every `(spec, seconds)` with `("done", bytes)` or `("wrong", message)`.
Whatever a grammar does to it, time without end, all memory, a crash, happens here.
"""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from deepinfer.errors import DeepInferError
from deepinfer.structured.grammar import GrammarCompiler, find_compiler

MEMORY = 4 << 30
"""Bytes that compiling may take beyond what the process has at its start."""

READY = ("ready", "")


def serve(connection: Connection) -> None:
    """Answer until the other side closes."""
    engine, vocabulary = connection.recv()
    compiler = find_compiler(engine)(vocabulary)
    compiler.prepare()
    _limit_memory()
    connection.send(READY)
    while True:
        spec, seconds = connection.recv()
        signal.alarm(math.ceil(seconds) + 5)  # should nobody be left to kill this process
        connection.send(_answer(compiler, spec))
        signal.alarm(0)


def _answer(compiler: GrammarCompiler, spec: Any) -> tuple[str, Any]:
    try:
        return "done", compiler.compile(spec)
    except DeepInferError as error:
        return "wrong", str(error)
    except MemoryError:
        return "wrong", f"so_args['schema']: compiling took more than {MEMORY >> 30} GiB of memory"
    except Exception as error:
        return "wrong", f"so_args['schema'] cannot be compiled: {type(error).__name__}: {error}"


def _limit_memory() -> None:
    """Let allocations fail before the machine suffers, where the system tells how much is in use."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = used + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's business
    with contextlib.suppress(EOFError, OSError):
        serve(Connection(int(sys.argv[1])))
