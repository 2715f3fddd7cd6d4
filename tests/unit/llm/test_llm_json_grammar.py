"""Schemas for which a grammar with bounded white space is made, and those that are left to the compilers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nerite.llm.json_grammar import bounded_grammar


def rules(schema: Any) -> dict[str, str]:
    grammar = bounded_grammar(json.dumps(schema))
    assert grammar is not None
    return dict(line.split(" ::= ", 1) for line in grammar.splitlines() if line)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "additionalProperties": True},
        {"type": "object", "properties": {"a": {"type": "string", "title": "A", "default": "b"}}, "required": ["a"]},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        {"enum": ["a", 1, None]},
        {"const": {"a": 1}},
        {"type": "string", "enum": ["a"]},
        {"type": ["string", "null"], "maxLength": 3},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}},
    ],
)
def test_each_rule_that_is_named_is_there(schema: Any) -> None:
    found = rules(schema)
    for body in found.values():
        plain = body
        for quoted in ('"\\""', '"\\\\"'):
            plain = plain.replace(quoted, "")
        for word in plain.replace("(", " ").replace(")", " ").split():
            name = word.rstrip("*?")
            if name.startswith(("rule", "reference")) and name.isalnum():
                assert name in found


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": "a"},
        {"type": "string", "format": "date"},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "prefixItems": []},
        {"type": "array", "minItems": -1},
        {"type": "object", "required": ["a"]},
        {"type": "object", "patternProperties": {}},
        {"type": "unknown"},
        {"type": []},
        {"enum": []},
        {"enum": [1], "type": "string"},
        {"const": 1, "enum": [1]},
        {"anyOf": []},
        {"anyOf": [{}], "type": "string"},
        {"oneOf": [{}]},
        {"allOf": [{}]},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/none"},
        {"$ref": "#/$defs/a", "type": "null", "$defs": {"a": {}}},
        {"type": ["string", "null"], "minimum": 1},
        {"items": {"type": "string"}},
        False,
    ],
)
def test_what_is_left_to_the_compilers(schema: Any) -> None:
    assert bounded_grammar(json.dumps(schema)) is None


def test_a_schema_that_is_too_large() -> None:
    many = {"anyOf": [{"enum": [number]} for number in range(5000)]}
    assert bounded_grammar(json.dumps(many)) is None


def test_optional_members_need_no_comma_before_the_first() -> None:
    found = rules({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}})
    first = found[found["root"]].split()[2]
    alternatives = found[first].split(" | ")
    assert alternatives[0].startswith('"\\"a\\""') and len(alternatives) == 2
    assert found[alternatives[1]].startswith('"\\"b\\""')
