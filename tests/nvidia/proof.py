"""The proof that the adapters of compute capability 10.x work, as one function: the owner of a B200 runs it with
`pytest -m sm100`, and the tests of every day run a part of it over doubles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deepinfer.hooks import LoadedBackend
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.testing.conformance.report import Report
from deepinfer.testing.conformance.runner import Options, run_conformance

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "nvidia-sm100"
"""Where the report goes that `deepinfer-nvidia/status.py` reads."""


def prove(
    backend: LoadedBackend, model: ModelConfig, levels: Sequence[int], folder: Path, op: str | None = None
) -> Report:
    """Conformance of a backend for a model that every kernel covers; writes report.json and report.md."""
    options = Options(levels=tuple(levels), config=model, op=op, quick=op is not None)  # type: ignore[arg-type]
    report = replace(run_conformance(backend, options), model="micro with 64 heads, 8 groups, 1,024 channels")
    report.write(folder)
    return report
