"""Rewrites JSON schemas so that the strings that the framework generates are valid JSON. Pure.

The framework applies a string's pattern verbatim between two quotation marks, and reads length limits as that many
characters except quotation marks and newlines. So a pattern could generate a quotation mark, and a length characters
that need escaping. Both are rewritten to patterns that cannot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, cast

from nerite.core.errors import Unsupported
from nerite.llm import json_schema

_QUOTED: Final = r'"(?:\\.|[^"\\\n])*"|\#[^\n]*|'
"""Literals and comments of a grammar."""
_CLASS: Final = r"\\.|\[(?P<but>\^)?(?P<items>(?:\\.|[^\]\\])*)(?:\]|\\?\Z)"
"""An unclosed class extends to the end: otherwise the end would be searched for from each bracket."""
_ITEM: Final = re.compile(
    r"\\(?:x(?P<two>[0-9a-fA-F]{2})|u(?P<four>[0-9a-fA-F]{4})|U(?P<eight>[0-9a-fA-F]{8})|[xu]\{(?P<any>[0-9a-fA-F]+)\})"
    r"|\\(?P<letter>.)|[^\x00-\x7f]",
    re.DOTALL,
)


def check_classes(where: str, text: str, *, quoted: bool = False) -> None:
    """Raise ``Unsupported`` for a negated character class with characters beyond ASCII, which the framework misreads.

    It matches all characters beyond ASCII. ``text`` is a regular expression, or a grammar if it is ``quoted``.
    """
    for part in re.finditer((_QUOTED if quoted else "") + _CLASS, text, re.DOTALL):
        if part["but"] and any(_beyond_ascii(item) for item in _ITEM.finditer(part["items"])):
            raise Unsupported(
                f"'{where}' has the class {part[0]}, which the engine cannot enforce because it excludes characters "
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

_PARTS: Final = re.compile(
    r"(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.))"
    r"|(?P<class>\[\^?)(?P<items>(?:\\.|[^\]\\])*)\]"
    r"|(?P<any>\.)"
    r"|(?P<rest>[^\\\[.]+)",
    re.DOTALL,
)
_ITEMS: Final = re.compile(
    r"(?P<low>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|[^\\])(?:-(?P<high>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|[^\\]))?",
    re.DOTALL,
)
_WITHOUT: Final = {"S": "[^ " + _NEVER + "]", "D": "[^0-9" + _NEVER + "]", "W": "[^a-zA-Z0-9_" + _NEVER + "]"}
_CONTROLS: Final = frozenset("nrtfv0bc")


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
    check_classes(path, pattern)
    return "".join(_parts(path, pattern))


def _parts(path: str, pattern: str) -> Iterator[str]:
    at = 0
    while at < len(pattern):
        part = _PARTS.match(pattern, at)
        if part is None:
            raise Unsupported(f"'{path}' cannot be parsed from '{pattern[at:]}' on")
        at = part.end()
        if part["any"]:
            yield _ANY
        elif part["escape"]:
            letter = part["escape"][1]
            if letter in _WITHOUT:
                yield _WITHOUT[letter]
            elif letter == "s":
                yield " "
            else:
                _check(path, part["escape"], part["escape"])
                yield part["escape"]
        elif part["class"] == "[^":
            yield f"[^{part['items']}{_NEVER}]"
        elif part["class"]:
            for item in _ITEMS.finditer(part["items"]):
                _check(path, item["low"], item["high"] or item["low"])
            yield part[0].replace(r"\s", " ")
        else:
            _check_text(path, part["rest"])
            yield part["rest"]


def _check_text(path: str, text: str) -> None:
    for character in text:
        _check(path, character, character)


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
    """Return the code of a character or escape; None for an escape that stands for several characters."""
    if len(character) == 1:
        return ord(character)
    if character[1] in "xu" and len(character) > 2:
        return int(character[2:], 16)
    if character[1] in _CONTROLS:
        return 0
    return None if character[1].isalnum() else ord(character[1])
