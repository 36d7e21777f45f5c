"""`EngineConfig`: every argument of an engine, checked once and then immutable.

Built by `entrypoints.llm` and by the commands through `EngineConfig.create`; completed by the engine with
`resolve(model_config)` as soon as the checkpoint's config is read, before any weight is. Does not import the model:
of a model config it reads `text.max_position_embeddings` and `text.sliding_window` only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Protocol

from deepinfer.environ import VARIABLES, Settings
from deepinfer.errors import ConfigError, UnsupportedError
from deepinfer.variables import closest

DEFAULT_MAX_MODEL_LEN = 4096
DEFAULT_MAX_BATCHED_TOKENS = 4096


class _TextLimits(Protocol):
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def sliding_window(self) -> int: ...


class ModelLimits(Protocol):
    """The part of `models.deepseek_v41.ModelConfig` that engine arguments are checked against."""

    @property
    def text(self) -> _TextLimits: ...


def _argument(default: Any, text: str, choices: tuple[str, ...] = (), low: float | None = None) -> Any:
    """A field with its one-line description; `cli.arguments` turns it into a flag."""
    return field(default=default, metadata={"help": text, "choices": choices, "low": low})


@dataclass(frozen=True)
class EngineConfig:
    """Arguments of an engine. Lengths are in tokens, `max_model_len` counts prompt and output together."""

    model: str = field(metadata={"help": "directory of a checkpoint, or a hub id", "choices": (), "low": None})
    tokenizer: str | None = _argument(None, "directory or hub id of the tokenizer (default: the model's)")
    revision: str | None = _argument(None, "branch, tag or commit of a hub id")
    tokenizer_revision: str | None = _argument(None, "the same for the tokenizer")
    trust_remote_code: bool = _argument(False, "run the code a checkpoint ships (its chat encoder)")
    load_format: str = _argument("auto", "auto reads the weights, dummy makes random ones", ("auto", "dummy"))
    seed: int = _argument(0, "seed of requests that bring none, and of dummy weights")
    accelerator: str | None = _argument(None, "backend (default: DEEPINFER_ACCELERATOR, else probe the machine)")
    numerics: str = _argument(
        "exact", "exact follows the checkpoint's formats, smooth rounds nowhere", ("exact", "smooth")
    )

    max_model_len: int | None = _argument(
        None, "longest prompt plus output (default: 4096 or the model's limit)", low=1
    )
    max_num_seqs: int = _argument(256, "requests that run at the same time", low=1)
    max_num_batched_tokens: int | None = _argument(None, "tokens of one step (default: by max-model-len)", low=1)
    chunked_prefill: bool = _argument(True, "split prompts longer than one step")
    num_kv_blocks: int | None = _argument(
        None, "usable cache blocks of 128 tokens (default: what memory allows)", low=1
    )
    gpu_memory_utilization: float = _argument(0.9, "share of the device's memory the engine may use")
    enable_prefix_caching: bool = _argument(False, "go on from what requests with the same beginning have computed")
    num_prefix_snapshots: int | None = _argument(
        None, "positions kept to go on from, one state slot each (default: max_num_seqs, at least 64)",
        low=1,
    )  # fmt: skip
    prefix_snapshot_interval: int = _argument(1024, "tokens between two of them inside a prompt", low=1)
    stop_preempted_request: bool = _argument(False, "end a preempted request instead of recomputing it")
    proposer: str = _argument("dspark", "who drafts tokens where drafts are on: dspark, ngram, none or module:factory")
    verification: str = _argument(
        "coupled",
        "rule that accepts drafts: coupled leaves every output as it is without drafts, rejection accepts more of them",
        ("coupled", "rejection"),
    )

    data_parallel_size: int = _argument(1, "data parallel ranks", low=0)
    context_parallel_size: int = _argument(1, "context parallel ranks", low=1)
    expert_parallel_size: int = _argument(1, "expert parallel ranks", low=1)
    engram_parallel_size: int = _argument(1, "ranks the Engram tables are spread over", low=0)

    decode_sequence: bool = _argument(False, "generate() returns plain strings, as the original did")
    op_overrides: tuple[str, ...] = _argument((), "bind an op elsewhere, e.g. attention.*=reference (repeatable)")
    trace_ops: str | None = _argument(None, "trace bound ops as JSON lines", ("count", "time", "shapes"))
    settings: Settings = field(default_factory=Settings, repr=False)

    @classmethod
    def create(cls, settings: Settings | None = None, **arguments: Any) -> EngineConfig:
        """A checked config. `arguments` may also name fields of `Settings`, which then win over the environment.

        settings   None: `Settings.load()`
        Raises ConfigError naming argument, value and expected form; UnsupportedError for what this version lacks.
        """
        settings = Settings.load() if settings is None else settings
        arguments = _without_legacy(arguments)
        own = {f.name for f in fields(cls)} - {"settings"}
        shared = {v.field for v in VARIABLES} - own
        unknown = sorted(set(arguments) - own - shared)
        if unknown:
            raise ConfigError(f"unknown engine argument {unknown[0]!r}.{closest(unknown[0], own | shared)}")
        settings = settings.override(**{name: arguments.pop(name) for name in list(arguments) if name in shared})
        config = cls(settings=settings, **_from_settings(arguments, settings))
        _check_types(config)
        _check_values(config)
        _check_supported(config)
        return config

    def resolve(self, model: ModelLimits) -> EngineConfig:
        """The config with every length filled in, checked against the model's limits."""
        limit = model.text.max_position_embeddings
        length = self.max_model_len or min(DEFAULT_MAX_MODEL_LEN, limit)
        if length > limit:
            raise ConfigError(f"max_model_len={length}: the model's max_position_embeddings is {limit}")
        check_truncation(self.settings, model.text.sliding_window)
        least = self.max_num_seqs * (1 + self.num_draft_tokens)
        tokens = self.max_num_batched_tokens or max(length, DEFAULT_MAX_BATCHED_TOKENS, least)
        if not self.chunked_prefill and tokens < length:
            raise ConfigError(
                f"max_num_batched_tokens={tokens} is below max_model_len={length}, and chunked_prefill=False cannot "
                "split a prompt: raise the first, lower the second, or allow chunked prefill"
            )
        return replace(self, max_model_len=length, max_num_batched_tokens=tokens)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens per request and step, 0 = no speculation."""
        return 0 if self.proposer == "none" else self.settings.use_nextn_decode

    @property
    def overlap(self) -> bool:
        """Zero-overhead scheduling: on unless somebody switched it off."""
        return self.settings.zero_overhead_scheduling is not False

    @property
    def runtime_max_model_len(self) -> int:
        """Exclusive bound of every position used at run time: drafts and a step in flight go beyond max_model_len."""
        assert self.max_model_len is not None, "resolve() the config first"
        drafts = self.num_draft_tokens
        in_flight = drafts + 1 if self.overlap and drafts else 0
        return self.max_model_len + drafts + in_flight + drafts

    @property
    def num_state_slots(self) -> int:
        """State slots, the null slot 0 included."""
        return int(self.max_num_seqs * self.settings.num_state_slots_ratio) + 1


def check_truncation(settings: Settings, sliding_window: int) -> None:
    """Prefill truncation must keep whole windows of the decoder half: window + backtracking tokens (ConfigError)."""
    mode, keep = settings.yoco_prefill_truncation_mode, settings.yoco_prefill_keep_tokens
    least = sliding_window + settings.max_backtracking_tokens
    if mode != "off" and keep < least:
        raise ConfigError(
            f"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS={keep} with DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE={mode}: expected "
            f"at least {least} (sliding_window {sliding_window} + DEEPINFER_MAX_BACKTRACKING_TOKENS "
            f"{settings.max_backtracking_tokens}), otherwise the decoder layers' windows have holes"
        )


# --- arguments of the original that carry no meaning here -----------------------------------------------------------

_ANY = object()
_LEGACY: Mapping[str, Any] = {
    "served_model_name": _ANY,
    "disable_log_stats": _ANY,
    "offline_inference": _ANY,
    "ignore_len": _ANY,
    "engine_rank": (0,),
    "engine_group_rank": (0,),
    "engine_type": ("NORMAL", 0),
    "tokens_per_block": (-1, 128),
    "lookahead_tokens": (0,),
}
"""Accepted so that existing scripts run; a tuple lists the only values that mean the same here."""


def _without_legacy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    for name, allowed in _LEGACY.items():
        if name in arguments and allowed is not _ANY and arguments[name] not in allowed:
            values = " or ".join(map(repr, allowed))
            raise UnsupportedError(f"{name}={arguments[name]!r}: this version supports {values} only")
    return {name: value for name, value in arguments.items() if name not in _LEGACY}


def _from_settings(arguments: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Arguments with what a variable can give as well filled in. DEEPINFER_OPS stays in `settings`: see `build_ops`."""
    if "model" not in arguments:
        raise ConfigError("model is missing: give the directory of a checkpoint or a hub id")
    for name in ("model", "tokenizer"):
        if isinstance(arguments.get(name), os.PathLike):
            arguments[name] = os.fspath(arguments[name])
    overrides = arguments.get("op_overrides") or ()
    overrides = (overrides,) if isinstance(overrides, str) else tuple(overrides)
    merged = dict(arguments, op_overrides=overrides)
    for name in ("accelerator", "num_kv_blocks", "trace_ops"):
        if merged.get(name) is None:
            merged[name] = getattr(settings, name)
    for name in ("data_parallel_size", "engram_parallel_size"):  # 0 = derive, as in the original
        merged[name] = merged.get(name) or 1
    return merged


# --- checks ----------------------------------------------------------------------------------------------------------

_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "tuple[str, ...]": (tuple,),
}


def _check_types(config: EngineConfig) -> None:
    for f in fields(config):
        kind, _, optional = str(f.type).partition(" | ")
        value = getattr(config, f.name)
        if kind not in _KINDS or (optional and value is None):
            continue
        wrong_bool = isinstance(value, bool) and kind != "bool"
        if wrong_bool or not isinstance(value, _KINDS[kind]):
            raise ConfigError(f"{f.name}={value!r}: expected {kind}, found {type(value).__name__}")


def _check_values(config: EngineConfig) -> None:
    for f in fields(config):
        value, low, choices = getattr(config, f.name), f.metadata.get("low"), f.metadata.get("choices")
        if value is None:
            continue
        if choices and value not in choices:
            raise ConfigError(f"{f.name}={value!r}: expected one of {', '.join(choices)}.{closest(value, choices)}")
        if low is not None and value < low:
            raise ConfigError(f"{f.name}={value}: expected at least {low}")
    if not config.model.strip():
        raise ConfigError("model='': expected the directory of a checkpoint or a hub id")
    share = config.gpu_memory_utilization
    if not (math.isfinite(share) and 0 < share <= 1):
        raise ConfigError(f"gpu_memory_utilization={share}: expected a number above 0 and at most 1")
    temperatures = len(config.settings.dflash_confidence_head_temperature)
    if config.num_draft_tokens and temperatures not in (1, config.num_draft_tokens):
        raise ConfigError(
            f"DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE has {temperatures} values: expected one, or one for each of "
            f"the {config.num_draft_tokens} drafts"
        )
    _check_step_size(config)


def _check_step_size(config: EngineConfig) -> None:
    rows = 1 + config.num_draft_tokens
    tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs
    if tokens is not None and tokens < sequences * rows:
        raise ConfigError(
            f"max_num_batched_tokens={tokens}: one decode step of max_num_seqs={sequences} requests needs "
            f"{sequences * rows} (1 + {rows - 1} draft tokens each): raise it or lower max_num_seqs"
        )


def _check_supported(config: EngineConfig) -> None:
    """Legal wishes this version cannot serve yet: said at once instead of ignored."""
    for name in ("data_parallel_size", "context_parallel_size", "expert_parallel_size", "engram_parallel_size"):
        if getattr(config, name) > 1:
            raise UnsupportedError(f"{name}={getattr(config, name)}: this version runs on one rank; use {name}=1")


def argument_fields() -> list[Any]:
    """The fields of EngineConfig that a user gives, in order (dataclass fields with help, choices and default)."""
    return [f for f in fields(EngineConfig) if f.metadata]


def default_of(argument: Any) -> Any:
    """The default of one of `argument_fields()`, None where it has none."""
    return None if argument.default is MISSING else argument.default
