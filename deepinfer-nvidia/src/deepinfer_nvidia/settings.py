"""`DEEPINFER_*` variables that only this backend understands; core finds them through entry points.

Existing launch scripts set them. None is read yet: they belong to the communicator and the profiler.
"""

from __future__ import annotations

from deepinfer.variables import TEXT, Variable, integer

NCCL_NUM_SMS = Variable(
    "NCCL_NUM_SMS", integer(1), 32, "least and most CTAs of NCCL groups", "CTAs", "parallelism", active=False
)
NCCL_MEMORY_SAMPLE_INTERVAL_STEPS = Variable(
    "NCCL_MEMORY_SAMPLE_INTERVAL_STEPS", integer(1), 1000, "steps between log lines of NCCL's memory", "steps",
    "parallelism", active=False,
)  # fmt: skip
PROFILE_TORCH_CUDA_MEMORY = Variable(
    "PROFILE_TORCH_CUDA_MEMORY", TEXT, None, "record the history of CUDA memory", "", "debugging", active=False
)
