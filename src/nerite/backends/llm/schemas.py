"""JSON schemas within JSON schemas. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from nerite.core.errors import InvalidArgument
from nerite.core.text import shown

_DEEPEST: Final = 64
_SCHEMAS_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS_OF_SCHEMAS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS: Final = frozenset(
    {"items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)


def within(path: str, schema: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
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
                yield from within(f"{path}.{keyword}" + (f".{shown(str(key))}" if key != "" else ""), each, depth + 1)
