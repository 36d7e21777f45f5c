"""`SamplingParams`: wrong values are refused where they are written, with field and value in the message."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.sampling_params import SamplingParams
from deepinfer.so_args import StructuredOutput

WRONG = [
    ("top_k", 0.4, TypeError),
    ("top_k", True, TypeError),
    ("top_k", 0, ValueError),
    ("top_k", -2, ValueError),
    ("top_k", 2**31, ValueError),
    ("temperature", float("nan"), ValueError),
    ("temperature", float("inf"), ValueError),
    ("temperature", -1, ValueError),
    ("temperature", 1e39, ValueError),
    ("temperature", "0.5", TypeError),
    ("temperature", True, TypeError),
    ("temperature", None, TypeError),
    ("top_p", 0, ValueError),
    ("top_p", 1.0000001, ValueError),
    ("top_p", float("nan"), ValueError),
    ("max_tokens", 1.5, TypeError),
    ("max_tokens", -1, ValueError),
    ("max_tokens", 2**31, ValueError),
    ("seq_seed", -1, ValueError),
    ("seq_seed", 2**64, ValueError),
    ("seq_seed", "7", TypeError),
    ("seq_seed", 7.0, TypeError),
    ("top_logprobs", 1001, ValueError),
    ("top_logprobs", -1, ValueError),
    ("logprobs", 1001, ValueError),
    ("logprobs", "yes", TypeError),
    ("prompt_logprobs", 1, TypeError),
    ("ignore_eos", "false", TypeError),
    ("first_n_token_no_eos", -1, ValueError),
    ("min_tokens", -1, ValueError),
    ("stop", [7], TypeError),
    ("stop", ["a", ""], ValueError),
    ("stop_token_ids", [-1], ValueError),
    ("stop_token_ids", "12", TypeError),
    ("stop_token_ids", [1.0], TypeError),
    ("golden_token_ids", [3, -2], ValueError),
    ("golden_token_ids", [True], TypeError),
    ("golden_token_ids", 3, TypeError),
    ("so_args", "json", TypeError),
]


@pytest.mark.parametrize(("field", "value", "error"), WRONG, ids=lambda v: repr(v) if not isinstance(v, type) else "")
def test_wrong_value_is_refused_at_construction(field, value, error):
    with pytest.raises(error) as caught:
        SamplingParams(**{field: value})
    assert field in str(caught.value)
    shown = value[-1] if isinstance(value, list) else value
    spellings = {repr(shown), repr(float(shown))} if type(shown) in (int, float) else {repr(shown)}
    assert any(spelling in str(caught.value) for spelling in spellings)


def test_value_errors_are_request_errors():
    with pytest.raises(RequestError):
        SamplingParams(temperature=-0.5)


def test_min_tokens_may_not_exceed_max_tokens():
    SamplingParams(min_tokens=16)
    with pytest.raises(ValueError, match="min_tokens=17 is larger than max_tokens=16"):
        SamplingParams(min_tokens=17)


def test_accepted_edges():
    assert SamplingParams(max_tokens=0).max_tokens == 1
    assert SamplingParams(seq_seed=2**64 - 1).seq_seed == 2**64 - 1
    assert SamplingParams(top_k=np.int64(5), temperature=np.float32(0.5), top_p=1).top_k == 5
    assert SamplingParams(golden_token_ids=np.array([4, -1])).golden_token_ids == (4, -1)
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=None, stop_token_ids=None).stop_token_ids == ()
    assert SamplingParams(ignore_eos=np.bool_(True)).ignore_eos is True


def test_immutable_and_comparable():
    params = SamplingParams(temperature=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    assert dataclasses.replace(params, top_k=3) == SamplingParams(temperature=0.5, top_k=3)
    assert "so_args" in repr(params)
    assert "golden_token_ids" in repr(params)


def test_from_dict_round_trip_and_unknown_key():
    params = SamplingParams(temperature=0.6, stop=["a"], golden_token_ids=[1, -1], seq_seed=3)
    assert SamplingParams.from_dict(params.to_dict()) == params
    with pytest.raises(RequestError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 1.0})


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-4, True), (2e-4, False), (1, False)])
def test_greedy_limit(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_number_of_top_logprobs_is_the_larger_wish():
    assert SamplingParams(logprobs=5, top_logprobs=3).num_top_logprobs == 5
    assert SamplingParams(logprobs=True, top_logprobs=3).num_top_logprobs == 3
    assert SamplingParams(logprobs=True).num_top_logprobs == 0


def test_golden_and_eos_by_output_index():
    params = SamplingParams(golden_token_ids=[7, -1], first_n_token_no_eos=1, min_tokens=3)
    assert [params.golden_at(i) for i in range(3)] == [7, -1, -1]
    assert [params.forbids_eos_at(i) for i in range(4)] == [True, True, True, False]
    assert [SamplingParams(first_n_token_no_eos=2).forbids_eos_at(i) for i in range(3)] == [True, True, False]


def test_seeds_of_requests():
    assert SamplingParams(seq_seed=9).seed_for(1, 2) == 9
    free = SamplingParams()
    seeds = {free.seed_for(engine, number) for engine in (0, 1, 2**63) for number in range(200)}
    assert len(seeds) == 600
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert free.seed_for(5, 6) == free.seed_for(5, 6)


SO_WRONG = [
    ({"schema": "{}"}, "schema_type"),
    ({"schema_type": "xml", "schema": ""}, "schema_type"),
    ({"schema_type": "json"}, "schema"),
    ({"schema_type": "json", "schema": "{}", "bound_token_id": 3}, "trigger_token_ids"),
    ({"schema_type": "json", "schema": "{}", "trigger_token_ids": []}, "trigger_token_ids"),
    ({"schema_type": "json", "schema": "{}", "trigger_token_ids": [-1]}, "trigger_token_ids"),
    ({"schema_type": "json", "schema": "{}", "trigger_token_ids": [1], "bound_token_id": -3}, "bound_token_id"),
    ({"schema_type": "json", "schema": "{}", "serialized": True}, "serialized"),
    ({"schema_type": "json", "schema": "{}", "bound_token_ids": [3]}, "did you mean 'bound_token_id'"),
    ({"schema_type": "json", "schema": "\ud800"}, "Unicode"),
    ({"schema_type": "json", "schema": {"a": float("nan")}}, "JSON"),
    ({"schema_type": "json_object", "schema": "{}"}, "json_object"),
    ({"schema_type": "choice", "schema": []}, "at least one"),
    ({"schema_type": "json", "schema": "{}", "whitespace": "some"}, "whitespace"),
    ({"schema_type": "regex", "schema": "a", "whitespace": "any"}, "JSON only"),
]


@pytest.mark.parametrize(("so_args", "named"), SO_WRONG, ids=range(len(SO_WRONG)))
def test_structured_output_shape_is_checked(so_args, named):
    with pytest.raises(ValueError, match=named):
        SamplingParams(so_args=so_args)


def test_structured_output_types_and_copy():
    with pytest.raises(TypeError, match="regex"):
        SamplingParams(so_args={"schema_type": "regex", "schema": {"a": 1}})
    with pytest.raises(TypeError, match="bound_token_id"):
        SamplingParams(so_args={"schema_type": "regex", "schema": "a", "trigger_token_ids": [1], "bound_token_id": [2]})
    schema = {"type": "object"}
    params = SamplingParams(so_args={"schema_type": "json", "schema": schema})
    schema["type"] = "array"
    assert params.structured.schema == '{"type": "object"}'


def test_structured_output_round_trip():
    so_args = {"schema_type": "json", "schema": "{}", "trigger_token_ids": [4, 5], "bound_token_id": 6}
    params = SamplingParams(so_args=so_args | {"whitespace": "any"})
    assert params.so_args == StructuredOutput.json({}, trigger_token_ids=[4, 5], bound_token_id=6, whitespace="any")
    assert SamplingParams.from_dict(params.to_dict()) == params
    assert (
        SamplingParams.from_dict(SamplingParams(so_args={"schema_type": "json_object"}).to_dict()).so_args.schema
        is None
    )
    assert SamplingParams(so_args=StructuredOutput.choice(["a", "b"])).structured.schema == ("a", "b")


def test_module_does_not_import_torch_or_numpy():
    code = (
        "import sys, deepinfer.sampling_params as s; s.SamplingParams(); print({'torch', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
