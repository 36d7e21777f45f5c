"""Settings: names, parsing, precedence, origins, and what a wrong value or name is answered with."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import re
import tomllib
from pathlib import Path

import pytest

from deepinfer import environ
from deepinfer.environ import VARIABLES, Settings, variable_of
from deepinfer.errors import ConfigError
from deepinfer.variables import as_text

ROOT = Path(__file__).parents[2]

PUBLISHED = """
ACCELERATOR COMPUTE_SUM_SMALLER_PROBS JIT_CACHE_DIR USERBUFFER_COMM_SMS GLOO_TIMEOUT REARRANGE_P2P_GROUPS
OVERRIDE_NUM_EXTRA_EXPERTS EXPERT_COUNT_WINDOW_SIZE EXPERT_REARRANGEMENT_STEP_INTERVAL
REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE MOE_LB_STAT_INTERVAL FORCE_IMBALANCE_RATIO FORCE_LOAD_BALANCE SHOW_EPLB_DETAIL
PREFILL_MAX_SUM_SEQLEN_K INDEX_ATTN_MEMORY_LIMIT USE_NEXTN_DECODE ENABLE_MTP_VARLEN MAX_BACKTRACKING_TOKENS
DFLASH_CONFIDENCE_HEAD_TEMPERATURE ENGRAM_PAD_TOKEN ENGRAM_FORCE_GPU_STORAGE SAMPLER_FORCE_TOPK DECODE_TOKEN_BLACKLIST
ENFORCE_EAGER DFLASH_ENFORCE_EAGER CUDAGRAPH_BATCH_SIZE_INTERVAL DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL
DECODE_PERF_CACHE_DIR DECODE_PERF_CACHE_TTL_SEC NUM_STATE_SLOTS_RATIO PREFILL_STORE_EXTRA_STATE PREFILL_STORE_EXTRA_SIZE
XGRAMMAR_DEBUG XGRAMMAR_TIMEOUT XGRAMMAR_DISABLE_CACHE XGRAMMAR_CACHE_LIMIT_BYTES SO_BUILDER_CPUS
PREFILL_ATTEMPT_INTERVAL PREFILL_ANY_ATTEMPT_INTERVAL ZERO_OVERHEAD_SCHEDULING LOGGING_INTERVAL_STEP
RINGBUFFER_WARNING_INTERVAL GC_INTERVAL_STEP YOCO_PREFILL_TRUNCATION_MODE YOCO_PREFILL_KEEP_TOKENS BATCH_INVARIANT
DISABLE_SYNC_GUARD ENABLE_MEMORY_TRACING PROFILE_HTTP_ENABLE PROFILE_HTTP_PORT_BASE TORCH_PROFILER_DIR
USE_MULTIMODAL_POOL MULTIMODAL_POOL_SIZE_GB MULTI_MODAL_BUFFER_SIZE MULTI_MODAL_WORKER_TIMEOUT CPP_LOG_LEVEL
HF_MODEL_DIR
""".split()
"""The names DeepInfer 0.1.0 understands, less the three that belong to one vendor's backend."""


def test_every_published_name_works():
    assert not set(PUBLISHED) - {variable.name for variable in VARIABLES}


def test_what_is_called_active_is_read_somewhere():
    sources = [
        p for p in (ROOT / "deepinfer-core" / "src").rglob("*.py") if p.name not in ("environ.py", "variables.py")
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*sources, ROOT / "build.sh"])
    words = set(re.findall(r"\w+", text))
    unread = [v.name for v in VARIABLES if v.active and not {v.field, v.full_name} & words]
    assert not unread


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_default_survives_its_own_spelling(variable):
    text = as_text(variable.default)
    assert (variable.parse(text) if text else variable.default) == variable.default
    assert variable.help and not variable.help.endswith(".")


def test_booleans():
    for text in ("1", "TRUE", "Yes", "on", " 1 "):
        assert Settings.load({"DEEPINFER_BATCH_INVARIANT": text}).batch_invariant is True
    for text in ("0", "False", "no", "OFF"):
        assert Settings.load({"DEEPINFER_BATCH_INVARIANT": text}).batch_invariant is False


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("BATCH_INVARIANT", "maybe", "a boolean: 0/1, true/false, yes/no or on/off"),
        ("BATCH_INVARIANT", "2", "a boolean"),
        ("NUM_KV_BLOCKS", "ten", "an integer of at least 1"),
        ("NUM_KV_BLOCKS", "1.5", "an integer"),
        ("GLOO_TIMEOUT", "nan", "a number of at least 0"),
        ("FORCE_IMBALANCE_RATIO", "0.5", "a number that is 0 or at least 1.0"),
        ("YOCO_PREFILL_TRUNCATION_MODE", "compakt", "one of off, mask, compact"),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,0", "a positive number"),
        ("PROFILE_HTTP_PORT_BASE", "70000", "an integer in 1..65535"),
    ],
)
def test_parse_error_names_variable_value_and_form(name, text, expected):
    with pytest.raises(ConfigError) as caught:
        Settings.load({f"DEEPINFER_{name}": text})
    assert f"DEEPINFER_{name}={text!r}: expected {expected}" in str(caught.value)


def test_all_wrong_values_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        Settings.load({"DEEPINFER_STRICT_OPS": "x", "DEEPINFER_USE_NEXTN_DECODE": "-1"})
    assert "DEEPINFER_STRICT_OPS" in str(caught.value)
    assert "DEEPINFER_USE_NEXTN_DECODE" in str(caught.value)


def test_argument_beats_environment_beats_default():
    environment = {"DEEPINFER_GC_INTERVAL_STEP": "7", "DEEPINFER_STRICT_OPS": "1"}
    settings = Settings.load(environment, gc_interval_step=9)
    assert (settings.gc_interval_step, settings.strict_ops, settings.debug) == (9, True, False)
    assert [settings.origin(n) for n in ("gc_interval_step", "strict_ops", "debug")] == [
        "argument", "environment", "default"]  # fmt: skip


def test_arguments_are_parsed_and_none_means_not_given():
    settings = Settings.load({}, decode_token_blacklist=[2, 7], ops=["a=b", "c=d"], hf_model_dir=None)
    assert settings.decode_token_blacklist == "2,7"
    assert settings.ops == ("a=b", "c=d")
    assert settings.origin("hf_model_dir") == "default"
    with pytest.raises(ConfigError, match="DEEPINFER_NUM_KV_BLOCKS='1.5'"):
        Settings.load({}, num_kv_blocks=1.5)


def test_unknown_argument_gets_the_nearest_spelling():
    with pytest.raises(ConfigError, match="'batch_invarient'. Did you mean batch_invariant"):
        Settings.load({}, batch_invarient=True)


def test_unknown_name_warns_with_nearest_spelling(caplog):
    Settings.load({"DEEPINFER_BATCH_INVARIENT": "1", "OTHER_VARIABLE": "1"})
    assert [record.getMessage() for record in caplog.records] == [
        "DEEPINFER_BATCH_INVARIENT is not a variable of DeepInfer or of an installed backend. "
        "Did you mean DEEPINFER_BATCH_INVARIANT?"
    ]


def test_a_name_nothing_reads_yet_is_reported(caplog):
    inactive = next(variable for variable in VARIABLES if not variable.active)
    Settings.load({inactive.full_name: as_text(inactive.default) or "1"})
    assert f"{inactive.full_name} is accepted, but nothing in this version reads it" in caplog.text


def test_empty_counts_as_unset(caplog):
    settings = Settings.load({"DEEPINFER_ACCELERATOR": "", "DEEPINFER_BATCH_INVARIANT": " ", "DEEPINFER_TYPO": ""})
    assert settings.accelerator is None
    assert settings.origin("batch_invariant") == "default"
    assert not caplog.records


def test_backtracking_covers_the_drafts():
    assert Settings().max_backtracking_tokens == 6
    assert Settings(use_nextn_decode=7).max_backtracking_tokens == 8
    assert Settings.load({"DEEPINFER_MAX_BACKTRACKING_TOKENS": "2"}, use_nextn_decode=5).max_backtracking_tokens == 6
    assert Settings(max_backtracking_tokens=10).max_backtracking_tokens == 10


def test_settings_are_immutable_picklable_and_never_written_back(monkeypatch):
    monkeypatch.setenv("DEEPINFER_STRICT_OPS", "1")
    before = dict(os.environ)
    settings = Settings.load(use_nextn_decode=0, hf_model_dir="~/model")
    assert dict(os.environ) == before
    assert settings.hf_model_dir == Path("~/model").expanduser()
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.strict_ops = False


def test_describe_has_one_complete_row_a_variable():
    rows = Settings.load({"DEEPINFER_LOGGING_INTERVAL_STEP": "5"}).describe()
    assert [row.variable for row in rows] == list(VARIABLES)
    row = next(row.as_dict() for row in rows if row.variable.name == "LOGGING_INTERVAL_STEP")
    assert (row["value"], row["origin"], row["default"], row["unit"]) == ("5", "environment", "100", "steps")


def test_a_backend_declares_its_own_variables(monkeypatch, caplog):
    declared = {"ACME_STREAMS": None}
    monkeypatch.setattr(environ, "installed_variables", lambda: declared)
    settings = Settings.load({"DEEPINFER_ACME_STREAMS": "3", "DEEPINFER_ACME_STREAM": "3"})
    variable = dataclasses.replace(variable_of("gc_interval_step"), name="ACME_STREAMS")
    assert settings.backend_value(variable) == 3
    assert Settings().backend_value(variable) == variable.default
    assert [r.getMessage().split()[0] for r in caplog.records] == ["DEEPINFER_ACME_STREAM"]


def test_names_of_the_nvidia_backend_work_once_it_is_installed(monkeypatch, caplog):
    project = tomllib.loads((ROOT / "deepinfer-nvidia" / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["deepinfer.settings"]
    monkeypatch.setattr(environ, "installed_variables", lambda: declared)
    settings = Settings.load({f"DEEPINFER_{name}": "7" for name in declared})
    assert set(declared) == {"NCCL_NUM_SMS", "NCCL_MEMORY_SAMPLE_INTERVAL_STEPS", "PROFILE_TORCH_CUDA_MEMORY"}
    assert not caplog.records
    for name, target in declared.items():
        module, _, attribute = target.partition(":")
        variable = getattr(importlib.import_module(module), attribute)
        assert (variable.name, str(settings.backend_value(variable))) == (name, "7")
