"""Grammars for the JSON of a schema, in which white space and numbers are bounded. Pure.

The compilers of engines allow any white space between the parts of JSON and any number of digits, and weak models go
on with either until their limit. A grammar made here allows a space, or a line break with an indentation, and as many
digits as a 64-bit number has. Schemas with keywords that are not known here are left to the compilers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

_BASICS: Final = r"""
ws ::= " "? | "\n" [ \t]{0,32}
character ::= [^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})
string ::= "\"" character* "\""
integer ::= "-"? ("0" | [1-9] [0-9]{0,18})
number ::= integer ("." [0-9]{1,17})? ([eE] [+-]? [0-9]{1,3})?
boolean ::= "true" | "false"
null ::= "null"
pair ::= string ws ":" ws value
object ::= "{" ws (pair (ws "," ws pair)* ws)? "}"
array ::= "[" ws (value (ws "," ws value)* ws)? "]"
value ::= string | number | boolean | null | object | array
"""
_TYPES: Final = ("string", "integer", "number", "boolean", "null", "object", "array")
_NOTES: Final = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$comment")
)
"""Keywords that do not restrict values."""
_DEFINITIONS: Final = frozenset(("$defs", "definitions"))
_OF_TYPES: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset(("minLength", "maxLength")),
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
}
_MOST: Final = 4096
"""Maximum of lengths and numbers of elements, and of rules."""
_LOCAL: Final = "#/"


class _NotKnown(Exception):
    """A schema has a keyword whose meaning no grammar here has."""


def bounded_grammar(schema: str) -> str | None:
    """Return the EBNF grammar of a schema in JSON; None if the schema is to be compiled as it is."""
    try:
        return _Rules(json.loads(schema)).text()
    except (_NotKnown, RecursionError):
        return None


class _Rules:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._rules: list[str] = []
        self._references: dict[str, str] = {}

    def text(self) -> str:
        """Return the grammar. Raises ``_NotKnown``."""
        root = self._of(self._root)
        return "\n".join([f"root ::= {root}", *self._rules]) + _BASICS

    def _rule(self, body: str) -> str:
        if len(self._rules) >= _MOST:
            raise _NotKnown
        name = f"rule{len(self._rules)}"
        self._rules.append(f"{name} ::= {body}")
        return name

    def _of(self, schema: Any) -> str:
        """Return the name of the rule of a schema."""
        if schema is True:
            return "value"
        if not isinstance(schema, dict):
            raise _NotKnown
        given = {key: value for key, value in schema.items() if key not in _NOTES and key not in _DEFINITIONS}
        if not given:
            return "value"
        if "$ref" in given:
            return self._reference(given)
        if "const" in given or "enum" in given:
            return self._literals(given)
        if "anyOf" in given:
            options = given["anyOf"]
            if len(given) > 1 or not isinstance(options, list) or not options:
                raise _NotKnown
            return self._rule(" | ".join(self._of(each) for each in options))
        kind = given.pop("type", None)
        if isinstance(kind, list) and kind:
            return self._rule(" | ".join(self._typed(each, _restricted(given, each, kind)) for each in kind))
        return self._typed(kind, given)

    def _reference(self, given: Mapping[str, Any]) -> str:
        place = given["$ref"]
        if len(given) > 1 or not isinstance(place, str) or not place.startswith(_LOCAL):
            raise _NotKnown
        if place not in self._references:
            found = self._root
            for part in place.removeprefix(_LOCAL).split("/"):
                part = part.replace("~1", "/").replace("~0", "~")
                if not isinstance(found, dict) or part not in found:
                    raise _NotKnown
                found = found[part]
            name = self._references[place] = f"reference{len(self._references)}"
            self._rules.append(f"{name} ::= {self._of(found)}")
        return self._references[place]

    def _literals(self, given: Mapping[str, Any]) -> str:
        if not given.keys() <= {"const", "enum", "type"} or {"const", "enum"} <= given.keys():
            raise _NotKnown
        values = given["enum"] if "enum" in given else [given["const"]]
        if not isinstance(values, list) or not values or ("type" in given and not _are(values, given["type"])):
            raise _NotKnown
        return self._rule(" | ".join(_literal(json.dumps(value, ensure_ascii=False)) for value in values))

    def _typed(self, kind: Any, given: Mapping[str, Any]) -> str:
        if kind not in _TYPES or not given.keys() <= _OF_TYPES.get(kind, frozenset()):
            raise _NotKnown
        if kind == "object":
            return self._object(given) if given else "object"
        if kind == "array":
            return self._array(given) if given else "array"
        if kind == "string" and given:
            least, most = _bounds(given, "minLength", "maxLength")
            characters = f"character{_times(least, most)}" if most != 0 else ""
            return self._rule(f'"\\"" {characters} "\\""')
        return str(kind)

    def _array(self, given: Mapping[str, Any]) -> str:
        item = self._of(given.get("items", True))
        least, most = _bounds(given, "minItems", "maxItems")
        if most == 0:
            return self._rule('"[" ws "]"')
        times = _times(max(least - 1, 0), None if most is None else most - 1)
        further = f'(ws "," ws {item}){times}' if most != 1 else ""
        elements = f"{item} {further} ws"
        return self._rule(f'"[" ws {elements if least else f"({elements})?"} "]"')

    def _object(self, given: Mapping[str, Any]) -> str:
        properties, required = given.get("properties", {}), given.get("required", [])
        more = given.get("additionalProperties", False)
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _NotKnown
        if not all(name in properties for name in required):
            raise _NotKnown
        others = "" if more is False else f'string ws ":" ws {self._of(more)}'
        # From the last property to the first: what may follow if another member precedes, and if none does.
        after = self._rule(f'(ws "," ws {others})* ws' if others else "ws")
        first = self._rule(f'({others} (ws "," ws {others})* ws)?' if others else '""')
        for name, schema in reversed(properties.items()):
            member = f'{_literal(json.dumps(name, ensure_ascii=False))} ws ":" ws {self._of(schema)}'
            skipped = ("", "") if name in required else (f" | {after}", f" | {first}")
            after, first = (
                self._rule(f'ws "," ws {member} {after}{skipped[0]}'),
                self._rule(f"{member} {after}{skipped[1]}"),
            )
        return self._rule(f'"{{" ws {first} "}}"')


def _restricted(given: Mapping[str, Any], kind: Any, kinds: list[Any]) -> dict[str, Any]:
    """Return the keywords that concern one of several types. Raises ``_NotKnown`` for those that concern none."""
    known = {key for each in kinds if isinstance(each, str) for key in _OF_TYPES.get(each, ())}
    if not given.keys() <= known or not isinstance(kind, str):
        raise _NotKnown
    return {key: value for key, value in given.items() if key in _OF_TYPES.get(kind, ())}


def _bounds(given: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    low, high = given.get(least, 0), given.get(most)
    if type(low) is not int or not 0 <= low <= _MOST or (high is not None and type(high) is not int):
        raise _NotKnown
    if high is not None and not low <= high <= _MOST:
        raise _NotKnown
    return low, high


def _times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}" if low or high is not None else "*"


def _literal(text: str) -> str:
    """Return a text as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def _are(values: list[Any], kind: Any) -> bool:
    """Return whether all values have a type, or one of several."""
    kinds = kind if isinstance(kind, list) else [kind]
    known = tuple(each for name in kinds if isinstance(name, str) for each in _KINDS.get(name, ()))
    return all(type(value) in known for value in values)
