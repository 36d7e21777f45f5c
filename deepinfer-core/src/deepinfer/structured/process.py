"""`CompileProcess`: the engine's side of a process that compiles grammars, with a limit of time.

A thread of the builder owns one and calls `compile`; any other thread may `kill` it. Uses no multiprocessing start
method, so a user's script is never imported a second time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

from deepinfer.errors import StructuredOutputError
from deepinfer.structured.grammar import GrammarSpec
from deepinfer.structured.vocabulary import Vocabulary

START_SECONDS = 120.0
"""Patience with a process that imports the grammar engine on a busy machine; compiling has its own limit."""


class CompileProcess:
    """At most one process at a time, started when it is needed and again after it has been killed."""

    def __init__(self, engine: str, vocabulary: Vocabulary) -> None:
        self._engine, self._vocabulary = engine, vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._killed = False
        self._closed = False

    def compile(self, spec: GrammarSpec, seconds: float) -> bytes:
        """What the grammar engine made of a spec. StructuredOutputError if it refuses, takes longer than `seconds`
        (its start not counted), dies or is killed."""
        connection = self._ready()
        began = time.monotonic()
        try:
            connection.send((spec, seconds))
            if not connection.poll(seconds):
                self._end()
                raise StructuredOutputError(
                    f"so_args['schema']: compiling took longer than {seconds:g} s (DEEPINFER_XGRAMMAR_TIMEOUT); "
                    "make it simpler"
                )
            outcome, value = connection.recv()
        except (EOFError, OSError):
            raise self._died(f"after {time.monotonic() - began:.1f} s") from None
        if outcome != "done":
            raise StructuredOutputError(value)
        return value

    def kill(self) -> None:
        """End the process at once, whatever it does. From any thread; the owner's next `compile` starts another."""
        with self._lock:
            if self._process is not None:
                self._killed = True
                self._process.kill()

    def close(self) -> None:
        """Kill it and start no other. From any thread; the owner then calls `reap`."""
        with self._lock:
            self._closed = True
        self.kill()

    def reap(self) -> None:
        """Leave nothing behind; the owner's last call."""
        self._end()

    @property
    def pid(self) -> int | None:
        """Of the process, None if there is none."""
        process = self._process
        return None if process is None else process.pid

    def _ready(self) -> Connection:
        """The connection to a process that waits for work."""
        if self._connection is not None and self._lives():
            return self._connection
        self._end()
        connection = self._start()
        try:
            connection.send((self._engine, self._vocabulary))
            if not connection.poll(START_SECONDS):
                self._end()
                raise StructuredOutputError(f"the process that compiles grammars did not start in {START_SECONDS:g} s")
            connection.recv()
        except (EOFError, OSError):
            raise self._died("while it started") from None
        return connection

    def _lives(self) -> bool:
        """Whether the process is there to answer: not killed in its last moments of work, not dead since."""
        with self._lock:
            return not self._killed and self._process is not None and self._process.poll() is None

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs, self._lock:
            if self._closed:
                ours.close()
                raise StructuredOutputError("the engine is closed")
            self._killed = False
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deepinfer.structured.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        return self._connection

    def _end(self) -> int | None:
        """Kill the process and forget it; how it ended, None if there was none."""
        self.kill()
        with self._lock:
            process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        return None if process is None else process.wait()

    def _died(self, when: str) -> StructuredOutputError:
        """The error for a process that has closed its end."""
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process is not None:
                process.wait(timeout=5)
        status = self._end() or 0
        cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return StructuredOutputError(f"so_args['schema']: the process that compiles grammars died {when} ({cause})")
