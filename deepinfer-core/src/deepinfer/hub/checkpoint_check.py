"""Compares the tensors of a checkpoint with the manifest of a model: names, dtypes, shapes. Reads no data.

Called by `Checkpoint.validate`. The rule is exact equality: a tensor that is missing would leave a parameter at a
random value, one that is unexpected shows a different model, a wrong dtype or shape would be garbage.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from deepinfer.hub.faults import Faults
from deepinfer.hub.safetensors_header import TensorInfo
from deepinfer.hub.tensor_spec import TensorSpec

_EXPERT = re.compile(r"^(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<part>.+)$")
_FOLDED_NORM = re.compile(r"\.hc_\w*norm\.weight$")


def compare(directory: Path, tensors: Mapping[str, TensorInfo], manifest: Mapping[str, TensorSpec]) -> None:
    """Raise CheckpointError listing missing, unexpected and different tensors; return when there are none."""
    missing = [name for name in manifest if name not in tensors]
    unexpected = [name for name in tensors if name not in manifest]
    different = [name for name, spec in manifest.items() if name in tensors and not _same(tensors[name], spec)]
    faults = Faults(directory)
    for name in different:
        info, spec = tensors[name], manifest[name]
        faults.add(f"{info.file.name}: {name}: found {info}, expected {spec.dtype} {list(spec.shape)}")
    # Interleaved so that neither list hides the other: a renamed tensor is in both.
    for pair in _interleave(_missing_lines(missing, manifest), (_unexpected_line(n, tensors[n]) for n in unexpected)):
        faults.add(pair)
    counts = f"{len(missing)} missing, {len(unexpected)} unexpected, {len(different)} of wrong dtype or shape"
    faults.raise_if_any(f"the tensors are not those of its config.json: {counts}")


def _same(info: TensorInfo, spec: TensorSpec) -> bool:
    return info.dtype == spec.dtype and info.shape == spec.shape


def _missing_lines(missing: Iterable[str], manifest: Mapping[str, TensorSpec]) -> Iterator[str]:
    """One line a tensor, but one line a layer for its experts."""
    incomplete: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in missing:
        match = _EXPERT.match(name)
        if match is None:
            yield f"{name}: missing, expected {manifest[name].dtype} {list(manifest[name].shape)}"
        else:
            incomplete[match["layer"]][match["expert"]].append(match["part"])
    totals = Counter(name.rsplit(".", 3)[0] for name in manifest if name.endswith(".w1.weight"))
    for layer, experts in incomplete.items():
        expert, parts = next(iter(experts.items()))
        found = f"{len(experts)} of {totals[layer]} experts are incomplete"
        yield f"{layer}: {found}; expert {expert} lacks {', '.join(parts)}"


def _unexpected_line(name: str, info: TensorInfo) -> str:
    line = f"{info.file.name}: {name}: found {info}, expected no such tensor"
    if _FOLDED_NORM.search(name):
        line += " (this norm is folded into hc_*_fn in the published format)"
    return line


def _interleave(first: Iterable[str], second: Iterable[str]) -> Iterator[str]:
    iterators = [iter(first), iter(second)]
    while iterators:
        for iterator in list(iterators):
            line = next(iterator, None)
            if line is None:
                iterators.remove(iterator)
            else:
                yield line
