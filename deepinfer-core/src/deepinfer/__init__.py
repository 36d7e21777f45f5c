"""DeepInfer: offline inference for DeepSeek-V4.1-Flash on any accelerator.

    from deepinfer import LLM, SamplingParams

    with LLM("path/or/hub-id") as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.text)

Names are resolved on first use, so that `import deepinfer` is quick and imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.engine.output import RequestMetrics, RequestOutput, ScoreOutput, TokenOutput
    from deepinfer.entrypoints.llm import LLM
    from deepinfer.errors import DeepInferError, EngineError, RequestError
    from deepinfer.sampling_params import SamplingParams

    __version__: str

_HOMES = {
    "LLM": "deepinfer.entrypoints.llm",
    "SamplingParams": "deepinfer.sampling_params",
    "RequestOutput": "deepinfer.engine.output",
    "TokenOutput": "deepinfer.engine.output",
    "RequestMetrics": "deepinfer.engine.output",
    "ScoreOutput": "deepinfer.engine.output",
    "DeepInferError": "deepinfer.errors",
    "EngineError": "deepinfer.errors",
    "RequestError": "deepinfer.errors",
}

__all__ = [
    "LLM", "DeepInferError", "EngineError", "RequestError", "RequestMetrics", "RequestOutput", "SamplingParams",
    "ScoreOutput", "TokenOutput", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("deepinfer-core")
    if name not in _HOMES:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
