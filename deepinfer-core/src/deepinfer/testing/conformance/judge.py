"""Runs one op on one sample in three contexts and says whether the subject's result is right.

The core of levels 1 and 2: both call `run_op` and `judge`, which look at results through the op's record only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from deepinfer.hooks import QuantTensor
from deepinfer.reference import quant
from deepinfer.testing import compare
from deepinfer.testing.compare import Verdict
from deepinfer.testing.opinfo.context import SampleContext
from deepinfer.testing.opinfo.record import Args, OpInfo, Sample
from deepinfer.testing.opinfo.tree import dense, named, values
from deepinfer.testing.results import Failure, Worst


def run_op(info: OpInfo, ctx: SampleContext, args: Args) -> Any:
    """Call the op of the context's table; returns its result, finished on the device."""
    with torch.no_grad():
        result = info.function(ctx.ops)(*args)
    ctx.ops.runtime.synchronize()
    return result


def observed(info: OpInfo, ctx: SampleContext, args: Args, result: Any) -> dict[str, Any]:
    """What is compared of a result, by name: tensors on the host, anything else as it is."""
    with torch.no_grad():
        seen = info.observe(ctx, args, result)
        parts = seen if isinstance(seen, dict) else named(seen, info.outputs) if seen is result else {"out": seen}
        leaves = {name: dense(leaf) for part, value in parts.items() for name, leaf in values(value, part)}
    return {name: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in leaves.items()}


def outcome(info: OpInfo, ctx: SampleContext, sample: Sample) -> dict[str, Any]:
    """`observed` of one call with fresh operands."""
    args = sample.fresh()
    return observed(info, ctx, args, run_op(info, ctx, args))


def judge(info: OpInfo, found: dict[str, Any], working: dict[str, Any], ideal: dict[str, Any]) -> Worst | None:
    """Raise `Failure` naming the first part that is wrong; returns the worst element of what passed."""
    if info.judge_all is not None:
        return accept(info.judge_all(found, working, ideal))
    if found.keys() != working.keys():
        raise Failure(f"the result has the parts {', '.join(found)}, expected {', '.join(working)}")
    return accept((name, _leaf(info, name, found[name], working[name], ideal[name])) for name in found)


def _leaf(info: OpInfo, name: str, found: Any, working: Any, ideal: Any) -> Verdict:
    if not isinstance(working, torch.Tensor) or not isinstance(found, torch.Tensor):
        same = type(found) is type(working) and found == working
        return Verdict(same, "" if same else f"{found!r}, expected {working!r}")
    rule = info.judges.get(name) or info.judges.get(name.partition(".")[0])
    if rule is None:
        rule = compare.close if working.is_floating_point() else _integers
    return rule(found, working, ideal)


def _integers(found: torch.Tensor, working: torch.Tensor, ideal: torch.Tensor) -> Verdict:
    return compare.equal(found, working)


def accept(verdicts: Iterable[tuple[str, Verdict]]) -> Worst | None:
    """Raise `Failure` at the first verdict that is not ok; returns the worst element nearest to its bound."""
    nearest: Worst | None = None
    for name, verdict in verdicts:
        if not verdict.ok:
            raise Failure(f"{name}: {verdict.detail}", verdict.worst)
        if verdict.worst is not None and (nearest is None or _share(verdict.worst) > _share(nearest)):
            nearest = {"part": name, **verdict.worst}
    return nearest


def _share(worst: Worst) -> float:
    bound = worst.get("bound", 0.0)
    return worst.get("error", 0.0) / bound if bound else 0.0


def off_grid(parts: Mapping[str, Any]) -> Iterator[str]:
    """Quantized parts of a result that are not: quantizing them again would change them."""
    for name, leaf in values(parts):
        if isinstance(leaf, QuantTensor):
            held = leaf.dequantize().detach().cpu()
            again = quant.fake_q8(held, held.dtype)
            verdict = compare.equal(again, held)
            if not verdict.ok:
                yield f"{name} is not quantized: {verdict.detail} after quantizing again"
