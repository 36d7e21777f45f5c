"""Engine arguments: defaults, limits, messages, and what comes from settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepinfer.config import EngineConfig, check_truncation
from deepinfer.environ import Settings
from deepinfer.errors import ConfigError, UnsupportedError


def create(**arguments) -> EngineConfig:
    settings = arguments.pop("settings", Settings())
    return EngineConfig.create(settings, **{"model": "m"} | arguments)


def model(max_position_embeddings: int = 1 << 20, sliding_window: int = 128):
    text = SimpleNamespace(max_position_embeddings=max_position_embeddings, sliding_window=sliding_window)
    return SimpleNamespace(text=text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_model_len": 0}, "max_model_len=0: expected at least 1"),
        ({"max_model_len": "100"}, "max_model_len='100': expected int, found str"),
        ({"max_num_seqs": True}, "max_num_seqs=True: expected int, found bool"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5: expected a number above 0 and at most 1"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization=0.0: expected"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan: expected"),
        ({"load_format": "dumy"}, "load_format='dumy': expected one of auto, dummy. Did you mean dummy?"),
        ({"numerics": "fast"}, "numerics='fast': expected one of exact, smooth"),
        ({"model": ""}, "model='': expected the directory of a checkpoint or a hub id"),
        ({"max_num_batched_tokens": 255}, "max_num_batched_tokens=255: one decode step of max_num_seqs=256"),
        ({"max_modellen": 5}, "unknown engine argument 'max_modellen'. Did you mean max_model_len?"),
        ({"num_kv_blocks": 0}, "num_kv_blocks=0: expected at least 1"),
    ],
)
def test_wrong_argument(arguments, message):
    with pytest.raises(ConfigError) as caught:
        create(**arguments)
    assert message in str(caught.value)


def test_model_is_required():
    with pytest.raises(ConfigError, match="model is missing"):
        EngineConfig.create(Settings())


@pytest.mark.parametrize(
    "arguments",
    [{"expert_parallel_size": 8}, {"data_parallel_size": 2}, {"context_parallel_size": 2},
     {"engine_rank": 1}, {"tokens_per_block": 64}],
)  # fmt: skip
def test_what_this_version_lacks_is_refused_at_start(arguments):
    with pytest.raises(UnsupportedError) as caught:
        create(**arguments)
    name = next(iter(arguments))
    assert name.lower() in str(caught.value).lower()


def test_arguments_of_the_original_are_accepted():
    legacy = {"served_model_name": "x", "disable_log_stats": True, "engine_rank": 0, "tokens_per_block": 128,
              "data_parallel_size": 0, "engram_parallel_size": 0, "trust_remote_code": True}  # fmt: skip
    config = create(**legacy)
    assert (config.data_parallel_size, config.engram_parallel_size, config.trust_remote_code) == (1, 1, True)


def test_lengths_are_filled_in_from_the_model():
    assert create().resolve(model()).max_model_len == 4096
    short = create().resolve(model(max_position_embeddings=512))
    assert (short.max_model_len, short.max_num_batched_tokens) == (512, 4096)
    assert create(max_model_len=8000).resolve(model()).max_num_batched_tokens == 8000
    assert create(max_num_seqs=5000).resolve(model()).max_num_batched_tokens == 5000
    with pytest.raises(ConfigError, match="max_model_len=600: the model's max_position_embeddings is 512"):
        create(max_model_len=600).resolve(model(max_position_embeddings=512))


def test_prompts_must_fit_a_step_without_chunks():
    arguments = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    assert create(**arguments).resolve(model()).max_num_batched_tokens == 256
    with pytest.raises(ConfigError, match="max_num_batched_tokens=256 is below max_model_len=512"):
        create(**arguments, chunked_prefill=False).resolve(model())


def test_confidence_temperatures_are_one_or_one_a_draft():
    for values in ((2.0,), (1.0, 1.1, 1.2)):
        create(use_nextn_decode=3, dflash_confidence_head_temperature=values)
    with pytest.raises(ConfigError, match="CONFIDENCE_HEAD_TEMPERATURE has 2 values: .* each of the 3 drafts"):
        create(use_nextn_decode=3, dflash_confidence_head_temperature=(1.0, 2.0))
    create(dflash_confidence_head_temperature=(1.0, 2.0))  # nobody drafts


def test_no_proposer_means_no_drafts():
    assert create(use_nextn_decode=3, proposer="none").num_draft_tokens == 0
    with pytest.raises(ConfigError, match="verification='strict': expected one of coupled, rejection"):
        create(verification="strict")


def test_derived_sizes():
    config = create(max_num_seqs=256).resolve(model())
    assert config.num_state_slots == 308
    assert config.runtime_max_model_len == 4096
    drafting = Settings(use_nextn_decode=5, zero_overhead_scheduling=True)
    assert dataclasses.replace(config, settings=drafting).runtime_max_model_len == 4096 + 5 + 6 + 5


@pytest.mark.parametrize("mode", ["mask", "compact"])
@pytest.mark.parametrize("keep", [0, 1, 127, 133])
def test_truncation_must_keep_whole_windows(mode, keep):
    settings = Settings(yoco_prefill_truncation_mode=mode, yoco_prefill_keep_tokens=keep)
    with pytest.raises(ConfigError, match=rf"KEEP_TOKENS={keep} .* at least 134 "):
        create(settings=settings).resolve(model())


def test_truncation_that_keeps_enough_is_accepted():
    for keep in (134, 140, 1000):
        check_truncation(Settings(yoco_prefill_truncation_mode="compact", yoco_prefill_keep_tokens=keep), 128)
    check_truncation(Settings(yoco_prefill_truncation_mode="off", yoco_prefill_keep_tokens=0), 128)
    with pytest.raises(ConfigError):
        check_truncation(Settings(yoco_prefill_truncation_mode="mask", yoco_prefill_keep_tokens=37), 32)


def test_arguments_win_over_variables_and_overrides_stay_apart():
    settings = Settings(accelerator="acme", num_kv_blocks=10, ops=("gemm.*=reference",), trace_ops="count")
    config = create(settings=settings, op_overrides=["attention.*=reference"], num_kv_blocks=20)
    assert (config.accelerator, config.num_kv_blocks, config.trace_ops) == ("acme", 20, "count")
    assert (config.op_overrides, config.settings.ops) == (("attention.*=reference",), ("gemm.*=reference",))
    assert create(settings=settings, op_overrides="a=b").op_overrides == ("a=b",)


def test_a_setting_can_be_given_as_an_argument():
    config = create(batch_invariant=True, sampler_force_topk="20")
    assert config.settings.batch_invariant is True
    assert config.settings.sampler_force_topk == 20
    assert config.settings.origin("batch_invariant") == "argument"


def test_environment_is_read_when_no_settings_are_given(monkeypatch):
    monkeypatch.setenv("DEEPINFER_NUM_KV_BLOCKS", "12")
    config = EngineConfig.create(model=Path("/some/where"))
    assert (config.num_kv_blocks, config.model) == (12, "/some/where")
