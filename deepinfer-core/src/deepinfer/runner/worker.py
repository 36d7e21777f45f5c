"""A worker: one device with its ops, weights, caches and sampler, made from an engine config in one pass.

Called by the executor. Order matters: everything that can be refused from files and headers alone is refused before
weights are read and memory is taken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch

from deepinfer.config import EngineConfig
from deepinfer.hooks import KVCache, LoadedBackend, Numerics, OpContext, OpTable, build_ops, op_failures, open_backend
from deepinfer.hooks.ops.step_inputs import Truncation
from deepinfer.hooks.trace import Wrapper
from deepinfer.hub.safetensors import Checkpoint, TensorSource
from deepinfer.hub.vocabulary import compress_vocabulary
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.manifest import manifest
from deepinfer.models.deepseek_v41.model import Model
from deepinfer.models.deepseek_v41.random_weights import SyntheticCheckpoint
from deepinfer.models.deepseek_v41.weights import build_model
from deepinfer.runner.cache import plan_capacity
from deepinfer.runner.inputs import CacheCapacity, StepBatch, StepHandle
from deepinfer.runner.measure import measure_costs
from deepinfer.runner.model_files import ModelFiles, open_model
from deepinfer.runner.model_runner import ModelRunner
from deepinfer.sample.sampler import Sampler
from deepinfer.speculate.cost_store import stored_costs
from deepinfer.speculate.costs import MeasuredCosts
from deepinfer.speculate.proposer import Proposer, ProposerContext, check_proposer, find_factory

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
    config: EngineConfig
    shape: str
    """digest of the model's configuration"""

    @classmethod
    def load(
        cls, config: EngineConfig, backend: LoadedBackend | None = None, wrappers: Sequence[Wrapper] = ()
    ) -> Worker:
        """Bind ops, check and load the checkpoint, allocate caches. backend, wrappers: see `bind_ops`."""
        files = open_model(config)
        settings, model_config = config.settings, files.config
        config = config.resolve(model_config)
        truncation = read_truncation(config, model_config)
        if config.num_draft_tokens:
            check_proposer(config.proposer, config.num_draft_tokens, model_config)
        source = tensor_source(config, files)
        vocab_map = read_vocab_map(files)
        context, ops = bind_ops(config, model_config, backend, wrappers)
        model = build_model(model_config, source, ops, context, vocab_map)
        spec = model_config.cache_spec(BLOCK_SIZE, settings.max_backtracking_tokens)
        capacity = plan_capacity(
            spec, config.max_model_len, config.max_num_seqs, settings.num_state_slots_ratio,
            cache_bytes(ops, config.gpu_memory_utilization, feedback_bytes(config, model_config)), config.num_kv_blocks,
            wanted_snapshots(config),
        )  # fmt: skip
        cache = ops.cache.allocate(spec, capacity.num_blocks, capacity.num_slots + capacity.num_snapshots)
        sampler = make_sampler(config, files, ops, context.device)
        runner = ModelRunner(
            model, cache, sampler, truncation, model_config.text.engram_max_ngram_size - 1,
            make_proposer(config, model_config, model, cache, context.device), config.verification == "rejection",
            capacity.num_slots,
        )  # fmt: skip
        shape = hashlib.sha256(json.dumps(model_config.raw, sort_keys=True).encode()).hexdigest()
        return cls(ops, runner, capacity, config, shape)

    def run(self, batch: StepBatch) -> StepHandle:
        """Issue a step to the device; an op that raises is reported as OpError with its provider."""
        with op_failures(self.ops):
            return self.runner.run(batch)

    def costs(self) -> MeasuredCosts:
        """What decode steps cost here, measured or from the directory of DEEPINFER_DECODE_PERF_CACHE_DIR."""
        config, settings = self.config, self.config.settings

        def measure() -> MeasuredCosts:
            return measure_costs(self, config.max_num_seqs, config.num_draft_tokens)

        if settings.decode_perf_cache_dir is None:
            return measure()
        ttl = settings.decode_perf_cache_ttl_sec
        return stored_costs(settings.decode_perf_cache_dir, self._cost_key(), ttl, measure)

    def _cost_key(self) -> dict[str, object]:
        """Everything that decides how long a step takes."""
        config, device = self.config, self.ops.runtime.properties()
        sizes = ("data_parallel_size", "context_parallel_size", "expert_parallel_size", "engram_parallel_size")
        return {
            "device": device.name,
            "cores": device.cores,
            "threads": torch.get_num_threads(),
            "providers": sorted({str(binding.provider) for binding in self.ops.bindings}),
            "core": version("deepinfer-core"),
            "torch": torch.__version__,
            "model": self.shape,
            "numerics": config.numerics,
            "batch_invariant": config.settings.batch_invariant,
            "sequences": config.max_num_seqs,
            "drafts": config.num_draft_tokens,
            "proposer": config.proposer,
            "verification": config.verification,
        } | {name: getattr(config, name) for name in sizes}

    def close(self) -> None:
        """Write the trace of the ops, where one was asked for, to standard error."""
        if self.ops.tracer is not None:
            self.ops.tracer.write(sys.stderr)


def wanted_snapshots(config: EngineConfig) -> int:
    """State slots for the prefix cache, if memory allows."""
    if not config.enable_prefix_caching:
        return 0
    return config.num_prefix_snapshots or max(config.max_num_seqs, 64)


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
        rule=config.verification,
    )  # fmt: skip


def make_proposer(
    config: EngineConfig, model_config: ModelConfig, model: Model, cache: KVCache, device: torch.device
) -> Proposer | None:
    """What drafts tokens, None without speculation."""
    if not config.num_draft_tokens:
        return None
    context = ProposerContext(
        config.num_draft_tokens, model_config, model, cache, config.settings, config.runtime_max_model_len, device
    )
    return find_factory(config.proposer)(context)


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


def cache_bytes(ops: OpTable, utilization: float, reserved: int = 0) -> int:
    """Bytes the caches may take: what the engine's share of the device leaves, and never more than that share of what
    is free, because others may use the device too. reserved: bytes that something else will take."""
    memory = ops.runtime.memory()
    return max(0, int(min(memory.total * utilization - memory.allocated, memory.free * utilization)) - reserved)


def feedback_bytes(config: EngineConfig, model_config: ModelConfig) -> int:
    """Bytes of draft distributions, which only the rejection rule keeps."""
    if config.verification != "rejection":
        return 0
    return 4 * config.num_state_slots * config.num_draft_tokens * model_config.text.vocab_size
