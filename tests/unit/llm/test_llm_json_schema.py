"""Schemas with parts that have no instances are found, with the place and the reason; others are let be."""

from __future__ import annotations

import copy
import time
from typing import Any

import jsonschema
import pytest

from nerite.core.errors import InvalidArgument
from nerite.llm.json_schema import check_schema

ENDLESS = {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#"}}}
NOTHING = {"type": "string", "enum": []}


def inside(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def refusal(schema: Any) -> str:
    """Return why a schema called ``s`` is refused; empty if it is not."""
    try:
        check_schema("s", schema)
    except InvalidArgument as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (NOTHING, "'s'"),
        ({"type": []}, "'s'"),
        ({"type": "string", "const": 3}, "'s'"),
        ({"type": "integer", "enum": ["1", 1.5]}, "'s'"),
        ({"type": "string", "allOf": [{"type": "integer"}]}, "'s'"),
        ({"type": "integer", "anyOf": [{"type": "string"}, {"const": None}]}, "'s'"),
        ({"anyOf": []}, "'s'"),
        ({"oneOf": [NOTHING, {"minimum": 1, "maximum": 0, "type": "number"}]}, "'s.oneOf.1'"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "'s'"),
        ({"type": "integer", "allOf": [{"minimum": 5, "maximum": 3}]}, "'s'"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "'s'"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "'s'"),
        ({"type": "array", "minItems": 1, "items": NOTHING}, "'s.items'"),
        ({"type": "array", "minItems": 2, "prefixItems": [{}, NOTHING]}, "'s.prefixItems.1'"),
        (inside(inside(NOTHING)), "'s.properties.a.properties.a'"),
        # An engine may begin with what need not be there.
        ({"type": "object", "properties": {"a": NOTHING}}, "'s.properties.a'"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "const": 3}]}, "'s.anyOf.1'"),
        (ENDLESS, "'s.properties.next'"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": NOTHING}}, "'s.$defs.a/b'"),
        ({"$ref": "#/x/0", "x": [{"items": NOTHING}]}, "'s.$ref.items'"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "'s.$defs.b'",
        ),
    ],
)
def test_what_has_no_instances(schema: dict[str, Any], place: str) -> None:
    assert refusal(schema).startswith(f"a part of 's' has no instances: no value matches {place}, which is {{")


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
        ({"type": "object", "required": ["a"], "properties": {"a": True}}, {"a": 1}),
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
    assert refusal(schema) == ""


@pytest.mark.parametrize(
    "schema", [{"type": "a"}, {"enum": 3}, {"$ref": "#/nowhere"}, {"type": "array", "minItems": "a"}]
)
def test_what_is_no_schema_is_for_others_to_say(schema: dict[str, Any]) -> None:
    assert refusal(schema) == ""


def test_it_is_not_looked_at_for_ever() -> None:
    """Each of these has the next twice, so that they are 2**40."""
    chain = {f"a{number}": {"anyOf": [{"allOf": [{"$ref": f"#/$defs/a{number + 1}"}]}] * 2} for number in range(40)}
    assert refusal({"$ref": "#/$defs/a0", "$defs": {**chain, "a40": {"type": "null"}}}) == ""
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(14):
        deep = {"anyOf": [copy.deepcopy(deep), deep]}
    assert refusal({"type": "string", "allOf": [deep]}) == ""


def test_a_schema_that_says_the_same_again_and_again() -> None:
    """One list of values, and thousands of references that spell its place differently."""

    def spelled(number: int) -> str:
        return "".join(f"%{ord(letter):x}" if number >> place & 1 else letter for place, letter in enumerate("a" * 16))

    values = list(range(10)) * 4500
    references = [{"$ref": f"#/$defs/{spelled(number)}"} for number in range(2000)]
    schema = {"$defs": {"a" * 16: {"enum": values}}, "anyOf": references}
    began = time.monotonic()
    assert refusal(schema) == ""
    assert refusal({"$ref": "#/" + "/".join("a" * 100_000), "anyOf": [{"$ref": "#/b"} for _ in range(5000)]}) == ""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        deep = {"items": deep, "minItems": 1}
    assert refusal({"anyOf": [copy.deepcopy(deep) for _ in range(160)]}) == ""
    assert time.monotonic() - began < 10
