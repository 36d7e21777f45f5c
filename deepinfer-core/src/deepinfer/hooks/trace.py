"""Wrappers around bound ops, put on when the table is made: counts, times and shapes as JSON lines.

With tracing off nothing is wrapped and nothing costs. `bind.py` applies a list of `Wrapper`s, innermost first;
`Tracer` is one, and whatever else wants to see calls (dumping operands, checking canaries) is another.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from deepinfer.hooks.table import Binding

MODES = ("count", "time", "shapes")


class Wrapper(Protocol):
    """Something that sees the calls of bound ops."""

    def wrap(self, binding: Binding, function: Callable[..., Any]) -> Callable[..., Any]:
        """The callable that takes the place of `function`, or `function` itself to leave an op alone."""
        ...


@dataclass(slots=True)
class _Totals:
    calls: int = 0
    ns: int = 0
    own_ns: int = 0


class Tracer:
    """Adds up the calls of every bound op.

    count   calls
    time    also nanoseconds from call to return; `own_ns` leaves out ops called inside. On a device that works
            asynchronously the tracer waits for it before and after each call: times are true, the run is slower.
    shapes  also shapes and dtypes of tensor operands, one record for each combination

    An op with an operand `layer` sets the layer of its record and of the ops called inside. Made for the one thread
    that runs the model.
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"trace mode {mode!r}, allowed: {', '.join(MODES)}")
        self.mode = mode
        self._wait: Callable[[], Any] | None = None
        self._totals: dict[tuple[Any, ...], _Totals] = {}
        self._layer: int | None = None
        self._inner_ns = 0

    def wrap(self, binding: Binding, function: Callable[..., Any]) -> Callable[..., Any]:
        if binding.spec.name == "runtime.synchronize":
            self._wait = function
        names = tuple(inspect.signature(function).parameters)
        traced = _Traced(self, binding.spec.name, binding.provider.name, names, function)
        return traced.count if self.mode == "count" else traced.time

    def records(self) -> list[dict[str, Any]]:
        """One dict a combination of op, provider, layer (and operand shapes), in order of first call.

        Keys: op, provider, layer, calls, ns, own_ns, shapes, dtypes; what the mode does not measure is None.
        """
        timed = self.mode != "count"
        return [
            {
                "op": op,
                "provider": provider,
                "layer": layer,
                "calls": totals.calls,
                "ns": totals.ns if timed else None,
                "own_ns": totals.own_ns if timed else None,
                "shapes": None if operands is None else {name: list(shape) for name, shape, _ in operands},
                "dtypes": None if operands is None else {name: dtype for name, _, dtype in operands},
            }
            for (op, provider, layer, operands), totals in self._totals.items()
        ]

    def write(self, target: str | Path | TextIO) -> None:
        """The records as JSON lines, to a file or an open stream."""
        text = "".join(json.dumps(record) + "\n" for record in self.records())
        if isinstance(target, (str, Path)):
            Path(target).write_text(text, encoding="utf-8")
        else:
            target.write(text)


@dataclass(frozen=True, slots=True)
class _Traced:
    """The wrapper of one op. names: the op's operands in order."""

    tracer: Tracer
    op: str
    provider: str
    names: tuple[str, ...]
    function: Callable[..., Any]

    def count(self, *args: Any, **kwargs: Any) -> Any:
        tracer, outer = self.tracer, self._enter(args, kwargs)
        try:
            self._totals(None).calls += 1
            return self.function(*args, **kwargs)
        finally:
            tracer._layer = outer

    def time(self, *args: Any, **kwargs: Any) -> Any:
        tracer, outer = self.tracer, self._enter(args, kwargs)
        totals = self._totals(self._operands(args, kwargs) if tracer.mode == "shapes" else None)
        before, tracer._inner_ns = tracer._inner_ns, 0
        self._settle()
        start = time.perf_counter_ns()
        try:
            result = self.function(*args, **kwargs)
            self._settle()
            return result
        finally:
            spent = time.perf_counter_ns() - start
            totals.calls += 1
            totals.ns += spent
            totals.own_ns += spent - tracer._inner_ns
            tracer._inner_ns = before + spent
            tracer._layer = outer

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Set the current layer from an operand `layer`; returns the layer to restore afterwards."""
        outer = self.tracer._layer
        if "layer" in self.names:
            layer = dict(zip(self.names, args, strict=False)).get("layer", kwargs.get("layer"))
            if isinstance(layer, int):
                self.tracer._layer = layer
        return outer

    def _settle(self) -> None:
        """Wait for the device, so that time is charged to the op that used it."""
        if self.tracer._wait is not None and not self.op.startswith("runtime."):
            self.tracer._wait()

    def _totals(self, operands: tuple[Any, ...] | None) -> _Totals:
        key = (self.op, self.provider, self.tracer._layer, operands)
        return self.tracer._totals.setdefault(key, _Totals())

    def _operands(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """(name, shape, dtype) of every tensor among the operands."""
        named = [*zip(self.names, args, strict=False), *kwargs.items()]
        return tuple(found for name, value in named for found in _tensors(name, value))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Shape and dtype of a tensor, or of the tensors in a `Weight`, a `QuantTensor`, a list or a tuple."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        yield name, tuple(value.shape), str(value.dtype).removeprefix("torch.")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tensors(f"{name}[{i}]", item)
    else:
        for attribute in ("values", "scales"):
            part = getattr(value, attribute, None)
            if part is not None and not callable(part):
                yield from _tensors(f"{name}.{attribute}", part)
