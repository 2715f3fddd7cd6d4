"""Schemas with parts that have no instances are found, with the place and the reason; others are let be."""

from __future__ import annotations

import time
from typing import Any

import jsonschema
import pytest

from nerite.llm.json_schema import impossible_schema

ENDLESS = {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#"}}}
NOTHING = {"type": "string", "enum": []}


def inside(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (NOTHING, "'s.enum' has no value"),
        ({"type": []}, "'s.type' names none"),
        ({"type": "string", "const": 3}, "'s' has type and const, which contradict each other"),
        ({"type": "integer", "enum": ["1", 1.5]}, "'s' has type and enum, which contradict each other"),
        ({"type": "string", "allOf": [{"type": "integer"}]}, "'s' has type and allOf, which contradict each other"),
        ({"anyOf": []}, "'s.anyOf' has no schema"),
        ({"oneOf": [NOTHING, {"minimum": 1, "maximum": 0, "type": "number"}]}, "'s.oneOf.0.enum' has no value"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "'s' has minimum 5 and maximum 3"),
        ({"type": "integer", "minimum": 1.2, "exclusiveMaximum": 2}, "'s' has minimum 1.2 and exclusiveMaximum 2"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "'s' has minLength 3 and maxLength 2"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "'s' has minItems 3 and maxItems 1"),
        ({"type": "array", "minItems": 1, "items": NOTHING}, "'s.items.enum' has no value"),
        ({"type": "array", "minItems": 2, "prefixItems": [{}, False]}, "'s.prefixItems.1' is false"),
        ({"type": "object", "minProperties": 1, "additionalProperties": False}, "'s' has minProperties 1, but allows"),
        ({"type": "object", "maxProperties": 0, "required": ["a"]}, "'s' requires 1 properties, but has maxProperties"),
        (
            {"type": "object", "required": ["b"], "properties": {"a": {}}, "additionalProperties": False},
            "'s' requires 'b', which is not in its properties, and allows no others",
        ),
        ({"type": "object", "required": ["b"], "additionalProperties": NOTHING}, "'s.additionalProperties.enum' has"),
        (inside(inside(NOTHING)), "'s.properties.a.properties.a.enum' has no value"),
        (inside(False), "'s.properties.a' is false"),
        # An engine may begin with what need not be there.
        ({"type": "object", "properties": {"a": NOTHING}}, "'s.properties.a.enum' has no value"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "const": 3}]}, "'s.anyOf.1' has type and const, which"),
        (ENDLESS, "'s.properties.next.$ref' refers to a schema without instances, or endlessly to itself"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": NOTHING}}, "'s.$ref' refers to a schema without instances"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "'s.$ref' refers to a schema without instances, or endlessly to itself",
        ),
    ],
)
def test_what_has_no_instances(schema: dict[str, Any], why: str) -> None:
    assert impossible_schema("s", schema).startswith(why)


@pytest.mark.parametrize(
    ("schema", "instance"),
    [
        ({}, None),
        ({"enum": [None]}, None),
        ({"type": ["string", "null"], "enum": ["a", 3]}, "a"),
        ({"type": "number", "const": 3}, 3),
        ({"type": "integer", "const": 3.0}, 3.0),
        ({"type": "number", "minimum": 1.5, "maximum": 1.5}, 1.5),
        ({"minimum": 5, "maximum": 3}, "a"),
        ({"type": "array", "minItems": 1, "prefixItems": [{}, False]}, [1]),
        ({"type": "array", "items": False}, []),
        ({"type": "object", "required": ["a"], "properties": {}}, {"a": 1}),
        (
            {"type": "object", "required": ["ab"], "patternProperties": {"^a": {}}, "additionalProperties": False},
            {"ab": 1},
        ),
        ({"anyOf": [False, {"type": "null"}]}, None),
        (
            {
                "type": "object",
                "required": ["next"],
                "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            },
            {"next": {"next": None}},
        ),
        (
            # That it may be an object is known only when it is known that it may be text.
            {
                "type": "object",
                "$ref": "#/$defs/tree",
                "$defs": {"tree": {"anyOf": [{"type": "string"}, inside({"$ref": "#/$defs/tree"})]}},
            },
            {"a": {"a": "leaf"}},
        ),
    ],
)
def test_what_has_some(schema: dict[str, Any], instance: Any) -> None:
    jsonschema.validate(instance, schema)
    assert impossible_schema("s", schema) == ""


@pytest.mark.parametrize(
    "schema", [{"type": "a"}, {"enum": 3}, {"$ref": "#/nowhere"}, {"type": "array", "minItems": "a"}]
)
def test_what_is_no_schema_is_for_others_to_say(schema: dict[str, Any]) -> None:
    assert impossible_schema("s", schema) == ""


def test_it_is_not_looked_at_for_ever() -> None:
    """Each of these has the next twice, so that they are 2**40."""
    chain = {f"a{number}": {"anyOf": [{"allOf": [{"$ref": f"#/$defs/a{number + 1}"}]}] * 2} for number in range(40)}
    assert impossible_schema("s", {"$ref": "#/$defs/a0", "$defs": {**chain, "a40": {"type": "null"}}}) == ""
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(14):
        deep = {"anyOf": [deep, deep]}
    assert impossible_schema("s", {"type": "string", "allOf": [deep]}) == ""


def test_a_schema_that_says_the_same_again_and_again() -> None:
    """One list of values, and thousands of references that spell its place differently."""

    def spelled(number: int) -> str:
        return "".join(f"%{ord(letter):x}" if number >> place & 1 else letter for place, letter in enumerate("a" * 16))

    values = list(range(10)) * 4500
    references = [{"$ref": f"#/$defs/{spelled(number)}"} for number in range(2000)]
    schema = {"$defs": {"a" * 16: {"enum": values}}, "anyOf": references}
    began = time.monotonic()
    assert impossible_schema("x", schema) == ""
    assert impossible_schema("x", {"$ref": "#/" + "/".join("a" * 100_000), "anyOf": [{"$ref": "#/b"}] * 5000}) == ""
    assert time.monotonic() - began < 10
