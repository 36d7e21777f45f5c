"""Grammars themselves: what compiles, what is refused, and that every text a grammar lets through is one the user's
schema or expression accepts, judged by `jsonschema` and `re`. No engine."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest
from forms import COMPILER, EOS, SECOND_EOS, VOCABULARY, allowed, bytes_of, grammar_of, ids_of, matches, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import StructuredOutputError
from deepinfer.structured.grammar import GrammarSpec
from deepinfer.structured.regex import plain_regex
from deepinfer.structured.vocabulary import is_possible

VALIDATOR = jsonschema.Draft202012Validator


def json_grammar(schema: object, whitespace: str = "bounded"):
    return grammar_of("json", schema if isinstance(schema, str) else json.dumps(schema), whitespace)


def assert_valid(schema: object, texts: int = 12, seed: int = 0, whitespace: str = "bounded") -> int:
    """Random texts of a schema's grammar are valid; returns how many ended in time."""
    grammar, source, ended = json_grammar(schema, whitespace), random.Random(seed), 0
    for _ in range(texts):
        text = walk(grammar, source)
        if text is not None:
            VALIDATOR(schema).validate(json.loads(text.decode()))
            ended += 1
    return ended


# --- random schemas ---


def schemas(depth: int = 2) -> st.SearchStrategy:
    numbers = st.integers(-60, 60)
    bounds = st.tuples(numbers, numbers).map(sorted).map(lambda pair: {"minimum": pair[0], "maximum": pair[1]})
    lengths = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted)
    leaf = st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string"}, {"type": "integer"}, {}, True]),
        bounds.map(lambda b: {"type": "integer", **b}),
        bounds.map(lambda b: {"type": "number", **b}),
        numbers.map(lambda n: {"type": ["number", "null"], "exclusiveMinimum": n}),
        lengths.map(lambda p: {"type": "string", "minLength": p[0], "maxLength": p[1]}),
        st.integers(1, 40).map(lambda n: {"type": "integer", "multipleOf": n}),
        st.sampled_from(["^a.b$", '[^x"]{1,3}', r"\S\d?", "(é|ab)+", "^.{2}ü.$"]).map(
            lambda p: {"type": "string", "pattern": p}
        ),
        st.sampled_from(["date", "email", "uuid", "ipv4", "made-up"]).map(lambda f: {"type": "string", "format": f}),
        st.lists(
            st.sampled_from([1, 2.5, True, None, "a", "在", 'q"\\', [1], {"k": None}]), min_size=1, max_size=4
        ).map(lambda values: {"enum": values}),
    )
    if not depth:
        return leaf
    inner = schemas(depth - 1)
    names = st.sampled_from(["a", "ab", "é", 'q"', "z\\n"])
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(names, inner, max_size=3)},
        optional={"additionalProperties": st.one_of(st.booleans(), inner)},
    ).flatmap(
        lambda s: (
            st.lists(st.sampled_from(sorted(s["properties"])), unique=True).map(lambda r: {**s, "required": r})
            if s["properties"]
            else st.just(s)
        )
    )
    counts = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(sorted)
    arrays = st.tuples(inner, counts).map(
        lambda p: {"type": "array", "items": p[0], "minItems": p[1][0], "maxItems": p[1][1]}
    )
    tuples = st.lists(inner, min_size=1, max_size=2).map(lambda items: {"type": "array", "prefixItems": items})
    unions = st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options})
    return st.one_of(leaf, objects, arrays, tuples, unions)


@settings(max_examples=60, deadline=None)
@given(schemas(), st.integers(0, 10_000), st.sampled_from(["bounded", "none"]))
def test_every_text_of_a_random_schema_is_valid(schema, seed, whitespace):
    assert_valid(schema, texts=3, seed=seed, whitespace=whitespace)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(schemas(3), st.integers(0, 10_000), st.sampled_from(["bounded", "none", "any"]))
def test_every_text_of_many_random_schemas_is_valid(schema, seed, whitespace):
    assert_valid(schema, texts=4, seed=seed, whitespace=whitespace)


# --- JSON, case by case ---

MUTUAL = {
    "$defs": {
        "List": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
        "Item": {
            "type": "object",
            "properties": {
                "P": {"type": "string", "pattern": r"^(\{[\w\-]+\})|([\w\-]+)$"},
                "C": {"$ref": "#/$defs/List"},
            },
            "required": ["P"],
            "additionalProperties": False,
        },
    },
    "type": "object",
    "properties": {"A": {"type": "string", "pattern": "^[a-z0-9]+$"}, "C": {"$ref": "#/$defs/List"}},
    "required": ["A"],
    "additionalProperties": False,
}


def test_so01_definitions_that_refer_to_each_other():
    assert assert_valid(MUTUAL, texts=25) > 10
    deep = '{"A":"x","C":[{"P":"{y-z}","C":[{"P":"q","C":[]}]}]}'
    assert matches(json_grammar(MUTUAL), deep)
    assert not matches(json_grammar(MUTUAL), deep.replace("y-z", "y z"))


@pytest.mark.parametrize(
    "spec",
    [
        ("ebnf", "root ::= root"),
        ("json", '{"$ref":"#/$defs/A","$defs":{"A":{"$ref":"#/$defs/A"}}}'),
    ],
)
def test_so02_a_grammar_of_itself_only_is_refused_or_allows_nothing(spec):
    """Versions of xgrammar differ; the builder refuses a grammar that allows nothing."""
    try:
        assert allowed(grammar_of(*spec).start()) == []
    except StructuredOutputError as error:
        assert "$ref" in str(error)  # noqa: PT017


def test_so02_counts_beyond_all_reason():
    unbounded = json_grammar({"type": "array", "items": {"type": "null"}, "maxItems": 18446744073709551615})
    assert matches(unbounded, "[null,null]")
    many = json_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 100000})
    assert not matches(many, "[1,2]")
    with pytest.raises(StructuredOutputError, match="minItems=18446744073709551615"):
        json_grammar({"type": "array", "minItems": 18446744073709551615})


@pytest.mark.parametrize("text", ['{"enum":["在线","北京"]}', '{"enum":["\\u5728\\u7ebf","\\u5317\\u4eac"]}'])
def test_so05_chinese_values_raw_and_escaped(text):
    grammar = json_grammar(text)
    texts = {walk(grammar, random.Random(seed)).decode().lstrip(" ") for seed in range(20)}
    assert texts == {'"在线"', '"北京"'}


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [("ebnf", "root ::= [éü日]+", "[éü日]+"), ("regex", "[а-яё]+", "[а-яё]+"), ("regex", "[😀-😎]", "[😀-😎]")],
)
def test_so06_classes_beyond_ascii(kind, source, pattern):
    grammar = grammar_of(kind, source)
    for seed in range(30):
        assert re.fullmatch(pattern, walk(grammar, random.Random(seed)).decode())
    first = {VOCABULARY.tokens[token][0] for token in allowed(grammar.start())}
    assert first <= {0xC3, 0xE6, 0xD0, 0xD1, 0xF0}


def test_so07_empty_objects_and_long_bounds():
    assert_valid({"type": "object", "properties": {}})
    closed = json_grammar({"type": "object", "properties": {}, "additionalProperties": False}, "none")
    assert [walk(closed, random.Random(seed)) for seed in range(5)] == [b"{}"] * 5
    string = json_grammar({"type": "string", "maxLength": 5000})
    assert matches(string, '"' + "x" * 5000 + '"')
    assert not matches(string, '"' + "x" * 5001 + '"')
    array = json_grammar({"type": "array", "maxItems": 1998, "items": {"type": "integer"}}, "none")
    assert matches(array, json.dumps([7] * 1998, separators=(",", ":")))
    assert not matches(array, json.dumps([7] * 1999, separators=(",", ":")))


def test_so08_values_of_all_types_and_any_order_of_keywords():
    assert assert_valid({"enum": [1, True, None, 2.5]}) == 12
    assert assert_valid({"type": "object", "additionalProperties": {"type": "integer"}}) > 6
    properties = {"properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}}
    rest, required = {"additionalProperties": {"type": "integer"}}, {"required": ["a"]}
    orders = [properties | rest | required, rest | required | properties, required | rest | properties]
    found = [{text: matches(json_grammar({"type": "object"} | order), text) for text in TEXTS} for order in orders]
    assert found[0] == found[1] == found[2]
    assert [text for text, accepted in found[0].items() if accepted] == TEXTS[:4]


TEXTS = [
    '{"a":null}', '{"a":null,"c":1}', '{"a":null,"b":true}', '{"a":null,"b":false,"c":-3,"d":0}',
    '{"a":1}', '{"b":true}', '{"a":null,"c":"x"}', '{}', '{"a":null,"b":1}', r'{"a":null,"\u0062":1}',
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "#: uniqueItems"),
        ({"properties": {"a": {"type": "integer", "not": {"const": 3}}}}, "#/properties/a: not"),
        ({"type": "object", "if": {}, "then": {}}, "#: if, then"),
        ({"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"allOf": [{"type": "object"}, {"type": "object"}]}, "allOf cannot be enforced with several schemas"),
        ({"$ref": "https://example.org/x.json"}, r"\$ref 'https://example.org/x.json'"),
        ({"$ref": "#foo"}, r"\$ref '#foo'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf with overlapping"),
        ({"$ref": "#/$defs/N"}, r"\$defs"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "maxLength, pattern"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "integer", "multipleOf": 3, "minimum": 1}, "multipleOf"),
        ({"anyOf": [{"type": "integer"}], "minimum": 3}, "minimum cannot be enforced beside 'anyOf'"),
        ({"minimum": 3}, "minimum cannot be enforced without a type"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "patternProperties"),
        ({"type": "object", "properties": {"a": {"$id": "x"}}}, r"\$id"),
        ({"type": "string", "maxlength": 3}, "maxlength"),
        ({"type": "text"}, "'text', expected one of array"),
        ({"type": "integer", "enum": ["a"]}, "no value of enum has type 'integer'"),
        ({"type": "string", "pattern": r"(a)\1"}, "#/pattern.*back reference"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "'a' is required"),
        ("[1]", "list, expected an object"),
        ('{"type":', "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_so16_what_cannot_be_enforced_is_named(schema, named):
    with pytest.raises(StructuredOutputError, match=named):
        json_grammar(schema)


def test_annotations_and_harmless_keywords_pass():
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:x", "title": "T", "x-note": 1,
        "type": "object", "description": "d", "minimum": 3, "required": ["kind"],
        "properties": {"kind": {"const": "a", "type": "string", "default": "a"}, "next": {"$ref": "#", "title": "N"}},
    }  # fmt: skip
    assert matches(json_grammar(schema), '{"kind":"a","next":{"kind":"a"}}')
    assert not matches(json_grammar(schema), '{"kind":"b"}')


def test_any_json_object():
    grammar = grammar_of("json_object", None)
    assert matches(grammar, '{"a":[1,{"b":null}],"":"\\n"}')
    assert not matches(grammar, "[1]")


def test_so13_white_space_policies():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for policy, most in (("none", 0), ("bounded", 12), ("any", 300)):
        grammar = json_grammar(schema, policy)
        assert matches(grammar, "{" + " " * most + '"n":1}')
        assert matches(grammar, "{" + " " * (most + 1) + '"n":1}') == (policy == "any")
        assert matches(grammar, ' {"n":1}') == (policy != "none")
        assert not matches(grammar, '  {"n":1}') and not matches(grammar, '{"n":1} ')


def test_no_special_token_and_no_broken_character_inside_a_string():
    state = json_grammar({"type": "string"}).start()
    assert state.accept(ids_of('"')[0])
    inside = allowed(state)
    assert {EOS, SECOND_EOS}.isdisjoint(inside)
    assert all(VOCABULARY.tokens[token] for token in inside)
    assert max(inside) < 512
    for lead, wrong in ((b"\xed", b"\xa0"), (b"\xe0", b"\x80"), (b"\xf0", b"\x80"), (b"\xf4", b"\x90")):
        assert state.accept(ids_of(lead)[0])
        assert ids_of(wrong)[0] not in allowed(state) and not state.accept(ids_of(wrong)[0])
        state.rollback(1)
    assert allowed(state) == inside


# --- expressions, grammars, choices ---

PATTERNS = [
    "^(|.*)$", r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)", "(a|)b", r"[^\"]{1,5}",
    r"\S+\s\D?", r"[\s\S]{2}", r"a{,3}[]a-c]x{2}", r".{2,4}é.", r'"\\?/', r"\d{4}-\d\d|(?P<w>x)y*?",
    "[$^.*+?()|{}\\-]+", r"[^\d]\W[^\W]",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_so04_texts_match_the_expression_as_python_reads_it(pattern):
    plain, inside = grammar_of("regex", pattern), json_grammar({"type": "string", "pattern": pattern})
    for seed in range(12):
        text = walk(plain, random.Random(seed), stop=0.5)
        assert text is None or re.fullmatch(pattern, text.decode()), text
        text = walk(inside, random.Random(seed), stop=0.5)
        assert text is None or re.fullmatch(pattern, json.loads(text.decode())), text


def test_so04_the_empty_text_is_legal():
    assert EOS in allowed(grammar_of("regex", "^(|.*)$").start())


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("a(?=b)", "look-around"), (r"(a)\1", "back reference"), (r"\bfoo", "word boundary"), ("(?i)a", "flags"),
        ("a$b", "anchor"), ("[", "wrong"), ("a{3,1}", "wrong"), ("(?>a)", "atomic"), ("(" * 3000, "wrong|deep"),
        (r"[^\s\S]", "empty set"),
    ],
    ids=lambda value: value[:12],
)  # fmt: skip
def test_expressions_that_no_grammar_can_follow(pattern, named):
    with pytest.raises(StructuredOutputError, match=named):
        grammar_of("regex", pattern)


def test_expressions_are_written_plainly():
    assert plain_regex(r"^a.\.$|[^\n\]]?") == r"a[^\x0a]\.|(?:[^\x0a\]])?"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ('root ::= "a"\nroot ::= "b"', 'line 2.*"root" is defined multiple times'),
        ("root ::= foo", '"foo" is not defined'),
        ('start ::= "a"', "root"),
        ("root ::=", "EBNF"),
    ],
)
def test_so03_a_wrong_grammar_is_refused_with_the_parsers_words(source, named):
    with pytest.raises(StructuredOutputError, match=named):
        grammar_of("ebnf", source)
    assert {walk(grammar_of("ebnf", 'root ::= "a" | "b"'), random.Random(seed)) for seed in range(9)} == {b"a", b"b"}


@given(st.lists(st.text(max_size=6), min_size=1, max_size=5), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_choices_of_any_text(texts, seed):
    grammar = grammar_of("choice", tuple(texts))
    assert walk(grammar, random.Random(seed)).decode() in texts
    assert all(matches(grammar, text) for text in texts)


# --- states and vocabulary ---


def test_end_tokens_come_when_the_text_is_complete_and_end_it():
    """SO12, SO14: either end token, and nothing else, once nothing can follow."""
    grammar = json_grammar({"type": "boolean"})
    state = grammar.start()
    for token in ids_of("true"):
        assert {EOS, SECOND_EOS}.isdisjoint(allowed(state))
        assert not state.accept(EOS) and state.accept(token)
    assert allowed(state) == sorted((EOS, SECOND_EOS))
    for end in (EOS, SECOND_EOS):
        assert state.accept(end) and state.is_terminated and not state.accept(end)
        state.rollback(1)
        assert not state.is_terminated and state.is_complete


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.data())
def test_rollback_restores_every_mask(seed, data):
    source = random.Random(seed)
    state, masks, ids = json_grammar(MUTUAL).start(), [], []
    for _ in range(25):
        options = [token for token in allowed(state) if token not in VOCABULARY.eos_ids]
        if not options:  # the text is complete
            break
        masks.append(allowed(state))
        ids.append(source.choice(options))
        assert state.accept(ids[-1])
    back = data.draw(st.integers(0, len(ids)))
    state.rollback(back)
    assert back == 0 or allowed(state) == masks[len(ids) - back]
    fresh = json_grammar(MUTUAL).start()
    assert all(fresh.accept(token) for token in ids[: len(ids) - back])
    assert allowed(fresh) == allowed(state)


def test_so11_ids_without_text_are_never_allowed():
    state = grammar_of("regex", ".*").start()
    assert max(token for token in allowed(state)) < 512
    assert not state.accept(530) and not state.accept(SIZE_BEYOND) and not state.accept(-1)


SIZE_BEYOND = 10_000


@given(st.binary(max_size=6))
def test_pieces_of_utf8(data):
    """`is_possible` says what trying all surroundings says."""
    fronts = [
        b"",
        b"\xc3",
        b"\xe1",
        b"\xe1\x80",
        b"\xed",
        b"\xe0",
        b"\xf1",
        b"\xf1\x80",
        b"\xf1\x80\x80",
        b"\xf0",
        b"\xf4",
    ]
    backs = [b"\x80" * n for n in range(4)] + [
        b"\x9f",
        b"\xa0",
        b"\x9f\x80",
        b"\xa0\x80",
        b"\x90\x80\x80",
        b"\x8f\x80\x80",
    ]
    possible = any(_decodes(front + data + back) for front in fronts for back in backs)
    assert is_possible(data) == possible


def _decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_compiled_form_survives_the_way_between_processes():
    spec = GrammarSpec("json", json.dumps(MUTUAL))
    data = COMPILER.compile(spec)
    assert isinstance(data, bytes)
    assert COMPILER.load(data).num_bytes > 0
    assert bytes_of(ids_of("é")) == "é".encode()
