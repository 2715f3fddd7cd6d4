"""Whether a JSON schema and all that is in it have instances, as far as the schema itself tells. Pure.

Engines do not see to it: they write something else instead, or begin with a part that they cannot end. What is said to
have none here has none; what is not may have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from nerite.core.errors import InvalidArgument
from nerite.core.text import quoted_text

# JSON schemas within JSON schemas. Pure.

_DEEPEST: Final = 64
_SCHEMAS_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS_OF_SCHEMAS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS: Final = frozenset(
    {"items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)


def schemas_within(path: str, schema: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Go through a schema and those within it, each with where it stands. Raises ``InvalidArgument`` for too many."""
    if depth > _DEEPEST:
        raise InvalidArgument(f"'{path}' is {depth} schemas deep, and may be {_DEEPEST}")
    yield path, schema
    for keyword, value in schema.items():
        inner: Iterator[tuple[Any, Any]] = iter(())
        if keyword in _SCHEMAS:
            inner = iter([("", value)])
        elif keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            inner = iter(value.items())
        elif keyword in _LISTS_OF_SCHEMAS and isinstance(value, list):
            inner = iter(enumerate(value))
        for key, each in inner:
            if isinstance(each, dict):
                yield from schemas_within(
                    f"{path}.{keyword}" + (f".{quoted_text(str(key))}" if key != "" else ""), each, depth + 1
                )


_NUMBER: Final = "number"
"""One with a fraction: those without are integers."""
_ALL: Final = frozenset({"null", "boolean", "integer", _NUMBER, "string", "array", "object"})
_MOST: Final = 10_000
"""Schemas that are looked at, and values in their lists; those within one another may be as many as there are atoms."""


class _Verdict(NamedTuple):
    """On a schema."""

    kinds: frozenset[str]
    """What an instance of it may be."""
    why: str = ""
    """Where there is none: the place, and the reason."""


def impossible_schema(path: str, schema: Any) -> str:
    """Return why ``schema``, which stands at ``path``, or a part of it has no instance; nothing if they may have."""
    try:
        return _Reader(path, schema).verdict()
    except (_Enough, RecursionError):
        return ""


class _Enough(Exception):
    """The schema is too large to be looked through."""


class _Reader:
    """Looks at a schema again and again, until what its references may lead to is known."""

    def __init__(self, path: str, schema: Any) -> None:
        self._path = path
        self._schema = schema
        self._led: dict[str, frozenset[str]] = {}
        """What an instance of each reference's target may be, as far as is known: at first nothing."""
        self._targets: dict[str, Any] = {}
        self._left = _MOST

    def verdict(self) -> str:
        while True:
            known = dict(self._led)
            for reference in known:
                if reference not in self._targets:
                    self._targets[reference] = _target(self._schema, reference)
                self._led[reference] = self._of(reference, self._targets[reference]).kinds
            verdicts = [self._of(where, each) for where, each in schemas_within(self._path, self._schema)]
            if self._led == known:
                return next((each.why for each in verdicts if not each.kinds), "")

    def _of(self, path: str, schema: Any) -> _Verdict:
        self._left -= 1
        if self._left < 0:
            raise _Enough
        if schema is False:
            return _Verdict(frozenset(), f"'{path}' is false")
        if not isinstance(schema, dict):
            return _Verdict(_ALL)
        self._left -= sum(len(value) for value in schema.values() if isinstance(value, list))
        kinds, said = _ALL, []
        for keyword, verdict in self._said(path, schema):
            if not verdict.kinds:
                return verdict
            if verdict.kinds != _ALL:
                said.append(keyword)
            kinds &= verdict.kinds
        lacking = dict(self._lacking(path, schema, sorted(kinds)))
        contradiction = f"'{path}' has {' and '.join(said)}, which contradict each other"
        kinds -= lacking.keys()
        return _Verdict(kinds, "" if kinds else next(iter(lacking.values()), contradiction))

    def _said(self, path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, _Verdict]]:
        """Yield what each keyword lets be that speaks of all kinds of instances."""
        if "type" in schema:
            given = schema["type"]
            types = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}
            kinds = frozenset(types & _ALL) | ({"integer"} if _NUMBER in types else set())
            # What is no type is for the compiler to refuse.
            yield "type", _Verdict(kinds if types <= _ALL else _ALL, f"'{path}.type' names none")
        if isinstance(schema.get("enum"), list):
            yield "enum", _Verdict(frozenset(map(_kind, schema["enum"])), f"'{path}.enum' has no value")
        if "const" in schema:
            yield "const", _Verdict(frozenset({_kind(schema["const"])}))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                of = [self._of(f"{path}.{keyword}.{place}", each) for place, each in enumerate(schema[keyword])]
                why = of[0].why if of else f"'{path}.{keyword}' has no schema"
                yield keyword, _Verdict(frozenset().union(*(each.kinds for each in of)), why)
        if isinstance(schema.get("allOf"), list):
            for place, each in enumerate(schema["allOf"]):
                yield "allOf", self._of(f"{path}.allOf.{place}", each)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            kinds = self._led.setdefault(reference, frozenset())
            yield "$ref", _Verdict(kinds, f"what '{path}.$ref' leads to has none, or leads to itself without end")

    def _lacking(self, path: str, schema: Mapping[str, Any], kinds: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield which of some kinds there cannot be after all, and why."""
        for kind in kinds:
            if kind in ("integer", _NUMBER):
                why = _no_number(path, schema, whole=kind == "integer")
            elif kind == "string":
                why = _crossed(path, schema, "minLength", "maxLength")
            elif kind == "array":
                why = self._no_array(path, schema)
            else:
                why = self._no_object(path, schema) if kind == "object" else ""
            if why:
                yield kind, why

    def _no_array(self, path: str, schema: Mapping[str, Any]) -> str:
        if why := _crossed(path, schema, "minItems", "maxItems"):
            return why
        least = _number(schema, "minItems") or 0
        first = schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        for place, each in enumerate(first):
            if place < least and (why := self._of(f"{path}.prefixItems.{place}", each).why):
                return why
        return self._of(f"{path}.items", schema.get("items", True)).why if least > len(first) else ""

    def _no_object(self, path: str, schema: Mapping[str, Any]) -> str:
        if why := _crossed(path, schema, "minProperties", "maxProperties"):
            return why
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = schema.get("required")
        required = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
        most = _number(schema, "maxProperties")
        if most is not None and len(required) > most:
            return f"'{path}' requires {len(required)} properties, and has maxProperties {most}"
        if schema.get("patternProperties"):
            return ""
        others = schema.get("additionalProperties", True)
        least = _number(schema, "minProperties") or 0
        if others is False and len(properties) < least:
            return f"'{path}' has minProperties {least}, and there may be {len(properties)}"
        for name in sorted(required):
            if name not in properties and others is False:
                return f"'{path}' requires '{name}', which is none of its properties, and there may be no others"
            where = f"properties.{name}" if name in properties else "additionalProperties"
            if why := self._of(f"{path}.{where}", properties.get(name, others)).why:
                return why
        return ""


def _target(schema: Any, reference: str) -> Any:
    """Return what a reference leads to; what may be anything, if that is nowhere."""
    if not reference.startswith("#"):
        return True
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and name in schema:
            schema = schema[name]
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return True
    return schema


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return _NUMBER
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _number(schema: Mapping[str, Any], keyword: str) -> float | None:
    value = schema.get(keyword)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _crossed(path: str, schema: Mapping[str, Any], low: str, high: str) -> str:
    least, most = _number(schema, low), _number(schema, high)
    if least is None or most is None or least <= most:
        return ""
    return f"'{path}' has {low} {least} and {high} {most}"


def _no_number(path: str, schema: Mapping[str, Any], *, whole: bool) -> str:
    """Return why there is no number between the bounds of a schema."""
    low, high = -math.inf, math.inf
    said = []
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        bound = _number(schema, keyword)
        if bound is None:
            continue
        said.append(f"{keyword} {bound}")
        # The next one that there may be, where only some numbers may be; else the bound itself, which is none.
        if keyword.endswith("inimum"):
            least = math.floor(bound) + 1 if keyword.startswith("ex") else math.ceil(bound)
            low = max(low, least if whole else bound)
        else:
            greatest = math.ceil(bound) - 1 if keyword.startswith("ex") else math.floor(bound)
            high = min(high, greatest if whole else bound)
    return f"'{path}' has {' and '.join(said)}" if low > high else ""
