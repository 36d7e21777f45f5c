"""A worker: one device with its ops, weights, caches and sampler, made from an engine config in one pass.

Called by the executor. Order matters: everything that can be refused from files and headers alone is refused before
weights are read and memory is taken.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepinfer.config import EngineConfig
from deepinfer.hooks import LoadedBackend, Numerics, OpContext, OpTable, build_ops, op_failures, open_backend
from deepinfer.hooks.ops.step_inputs import Truncation
from deepinfer.hooks.trace import Wrapper
from deepinfer.hub.safetensors import Checkpoint, TensorSource
from deepinfer.hub.vocabulary import compress_vocabulary
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.manifest import manifest
from deepinfer.models.deepseek_v41.random_weights import SyntheticCheckpoint
from deepinfer.models.deepseek_v41.weights import build_model
from deepinfer.runner.cache import plan_capacity
from deepinfer.runner.inputs import CacheCapacity, StepBatch, StepResult
from deepinfer.runner.model_files import ModelFiles, open_model
from deepinfer.runner.model_runner import ModelRunner
from deepinfer.sample.sampler import Sampler

BLOCK_SIZE = 128
"""tokens of a paged cache block"""

LOCAL_RANK = 0
"""device of the only worker"""

logger = logging.getLogger("deepinfer.runner")


@dataclass(slots=True)
class Worker:
    """What `load` made; `run` is the hot path."""

    ops: OpTable
    runner: ModelRunner
    capacity: CacheCapacity

    @classmethod
    def load(
        cls, config: EngineConfig, backend: LoadedBackend | None = None, wrappers: Sequence[Wrapper] = ()
    ) -> Worker:
        """Bind ops, check and load the checkpoint, allocate caches. backend, wrappers: see `bind_ops`."""
        files = open_model(config)
        settings, model_config = config.settings, files.config
        config = config.resolve(model_config)
        truncation = read_truncation(config, model_config)
        source = tensor_source(config, files)
        vocab_map = read_vocab_map(files)
        context, ops = bind_ops(config, model_config, backend, wrappers)
        model = build_model(model_config, source, ops, context, vocab_map)
        spec = model_config.cache_spec(BLOCK_SIZE, settings.max_backtracking_tokens)
        capacity = plan_capacity(
            spec, config.max_model_len, config.max_num_seqs, settings.num_state_slots_ratio,
            cache_bytes(ops, config.gpu_memory_utilization), config.num_kv_blocks,
        )  # fmt: skip
        cache = ops.cache.allocate(spec, capacity.num_blocks, capacity.num_slots)
        sampler = make_sampler(config, files, ops, context.device)
        runner = ModelRunner(model, cache, sampler, truncation, model_config.text.engram_max_ngram_size - 1)
        return cls(ops, runner, capacity)

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step to its end; an op that raises is reported as OpError with its provider."""
        with op_failures(self.ops):
            return self.runner.run(batch)

    def close(self) -> None:
        """Write the trace of the ops, where one was asked for, to standard error."""
        if self.ops.tracer is not None:
            self.ops.tracer.write(sys.stderr)


def read_truncation(config: EngineConfig, model_config: ModelConfig) -> Truncation:
    """The prefill truncation the settings ask for, refused where the model cannot honour it."""
    settings = config.settings
    if settings.yoco_prefill_truncation_mode == "compact":
        model_config.topology.require_compactable()
    return Truncation(settings.yoco_prefill_truncation_mode, settings.yoco_prefill_keep_tokens)


def tensor_source(config: EngineConfig, files: ModelFiles) -> TensorSource:
    """The checkpoint, its headers checked against the manifest, or random tensors of the same shapes."""
    expected = manifest(files.config)
    if config.load_format == "dummy":
        return SyntheticCheckpoint(expected, config.seed)
    checkpoint = Checkpoint.open(files.directory)
    checkpoint.validate(expected)
    return checkpoint


def read_vocab_map(files: ModelFiles) -> torch.Tensor:
    """Compressed vocabulary [V] of the tokenizer; its size is a checksum in the config."""
    mapping, _ = compress_vocabulary(files.tokenizer, files.config.text.engram_compressed_vocab_size)
    return torch.as_tensor(mapping)


def make_sampler(config: EngineConfig, files: ModelFiles, ops: OpTable, device: torch.device) -> Sampler:
    """The sampler; head rows that the tokenizer has no token for are never sampled."""
    settings, vocab_size = config.settings, files.config.text.vocab_size
    return Sampler(
        ops, vocab_size, device,
        eos_ids=files.tokenizer.eos_ids,
        blacklist=settings.decode_token_blacklist,
        banned_ids=range(min(files.tokenizer.vocab_size, vocab_size), vocab_size),
        force_topk=settings.sampler_force_topk,
        sum_smaller=settings.compute_sum_smaller_probs,
    )  # fmt: skip


def bind_ops(
    config: EngineConfig,
    model_config: ModelConfig,
    backend: LoadedBackend | None = None,
    wrappers: Sequence[Wrapper] = (),
) -> tuple[OpContext, OpTable]:
    """Bind every op, of the backend that the config selects or of one that is open already.

    wrappers  put around bound calls, inside the tracer
    """
    settings = config.settings
    backend = backend or open_backend(config.accelerator, settings=settings)
    context = OpContext(
        device=backend.device(LOCAL_RANK),
        numerics=Numerics(quantize=config.numerics == "exact", order_free=settings.batch_invariant),
        traits=model_config.traits(BLOCK_SIZE, settings.max_backtracking_tokens, config.runtime_max_model_len),
        settings=settings,
    )
    ops = build_ops(backend, context, config.op_overrides, config.trace_ops, wrappers)
    ops.runtime.select(LOCAL_RANK)
    ops.runtime.warm_up()
    return context, ops


def cache_bytes(ops: OpTable, utilization: float) -> int:
    """Bytes the caches may take: what the engine's share of the device leaves, and never more than that share of what
    is free, because others may use the device too."""
    memory = ops.runtime.memory()
    return max(0, int(min(memory.total * utilization - memory.allocated, memory.free * utilization)))
