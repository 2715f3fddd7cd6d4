"""The lines of a head that name a span: cut out of it, since they are new with each request of a client that traces.

What is left repeats, byte for byte, and is what heads and all that hangs on them are looked up by.
"""

from __future__ import annotations

import re
from typing import Final

from nerite.core.trace_context import TraceContext, parse

_LINE: Final = re.compile(rb"\r\n(trace(?:parent|state))[ \t]*:([^\r\n]*)(?=\r\n)", re.IGNORECASE)


def split(head: bytes, whole: bool) -> tuple[bytes, TraceContext | None]:
    """Return a head without the lines, and the span; the head as it is if it names none, or is to stay ``whole``."""
    if b"parent" not in head and b"PARENT" not in head and b"Parent" not in head:
        return head, None
    found: dict[bytes, str] = {}
    for name, value in _LINE.findall(head):
        found.setdefault(name.lower(), value.decode("latin-1"))
    span = parse(found.get(b"traceparent"), found.get(b"tracestate"))
    return (head if whole or span is None else _LINE.sub(b"", head)), span
