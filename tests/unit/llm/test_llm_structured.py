"""Structured output: vLLM's names to grammars, and a refusal for what no grammar can make sure of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nerite.core.errors import InvalidArgument, Unsupported
from nerite.llm import sampling_parameters, structured_output
from nerite.llm.structured_output import Grammar

SCHEMA = {"type": "object", "properties": {"not": {"type": "integer"}}, "const": {"not": 1}}


@pytest.mark.parametrize(
    ("said", "kind", "source"),
    [
        ({"json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"json": json.dumps(SCHEMA), "regex": None, "backend": "xgrammar"}, "json_schema", json.dumps(SCHEMA)),
        ({"json_object": True}, "json_schema", '{"type": "object", "additionalProperties": true}'),
        ({"regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"choice": ['a "b"', "é"]}, "ebnf", r'root ::= "a \"b\"" | "é"'),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ],
)
@pytest.mark.parametrize("name", ["guided_decoding", "structured_outputs"])
def test_what_is_read(name: str, said: dict[str, Any], kind: str, source: str) -> None:
    expected = Grammar(kind, source)
    assert sampling_parameters.from_mapping({name: said}).grammar == expected
    # As Triton's vLLM backend has it.
    assert sampling_parameters.from_mapping({name: json.dumps(said)}).grammar == expected


def test_nothing_is_asked_for() -> None:
    for said in ({}, {"json": None}, {"json_object": False}, "{}"):
        assert structured_output.read_structured("guided_decoding", said) is None
    assert sampling_parameters.from_mapping({"guided_decoding": None}).grammar is None


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("{", "'guided_decoding' is not valid JSON"),
        ("[" * 100_000, "'guided_decoding' is not valid JSON"),
        ([], "'guided_decoding' must be an object"),
        ({"regx": "a"}, "'guided_decoding' has 'regx', which is not a form of answer. Did you mean regex?"),
        ({"regex": "a", "choice": ["b"]}, "'guided_decoding' has regex and choice: an answer has one form"),
        ({"regex": 3}, "'guided_decoding.regex' must be text"),
        ({"regex": "a" * 300_000}, "'guided_decoding.regex' has 300000 characters"),
        ({"choice": []}, "'guided_decoding.choice' must be a list of non-empty strings"),
        ({"choice": [""]}, "'guided_decoding.choice' must be a list of non-empty strings"),
        ({"json": "{"}, "'guided_decoding.json' is not valid JSON"),
        ({"json": [1]}, "'guided_decoding.json' must be a JSON schema"),
        ({"json_object": 1}, "'guided_decoding.json_object' must be true or false"),
        (
            {"grammar": "root ::= root"},
            "'guided_decoding.grammar' has the rule 'root', whose text never ends",
        ),
        (
            {"json": {"items": {"type": "string", "enum": []}, "type": "array", "minItems": 1}},
            "a part of 'guided_decoding.json' has no instances: no value matches 'guided_decoding.json.items', ",
        ),
    ],
)
def test_what_is_wrong(said: Any, text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        structured_output.read_structured("guided_decoding", said)
    assert refused.value.message.startswith(text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"not": {}}, "'guided_decoding.json.not' cannot be enforced"),
        (
            {"properties": {"a": {"items": {"anyOf": [{}, {"multipleOf": 3}]}}}},
            "'guided_decoding.json.properties.a.items.anyOf.1.multipleOf' cannot be enforced",
        ),
        ({"$defs": {"x": {"uniqueItems": True}}}, "'guided_decoding.json.$defs.x.uniqueItems' cannot"),
        ({"$ref": "https://example.com/x"}, "'guided_decoding.json.$ref' must point into the schema"),
        ({"$ref": "#/x", "x": {"items": {"not": {}}}}, "'guided_decoding.json.$ref.items.not' cannot be enforced"),
        ({"required": ["a"], "properties": {"b": {}}}, "'guided_decoding.json' requires 'a', which is not in its"),
        ({"required": [["a"]], "properties": {"a": {}}}, "'guided_decoding.json' requires ['a'], which is not in its"),
        ({"anyOf": [{"required": ["a"]}]}, "'guided_decoding.json.anyOf.0' requires 'a', which is not in its"),
        ({"allOf": [{}, {}]}, "'guided_decoding.json.allOf' has several schemas"),
        ({"pattern": "a", "maxLength": 3}, "'guided_decoding.json' has a pattern and maxLength"),
    ],
)
def test_what_no_grammar_says(schema: Any, text: str) -> None:
    with pytest.raises(Unsupported) as refused:
        structured_output.read_structured("guided_decoding", {"json": schema})
    assert refused.value.message.startswith(text)


def test_other_options_of_vllm() -> None:
    with pytest.raises(Unsupported, match=r"'guided_decoding.whitespace_pattern' is not supported"):
        structured_output.read_structured("guided_decoding", {"json": {}, "whitespace_pattern": " "})
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(InvalidArgument, match="is nested 65 schemas deep; the maximum is 64"):
        structured_output.read_structured("guided_decoding", {"json": deep})
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(InvalidArgument, match="is nested too deeply"):
        structured_output.read_structured("guided_decoding", {"json": deep})
    with pytest.raises(InvalidArgument, match="mean the same"):
        sampling_parameters.from_mapping({"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"}})
