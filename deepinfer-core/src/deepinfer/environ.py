"""Every `DEEPINFER_*` variable of core, declared once, and the immutable `Settings` built from them.

`Settings.load()` is called once by whoever starts an engine or a command; the result travels with `EngineConfig`.
Precedence: arguments > environment > defaults. Nothing here writes to the environment, and nothing else in core reads
a `DEEPINFER_*` variable. Does not know the model: rules that need its sizes live in `config`.

A variable that is set but empty counts as unset. Variables that belong to one backend are declared by that backend
(entry-point group `deepinfer.settings`, one entry a variable) and kept as text in `Settings.backend`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError
from deepinfer.variables import (
    BOOL,
    NUMBERS,
    PATH,
    PREFIX,
    TEXT,
    WORDS,
    Parser,
    Variable,
    as_text,
    choice,
    closest,
    integer,
    number,
)

logger = logging.getLogger("deepinfer.environ")

SETTINGS_GROUP = "deepinfer.settings"
"""Entry-point group in which a backend announces its own variables: `NAME = "package.module:VARIABLE"`."""

_GIB = 1 << 30
_MIN_BACKTRACKING = 6
"""Ring rows kept for rejected drafts when MAX_BACKTRACKING_TOKENS is not set (five drafts and their base token)."""


def _setting(default: Any, parser: Parser, group: str, text: str, unit: str = "", active: bool = True) -> Any:
    """A field of `Settings` together with everything a reader of the variable wants to know."""
    metadata = {"parser": parser, "group": group, "help": text, "unit": unit, "active": active}
    return field(default=default, metadata=metadata)


def _later(default: Any, parser: Parser, group: str, text: str, unit: str = "") -> Any:
    """A variable existing scripts set; accepted and checked, but nothing in this version reads it."""
    return _setting(default, parser, group, text, unit, active=False)


_DEV, _NUM, _CACHE, _SCHED = "device and backend", "numbers and sampling", "caches and truncation", "scheduling"
_SPEC, _PAR, _SO, _VIS = "speculation", "parallelism", "structured output", "vision input"
_GRAPH, _TOOL = "graphs", "files, logging and debugging"


@dataclass(frozen=True)
class Settings:
    """One field a variable, in lower case without the prefix. Built once, never changed.

    from_arguments, from_environment   names of the fields that were given there (all others are defaults)
    backend                            text of variables that installed backends declare, by name without prefix
    """

    # device and backend
    accelerator: str | None = _setting(
        None, TEXT, _DEV, "backend to use, by entry-point name; unset: probe the machine"
    )
    ops: tuple[str, ...] = _setting(
        (), WORDS, _DEV, "op overrides PATTERN=PROVIDER, as --op; e.g. attention.*=reference"
    )
    op_packs: tuple[str, ...] = _setting((), WORDS, _DEV, "op packs to load, most preferred first")
    strict_ops: bool = _setting(False, BOOL, _DEV, "refuse to start if a backend's own op has to fall back to core's")
    jit_cache_dir: Path | None = _later(None, PATH, _DEV, "root of the caches of compiled kernels")

    # numbers and sampling
    batch_invariant: bool = _setting(
        False, BOOL, _NUM, "bind only ops whose rows do not depend on the rest of the batch"
    )
    compute_sum_smaller_probs: bool = _setting(False, BOOL, _NUM, "return the cumulative probability at each token")
    sampler_force_topk: int = _setting(0, integer(0, 16384), _NUM, "sample among the K largest logits only; 0 = off")
    decode_token_blacklist: str = _setting("", TEXT, _NUM, "token ids that are never sampled, e.g. 0..3,7,10..12")
    engram_pad_token: int = _later(
        2, integer(0), _NUM, "token id before the beginning of a text in n-grams", "token id"
    )

    # caches and truncation
    num_kv_blocks: int | None = _setting(
        None, integer(1), _CACHE, "usable cache blocks of 128 tokens; unset: what memory allows", "blocks"
    )
    num_state_slots_ratio: float = _setting(1.2, number(1.0), _CACHE, "state slots = int(max_num_seqs * ratio) + 1")
    max_backtracking_tokens: int = _setting(
        _MIN_BACKTRACKING, integer(0), _CACHE, "spare ring rows for rejected drafts; raised to drafts + 1", "tokens"
    )
    yoco_prefill_truncation_mode: str = _setting(
        "off", choice("off", "mask", "compact"), _CACHE, "compute the decoder half only for the last prompt tokens"
    )
    yoco_prefill_keep_tokens: int = _setting(
        0, integer(0), _CACHE, "prompt tokens kept by truncation; at least window + backtracking", "tokens"
    )
    index_attn_memory_limit: int = _later(
        10 * _GIB, integer(1), _CACHE, "memory for indexer scores of one prefill chunk", "bytes"
    )
    prefill_store_extra_state: bool = _later(False, BOOL, _CACHE, "keep extra ring rows in a prefill-only engine")
    prefill_store_extra_size: int = _later(128, integer(0), _CACHE, "how many extra ring rows", "tokens")

    # scheduling
    prefill_max_sum_seqlen_k: int | None = _setting(
        None, integer(1), _SCHED, "cap on the summed context length of a prefill step; unset: none", "tokens"
    )
    zero_overhead_scheduling: bool | None = _setting(
        None, BOOL, _SCHED, "plan and launch a step while the device works on the one before; unset: on"
    )
    prefill_attempt_interval: int = _setting(
        70, integer(1), _SCHED, "steps between prefills while requests decode; unset: prefill at once", "steps"
    )
    prefill_any_attempt_interval: int = _later(
        100, integer(1), _SCHED, "steps after which one rank's wish to prefill is enough", "steps"
    )
    gc_interval_step: int = _setting(
        1000, integer(0), _SCHED, "steps between garbage collections; 0 = Python's own", "steps"
    )
    logging_interval_step: int = _setting(100, integer(), _SCHED, "steps between statistics lines; <= 0 off", "steps")

    # speculation
    use_nextn_decode: int = _setting(0, integer(0, 16), _SPEC, "draft tokens per request and step; 0 = off", "tokens")
    enable_mtp_varlen: bool = _setting(False, BOOL, _SPEC, "verify as many drafts as their confidence is worth")
    dflash_confidence_head_temperature: tuple[float, ...] = _setting(
        (1.0,), NUMBERS, _SPEC, "temperature of the confidence head, one for all drafts or one each"
    )
    decode_perf_cache_dir: Path | None = _setting(None, PATH, _SPEC, "directory of the measured cost curve")
    decode_perf_cache_ttl_sec: float = _setting(3600.0, number(0), _SPEC, "how long a stored cost curve is used", "s")

    # parallelism
    gloo_timeout: float = _setting(14400.0, number(0), _PAR, "default timeout of process groups", "s")
    userbuffer_comm_sms: int = _later(0, integer(0), _PAR, "multiprocessors for expert dispatch; 0 = library's choice")
    rearrange_p2p_groups: int = _later(1, integer(1), _PAR, "point-to-point groups of the expert shuffle")
    override_num_extra_experts: int = _later(0, integer(0), _PAR, "lower bound of redundant expert slots")
    expert_count_window_size: int = _later(100, integer(1), _PAR, "window of expert load statistics", "steps")
    expert_rearrangement_step_interval: int = _later(
        0, integer(0), _PAR, "steps between expert rearrangements; 0 = off", "steps"
    )
    rearrange_after_prefill_in_normal_engine: bool = _later(False, BOOL, _PAR, "also count and rearrange on prefill")
    moe_lb_stat_interval: int = _later(128, integer(1), _PAR, "steps between balance statistics", "steps")
    force_imbalance_ratio: float = _later(
        0.0, number(zero_or_at_least=1.0), _PAR, "random routing biased to the first rank (measurements only)"
    )
    force_load_balance: bool = _later(False, BOOL, _PAR, "random uniform routing (measurements only)")
    show_eplb_detail: bool = _later(False, BOOL, _PAR, "log rearrangement figures layer by layer")
    engram_force_gpu_storage: bool = _later(False, BOOL, _PAR, "Engram tables in device instead of host memory")

    # structured output
    so_engine: str = _setting("xgrammar", TEXT, _SO, "grammar engine: xgrammar, an installed one, or module:factory")
    so_whitespace: str = _setting(
        "bounded",
        choice("bounded", "none", "any"),
        _SO,
        "white space between elements of JSON, unless a request says; bounded = at most 12 characters in a row",
    )
    so_builder_cpus: int = _setting(
        4, integer(1), _SO, "processes that compile grammars, at most one a core", "processes"
    )
    so_max_schema_bytes: int = _setting(1 << 18, integer(1), _SO, "longest schema, expression or grammar", "bytes")
    so_max_schema_depth: int = _setting(128, integer(1), _SO, "most brackets within brackets in one", "brackets")
    xgrammar_timeout: float = _setting(20.0, number(0), _SO, "time to compile a grammar", "s")
    xgrammar_disable_cache: bool = _setting(False, BOOL, _SO, "compile every grammar anew")
    xgrammar_cache_limit_bytes: int = _setting(
        10 * _GIB, integer(), _SO, "memory for compiled grammars that are kept; <= 0 none", "bytes"
    )
    xgrammar_debug: bool = _later(False, BOOL, _SO, "log the grammar compiler's decisions")

    # graphs
    enforce_eager: bool = _later(False, BOOL, _GRAPH, "run the main model without captured graphs")
    dflash_enforce_eager: bool = _later(False, BOOL, _GRAPH, "run the draft model without captured graphs")
    cudagraph_batch_size_interval: int = _later(8, integer(1), _GRAPH, "grid of captured batch sizes", "sequences")
    dflash_cudagraph_batch_size_interval: int = _later(
        8, integer(1), _GRAPH, "the same for the draft model", "sequences"
    )
    disable_sync_guard: bool = _setting(False, BOOL, _GRAPH, "no check for accidental waits on the device")

    # vision input
    use_multimodal_pool: bool | None = _later(None, BOOL, _VIS, "image worker with shared memory; unset: where needed")
    multimodal_pool_size_gb: float = _later(8.0, number(0), _VIS, "memory of the image pool", "GiB")
    multi_modal_buffer_size: int = _later(512, integer(1), _VIS, "images under way at once", "images")
    multi_modal_worker_timeout: float = _later(1800.0, number(0), _VIS, "patience with the image worker", "s")

    # files, logging and debugging
    hf_model_dir: Path | None = _setting(
        None, PATH, _TOOL, "local copy of the published checkpoint, used when its hub id is asked for"
    )
    trace_ops: str | None = _setting(None, choice("count", "time", "shapes"), _TOOL, "trace bound ops, as --trace-ops")
    log_level: str = _setting(
        "warning", choice("debug", "info", "warning", "error"), _TOOL, "least severe message the commands print"
    )
    debug: bool = _setting(False, BOOL, _TOOL, "commands show tracebacks, as --debug")
    torch_spec: str | None = _setting(None, TEXT, _TOOL, "torch that build.sh installs, e.g. torch==2.13.0")
    cpp_log_level: str = _later("info", choice("off", "error", "warn", "info"), _TOOL, "log level of compiled code")
    ringbuffer_warning_interval: int = _later(60, integer(1), _TOOL, "warn when a rank does not take its work", "s")
    enable_memory_tracing: bool = _later(False, BOOL, _TOOL, "write a memory snapshot of the profile run")
    profile_http_enable: bool = _later(False, BOOL, _TOOL, "serve profiles over HTTP")
    profile_http_port_base: int = _later(6070, integer(1, 65535), _TOOL, "first port of the profile server", "port")
    torch_profiler_dir: Path = _later(Path("/tmp"), PATH, _TOOL, "directory of torch profiles")

    from_arguments: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    from_environment: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    backend: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        least = self.use_nextn_decode + 1
        if self.max_backtracking_tokens < least:
            object.__setattr__(self, "max_backtracking_tokens", least)

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
        """Settings from `arguments` (None = not given), then `environ` (None = this process's), then defaults.

        Raises ConfigError naming every variable that cannot be read, or the argument that names no setting.
        """
        environ = os.environ if environ is None else environ
        declared = installed_variables()
        _warn_about_names(environ, declared)
        from_environment = _parse_all(environ)
        backend = tuple(sorted((n, environ[PREFIX + n]) for n in declared if environ.get(PREFIX + n, "").strip()))
        loaded = cls(**from_environment, from_environment=frozenset(from_environment), backend=backend)
        return loaded.override(**arguments)

    def override(self, **arguments: Any) -> Settings:
        """A copy in which the arguments that are not None win."""
        given = {name: value for name, value in arguments.items() if value is not None}
        if not given:
            return self
        values = {name: variable_of(name).coerce(value) for name, value in given.items()}
        return replace(self, **values, from_arguments=self.from_arguments | values.keys())

    def origin(self, name: str) -> str:
        """Where field `name` comes from: "argument", "environment" or "default"."""
        if name in self.from_arguments:
            return "argument"
        return "environment" if name in self.from_environment else "default"

    def describe(self) -> list[SettingRow]:
        """One row a variable of core, in the order of declaration."""
        return [SettingRow(v, getattr(self, v.field), self.origin(v.field)) for v in VARIABLES]

    def backend_value(self, variable: Variable) -> Any:
        """The value of a variable that a backend declares."""
        text = dict(self.backend).get(variable.name)
        return variable.default if text is None else variable.parse(text)


@dataclass(frozen=True, slots=True)
class SettingRow:
    """What `deepinfer env` prints of one variable."""

    variable: Variable
    value: Any
    origin: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form; values are text as the environment would spell them, None if unset."""
        variable = self.variable
        return {
            "name": variable.full_name,
            "type": variable.parser.type_name,
            "default": as_text(variable.default) or None,
            "value": as_text(self.value) or None,
            "origin": self.origin,
            "unit": variable.unit,
            "group": variable.group,
            "active": variable.active,
            "help": variable.help,
        }


def _declared() -> tuple[Variable, ...]:
    """The variables of core, read off the fields of `Settings`."""
    return tuple(Variable(name=f.name.upper(), default=f.default, **f.metadata) for f in fields(Settings) if f.metadata)


VARIABLES: tuple[Variable, ...] = _declared()


def _parse_all(environ: Mapping[str, str]) -> dict[str, Any]:
    """Typed values of the variables that are set and not empty; one ConfigError lists all that are wrong."""
    values, problems = {}, []
    for variable in VARIABLES:
        text = environ.get(variable.full_name, "")
        try:
            if text.strip():
                values[variable.field] = variable.parse(text)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return values


def variable_of(name: str) -> Variable:
    """The variable behind field `name`; ConfigError with the nearest spelling if there is none."""
    for variable in VARIABLES:
        if variable.field == name:
            return variable
    raise ConfigError(f"unknown setting {name!r}.{closest(name, [v.field for v in VARIABLES])}")


def installed_variables() -> Mapping[str, EntryPoint]:
    """Names (without prefix) that installed backends declare. Reads package metadata only; imports no backend."""
    return {entry.name.upper().removeprefix(PREFIX): entry for entry in entry_points(group=SETTINGS_GROUP)}


def _warn_about_names(environ: Mapping[str, str], declared: Mapping[str, EntryPoint]) -> None:
    """A name nobody declares is probably a typo; a name nobody reads yet should not be taken for effective."""
    known = {v.full_name: v for v in VARIABLES} | {PREFIX + name: None for name in declared}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or not environ[name].strip():
            continue
        if name not in known:
            logger.warning(
                "%s is not a variable of DeepInfer or of an installed backend.%s", name, closest(name, known)
            )
        elif known[name] is not None and not known[name].active:
            logger.warning("%s is accepted, but nothing in this version reads it", name)
