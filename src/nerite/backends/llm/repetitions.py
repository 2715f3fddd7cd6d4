"""How much a grammar says when its repetitions are written out. Pure.

A compiler writes them out, more or less: a few characters become more states than there is time and memory for. An
engine that compiles in a process with limits need not look here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from nerite.backends.llm.structured import JSON_SCHEMA, Grammar
from nerite.core.errors import InvalidArgument

MOST: Final = 50_000
"""Parts of a grammar. Each of its texts and characters is one, as often as it is repeated."""
_PART: Final = re.compile(
    r"""\s+|\#[^\n]*
    |(?P<one>\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|"(?:\\.|[^"\\\n])*")
    |(?P<open>\((?:\?(?::|=|!|<?[=!]|P?<\w{1,64}>))?)
    |(?P<close>\))
    |\{(?P<times>[\s\d,]+)\}
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
"""What is not closed reaches to the end: to look for the other end from each beginning takes the square of the time."""
_AT_ONCE: Final = "*+?|"
_LONGEST_NUMBER: Final = 9
"""Digits. More is more than ``MOST`` in any case."""


def check(name: str, grammar: Grammar) -> None:
    """Raise ``InvalidArgument`` for a grammar that is too much when it is written out."""
    source = grammar.source
    parts = _of_schema(json.loads(source)) if grammar.kind == JSON_SCHEMA else _of_expression(source)
    if parts > MOST:
        raise InvalidArgument(
            f"structured output ({grammar.kind}): with its repetitions written out it has more than {MOST} parts, for "
            f"which the compiler of {name} takes too long: repeat less"
        )


def _of_expression(source: str) -> int:
    """Return how many parts a regular expression, or a grammar as llama.cpp has it, comes to."""
    groups = [0]
    last = 0
    for part in _PART.finditer(source):
        if part["open"]:
            groups.append(0)
            last = 0
        elif part["close"] and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif part["times"]:
            said = part["times"].replace(",", " ").split()
            times = max([1, *(int(digits[:_LONGEST_NUMBER]) for digits in said)])
            groups[-1] += last * (times - 1)
            last *= times
        elif part["one"] or (part["other"] and part["other"] not in _AT_ONCE):
            last = 1
            groups[-1] += 1
        groups[-1] = min(groups[-1], MOST * MOST)
        last = min(last, MOST * MOST)
    return sum(groups)


def _of_schema(schema: Any) -> int:
    """Return how many parts the texts that a schema has come to. It is no deeper than ``schemas.within`` lets be."""
    if isinstance(schema, list):
        return sum(map(_of_schema, schema))
    if not isinstance(schema, dict):
        return 1
    parts = 1
    for keyword, value in schema.items():
        if keyword in ("items", "additionalProperties"):
            counts = ("minItems", "maxItems") if keyword == "items" else ("minProperties", "maxProperties")
            parts += _of_schema(value) * _times(schema, *counts)
        elif keyword == "pattern" and isinstance(value, str):
            parts += _of_expression(value)
        elif isinstance(value, dict | list):
            parts += _of_schema(value)
    return min(parts + _times(schema, "minLength", "maxLength"), MOST * MOST)


def _times(schema: Mapping[str, Any], *counts: str) -> int:
    """Return how often something is repeated that may be repeated so often."""
    said = [value for keyword in counts if isinstance(value := schema.get(keyword), int)]
    return min(max([1, *said]), MOST * MOST)
