"""Checks of JSON schemas for what grammar compilers miss: they ignore keywords, contradictions and endless references.

An engine then generates text that does not match, or begins a part that it cannot complete, so such a schema is
rejected. What compilers reject themselves is left to them, such as unknown types, ``false``, or a required property
more than ``maxProperties`` allows. Pure.
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from nerite.core.errors import InvalidArgument, Unsupported
from nerite.core.text import quoted_text
from nerite.llm.expressions import MAX_PARTS, REGEX_TOKEN, expanded_size

_DEEPEST: Final = 64
_SCHEMAS_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS_OF_SCHEMAS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS: Final = frozenset(
    {"items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)
_INEXPRESSIBLE: Final = frozenset(
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
"""Keywords that no grammar can express."""


def schemas_within(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a schema, its subschemas and all that they refer to, each once, with its path, before what is in it.

    Raises ``InvalidArgument`` if they are nested too deeply.
    """
    seen: set[int] = set()
    left: deque[tuple[str, Any, int]] = deque([(path, schema, 0)])
    references: deque[tuple[str, Any, int]] = deque()
    """Visited last, because most targets are subschemas, too."""
    while left or references:
        where, each, depth = left.popleft() if left else references.popleft()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        if depth > _DEEPEST:
            raise InvalidArgument(f"'{where}' is nested {depth} schemas deep; the maximum is {_DEEPEST}")
        seen.add(id(each))
        yield where, each
        for keyword, value in each.items():
            if keyword in _SCHEMAS:
                left.append((f"{where}.{keyword}", value, depth + 1))
            elif keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
                left += ((f"{where}.{keyword}.{quoted_text(name)}", inner, depth + 1) for name, inner in value.items())
            elif keyword in _LISTS_OF_SCHEMAS and isinstance(value, list):
                left += ((f"{where}.{keyword}.{place}", inner, depth + 1) for place, inner in enumerate(value))
            elif keyword == "$ref" and isinstance(value, str):
                references.append((f"{where}.$ref", _target(schema, value), value.count("/")))


def _target(schema: Any, reference: Any) -> Any:
    """Return the target of a reference into ``schema``; None if it cannot be resolved."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and name in schema:
            schema = schema[name]
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return None
    return schema


def check_schema(path: str, schema: Mapping[str, Any]) -> None:
    """Raise ``NeriteError`` if no text can match a schema, or a part of it, or no grammar can express it."""
    schemas = list(schemas_within(path, schema))
    for where, each in schemas:
        _check_keywords(where, each)
    _check_instances(path, schema, schemas)


def _check_keywords(path: str, schema: Mapping[str, Any]) -> None:
    for keyword in schema:
        if keyword in _INEXPRESSIBLE:
            raise Unsupported(f"'{path}.{keyword}' cannot be enforced while text is generated: remove it")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise Unsupported(
            f"'{path}.$ref' must point into the schema, such as '#/$defs/name', got {reprlib.repr(reference)}"
        )
    if len(_list(schema, "allOf")) > 1:
        raise Unsupported(f"'{path}.allOf' has several schemas: merge them into one")
    properties = schema.get("properties")
    for name in _list(schema, "required"):
        if not isinstance(properties, dict) or not isinstance(name, str) or name not in properties:
            raise Unsupported(f"'{path}' requires {name!r}, which is not in its 'properties': define it there")
    if "pattern" in schema and (more := {"minLength", "maxLength", "format"} & schema.keys()):
        raise Unsupported(f"'{path}' has a pattern and {', '.join(sorted(more))}: express both in the pattern")


_NUMBER: Final = "number"
"""A number with a fraction; numbers without one are of kind ``integer``."""
_ALL: Final = frozenset({"null", "boolean", "integer", _NUMBER, "string", "array", "object"})
"""Kinds of values."""
_BOUNDS: Final = (
    ("integer", "minimum", "maximum"),
    (_NUMBER, "minimum", "maximum"),
    ("string", "minLength", "maxLength"),
    ("array", "minItems", "maxItems"),
    ("object", "minProperties", "maxProperties"),
)
_MAX_COUNT: Final = 20_000
"""Maximum number of times that a schema is examined, in all passes together."""


def _check_instances(path: str, root: Any, schemas: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise ``InvalidArgument`` if one of the schemas has no instances.

    Finds the kinds of values that each schema's instances may have: initially none, and more in each pass until a
    fixed point is reached. The check is sound but incomplete: a schema that is rejected has no instances; one that is
    not may still have none.
    """
    allowed = {id(schema): _kinds(schema) for _, schema in schemas}
    targets = {id(schema): _target(root, schema.get("$ref")) for _, schema in schemas}
    found: dict[int, frozenset[str]] = dict.fromkeys(allowed, frozenset())
    for _ in range(_MAX_COUNT // len(schemas)):
        before = dict(found)
        for _, schema in reversed(schemas):
            applied = [*_list(schema, "allOf"), targets[id(schema)]]
            kinds = allowed[id(schema)].intersection(*(found.get(id(each), _ALL) for each in applied))
            for keyword in ("anyOf", "oneOf"):
                if isinstance(schema.get(keyword), list):
                    kinds &= frozenset().union(*(found.get(id(each), _ALL) for each in schema[keyword]))
            found[id(schema)] = kinds - {kind for kind, each in _needs(schema) if not found.get(id(each), _ALL)}
        if found == before:
            break
    else:
        return
    for where, schema in reversed(schemas):  # the innermost one explains the others
        if not found[id(schema)]:
            why = f"no value matches '{where}', which is {reprlib.repr(schema)}"
            raise InvalidArgument(f"a part of '{path}' has no instances: {why}")


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the kinds of values that the schema's own keywords allow."""
    kinds = _ALL
    if "type" in schema:
        given = schema["type"]
        types = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}
        if types <= _ALL:  # the compiler rejects others
            kinds &= types | ({"integer"} if _NUMBER in types else set())
    if isinstance(schema.get("enum"), list):
        kinds &= set(map(_kind, schema["enum"]))
    if "const" in schema:
        kinds &= {_kind(schema["const"])}
    for kind, low, high in _BOUNDS:
        least, most = schema.get(low), schema.get(high)
        if isinstance(least, int | float) and isinstance(most, int | float) and least > most:
            kinds -= {kind}
    return kinds


def _needs(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that a part of each instance of one kind must match, with that kind."""
    properties = schema.get("properties")
    if isinstance(properties, dict):
        yield from (("object", properties[name]) for name in _list(schema, "required") if name in properties)
    least = max([0, *_integers(schema, "minItems")])
    first = _list(schema, "prefixItems")
    yield from (("array", each) for each in first[:least])
    if least > len(first):
        yield "array", schema.get("items")


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


def schema_size(schema: Any) -> int:
    """Return the number of parts of a schema whose repetitions are expanded."""
    if isinstance(schema, list):
        return sum(map(schema_size, schema))
    if not isinstance(schema, dict):
        return 1
    parts = 1
    for keyword, value in schema.items():
        if keyword == "items":
            parts += schema_size(value) * _times(schema, "minItems", "maxItems")
        elif keyword == "additionalProperties":
            parts += schema_size(value) * _times(schema, "minProperties", "maxProperties")
        elif keyword == "pattern" and isinstance(value, str):
            parts += expanded_size(REGEX_TOKEN.finditer(value))
        elif isinstance(value, dict | list):
            parts += schema_size(value)
    return min(parts + _times(schema, "minLength", "maxLength"), MAX_PARTS * MAX_PARTS)


def _times(schema: Mapping[str, Any], *counts: str) -> int:
    """Return the largest of the repetition bounds ``counts`` of a schema, at least 1."""
    return min(max([1, *_integers(schema, *counts)]), MAX_PARTS * MAX_PARTS)


def _integers(schema: Mapping[str, Any], *keywords: str) -> Iterable[int]:
    return (value for keyword in keywords if isinstance(value := schema.get(keyword), int))


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return the value of a keyword, or an empty list if it is missing or malformed."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
