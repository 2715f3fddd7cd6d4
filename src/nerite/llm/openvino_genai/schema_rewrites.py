"""Strings in JSON schemas, said so that what comes is JSON.

The framework takes a pattern for what stands between two quotation marks as it is, and a length for that many of any
character but those and a new line. So a pattern could write a quotation mark, and a length what has to be escaped. Both
are said here as patterns that cannot. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, cast

from nerite.core.errors import Unsupported
from nerite.llm import json_schema

# Classes of characters that the framework reads otherwise than they are written. Pure.
#
# It takes a class of all characters but some, where one of those is beyond ASCII, for all characters beyond ASCII.

_QUOTED: Final = r'"(?:\\.|[^"\\\n])*"|\#[^\n]*|'
"""In a grammar: texts and comments."""
_CLASS: Final = r"\\.|\[(?P<but>\^)?(?P<items>(?:\\.|[^\]\\])*)(?:\]|\\?\Z)"
"""One that is not closed reaches to the end: else that would be looked for from each bracket on."""
_ITEM: Final = re.compile(
    r"\\(?:x(?P<two>[0-9a-fA-F]{2})|u(?P<four>[0-9a-fA-F]{4})|U(?P<eight>[0-9a-fA-F]{8})|[xu]\{(?P<any>[0-9a-fA-F]+)\})"
    r"|\\(?P<letter>.)|[^\x00-\x7f]",
    re.DOTALL,
)


def check_classes(where: str, text: str, *, quoted: bool = False) -> None:
    """Raise ``Unsupported`` for a regular expression, or a grammar if it is ``quoted``, that has such a class."""
    for part in re.finditer((_QUOTED if quoted else "") + _CLASS, text, re.DOTALL):
        if part["but"] and any(_beyond(item) for item in _ITEM.finditer(part["items"])):
            raise Unsupported(
                f"'{where}' has the class {part[0]}, which the engine cannot keep to, for it leaves out characters "
                "beyond ASCII: say which there may be"
            )


def _beyond(item: re.Match[str]) -> bool:
    """Return whether some character of an item is beyond ASCII."""
    if code := item["two"] or item["four"] or item["eight"] or item["any"]:
        return int(code, 16) > 0x7F
    return item["letter"] in ("S", "D", "W") if item["letter"] else True


_NEVER: Final = r'"\\\x00-\x1f'
"""In a class: what is escaped in a JSON string."""
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
    """Return a schema whose strings are JSON's. Raises ``Unsupported`` for a pattern that cannot be said so."""
    schema = json.loads(source)
    for path, found in json_schema.schemas_within("schema", schema):
        each = cast(dict[str, Any], found)
        if "pattern" in each:
            each["pattern"] = _kept_inside(f"{path}.pattern", str(each["pattern"]))
        elif each.keys() & {"minLength", "maxLength"} and "format" not in each:
            least, most = each.pop("minLength", 0), each.pop("maxLength", None)
            if most is not None and least > most:
                raise Unsupported(f"'{path}' has minLength {least} and maxLength {most}: no text is like that")
            each["pattern"] = f"{_ANY}{{{least},{'' if most is None else most}}}"
    return json.dumps(schema)


def _kept_inside(path: str, pattern: str) -> str:
    """Return a pattern that never has what ends a string, or is escaped in one."""
    check_classes(path, pattern)
    return "".join(_parts(path, pattern))


def _parts(path: str, pattern: str) -> Iterator[str]:
    at = 0
    while at < len(pattern):
        part = _PARTS.match(pattern, at)
        if part is None:
            raise Unsupported(f"'{path}' cannot be read from '{pattern[at:]}' on")
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
    """Raise ``Unsupported`` if among the characters from one to another is one that a string cannot have."""
    if low in (r"\d", r"\w", r"\s"):
        return
    first, last = _code(low), _code(high)
    if first is None or last is None or first < 0x20 or any(first <= ord(never) <= last for never in '"\\'):
        raise Unsupported(
            f"'{path}' lets '{low if low == high else f'{low}-{high}'}' into a string, where it would have to be "
            "escaped: leave it out, or say which characters there may be, such as [a-z ]"
        )


def _code(character: str) -> int | None:
    """Return the number of a character that may be written as an escape; None for an escape that is many."""
    if len(character) == 1:
        return ord(character)
    if character[1] in "xu" and len(character) > 2:
        return int(character[2:], 16)
    if character[1] in _CONTROLS:
        return 0
    return None if character[1].isalnum() else ord(character[1])
