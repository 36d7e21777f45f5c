"""Structured output through the whole engine: outputs have their form, and nobody else's output changes.

Everything runs with order-free sums, so equality is bitwise. Random weights obey a grammar no less than trained ones.
"""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.errors import RequestError, StructuredOutputError

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": [1, 22, 333]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
FORMS = [
    {"schema_type": "regex", "schema": "(ab|cd){2,4}x"},
    {"schema_type": "json", "schema": SCHEMA, "whitespace": "none"},
    {"schema_type": "choice", "schema": ["yes", "no", "perhaps"]},
    {"schema_type": "ebnf", "schema": 'root ::= "<" word ">"\nword ::= [a-c] | [a-c] word'},
]
PROMPTS = [[0, *range(10 * n + 3, 10 * n + 12 + n)] for n in range(1, 5)]
FREE = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, seq_seed=7)


def params(form, seed, **fields):
    return SamplingParams(so_args=form, seq_seed=seed, max_tokens=60, skip_special_tokens=True, **fields)


def has_form(form, text):
    kind, schema = form["schema_type"], form["schema"]
    if kind == "json":
        jsonschema.validate(json.loads(text), schema)
        return True
    if kind == "choice":
        return text in schema
    return bool(re.fullmatch(schema if kind == "regex" else "<[a-c]+>", text))


@pytest.fixture(scope="module")
def make(checkpoints):
    def build(**arguments):
        defaults = {"max_model_len": 256, "max_num_seqs": 8, "batch_invariant": True}
        return LLM(str(checkpoints("micro")), **(defaults | arguments))

    return build


@pytest.fixture(scope="module")
def llm(make):
    with make() as made:
        yield made


def run(llm, prompts, each):
    return llm.generate(prompt_token_ids=prompts, sampling_params=each, use_tqdm=False)


@pytest.fixture(scope="module")
def alone(llm):
    """Every form alone, then the unconstrained request alone."""
    outputs = [run(llm, [prompt], [params(form, 3)])[0] for prompt, form in zip(PROMPTS, FORMS, strict=True)]
    return [(output.token_ids, output.logprobs) for output in [*outputs, run(llm, [PROMPTS[0]], [FREE])[0]]]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["schema_type"])
def test_every_output_has_its_form(llm, form):
    outputs = run(llm, PROMPTS, [params(form, seed, temperature=t) for seed, t in enumerate((0.0, 0.7, 1.0, 1.5))])
    assert all(output.error is None for output in outputs), outputs
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert ended or form["schema_type"] == "ebnf"  # a word of any length may run into max_tokens
    assert all(has_form(form, output.text) for output in ended), outputs


OTHERS = [
    {},
    {"max_num_batched_tokens": 16},
    {"zero_overhead_scheduling": False},
    {"use_nextn_decode": 3},
    {"use_nextn_decode": 3, "zero_overhead_scheduling": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", OTHERS, ids=lambda arguments: ",".join(arguments) or "as it comes")
def test_batch_chunks_overlap_and_drafts_change_nothing(make, alone, arguments):
    with make(**arguments) as llm:
        outputs = run(llm, [*PROMPTS, PROMPTS[0]], [*(params(form, 3) for form in FORMS), FREE])
    assert [(output.token_ids, output.logprobs) for output in outputs] == alone


@pytest.mark.slow
def test_a_preempted_request_goes_on_where_it_was(make):
    prompts = [[0, *(3 + (7 * n + i) % 400 for i in range(118 + n))] for n in range(4)]
    forms = [params({"schema_type": "regex", "schema": "[ab]{20}"}, n) for n in range(4)]
    with make() as llm:
        expected = [output.token_ids for output in run(llm, prompts, forms)]
    with make(num_kv_blocks=5) as llm:
        outputs = run(llm, prompts, forms)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [output.token_ids for output in outputs] == expected
    assert all(re.fullmatch("[ab]{20}", output.text) for output in outputs)


def test_wrong_forms_fail_alone(llm, alone):
    wrong = [
        ({"schema_type": "json", "schema": '{"type": "objekt"}'}, "schema"),
        ({"schema_type": "regex", "schema": "(unclosed"}, "(unclosed"),
        ({"schema_type": "ebnf", "schema": "root ::= missing"}, "missing"),
        ({"schema_type": "regex", "schema": "a", "trigger_token_ids": [5, 99999]}, "99999"),
    ]
    prompts = [PROMPTS[0], *[PROMPTS[1]] * len(wrong), PROMPTS[0]]
    outputs = run(llm, prompts, [params(FORMS[0], 3), *(params(form, 1) for form, _ in wrong), FREE])
    for output, (_, named) in zip(outputs[1:-1], wrong, strict=True):
        assert isinstance(output.error, RequestError) and named in str(output.error), output
        assert not output.token_ids
    assert [(output.token_ids, output.logprobs) for output in (outputs[0], outputs[-1])] == [alone[0], alone[-1]]


def test_the_form_holds_from_the_trigger_on(llm):
    golden = [300, 301, 302, 303]
    form = {"schema_type": "regex", "schema": "(ab){3}", "trigger_token_ids": [302, 303]}
    (output,) = run(llm, [PROMPTS[0]], [params(form, 5, golden_token_ids=golden)])
    (bound,) = run(llm, [PROMPTS[0]], [params({**form, "bound_token_id": 301}, 5, golden_token_ids=golden[:2])])
    for one in (output, bound):
        assert one.error is None and one.token_ids[:4] == golden
        assert llm.get_tokenizer().decode(one.token_ids[4:], skip_special_tokens=True) == "ababab"


def test_a_forced_token_against_the_form_is_named(llm):
    (output,) = run(llm, [PROMPTS[0]], [params(FORMS[2], 5, golden_token_ids=[300])])
    assert isinstance(output.error, StructuredOutputError)
    assert "golden_token_ids[0]=300" in str(output.error) and "so_args" in str(output.error)
