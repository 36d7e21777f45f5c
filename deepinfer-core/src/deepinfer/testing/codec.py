"""Stores the operands and results of an op: numbers as safetensors, everything around them as JSON.

Used by `capture.py` and `replay.py`. Handles what crosses a hook: tensors, host arrays, nested dataclasses
(`StepInputs`, `QuantTensor`, `Selection`), caches with their private storage. Memory that several tensors share is
stored once and shared again when read, so that a cache keeps its views. Knows nothing about ops or backends.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from deepinfer.errors import DeepInferError

LIMIT = 8 << 30
"""Most bytes of tensors in one record."""

_ALIGNMENT = 16
"""Byte ranges of shared memory begin at multiples of this, so that any dtype can be placed in them."""


class CodecError(DeepInferError):
    """A value cannot be stored, or not be read here."""


Json = Any
Stand = Callable[[object], Json | None]
"""Gives the JSON form of a value that is stored in another way than by its parts; None for all others."""


@dataclass(slots=True)
class _Memory:
    """Memory that one or more tensors lie in: bytes low .. high of it are used."""

    key: str
    bytes: torch.Tensor
    low: int
    high: int


class Encoder:
    """Collects values, then gives their tensors. Values are copied in `finish`, before which they may not change.

    stand_in  asked first for every value that is no plain number or text
    """

    def __init__(self, stand_in: Stand | None = None) -> None:
        self._stand_in = stand_in or (lambda value: None)
        self._memory: dict[int, _Memory] = {}
        self._alive: list[object] = []

    def encode(self, value: Any) -> Json:
        """The JSON form of a value. Raises CodecError naming what cannot be stored."""
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"kind": "float", "value": str(value)}
        replacement = self._stand_in(value)
        if replacement is not None:
            return replacement
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return {"kind": "array", "tensor": self._tensor(torch.from_numpy(np.ascontiguousarray(value)))}
        if isinstance(value, np.generic):
            return self.encode(value.item())
        return self.by_parts(value)

    def by_parts(self, value: Any) -> Json:
        """`encode` for a compound value, without asking for a stand-in for the value itself."""
        if isinstance(value, (torch.dtype, torch.device)):
            return {"kind": type(value).__name__, "value": str(value).removeprefix("torch.")}
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return {"kind": type(value).__name__, "items": [self.encode(item) for item in value]}
        if isinstance(value, Mapping):
            return {"kind": "dict", "items": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        state = state_of(value)
        if state is None:
            raise CodecError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be stored")
        return {
            "kind": "object",
            "class": f"{type(value).__module__}:{type(value).__qualname__}",
            "fields": {name: self.encode(part) for name, part in state.items()},
        }

    def _tensor(self, tensor: torch.Tensor) -> Json:
        tensor = tensor.detach()
        self._alive.append(tensor)  # a temporary's memory must not be reused while its address is a key
        memory = self._place(tensor)
        size = tensor.element_size()
        return {
            "kind": "tensor",
            "memory": memory.key,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "byte": tensor.storage_offset() * size,
            "host": tensor.device.type == "cpu",
        }

    def _place(self, tensor: torch.Tensor) -> _Memory:
        storage, size = tensor.untyped_storage(), tensor.element_size()
        start = int(tensor.storage_offset()) * size
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (last + 1) * size if tensor.numel() else start
        address = storage.data_ptr()  # 0 for empty memory, of which one is like another
        found = self._memory.get(address)
        if found is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            found = _Memory(f"m{len(self._memory)}", flat, start, end)
            self._memory[address] = found
        found.low, found.high = min(found.low, start), max(found.high, end)
        return found

    def finish(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """({key: bytes on the host}, {key: first byte of the memory that they cover}).

        Raises CodecError if there are more than `LIMIT` of them.
        """
        places = list(self._memory.values())
        total = sum(place.high - place.low for place in places)
        if total > LIMIT:
            raise CodecError(f"the operands take {total / 1e9:.1f} GB, at most {LIMIT / 1e9:.1f} GB are stored")
        starts = {place.key: place.low - place.low % _ALIGNMENT for place in places}
        copies = {p.key: p.bytes[starts[p.key] : p.high].to("cpu", copy=True) for p in places}
        return copies, starts


def state_of(value: object) -> dict[str, Any] | None:
    """Names and values that make up an object: a dataclass's fields, or attributes; None for code and the like."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return None
    return dict(vars(value))


class Decoder:
    """Makes values of what `Encoder` stored.

    tensors, starts  as `Encoder.finish` gave them
    device           where tensors go that were on the recording process's device
    packages         names of the packages that classes may be taken from
    stand_in         gives the value for a form that the encoder's stand-in made, by its "kind"
    all_on_device    the recording process's device was the host itself, so every tensor goes to `device`
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        starts: Mapping[str, int],
        device: torch.device,
        packages: frozenset[str],
        stand_in: Callable[[str, Json], Any],
        all_on_device: bool,
    ) -> None:
        self._tensors, self._starts = tensors, starts
        self._device, self._all_on_device = device, all_on_device
        self._packages, self._stand_in = packages, stand_in
        self._placed: dict[tuple[str, torch.device], torch.Tensor] = {}

    def decode(self, form: Json) -> Any:
        """The value of a JSON form; tensors are copies of what is stored. Raises CodecError."""
        if not isinstance(form, dict):
            return form
        kind = form["kind"]
        if kind == "tensor":
            return self._tensor(form, torch.device("cpu") if self._is_host(form) else self._device)
        if kind == "array":
            return self._tensor(form["tensor"], torch.device("cpu")).numpy()
        if kind in ("list", "tuple"):
            items = [self.decode(item) for item in form["items"]]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            return {self.decode(key): self.decode(value) for key, value in form["items"]}
        if kind == "object":
            return self._object(form)
        if kind == "float":
            return float(form["value"])
        if kind == "dtype":
            return getattr(torch, form["value"])
        if kind == "device":
            return self._device
        return self._stand_in(kind, form)

    def _is_host(self, form: Json) -> bool:
        return form["host"] and not self._all_on_device

    def _tensor(self, form: Json, device: torch.device) -> torch.Tensor:
        key, dtype = form["memory"], getattr(torch, form["dtype"])
        place = self._placed.get((key, device))
        if place is None:
            place = self._placed[key, device] = self._tensors[key].to(device, copy=True)
        offset = (form["byte"] - self._starts[key]) // dtype.itemsize
        empty = torch.empty(0, dtype=dtype, device=device)
        return empty.set_(place.untyped_storage(), offset, tuple(form["shape"]), tuple(form["stride"]))

    def _object(self, form: Json) -> Any:
        module, _, name = form["class"].partition(":")
        package = module.partition(".")[0]
        if package not in self._packages:
            known = ", ".join(sorted(self._packages))
            raise CodecError(f"the record holds a {module}.{name}; only classes of {known} are known here")
        klass: Any = importlib.import_module(module)
        for part in name.split("."):
            klass = getattr(klass, part)
        made = object.__new__(klass)
        for field, value in form["fields"].items():
            object.__setattr__(made, field, self.decode(value))
        return made
