"""What a grammar comes to when its repetitions are written out."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest

from nerite.core.errors import InvalidArgument, Unsupported
from nerite.llm import structured_output
from nerite.llm.expressions import endless_rule
from nerite.llm.openvino_genai import schema_rewrites
from nerite.llm.structured_output import EBNF, JSON_SCHEMA, REGEX, Grammar


def nested(depth: int, times: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": times}
    return schema


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (REGEX, "[0-9]{1,3}(\\.[0-9]{1,3}){3}"),
        (REGEX, "(a{100}b{100}){20}"),
        (REGEX, "[a-z]{0,40000}"),
        (REGEX, "a{,5}[{100000}]\\{99999}(?:b|c)*(?P<name>d){3}"),
        (REGEX, "x{" + "a" * 1000),
        (EBNF, 'root ::= (a | "b"{2,3})* # comment{99999999}\na ::= [a-z]{1,20}'),
        (JSON_SCHEMA, json.dumps(nested(2, 100))),
        (JSON_SCHEMA, json.dumps({"type": "string", "maxLength": 20_000})),
        (JSON_SCHEMA, json.dumps({"properties": {"a": {"pattern": "a{3}"}}, "minItems": "none", "items": True})),
    ],
)
def test_what_is_not_too_much(kind: str, source: str) -> None:
    structured_output.check_repetitions("vllm", Grammar(kind, source))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (REGEX, "(a{0,300}b){0,300}"),
        (REGEX, "((a{1000}){1000}){1000}"),
        (REGEX, "a{60000,}"),
        (REGEX, "a{" + "9" * 1000 + "}"),
        (REGEX, "(a|b){2}" * 20_000),
        (REGEX, "( {1000}){1000}"),
        (REGEX, "#(a{1000}){1000}"),
        (REGEX, '"(a{1000}){1000}"'),
        (EBNF, 'root ::= ("a"{300} b){300}\nb ::= "b"'),
        (JSON_SCHEMA, json.dumps(nested(4, 20))),
        (JSON_SCHEMA, json.dumps({"type": "string", "minLength": 10**12})),
        (JSON_SCHEMA, json.dumps({"properties": {"a": {"pattern": "(a{300}){300}"}}})),
        (JSON_SCHEMA, json.dumps({"additionalProperties": {"maxLength": 300}, "minProperties": 300})),
    ],
)
def test_what_is_too_much(kind: str, source: str) -> None:
    with pytest.raises(InvalidArgument, match=r"with its repetitions expanded it has more than 50000 parts"):
        structured_output.check_repetitions("vllm", Grammar(kind, source))


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        *(("", piece) for piece in ("(", "[", "[^", "{", "a{1", "(?P<", '"', "\\", " ", "|")),
        *(
            ("[", "\\]"),
            ("[[", "["),
            ('"', '\\"'),
            ("{", " "),
            ("{1", " ,"),
            ("(?P<", "a"),
            ("#", "#"),
            ("a ::= ", "("),
        ),
    ],
)
def test_it_is_looked_at_once(first: str, piece: str) -> None:
    """By all that look at grammars before they are compiled."""
    source = first + piece * (100_000 // len(piece)) + "\\"
    began = time.monotonic()
    for kind in (REGEX, EBNF):
        with suppress(InvalidArgument):
            structured_output.check_repetitions("vllm", Grammar(kind, source))
        with suppress(Unsupported):
            schema_rewrites.check_classes(kind, Grammar(kind, source).tokens())
    endless_rule(source)
    with suppress(Unsupported):
        schema_rewrites.plain_json_strings(json.dumps({"type": "string", "pattern": source}))
    assert time.monotonic() - began < 20
