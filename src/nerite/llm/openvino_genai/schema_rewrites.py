"""Rewrites JSON schemas so that the strings that the framework generates are valid JSON. Pure.

The framework applies a string's pattern verbatim between two quotation marks, and reads length limits as that many
characters except quotation marks and newlines. So a pattern could generate a quotation mark, and a length characters
that need escaping. Both are rewritten to patterns that cannot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final, cast

from nerite.core.errors import Unsupported
from nerite.llm import json_schema
from nerite.llm.expressions import REGEX_TOKEN

_ITEM: Final = re.compile(
    r"\\(?:x(?P<two>[0-9a-fA-F]{2})|u(?P<four>[0-9a-fA-F]{4})|U(?P<eight>[0-9a-fA-F]{8})|[xu]\{(?P<any>[0-9a-fA-F]+)\})"
    r"|\\(?P<letter>.)|[^\x00-\x7f]",
    re.DOTALL,
)


def check_classes(where: str, tokens: Iterable[re.Match[str]]) -> None:
    """Raise ``Unsupported`` for a negated character class with characters beyond ASCII, which the framework misreads.

    It matches all characters beyond ASCII.
    """
    for token in tokens:
        if (token["one"] or "").startswith("[^") and any(map(_beyond_ascii, _ITEM.finditer(token["one"]))):
            raise Unsupported(
                f"'{where}' has the class {token[0]}, which the engine cannot enforce because it excludes characters "
                "beyond ASCII: list the allowed characters instead"
            )


def _beyond_ascii(item: re.Match[str]) -> bool:
    """Return whether some character of an item is beyond ASCII."""
    if code := item["two"] or item["four"] or item["eight"] or item["any"]:
        return int(code, 16) > 0x7F
    return item["letter"] in ("S", "D", "W") if item["letter"] else True


_NEVER: Final = r'"\\\x00-\x1f'
"""Characters that JSON strings must escape, in the syntax of a character class."""
_ANY: Final = f"[^{_NEVER}]"

_CHARACTER: Final = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|[^\\]"
_ITEMS: Final = re.compile(f"({_CHARACTER})(?:-({_CHARACTER}))?", re.DOTALL)
"""A character of a class, or a range of them."""
_REPLACED: Final = {
    ".": _ANY,
    r"\s": " ",
    r"\S": f"[^ {_NEVER}]",
    r"\D": f"[^0-9{_NEVER}]",
    r"\W": f"[^a-zA-Z0-9_{_NEVER}]",
}


def plain_json_strings(source: str) -> str:
    """Return a schema whose strings are valid JSON. Raises ``Unsupported`` for a pattern that cannot be rewritten."""
    schema = json.loads(source)
    for path, found in json_schema.schemas_within("schema", schema):
        each = cast(dict[str, Any], found)
        if "pattern" in each:
            each["pattern"] = _rewrite_pattern(f"{path}.pattern", str(each["pattern"]))
        elif each.keys() & {"minLength", "maxLength"} and "format" not in each:
            least, most = each.pop("minLength", 0), each.pop("maxLength", None)
            if most is not None and least > most:
                raise Unsupported(f"'{path}' has minLength {least} and maxLength {most}: no text satisfies both")
            each["pattern"] = f"{_ANY}{{{least},{'' if most is None else most}}}"
    return json.dumps(schema)


def _rewrite_pattern(path: str, pattern: str) -> str:
    """Return a pattern that never matches characters that end a string or need escaping in one."""
    check_classes(path, REGEX_TOKEN.finditer(pattern))
    return "".join(_rewrite(path, token) for token in REGEX_TOKEN.finditer(pattern))


def _rewrite(path: str, token: re.Match[str]) -> str:
    text = token[0]
    if text in _REPLACED:
        return _REPLACED[text]
    if text.startswith("["):
        if not token["closed"]:
            raise Unsupported(f"'{path}' cannot be parsed from '{text}' on")
        if text.startswith("[^"):
            return f"{text[:-1]}{_NEVER}]"
        for low, high in _ITEMS.findall(text[1:-1]):
            _check(path, low, high or low)
        return text.replace(r"\s", " ")
    if token["one"] or token["other"]:
        _check(path, text, text)
    return text


def _check(path: str, low: str, high: str) -> None:
    """Raise ``Unsupported`` if the range of characters includes one that needs escaping in a JSON string."""
    if low in (r"\d", r"\w", r"\s"):
        return
    first, last = _code(low), _code(high)
    if first is None or last is None or first < 0x20 or any(first <= ord(never) <= last for never in '"\\'):
        raise Unsupported(
            f"'{path}' allows '{low if low == high else f'{low}-{high}'}' in a string, where it would have to be "
            "escaped: remove it, or list the allowed characters, such as [a-z ]"
        )


def _code(character: str) -> int | None:
    """Return the code of a character or escape; None for an escape that stands for others, or for a control."""
    if len(character) > 2:
        return int(character[2:], 16)
    return None if len(character) == 2 and character[1].isalnum() else ord(character[-1])
