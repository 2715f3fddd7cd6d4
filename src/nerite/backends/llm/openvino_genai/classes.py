"""Classes of characters that the framework reads otherwise than they are written. Pure.

It takes a class of all characters but some, where one of those is beyond ASCII, for all characters beyond ASCII.
"""

from __future__ import annotations

import re
from typing import Final

from nerite.core.errors import Unsupported

_QUOTED: Final = r'"(?:\\.|[^"\\\n])*"|\#[^\n]*|'
"""In a grammar: texts and comments."""
_CLASS: Final = r"\\.|\[(?P<but>\^)?(?P<items>(?:\\.|[^\]\\])*)(?:\]|\\?\Z)"
"""One that is not closed reaches to the end: else that would be looked for from each bracket on."""
_ITEM: Final = re.compile(
    r"\\(?:x(?P<two>[0-9a-fA-F]{2})|u(?P<four>[0-9a-fA-F]{4})|U(?P<eight>[0-9a-fA-F]{8})|[xu]\{(?P<any>[0-9a-fA-F]+)\})"
    r"|\\(?P<letter>.)|[^\x00-\x7f]",
    re.DOTALL,
)


def check(where: str, text: str, *, quoted: bool = False) -> None:
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
