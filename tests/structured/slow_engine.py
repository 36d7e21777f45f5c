"""A grammar engine for tests of compiling: a spec says how it goes. "sleep SECONDS", "die", "wrong", or any text."""

from __future__ import annotations

import os
import time

import numpy as np

from deepinfer.errors import StructuredOutputError


class State:
    """One text: nothing but the end may come."""

    is_complete, is_terminated = True, False

    def fill_mask(self, row: np.ndarray) -> None:
        row[:] = 0
        row[0] = 2  # the end token, id 1


class Text:
    """A compiled grammar of `num_bytes` bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.num_bytes = data, len(data)

    def start(self) -> State:
        return State()


class Compiler:
    def __init__(self, vocabulary: object) -> None:
        self.vocabulary = vocabulary

    def require(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def compile(self, spec) -> bytes:
        word, _, number = spec.source.partition(" ")
        if word == "sleep":
            time.sleep(float(number))
        elif word == "die":
            os._exit(3)
        elif word == "wrong":
            raise StructuredOutputError("so_args['schema']: wrong as asked for")
        return f"{spec.source} in {os.getpid()}".encode()

    def load(self, data: bytes) -> Text:
        return Text(data)
