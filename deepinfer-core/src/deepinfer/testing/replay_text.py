"""A replayed call in words, for `deepinfer replay` and `deepinfer bisect`."""

from __future__ import annotations

import torch

from deepinfer.hooks.table import REFERENCE
from deepinfer.testing.compare import Verdict
from deepinfer.testing.replay import Outcome, Replay, some


def text(done: Replay) -> str:
    """The comparison, a few lines."""
    head, verdicts = done.call.head, done.verdicts()
    width = max(len(done.provider), len(REFERENCE))
    bad = {name: verdict for name, verdict in verdicts.items() if not verdict.ok}
    good = {name: verdict for name, verdict in verdicts.items() if verdict.ok}
    lines = [
        f"{head['op']} v{head['version']}, call {head['call']}, recorded from {head['provider']} "
        f"{head['distribution_version']} ({head['distribution']}) on {head['device']}",
        f"  {done.provider:<{width}}  {_shapes(done.found)}{done.repeated()}",
        f"  {REFERENCE:<{width}}  {_shapes(done.working)}",
        *(f"  wrong  {name}: {verdict.detail}{_worst(verdict)}" for name, verdict in bad.items()),
    ]
    if good:
        name = max(good, key=lambda name: _share(good[name]))
        lines.append(f"  right  {some(list(good))}{_worst(good[name], name)}")
    who = f"{done.provider} {'agrees with' if done.ok else 'DIFFERS from'} the reference"
    return "\n".join([*lines, f"{who} on this call of {done.call.op}"])


def _shapes(outcome: Outcome) -> str:
    if outcome.error:
        return outcome.error
    tensors = [(name, leaf) for name, leaf in outcome.leaves.items() if isinstance(leaf, torch.Tensor)]
    shown = [f"{name} {str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" for name, leaf in tensors]
    return some(shown, 3)


def _share(verdict: Verdict) -> float:
    worst = verdict.worst or {}
    return worst["error"] / worst["bound"] if worst.get("bound") else 0.0


def _worst(verdict: Verdict, name: str = "") -> str:
    worst = verdict.worst
    if not worst or "found" not in worst:
        return ""
    return (
        f"\n         worst {f'in {name} ' if name else ''}at {worst['index']}: found {worst['found']:.6g}, expected "
        f"{worst['expected']:.6g}, error {worst['error']:.3g}, allowed {worst['bound']:.3g}"
    )
