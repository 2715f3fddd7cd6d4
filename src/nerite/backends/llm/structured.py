"""Structured output: what the text of an answer has to be an instance of, under vLLM's names. Pure.

A schema is looked through for what engines are known to leave out in silence: an answer that does not fit a schema is
worse than a refusal.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nerite.backends.llm import schemas
from nerite.backends.llm.ebnf import endless
from nerite.backends.llm.possible import impossible
from nerite.config.near import nearest
from nerite.core.byte_budget import GRAMMARS, Memo
from nerite.core.errors import InvalidArgument, Unsupported

JSON_SCHEMA: Final = "json_schema"
REGEX: Final = "regex"
EBNF: Final = "ebnf"

_LONGEST: Final = 256 * 1024
"""Characters of a grammar: what is compiled for all that it says is not without bounds."""
_ANY_OBJECT: Final = {"type": "object", "additionalProperties": True}

_KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")
_OPTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "backend": (None, "auto", "xgrammar"),
    "disable_additional_properties": (None, False),
    "disable_any_whitespace": (None, False),
    "disable_fallback": (None, False, True),
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
}
"""What else vLLM has there, and the values that ask for nothing of us."""

_LEFT_OUT: Final = frozenset(
    {
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "multipleOf",
        "not",
        "then",
        "uniqueItems",
    }
)
"""Keywords of JSON Schema that no grammar says."""


@dataclass(frozen=True)
class Grammar:
    """What the text has to be an instance of."""

    kind: str
    """``json_schema``, ``regex`` or ``ebnf``."""
    source: str

    def digest(self, *more: object) -> bytes:
        """Return what to remember the grammar by, with ``more`` that belongs to it: grammars are long."""
        return hashlib.sha256(repr((self.kind, self.source, *more)).encode()).digest()


_right: Final[Memo[bytes, None]] = Memo()
"""Grammars that were looked through, by their digests."""


def read(name: str, value: Any) -> Grammar | None:
    """Read the value of the sampling parameter ``name``; None if it asks for nothing. Raises ``NeriteError``."""
    if isinstance(value, str):  # as Triton's vLLM backend has it
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"'{name}' is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(
            f'\'{name}\' has to be an object, such as {{"regex": "[0-9]+"}}, got {reprlib.repr(value)}'
        )
    wanted = {kind: value[kind] for kind in _KINDS if value.get(kind) is not None and value[kind] is not False}
    _check_options(name, value)
    if len(wanted) > 1:
        raise InvalidArgument(f"'{name}' says {' and '.join(wanted)}: an answer has one form, choose one")
    for kind, given in wanted.items():
        grammar = _grammar(f"{name}.{kind}", kind, given)
        if len(grammar.source) > _LONGEST:
            raise InvalidArgument(f"'{name}.{kind}' has {len(grammar.source)} characters, and may have {_LONGEST}")
        _look_through(f"{name}.{kind}", grammar)
        return grammar
    return None


def _check_options(name: str, value: Mapping[str, Any]) -> None:
    for key, said in value.items():
        if key in _KINDS or said in _OPTIONS.get(key, ()):
            continue
        if key in _OPTIONS:
            raise Unsupported(f"'{name}.{key}' is not offered: take it out")
        meant = nearest(key, (*_KINDS, *_OPTIONS))
        raise InvalidArgument(
            f"'{name}' has '{key}', which is no form of an answer. "
            + (f"Did you mean {meant}?" if meant else f"There are: {', '.join(_KINDS)}.")
        )


def _grammar(name: str, kind: str, given: Any) -> Grammar:
    if kind == "json_object":
        if given is not True:
            raise InvalidArgument(f"'{name}' has to be true or false, got {reprlib.repr(given)}")
        return Grammar(JSON_SCHEMA, json.dumps(_ANY_OBJECT))
    if kind == "json":
        try:
            return Grammar(JSON_SCHEMA, json.dumps(_schema(name, given)))
        except RecursionError:
            raise InvalidArgument(f"'{name}' is too deep") from None
    if kind == "choice":
        return Grammar(EBNF, _choice(name, given))
    if not isinstance(given, str):
        raise InvalidArgument(f"'{name}' has to be text, got {reprlib.repr(given)}")
    return Grammar(REGEX if kind == "regex" else EBNF, given)


def _choice(name: str, given: Any) -> str:
    if not isinstance(given, list) or not given or not all(isinstance(each, str) and each for each in given):
        raise InvalidArgument(f"'{name}' has to be a list of texts that are not empty, got {reprlib.repr(given)}")
    return "root ::= " + " | ".join(json.dumps(each, ensure_ascii=False) for each in given)


def _schema(name: str, given: Any) -> Any:
    """Return what a schema says. Raises ``InvalidArgument`` for what is no object."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"'{name}' is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise InvalidArgument(f"'{name}' has to be a JSON schema, which is an object, got {reprlib.repr(given)}")
    return given


def _look_through(name: str, grammar: Grammar) -> None:
    """Raise ``NeriteError`` for what no text can be, or no grammar say. What is right is known the next time."""
    key = grammar.digest(name)
    if key in _right:
        return
    if grammar.kind == EBNF:
        if rule := endless(grammar.source):
            raise InvalidArgument(f"'{name}' has the rule '{rule}', of which no text comes to an end")
    elif grammar.kind == JSON_SCHEMA:
        schema = json.loads(grammar.source)
        for path, each in schemas.within(name, schema):
            _check(path, each)
        if why := impossible(name, schema):
            raise InvalidArgument(f"a part of '{name}' has no instances: {why}")
    GRAMMARS.put(_right, key, None, len(key))


def _check(path: str, schema: Mapping[str, Any]) -> None:
    for keyword in schema:
        if keyword in _LEFT_OUT:
            raise Unsupported(f"'{path}.{keyword}' cannot be made sure of while text is generated: take it out")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise Unsupported(
            f"'{path}.$ref' has to be within the schema, such as '#/$defs/name', got {reprlib.repr(reference)}"
        )
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise Unsupported(f"'{path}.allOf' has several schemas: put them together into one")
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(required, list):
        for name in required:
            if not isinstance(properties, dict) or name not in properties:
                raise Unsupported(
                    f"'{path}' requires {name!r}, which is none of its 'properties': say there what it is"
                )
    if "pattern" in schema and (more := {"minLength", "maxLength", "format"} & schema.keys()):
        raise Unsupported(f"'{path}' has a pattern and {', '.join(sorted(more))}: say it in the pattern")
