"""`--dump-op NAME[:n]`: stores the operands and results of one call of a bound op, for `deepinfer replay`.

A `CallDumper` is a wrapper of bound calls (`hooks.trace.Wrapper`): hand it to whoever binds the ops. It stores the
n-th call, or without n the first that fails: that raises, or returns a NaN. Two files are written: numbers in
`<op>-call<n>.safetensors`, everything else in `<op>-call<n>.json`. The n-th call's operands are written before it
runs, so that they survive a kernel that takes the process down.

Prepared weights are stored as the checkpoint's weights that they were made of, and prepared again by whoever replays;
a step's `plan` is made anew for the same reason. A cache in a private layout is stored twice, as it is and as its reads
show it. All this keeps the record readable for core's reference.
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deepinfer.errors import ConfigError
from deepinfer.hooks import CANONICAL, Binding, KVCache, OpContext, OpTable, StepInputs, Weight
from deepinfer.hooks.ops import contracts
from deepinfer.testing.cache_view import CacheView
from deepinfer.testing.codec import CodecError, Encoder, Json, state_of

logger = logging.getLogger("deepinfer.testing")

FORMAT = 1
"""Version of the files' layout."""

PREPARING = ("gemm.prepare_weight", "gemm.prepare_expert_weight", "engram.prepare_table")
"""Ops that turn a checkpoint's weight into what others read."""

ALLOCATING = "cache.allocate"
"""The op whose layout is that of every cache of its table."""


@dataclass(frozen=True, slots=True)
class Target:
    """Which call to store. call counts from 1; None: the first that fails."""

    op: str
    call: int | None

    @classmethod
    def parse(cls, text: str) -> Target:
        """`NAME` or `NAME:n`; ConfigError with the nearest name for an op that does not exist."""
        name, colon, number = text.partition(":")
        known = [spec.name for contract in contracts() for spec in contract.op_specs.values()]
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else " `deepinfer ops` lists them."
            raise ConfigError(f"--dump-op {text!r}: there is no op {name!r}.{hint}")
        if colon and not (number.isdecimal() and int(number) > 0):
            raise ConfigError(f"--dump-op {text!r}: expected NAME or NAME:n with n = 1, 2, ...")
        return cls(name, int(number) if colon else None)


Wanted = Callable[["Record", Any], bool]
"""Whether a call, with its result, is one to store."""


class CallDumper:
    """Stores one call of one op. `written` is the JSON file, None until there is one.

    wanted  decides about calls that are not named by number; None: those that return a NaN
    """

    def __init__(self, target: str | Target, directory: str | Path, wanted: Wanted | None = None) -> None:
        self.target = Target.parse(target) if isinstance(target, str) else target
        self.directory = Path(directory)
        self._wanted = wanted or (lambda record, result: has_nan(result))
        self._busy = False
        self.written: Path | None = None
        self.calls = 0
        self._prepared: dict[int, tuple[object, str, Weight]] = {}
        self._encoder = Encoder()
        self._ops: OpTable | None = None
        self._device = torch.device("cpu")

    def outcome(self) -> str:
        """What came of it, in words."""
        if self.written is not None:
            return f"stored in {self.written}"
        if self.target.call is None:
            return f"none of {self.calls} calls failed, nothing is stored; {self.target.op}:1 would store the first"
        return f"there were {self.calls} calls, nothing is stored"

    def wrap(self, binding: Binding, function: Callable[..., Any]) -> Callable[..., Any]:
        """Called by the binder for every op."""
        name = binding.spec.name
        if name in PREPARING:
            function = self._remembering(name, function)
        return self._watching(binding, function) if name == self.target.op else function

    def _remembering(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def prepare(weight: Weight) -> object:
            result = function(weight)
            self._prepared[id(result)] = (result, name, weight)  # `result` stays alive, so its id stays its own
            return result

        return prepare

    def _watching(self, binding: Binding, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*operands: Any, **named: Any) -> Any:
            if self._busy:  # reading a cache's contents goes through the ops of the same table
                return function(*operands, **named)
            self.calls += 1
            if self.written is not None or self.target.call not in (None, self.calls):
                return function(*operands, **named)
            record = self._begin(binding, operands, named)
            if record is None:
                return function(*operands, **named)
            return self._run(record, function, operands, named)

        return call

    def _begin(self, binding: Binding, operands: tuple[Any, ...], named: dict[str, Any]) -> Record | None:
        try:
            with self._looking():
                record = Record(self, binding, operands, named)
        except CodecError as error:
            logger.warning("--dump-op %s: call %d is not stored: %s", self.target.op, self.calls, error)
            return None
        if self.target.call is not None:
            record.write()
        return record

    def _run(self, record: Record, function: Callable[..., Any], operands: Any, named: Any) -> Any:
        try:
            result = function(*operands, **named)
        except Exception as error:
            record.error = f"{type(error).__name__}: {error}"
            self.written = record.write()
            raise
        with self._looking():
            if self._keeps(record, result, (operands, named)):
                self.written = record.write()
        return result

    def _keeps(self, record: Record, result: Any, operands: tuple[Any, Any]) -> bool:
        try:
            record.add_result(result, operands)
        except CodecError as error:
            logger.warning("--dump-op %s: the result is not stored: %s", self.target.op, error)
        return self.target.call is not None or self._wanted(record, result)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def stand_in(self, value: object) -> Json | None:
        """How values that only one provider can read are stored."""
        prepared = self._prepared.get(id(value))
        if prepared is not None:
            _, op, weight = prepared
            return {"kind": "prepared", "op": op, "weight": self._encoder.by_parts(weight)}
        if isinstance(value, StepInputs) and (value.scratch or value.plan is not None):
            bare = replace(value, scratch={}, plan=None)
            return {"kind": "step", "planned": value.plan is not None, "step": self._encoder.by_parts(bare)}
        if isinstance(value, KVCache) and self._ops is not None and self._ops.binding(ALLOCATING).layout != CANONICAL:
            view = CacheView.read(self._ops, value, self._device)
            return {"kind": "cache", "own": self._encoder.by_parts(value), "view": self._encoder.encode(view)}
        return None

    def encoder(self, binding: Binding) -> Encoder:
        """A fresh encoder for operands of a bound op; it knows what was prepared so far."""
        group = binding.function.__self__  # type: ignore[attr-defined]  # bound methods of op groups only
        self._ops, self._device = group.ops, group.context.device
        self._encoder = Encoder(self.stand_in)
        return self._encoder


class Record:
    """One call on its way to the files."""

    def __init__(self, dumper: CallDumper, binding: Binding, operands: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.error: str | None = None
        self._dumper, self._binding, self._call = dumper, binding, dumper.calls
        encoder = dumper.encoder(binding)
        self._before = {"operands": encoder.encode(operands), "named": encoder.encode(named)}
        self._after: dict[str, Json] = {}
        self._tensors, self._starts = encoder.finish()
        self._context = _context_of(binding)

    def add_result(self, result: Any, operands: tuple[Any, Any]) -> None:
        """Store the result and the operands as the call left them; memory that did not change is not stored twice."""
        encoder = self._dumper.encoder(self._binding)
        after = encoder.encode(operands)  # first, so that memory gets the names it had before the call
        forms = {"operands_after": after, "result": encoder.encode(result)}
        tensors, starts = encoder.finish()
        same = {key: key for key in tensors if self._is_known(key, tensors[key], starts[key])}
        names = {key: same.get(key, f"after_{key}") for key in tensors}
        self._tensors |= {names[key]: tensor for key, tensor in tensors.items() if key not in same}
        self._starts |= {names[key]: start for key, start in starts.items() if key not in same}
        self._after = {name: _renamed(form, names) for name, form in forms.items()}

    def _is_known(self, key: str, tensor: torch.Tensor, start: int) -> bool:
        known = self._tensors.get(key)
        return known is not None and self._starts[key] == start and torch.equal(known, tensor)

    @property
    def path(self) -> Path:
        """The JSON file."""
        return self._dumper.directory / f"{self._binding.spec.name}-call{self._call}.json"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What goes into the other file."""
        return self._tensors

    def head(self) -> dict[str, Json]:
        """What goes into the JSON file."""
        spec, provider, encoder = self._binding.spec, self._binding.provider, Encoder()
        return {
            "format": FORMAT,
            "op": spec.name,
            "version": spec.version,
            "call": self._call,
            "provider": provider.name,
            "distribution": provider.distribution,
            "distribution_version": provider.version,
            "implementation": self._binding.implementation,
            "layout": self._binding.layout,
            "device": str(self._context.device),
            "numerics": encoder.encode(self._context.numerics),
            "traits": encoder.encode(self._context.traits),
            "error": self.error,
            **self._before,
            **self._after,
            "starts": self._starts,
        }

    def write(self) -> Path:
        """Write both files; returns the JSON one."""
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(self._tensors, path.with_suffix(".safetensors"))
        path.write_text(json.dumps(self.head(), indent=1) + "\n", encoding="utf-8")
        return path


def _context_of(binding: Binding) -> OpContext:
    return binding.function.__self__.context  # type: ignore[attr-defined]  # bound methods of op groups only


def _renamed(form: Json, names: dict[str, str]) -> Json:
    """A JSON form with other names of memory."""
    if isinstance(form, list):
        return [_renamed(item, names) for item in form]
    if not isinstance(form, dict):
        return form
    renamed = {key: _renamed(value, names) for key, value in form.items()}
    if form.get("kind") == "tensor":
        renamed["memory"] = names[form["memory"]]
    return renamed


def has_nan(value: Any) -> bool:
    """Whether a result holds a NaN anywhere."""
    return any(bool(torch.isnan(t.float()).any()) for t in tensors_in(value) if t.is_floating_point())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a nest of lists, tuples, dicts and objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    else:
        for part in (state_of(value) or {}).values():
            yield from tensors_in(part)
