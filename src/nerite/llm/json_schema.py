"""Detects JSON schemas that have no instances, or contain a schema that has none. Pure.

Engines do not detect this: they generate something else, or begin a part that they cannot complete. The check is sound
but incomplete: a schema that is reported has no instances; one that is not reported may still have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from nerite.core.errors import InvalidArgument
from nerite.core.text import quoted_text

_DEEPEST: Final = 64
_SCHEMAS_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS_OF_SCHEMAS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS: Final = frozenset(
    {"items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)


def schemas_within(path: str, schema: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a schema and its subschemas, each with its path. Raises ``InvalidArgument`` if nested too deeply."""
    if depth > _DEEPEST:
        raise InvalidArgument(f"'{path}' is nested {depth} schemas deep; the maximum is {_DEEPEST}")
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
"""A number with a fraction; numbers without one are of kind ``integer``."""
_ALL: Final = frozenset({"null", "boolean", "integer", _NUMBER, "string", "array", "object"})
_MAX_COUNT: Final = 10_000
"""Maximum number of schemas and list values that are examined; nesting can make their number explode."""


class _Verdict(NamedTuple):
    """Result of examining a schema."""

    kinds: frozenset[str]
    """Kinds of values that its instances may be."""
    why: str = ""
    """If it has no instances: the place and the reason."""


def impossible_schema(path: str, schema: Any) -> str:
    """Return why ``schema`` at ``path``, or a part of it, has no instances; empty if no such part was found."""
    try:
        return _Reader(path, schema).verdict()
    except (_TooLarge, RecursionError):
        return ""


class _TooLarge(Exception):
    """The schema is too large to be examined."""


class _Reader:
    """Examines a schema repeatedly until the kinds of its references' targets reach a fixed point."""

    def __init__(self, path: str, schema: Any) -> None:
        self._path = path
        self._schema = schema
        self._led: dict[str, frozenset[str]] = {}
        """Kinds of instances of each reference's target that are known to be possible; initially none."""
        self._targets: dict[str, Any] = {}
        self._left = _MAX_COUNT

    def verdict(self) -> str:
        while True:
            known = dict(self._led)
            for reference in known:
                if reference not in self._targets:
                    self._targets[reference] = _target(self._schema, reference)
                self._led[reference] = self._examine(reference, self._targets[reference]).kinds
            verdicts = [self._examine(where, each) for where, each in schemas_within(self._path, self._schema)]
            if self._led == known:
                return next((each.why for each in verdicts if not each.kinds), "")

    def _examine(self, path: str, schema: Any) -> _Verdict:
        self._left -= 1
        if self._left < 0:
            raise _TooLarge
        if schema is False:
            return _Verdict(frozenset(), f"'{path}' is false")
        if not isinstance(schema, dict):
            return _Verdict(_ALL)
        self._left -= sum(len(value) for value in schema.values() if isinstance(value, list))
        kinds, restricting = _ALL, []
        for keyword, verdict in self._keyword_verdicts(path, schema):
            if not verdict.kinds:
                return verdict
            if verdict.kinds != _ALL:
                restricting.append(keyword)
            kinds &= verdict.kinds
        impossible = dict(self._impossible_kinds(path, schema, sorted(kinds)))
        contradiction = f"'{path}' has {' and '.join(restricting)}, which contradict each other"
        kinds -= impossible.keys()
        return _Verdict(kinds, "" if kinds else next(iter(impossible.values()), contradiction))

    def _keyword_verdicts(self, path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, _Verdict]]:
        """Yield the verdict of each keyword that applies to instances of all kinds."""
        if "type" in schema:
            given = schema["type"]
            types = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}
            kinds = frozenset(types & _ALL) | ({"integer"} if _NUMBER in types else set())
            # Unknown types are rejected by the compiler.
            yield "type", _Verdict(kinds if types <= _ALL else _ALL, f"'{path}.type' names none")
        if isinstance(schema.get("enum"), list):
            yield "enum", _Verdict(frozenset(map(_kind, schema["enum"])), f"'{path}.enum' has no value")
        if "const" in schema:
            yield "const", _Verdict(frozenset({_kind(schema["const"])}))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                inner = [self._examine(f"{path}.{keyword}.{place}", each) for place, each in enumerate(schema[keyword])]
                why = inner[0].why if inner else f"'{path}.{keyword}' has no schema"
                yield keyword, _Verdict(frozenset().union(*(each.kinds for each in inner)), why)
        if isinstance(schema.get("allOf"), list):
            for place, each in enumerate(schema["allOf"]):
                yield "allOf", self._examine(f"{path}.allOf.{place}", each)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            kinds = self._led.setdefault(reference, frozenset())
            yield "$ref", _Verdict(kinds, f"'{path}.$ref' refers to a schema without instances, or endlessly to itself")

    def _impossible_kinds(
        self, path: str, schema: Mapping[str, Any], kinds: Iterable[str]
    ) -> Iterator[tuple[str, str]]:
        """Yield the kinds of which no instance can exist, and why."""
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
            if place < least and (why := self._examine(f"{path}.prefixItems.{place}", each).why):
                return why
        return self._examine(f"{path}.items", schema.get("items", True)).why if least > len(first) else ""

    def _no_object(self, path: str, schema: Mapping[str, Any]) -> str:
        if why := _crossed(path, schema, "minProperties", "maxProperties"):
            return why
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = schema.get("required")
        required = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
        most = _number(schema, "maxProperties")
        if most is not None and len(required) > most:
            return f"'{path}' requires {len(required)} properties, but has maxProperties {most}"
        if schema.get("patternProperties"):
            return ""
        others = schema.get("additionalProperties", True)
        least = _number(schema, "minProperties") or 0
        if others is False and len(properties) < least:
            return f"'{path}' has minProperties {least}, but allows only {len(properties)}"
        for name in sorted(required):
            if name not in properties and others is False:
                return f"'{path}' requires '{name}', which is not in its properties, and allows no others"
            where = f"properties.{name}" if name in properties else "additionalProperties"
            if why := self._examine(f"{path}.{where}", properties.get(name, others)).why:
                return why
        return ""


def _target(schema: Any, reference: str) -> Any:
    """Return the target of a reference; True, which allows anything, if it cannot be resolved."""
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
    """Return why no number lies between the bounds of a schema; empty if one does."""
    low, high = -math.inf, math.inf
    bounds = []
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        bound = _number(schema, keyword)
        if bound is None:
            continue
        bounds.append(f"{keyword} {bound}")
        # For integers the nearest allowed one; otherwise the bound itself, even if it is excluded.
        if keyword.endswith("inimum"):
            least = math.floor(bound) + 1 if keyword.startswith("ex") else math.ceil(bound)
            low = max(low, least if whole else bound)
        else:
            greatest = math.ceil(bound) - 1 if keyword.startswith("ex") else math.floor(bound)
            high = min(high, greatest if whole else bound)
    return f"'{path}' has {' and '.join(bounds)}" if low > high else ""
