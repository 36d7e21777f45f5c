"""How many blocks and slots the caches get.

Called by the worker after the weights are loaded. Sizes come from the published bytes of `CacheSpec`; a backend whose
layout is larger says so through its own memory figures.
"""

from __future__ import annotations

from deepinfer.errors import ConfigError
from deepinfer.hooks import CacheSpec
from deepinfer.runner.inputs import CacheCapacity

NULL = 1
"""ids never handed out: block 0 and slot 0"""

SNAPSHOT_SHARE = 4
"""at most one part in so many of the caches' memory is for the prefix cache"""


def plan_capacity(
    spec: CacheSpec,
    max_model_len: int,
    max_num_seqs: int,
    slots_ratio: float,
    free_bytes: int | None,
    num_blocks: int | None,
    num_snapshots: int = 0,
) -> CacheCapacity:
    """Blocks and slots for an engine.

    slots_ratio  state slots per running sequence (DEEPINFER_NUM_STATE_SLOTS_RATIO)
    free_bytes   memory that caches may take, None = no limit known
    num_blocks   fixed number of usable blocks, or None: as many as fit, at most what max_num_seqs sequences of
                 max_model_len tokens can use
    num_snapshots  slots for the prefix cache; fewer if they would take more than a quarter of `free_bytes`
    Raises ConfigError if not even one sequence of max_model_len fits.
    """
    slots = int(max_num_seqs * slots_ratio) + NULL
    if free_bytes is not None:
        num_snapshots = min(num_snapshots, max(free_bytes // SNAPSHOT_SHARE // spec.bytes_per_slot(), 1))
    per_sequence = -(-max_model_len // spec.block_size)
    if num_blocks is None:
        num_blocks = max_num_seqs * per_sequence
        if free_bytes is not None:
            fitting = (free_bytes - (slots + num_snapshots) * spec.bytes_per_slot()) // max(1, spec.bytes_per_block())
            num_blocks = min(num_blocks, fitting)
        _require_one_sequence(num_blocks, per_sequence, max_model_len, free_bytes)
    return CacheCapacity(num_blocks + NULL, slots, spec.block_size, num_snapshots)


def _require_one_sequence(num_blocks: int, needed: int, max_model_len: int, free_bytes: int | None) -> None:
    if num_blocks < needed:
        raise ConfigError(
            f"caches: {max(0, num_blocks)} blocks fit into {free_bytes} free bytes, but one sequence of "
            f"max_model_len={max_model_len} needs {needed}. Lower max_model_len or max_num_seqs, or raise "
            "gpu_memory_utilization."
        )
