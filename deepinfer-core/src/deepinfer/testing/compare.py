"""The tolerance rule of the conformance kit: when a backend's numbers count as right.

An op's result `y` is held against two runs of core's reference on the same inputs, which were quantized once: `ideal`,
in float64 without a rounding at the end, and `working`, in the dtypes of the model, as the yardstick of what rounding
costs. With E the largest absolute error and R the relative error in the 2-norm, both against `ideal`,

    pass if  E(y) <= 2 E(working) + atol   and   R(y) <= 2 R(working) + rtol
    and      the same R bound holds in every row (last dimension), rows of negligible norm left out
    and      y is finite exactly where `ideal` is; integers and flags are equal

Used by levels 1 and 2, by the comparison of two backends and by replay. Knows tensors only, nothing of ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

FACTOR = 2.0
"""How many times the working dtype's own error is allowed."""

NEGLIGIBLE = 1e-6
"""Rows whose norm is below this share of the largest row's are not judged by themselves."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Floors of the two bounds, for results that the yardstick happens to hit exactly."""

    atol: float
    rtol: float


TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-5, 1.3e-6),
    torch.float32: Tolerance(1e-5, 1.3e-6),
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(1e-3, 1.6e-2),
    torch.float8_e4m3fn: Tolerance(0.1, 0.1),
    torch.float8_e5m2: Tolerance(0.2, 0.2),
    torch.float4_e2m1fn_x2: Tolerance(0.3, 0.3),
}
"""By dtype of the result. Values that a quantizer made arrive dequantized and count as the dtype they are held in."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one comparison.

    ok      whether the numbers count as right;  detail: why not, in words
    worst   the worst element: error, bound, index, found, expected; None where there is nothing to compare
    """

    ok: bool
    detail: str = ""
    worst: Mapping[str, Any] | None = None


def close(found: torch.Tensor, working: torch.Tensor, ideal: torch.Tensor) -> Verdict:
    """The rule above for floating results of equal shape, on any devices.

    found    the result; its dtype chooses the floors. A dtype narrower than `working`'s is judged by a yardstick
             rounded to it.
    """
    if found.shape != ideal.shape:
        return Verdict(False, f"shape {list(found.shape)}, expected {list(ideal.shape)}")
    tolerance = TOLERANCES[found.dtype]
    y, w, t = _wide(found), _wide(working.to(found.dtype)), _wide(ideal)
    verdict = _same_specials(y, t)
    if not verdict.ok or t.numel() == 0:
        return verdict
    finite = torch.isfinite(t)
    y, w, t = (x.masked_fill(~finite, 0.0) for x in (y, w, t))
    w = torch.where(torch.isfinite(w), w, t)
    error, allowed = (y - t).abs(), FACTOR * float((w - t).abs().max()) + tolerance.atol
    worst = _worst(error, allowed, y, t)
    if worst["error"] > allowed:
        return Verdict(False, f"largest error {worst['error']:.3g} at {worst['index']}, allowed {allowed:.3g}", worst)
    detail = _relative(y, w, t, tolerance.rtol)
    return Verdict(not detail, detail, worst)


def _relative(y: torch.Tensor, w: torch.Tensor, t: torch.Tensor, rtol: float) -> str:
    """What is wrong with the relative errors, overall and row by row; empty if nothing."""
    tiny = torch.finfo(torch.float64).tiny
    norm = max(float(t.norm()), tiny)
    overall, yardstick = float((y - t).norm()) / norm, float((w - t).norm()) / norm
    if overall > FACTOR * yardstick + rtol:
        return f"relative error {overall:.3g}, allowed {FACTOR * yardstick + rtol:.3g}"
    rows_y, rows_w, rows_t = (x.reshape(-1, x.shape[-1] if x.dim() else 1) for x in (y, w, t))
    norms = rows_t.norm(dim=-1)
    judged = norms > max(NEGLIGIBLE * float(norms.max()), tiny)
    norms = norms.clamp(min=tiny)
    errors = ((rows_y - rows_t).norm(dim=-1) / norms).masked_fill(~judged, 0.0)
    bounds = FACTOR * ((rows_w - rows_t).norm(dim=-1) / norms).clamp(min=yardstick) + rtol
    row = int((errors / bounds).argmax())
    if errors[row] > bounds[row]:
        place = _index(row, y.shape[:-1])
        return f"relative error {float(errors[row]):.3g} of row {place}, allowed {float(bounds[row]):.3g}"
    return ""


def equal(found: torch.Tensor, expected: torch.Tensor) -> Verdict:
    """Equal shapes and values; NaN equals NaN, and 0 equals -0."""
    if found.shape != expected.shape:
        return Verdict(False, f"shape {list(found.shape)}, expected {list(expected.shape)}")
    y, t = _wide(found), _wide(expected)
    differs = ~((y == t) | (y.isnan() & t.isnan())) if y.is_floating_point() else y != t
    if not bool(differs.any()):
        return Verdict(True)
    place = int(differs.reshape(-1).int().argmax())
    index, count = _index(place, y.shape), int(differs.sum())
    values = y.reshape(-1)[place].item(), t.reshape(-1)[place].item()
    worst = {
        "error": abs(values[0] - values[1]),
        "bound": 0.0,
        "index": index,
        "found": values[0],
        "expected": values[1],
    }
    detail = f"{count} of {y.numel()} elements differ, first {values[0]!r} at {index}, expected {values[1]!r}"
    return Verdict(False, detail, worst)


def equal_but_ties(found: torch.Tensor, working: torch.Tensor, share: float = 0.02) -> Verdict:
    """Values of a format whose scale is no power of two: at most a `share` of them rounded to the neighbouring code.

    Whether a quantizer divides by such a scale or multiplies by its reciprocal decides numbers that lie between two
    codes. Neighbouring codes are at most a third of the largest value of their row apart.
    """
    if found.shape != working.shape:
        return Verdict(False, f"shape {list(found.shape)}, expected {list(working.shape)}")
    if found.numel() == 0:
        return Verdict(True)
    y, w = _wide(found), _wide(working)
    error, step = (y - w).abs(), w.abs().amax(-1, keepdim=True) * 0.34
    worst = _worst(error, float(step.max()), y, w)
    if not bool((error <= step).all()):  # a NaN is not
        return Verdict(False, f"error {worst['error']:.3g} at {worst['index']} is more than one code", worst)
    differing = float((error > 0).double().mean())
    if differing > share:
        return Verdict(False, f"{differing:.1%} of the values differ, allowed {share:.0%} on ties", worst)
    return Verdict(True, "", worst)


def same_selection(
    found: torch.Tensor, scores: torch.Tensor, count: int, tolerance: Tolerance = TOLERANCES[torch.bfloat16]
) -> Verdict:
    """Each row lists its `count` best columns, as a set: one may take another's place if their scores hardly differ.

    found   [R, T] int64, distinct columns and -1 padding, in any order
    scores  [R, K] float64, -inf where nothing may be chosen
    A column left out may beat one taken by atol + rtol * |score| at most.
    """
    rows, width = scores.shape
    valid = found >= 0
    if bool((found >= width).any()):
        return Verdict(False, f"selects column {int(found.max())} of {width}")
    chosen = torch.zeros(rows, width + 1, dtype=torch.int64)
    chosen.scatter_add_(1, torch.where(valid, found, width), torch.ones_like(found))
    chosen = chosen[:, :width]
    possible = scores > -torch.inf
    wanted = possible.sum(1).clamp(max=count)
    checks = (
        ("selects a column twice", (chosen > 1).any(1)),
        ("selects what is invisible", ((chosen > 0) & ~possible).any(1)),
        ("selects too few or too many columns", chosen.sum(1) != wanted),
    )
    for what, wrong in checks:
        if bool(wrong.any()):
            row = int(wrong.int().argmax())
            return Verdict(False, f"row {row} {what}: {found[row].tolist()}", {"index": [row]})
    taken = chosen > 0
    lowest = scores.masked_fill(~taken, torch.inf).amin(1) if width else scores.new_zeros(rows)
    missed = scores.masked_fill(taken, -torch.inf).amax(1) if width else scores.new_zeros(rows)
    excess = torch.where((wanted > 0) & (missed > -torch.inf), missed - lowest, 0.0)
    bound = tolerance.atol + tolerance.rtol * torch.where(missed.isfinite(), missed.abs(), 0.0)
    row = int((excess - bound).argmax()) if rows else 0
    if rows and excess[row] > bound[row]:
        worst = {"error": float(excess[row]), "bound": float(bound[row]), "index": [row],
                 "found": float(lowest[row]), "expected": float(missed[row])}  # fmt: skip
        return Verdict(
            False, f"row {row} leaves out a score {float(missed[row]):.6g} for {float(lowest[row]):.6g}", worst
        )
    return Verdict(True)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """On the host, floats as float64; formats of 8 bits and less go through float32."""
    x = x.detach().cpu()
    if not x.is_floating_point():
        return x
    return x.float().double() if x.element_size() == 1 else x.double()


def _same_specials(y: torch.Tensor, t: torch.Tensor) -> Verdict:
    """Infinities and NaN where `ideal` has them, and nowhere else."""
    same = (y == t) | (y.isnan() & t.isnan()) | (torch.isfinite(y) & torch.isfinite(t))
    if bool(same.all()):
        return Verdict(True)
    place = int((~same).reshape(-1).int().argmax())
    index = _index(place, y.shape)
    values = y.reshape(-1)[place].item(), t.reshape(-1)[place].item()
    worst = {"error": float("inf"), "bound": 0.0, "index": index, "found": values[0], "expected": values[1]}
    return Verdict(False, f"{values[0]} at {index}, expected {values[1]:.6g}", worst)


def _worst(error: torch.Tensor, bound: float, y: torch.Tensor, t: torch.Tensor) -> dict[str, Any]:
    place = int(error.reshape(-1).argmax())
    pick = (x.reshape(-1)[place].item() for x in (error, y, t))
    largest, found, expected = pick
    return {"error": largest, "bound": bound, "index": _index(place, y.shape), "found": found, "expected": expected}


def _index(place: int, shape: torch.Size) -> list[int]:
    """Index of a flat place."""
    return [int(i) for i in torch.unravel_index(torch.tensor(place), shape)] if shape else []
