"""`DEEPINFER_*` variables that only this backend understands; core finds them through entry points.

Existing launch scripts set them. The communicator reads the first; the others belong to statistics and the profiler.
"""

from __future__ import annotations

import os
from typing import Any

from deepinfer.variables import TEXT, Variable, integer

NCCL_NUM_SMS = Variable("NCCL_NUM_SMS", integer(1), 32, "least and most CTAs of NCCL groups", "CTAs", "parallelism")
NCCL_MEMORY_SAMPLE_INTERVAL_STEPS = Variable(
    "NCCL_MEMORY_SAMPLE_INTERVAL_STEPS", integer(1), 1000, "steps between log lines of NCCL's memory", "steps",
    "parallelism", active=False,
)  # fmt: skip
PROFILE_TORCH_CUDA_MEMORY = Variable(
    "PROFILE_TORCH_CUDA_MEMORY", TEXT, None, "record the history of CUDA memory", "", "debugging", active=False
)


def value_of(variable: Variable) -> Any:
    """What the environment says, or the default. Raises `ConfigError` for a value that is not one."""
    text = os.environ.get(variable.full_name, "")
    return variable.parse(text) if text.strip() else variable.default
