"""Runs a stored call of an op again: on a provider, and on core's reference, and says how the results differ.

Reads what `capture.py` wrote. Weights are prepared, steps are planned again by whoever runs the op, so that a call
recorded on one provider can be replayed on another. Behind `deepinfer replay`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from deepinfer.environ import Settings
from deepinfer.errors import ConfigError
from deepinfer.hooks import CANONICAL, KVCache, LoadedBackend, OpContext, OpTable, QuantTensor, open_backend
from deepinfer.hooks.bind import bind
from deepinfer.hooks.build import contributions
from deepinfer.hooks.table import REFERENCE
from deepinfer.testing import compare, yardstick
from deepinfer.testing.cache_view import CacheView
from deepinfer.testing.capture import FORMAT, Record
from deepinfer.testing.codec import CodecError, Decoder, Json
from deepinfer.testing.compare import Verdict
from deepinfer.testing.opinfo.tree import dense, same_bits, values

CORE_PACKAGE = "deepinfer"


@dataclass(frozen=True)
class StoredCall:
    """A call as it was recorded. head: the JSON file; tensors: bytes by name of memory."""

    path: Path
    head: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, path: str | Path) -> StoredCall:
        """Read either of the two files of a call. ConfigError if it is none, or of another version of the layout."""
        path = Path(path).with_suffix(".json")
        try:
            head = json.loads(path.read_text(encoding="utf-8"))
            found = head["format"]
            tensors = load_file(path.with_suffix(".safetensors"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: is no call that --dump-op stored ({type(error).__name__}: {error})") from None
        if found != FORMAT:
            raise ConfigError(f"{path}: layout {found}, this version reads {FORMAT}; store the call again")
        return cls(path, head, tensors)

    @classmethod
    def of(cls, record: Record) -> StoredCall:
        """A call that is being recorded in this process."""
        return cls(record.path, json.loads(json.dumps(record.head())), record.tensors)

    @property
    def op(self) -> str:
        """Name of the op."""
        return self.head["op"]

    @property
    def provider(self) -> str:
        """Name of the provider that served the recorded call."""
        return self.head["provider"]

    def operands(self, ops: OpTable, context: OpContext, packages: frozenset[str]) -> tuple[list[Any], dict[str, Any]]:
        """Fresh operands for an op table: positional and named ones. CodecError if they are not for its provider."""
        decode = self._decoder(ops, context, packages).decode
        return list(decode(self.head["operands"])), decode(self.head["named"])

    def result(self, ops: OpTable, context: OpContext, packages: frozenset[str]) -> Any:
        """The recorded result and the operands after the call; None if the call raised or its result was not stored."""
        if "result" not in self.head:
            return None
        decode = self._decoder(ops, context, packages).decode
        return decode(self.head["result"]), decode(self.head["operands_after"])

    def _decoder(self, ops: OpTable, context: OpContext, packages: frozenset[str]) -> Decoder:
        on_host = torch.device(self.head["device"]).type == "cpu"

        def stand_in(kind: str, form: Json) -> Any:
            if kind == "prepared":
                group, _, method = form["op"].partition(".")
                return getattr(getattr(ops, group), method)(decoder.decode(form["weight"]))
            if kind == "step":
                step = decoder.decode(form["step"])
                return replace(step, plan=ops.attention.plan(step)) if form["planned"] else step
            if kind == "cache":
                return _own_or_view(decoder, form, context)
            raise CodecError(f"{self.path}: holds something of kind {kind!r}, which this version cannot read")

        decoder = Decoder(self.tensors, self.head["starts"], context.device, packages, stand_in, on_host)
        return decoder

    def context(self, device: torch.device, settings: Settings) -> OpContext:
        """What the op was bound with, on another device."""
        decoder = Decoder({}, {}, device, frozenset({CORE_PACKAGE}), lambda kind, form: None, True)
        numerics, traits = decoder.decode(self.head["numerics"]), decoder.decode(self.head["traits"])
        return OpContext(device, numerics, traits, settings)


def _own_or_view(decoder: Decoder, form: Json, context: OpContext) -> Any:
    """A cache in the layout of the provider that recorded it; for whoever does not know that, in core's."""
    try:
        return decoder.decode(form["own"])
    except CodecError:
        return decoder.decode(form["view"]).restore(context)


@dataclass(frozen=True)
class Outcome:
    """What one table made of the call: the result's leaves by name, or the error it raised."""

    leaves: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True)
class Replay:
    """Outcomes of a replayed call.

    recorded  the stored result, None if there is none that this provider can read
    found     on the provider;  working, ideal: on the reference, in the model's dtypes and in float64
    """

    call: StoredCall
    provider: str
    recorded: Outcome | None
    found: Outcome
    working: Outcome
    ideal: Outcome

    def verdicts(self) -> dict[str, Verdict]:
        """{leaf: whether the provider's is right}."""
        if self.found.error or self.working.error:
            same = bool(self.found.error) == bool(self.working.error)
            who = f"{self.provider} {self.found.error or 'raised nothing'}, reference {self.working.error or 'did not'}"
            return {"outcome": Verdict(same, who)}
        return {name: self._verdict(name) for name in dict.fromkeys((*self.working.leaves, *self.found.leaves))}

    def _verdict(self, name: str) -> Verdict:
        if name not in self.found.leaves or name not in self.working.leaves:
            return Verdict(False, "is in one of the results only")
        found, working = self.found.leaves[name], self.working.leaves[name]
        if not isinstance(working, torch.Tensor) or not isinstance(found, torch.Tensor):
            return Verdict(found == working, "" if found == working else f"{found!r}, expected {working!r}")
        if name.startswith(f"{CACHE}."):
            return compare.equal_but_ties(found, working)
        if not working.is_floating_point():
            return compare.equal(found, working)
        return compare.close(found, working, self.ideal.leaves.get(name, working))

    @property
    def ok(self) -> bool:
        """Whether the provider's result is right."""
        return all(verdict.ok for verdict in self.verdicts().values())

    def repeated(self) -> str:
        """How the provider's result compares with the recorded one, as the end of a sentence."""
        if self.recorded is None:
            return ""
        pairs = [(name, leaf, self.found.leaves.get(name)) for name, leaf in self.recorded.leaves.items()]
        differing = [name for name, a, b in pairs if not _same(a, b)]
        return f"; differs from the record in {some(differing)}" if differing else "; equal to the record, bit for bit"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return type(a) is type(b) and a == b


def replay(path: str | Path, provider: str | None = None, loaded: LoadedBackend | None = None) -> Replay:
    """Run a stored call again.

    provider  who runs it: a backend or an op pack; None: who served the recorded call. "reference": nobody, the
              recorded result itself is held against the reference
    loaded    the opened backend; None opens the one named like the provider
    """
    call, settings = StoredCall.read(path), Settings.load()
    provider = provider or call.provider
    if provider == REFERENCE:
        return judge_recorded(call, loaded)
    core, side = _reference(call, settings), _side(call, provider, settings, loaded)
    return Replay(call, provider, side.recorded(call), side.run(call), core.run(call), _ideal(call, core))


def judge_recorded(call: StoredCall, loaded: LoadedBackend | None = None) -> Replay:
    """The recorded result of a call, held against the reference. loaded: the backend whose classes it may hold."""
    settings = Settings()
    core = _reference(call, settings)
    side = core if loaded is None else _side(call, call.provider, settings, loaded)
    error = call.head["error"]
    recorded = Outcome({}, f"raised {error}") if error else side.recorded(call)
    found = recorded or Outcome({}, "has no result that can be read here")
    return Replay(call, "the record", None, found, core.run(call), _ideal(call, core))


@dataclass(frozen=True)
class _Side:
    """A table and what it was bound with. packages: whose classes it knows; widens: activations become float64."""

    ops: OpTable
    context: OpContext
    packages: frozenset[str]
    widens: bool = False

    def run(self, call: StoredCall) -> Outcome:
        """Call the op on fresh operands; operands that the op cannot take are an error of its own."""
        try:
            self._check_layout(call)
            operands, named = call.operands(self.ops, self.context, self.packages)
            if self.widens:
                operands = [_widened(operand) for operand in operands]
            with torch.no_grad():
                group, _, method = call.op.partition(".")
                result = getattr(getattr(self.ops, group), method)(*operands, **named)
                self.ops.runtime.synchronize()
            return self._outcome(call, result, [*operands, *named.values()])
        except CodecError as error:
            return Outcome({}, f"cannot take the operands: {error}")
        except Exception as error:
            return Outcome({}, f"raised {type(error).__name__}: {error}")

    def _check_layout(self, call: StoredCall) -> None:
        """Caches are stored in the layout of whoever recorded them, and in core's."""
        binding, recorded = self.ops.binding(call.op), call.head["layout"]
        if "kv_cache" in binding.spec.layouts and binding.layout not in (None, CANONICAL, recorded):
            raise CodecError(f"{binding.provider.name} works on layout {binding.layout}, the record on {recorded}")

    def recorded(self, call: StoredCall) -> Outcome | None:
        """The stored result, if it is of classes that this side knows."""
        try:
            stored = call.result(self.ops, self.context, self.packages)
        except CodecError:
            return None
        if stored is None:
            return None
        result, (operands, named) = stored
        return self._outcome(call, result, [*operands, *named.values()])

    def _outcome(self, call: StoredCall, result: Any, operands: Sequence[Any]) -> Outcome:
        """Leaves of a result, and what the ops that write caches left in them."""
        shown = {} if result is None else {"result": result}
        if self.ops.binding(call.op).spec.group == "cache":
            for cache in (operand for operand in operands if isinstance(operand, KVCache)):
                shown[CACHE] = _contents(self.ops, cache, self.context.device)
        leaves = {name: dense(leaf) for part, value in shown.items() for name, leaf in values(value, part)}
        return Outcome({n: x.detach().cpu() if isinstance(x, torch.Tensor) else x for n, x in leaves.items()})


CACHE = "cache"
"""Name of the part of an outcome that holds the contents of a cache."""


def _contents(ops: OpTable, cache: KVCache, device: torch.device) -> dict[str, dict[int, torch.Tensor]]:
    view = CacheView.read(ops, cache, device)
    return {"windows": view.windows, "entries": view.entries, "index": view.index}


def _side(call: StoredCall, provider: str, settings: Settings, loaded: LoadedBackend | None) -> _Side:
    loaded = loaded or _open(call, provider, settings)
    context = call.context(loaded.device(), settings)
    ops = bind(contributions(loaded), context, (f"{call.op}={provider}",))
    ops.runtime.select(0)
    groups = {type(binding.function.__self__) for binding in ops.bindings}  # type: ignore[attr-defined]
    packages = {base.__module__.partition(".")[0] for group in groups for base in group.__mro__}
    return _Side(ops, context, frozenset({CORE_PACKAGE, *packages}))


def _open(call: StoredCall, provider: str, settings: Settings) -> LoadedBackend:
    """The backend of that name, or the op pack on top of the backend that the settings select."""
    from deepinfer.hooks import discover

    packs = {entry.name for entry in discover.installed(discover.OP_PACKS)}
    if provider in packs:
        return open_backend(None, op_packs=(provider,), settings=settings)
    return open_backend(provider, settings=settings)


def _reference(call: StoredCall, settings: Settings) -> _Side:
    context = call.context(torch.device("cpu"), settings)
    return _Side(yardstick.working_table(context), yardstick.working_context(context), frozenset({CORE_PACKAGE}))


def _ideal(call: StoredCall, core: _Side) -> Outcome:
    """The float64 run: activations among the operands become float64."""
    ops, context = yardstick.ideal_table(core.context), yardstick.ideal_context(core.context)
    return _Side(ops, context, core.packages, widens=True).run(call)


def _widened(operand: Any) -> Any:
    if isinstance(operand, torch.Tensor):
        return operand.double() if operand.is_floating_point() and operand.element_size() > 1 else operand
    return replace(operand, values=operand.values.double()) if type(operand) is QuantTensor else operand


def some(names: Sequence[str], count: int = 6) -> str:
    """The first names of a list, and how many more there are."""
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")
