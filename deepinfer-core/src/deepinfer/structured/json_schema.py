"""JSON Schemas of users: what can be enforced while text is generated, and the rest refused by name.

A grammar engine follows some keywords exactly, some only alone, and others not at all, without a word. A schema passes
here only if every keyword in it is enforced (or says nothing about validity), so an output that has the form asked for
can be taken for validated. `prepared` also writes the schema out where engines read it differently from the standard
(2020-12): arrays without `items`, required properties that are not listed, `type` beside `enum`, patterns.

Stricter than the standard, which leaves outputs valid: an object with `properties` is closed unless the schema opens
it, properties come in the order of the schema, `pattern` matches the whole string. Called by compilers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from deepinfer.errors import StructuredOutputError
from deepinfer.structured.regex import json_string_regex

Schema = dict[str, Any] | bool

ANNOTATIONS = frozenset(
    "$schema $comment title description default examples example deprecated readOnly writeOnly discriminator "
    "contentEncoding contentMediaType contentSchema externalDocs".split()
)
DEFINITIONS = ("$defs", "definitions")
HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that must stand alone, in the order in which engines look for them."""
FORMATS = frozenset(
    "email date time date-time duration ipv4 ipv6 hostname uuid uri uri-reference uri-template json-pointer "
    "relative-json-pointer".split()
)
"""Formats that are enforced; others are annotations, as the standard has it."""
KEYWORDS = {
    "string": ("pattern", "format", "minLength", "maxLength"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties",
    ),
    "boolean": (),
    "null": (),
}  # fmt: skip
_TYPES = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
_MAX_COUNT = 2**31 - 1


def parse_schema(text: str) -> Schema:
    """The schema that a text spells. Raises StructuredOutputError."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StructuredOutputError(f"so_args['schema'] is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise StructuredOutputError(f"so_args['schema'] is a JSON {type(schema).__name__}, expected an object")
    return schema


def prepared(schema: Schema) -> Schema:
    """The schema as engines are to be given it. Raises StructuredOutputError naming place and keyword."""
    return _Checker().schema(schema, "#")


class _Checker:
    """Goes through one schema; `place` is the JSON pointer of where it is."""

    def schema(self, schema: Any, place: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise StructuredOutputError(f"schema at {place} is a JSON {type(schema).__name__}, expected an object")
        allowed = {"$id"} if place == "#" else set()
        keys = [key for key in schema if key not in ANNOTATIONS | allowed and not key.startswith("x-")]
        out: dict[str, Any] = {}
        for name in DEFINITIONS:
            if name in schema:
                out[name] = self._mapping(schema[name], f"{place}/{name}")
        keys = [key for key in keys if key not in DEFINITIONS]
        head = next((name for name in HEADS if name in schema), None)
        if head is not None:
            return out | self._head(head, schema, keys, place)
        return out | self._typed(schema, keys, place)

    def _head(self, head: str, schema: dict[str, Any], keys: list[str], place: str) -> dict[str, Any]:
        """A schema that is a reference, a choice of values or a choice of schemas."""
        beside = [key for key in keys if key != head and not (key == "type" and head in ("const", "enum"))]
        if beside:
            self._refuse(place, beside, f"beside {head!r}")
        value = schema[head]
        if head == "$ref":
            if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
                self._refuse(place, [f"$ref {value!r}"], "other than to a place in the schema itself (#/...)")
            return {head: value}
        if head in ("const", "enum"):
            return self._values(head, schema, place)
        if not isinstance(value, list) or not value:
            raise StructuredOutputError(f"schema at {place}: {head} must be a list of schemas that is not empty")
        if head == "allOf" and len(value) > 1:
            self._refuse(place, ["allOf"], "with several schemas: merge them")
        return {head: [self.schema(entry, f"{place}/{head}/{at}") for at, entry in enumerate(value)]}

    def _values(self, head: str, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """`const` or `enum`, without the values that `type` excludes."""
        values = [schema["const"]] if head == "const" else schema["enum"]
        if not isinstance(values, list) or not values:
            raise StructuredOutputError(f"schema at {place}: enum must be a list of values that is not empty")
        if "type" in schema:
            types = self._types(schema["type"], place)
            values = [value for value in values if any(_is_of(value, name) for name in types)]
            if not values:
                raise StructuredOutputError(f"schema at {place}: no value of {head} has type {schema['type']!r}")
        return {"const": values[0]} if head == "const" else {"enum": values}

    def _typed(self, schema: dict[str, Any], keys: list[str], place: str) -> dict[str, Any]:
        """A schema with a type, or with keywords that imply one."""
        known = {"type", *(keyword for keywords in KEYWORDS.values() for keyword in keywords)}
        unknown = [key for key in keys if key not in known]
        if unknown:
            self._refuse(place, unknown)
        names = self._types(schema["type"], place) if "type" in schema else self._implied(keys, place)
        out: dict[str, Any] = {}
        for name in names:
            own = {key: schema[key] for key in keys if key in KEYWORDS[name]}
            prepare: Callable[[dict[str, Any], str], dict[str, Any]] = getattr(self, f"_{name}", _unchanged)
            out |= prepare(own, place)
        if names:
            out["type"] = names[0] if len(names) == 1 else names
        if "number" in names and "multipleOf" in schema:
            self._refuse(place, ["multipleOf"], "for numbers: use integers")
        return out

    def _types(self, value: Any, place: str) -> list[str]:
        names = value if isinstance(value, list) else [value]
        for name in names:
            if not isinstance(name, str) or name not in KEYWORDS:
                raise StructuredOutputError(
                    f"schema at {place}: type {name!r}, expected one of {', '.join(sorted(KEYWORDS))}"
                )
        if not names:
            raise StructuredOutputError(f"schema at {place}: type is an empty list")
        return list(dict.fromkeys(names))

    def _implied(self, keys: list[str], place: str) -> list[str]:
        for name in ("object", "array"):
            if any(key in KEYWORDS[name] for key in keys):
                keys = [key for key in keys if key not in KEYWORDS[name]]
                if keys:
                    self._refuse(place, keys, "without a type")
                return [name]
        if keys:
            self._refuse(place, keys, "without a type")
        return []

    def _string(self, own: dict[str, Any], place: str) -> dict[str, Any]:
        if "format" in own and own["format"] not in FORMATS:
            del own["format"]
        if "pattern" in own:
            own["pattern"] = self._pattern(own["pattern"], f"{place}/pattern")
        lengths = [key for key in ("minLength", "maxLength") if key in own]
        for key in lengths:
            own[key] = self._count(own, key, place)
        if len(own) > 1 and own.keys() != {"minLength", "maxLength"}:
            self._refuse(place, sorted(own), "together: keep one")
        return own

    def _integer(self, own: dict[str, Any], place: str) -> dict[str, Any]:
        self._numbers(own, place)
        step = own.get("multipleOf")
        if step is not None and (not isinstance(step, int) or not 1 <= step <= 1024):
            self._refuse(place, [f"multipleOf {step!r}"], "other than whole numbers from 1 to 1024")
        return own

    def _number(self, own: dict[str, Any], place: str) -> dict[str, Any]:
        self._numbers(own, place)
        return own

    def _numbers(self, own: dict[str, Any], place: str) -> None:
        for key, value in own.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise StructuredOutputError(f"schema at {place}: {key}={value!r} is not a number")

    def _array(self, own: dict[str, Any], place: str) -> dict[str, Any]:
        if isinstance(own.get("items"), dict | bool):
            own["items"] = self.schema(own["items"], f"{place}/items")
        elif "items" in own:
            raise StructuredOutputError(f"schema at {place}: items must be one schema; use prefixItems for a tuple")
        elif "prefixItems" not in own:
            own["items"] = {}
        if "prefixItems" in own:
            items = self._list(own["prefixItems"], f"{place}/prefixItems")
            own["prefixItems"] = [{} if item is True else item for item in items]
        for key in ("minItems", "maxItems"):
            if key in own:
                own[key] = self._count(own, key, place)
        return own

    def _object(self, own: dict[str, Any], place: str) -> dict[str, Any]:
        for key in ("minProperties", "maxProperties"):
            if key in own:
                own[key] = self._count(own, key, place)
        for key in ("properties", "patternProperties"):
            if key in own:
                own[key] = self._mapping(own[key], f"{place}/{key}")
        if "additionalProperties" in own:
            own["additionalProperties"] = self.schema(own["additionalProperties"], f"{place}/additionalProperties")
        self._name_patterns(own, place)
        self._required(own, place)
        opened = own.get("additionalProperties", "properties" not in own) is not False
        if own.get("minProperties", 0) > 0 and (opened or "patternProperties" in own or "propertyNames" in own):
            self._refuse(place, ["minProperties"], "for an object that may have properties of any name")
        return own

    def _name_patterns(self, own: dict[str, Any], place: str) -> None:
        """`patternProperties` and `propertyNames`, each for an object that has nothing else."""
        for key in ("patternProperties", "propertyNames"):
            others = [name for name in ("properties", "required", "patternProperties", "propertyNames") if name != key]
            beside = [name for name in others if own.get(name)]
            if key == "patternProperties" and own.get("additionalProperties", False) is not False:
                beside.append("additionalProperties")
            if key in own and beside:
                self._refuse(place, [key], f"beside {', '.join(beside)}")
        if "patternProperties" in own:
            if len(own["patternProperties"]) > 1:
                self._refuse(place, ["patternProperties"], "with several patterns, which may overlap")
            place = f"{place}/patternProperties"
            own["patternProperties"] = {self._pattern(k, place): v for k, v in own["patternProperties"].items()}
        if "propertyNames" in own:
            names = own["propertyNames"]
            beside = [k for k in names if k not in ANNOTATIONS | {"pattern", "type"}] if isinstance(names, dict) else []
            if (
                not isinstance(names, dict)
                or beside
                or "pattern" not in names
                or names.get("type", "string") != "string"
            ):
                self._refuse(place, ["propertyNames"], "other than a pattern")
            own["propertyNames"] = {"pattern": self._pattern(names["pattern"], f"{place}/propertyNames/pattern")}

    def _required(self, own: dict[str, Any], place: str) -> None:
        """Every required property must be listed."""
        required = own.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise StructuredOutputError(f"schema at {place}: required must be a list of names")
        missing = [name for name in required if name not in own.get("properties", {})]
        if not missing:
            return
        rest = own.get("additionalProperties", True)
        if rest is False:
            raise StructuredOutputError(
                f"schema at {place}: {missing[0]!r} is required, but neither in properties nor allowed beside them"
            )
        if "properties" not in own:
            own.setdefault("additionalProperties", True)
        own["properties"] = own.get("properties", {}) | dict.fromkeys(missing, rest)

    def _pattern(self, pattern: Any, place: str) -> str:
        if not isinstance(pattern, str):
            raise StructuredOutputError(f"schema at {place} is {pattern!r}, expected a string")
        try:
            return f"^(?:{json_string_regex(pattern)})$"
        except StructuredOutputError as error:
            raise StructuredOutputError(f"schema at {place}: {error}") from None

    def _count(self, own: Mapping[str, Any], key: str, place: str) -> int:
        value = own[key]
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < 0:
            raise StructuredOutputError(f"schema at {place}: {key}={value!r}, expected a whole number of at least 0")
        if value > _MAX_COUNT and key.startswith("min"):
            raise StructuredOutputError(f"schema at {place}: {key}={value} is more than any text can have")
        return min(int(value), _MAX_COUNT)

    def _mapping(self, value: Any, place: str) -> dict[str, Schema]:
        if not isinstance(value, dict):
            raise StructuredOutputError(f"schema at {place} is a JSON {type(value).__name__}, expected an object")
        return {name: self.schema(entry, f"{place}/{name}") for name, entry in value.items()}

    def _list(self, value: Any, place: str) -> list[Schema]:
        if not isinstance(value, list):
            raise StructuredOutputError(f"schema at {place} is a JSON {type(value).__name__}, expected a list")
        return [self.schema(entry, f"{place}/{at}") for at, entry in enumerate(value)]

    def _refuse(self, place: str, keywords: list[str], how: str = "") -> NoReturn:
        raise StructuredOutputError(
            f"schema at {place}: {', '.join(keywords)} cannot be enforced{' ' + how if how else ''}; leave it out and "
            "check the output yourself"
        )


def _unchanged(own: dict[str, Any], place: str) -> dict[str, Any]:
    return own


def _is_of(value: Any, name: str) -> bool:
    """Whether a value has a type of JSON Schema, where 1.0 is an integer and true is no number."""
    if name in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (name == "number" or float(value).is_integer())
    return isinstance(value, _TYPES[name])
