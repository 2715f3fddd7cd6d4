"""Limits for text from clients and models, and bounded quoting of such text in messages.

Every name, id, key and parameter of a client goes through ``client_text.checked`` where its protocol is parsed. After
that, text is valid Unicode of bounded length: it can be encoded, logged, used as a label and sent to a worker without
another check. ``quoted_text`` quotes client text in a message; ``bounded`` is applied to each message as a whole.
"""

from __future__ import annotations

import re
from typing import Final

MAX_NAME: Final = 1024
"""Characters of a name, an id or a key."""
MAX_VALUE: Final = 1024 * 1024
"""Characters of a parameter value: grammars and JSON schemas are passed as parameters."""
MAX_SHOWN: Final = 200
"""Characters of a name, or of any other text without a space, that a message shows."""
MAX_MESSAGE: Final = 16 * 1024
"""Characters of a message: the text of an exception that a model raises may have any length."""
MAX_RECORD: Final = 64 * 1024
"""Characters of the message of a log record."""

_LONG_RUN: Final = re.compile(rf"(?<!\w)'[^'\n]{{{MAX_SHOWN + 1},}}'|\S{{{MAX_SHOWN + 1},}}")
"""A long quoted name, or long text without a space. A quote after a letter or digit does not open a name."""
_LEFT_OUT: Final = "…"


def text_error(text: str, limit: int = MAX_NAME) -> str | None:
    """Return why ``text`` is invalid, as a predicate for a sentence that begins with the field's name, or None.

    Lone surrogates represent bytes that are not UTF-8: lenient decoders produce them (``surrogateescape``).
    """
    if len(text) > limit:
        return f"is {len(text)} characters long, more than the {limit} that are allowed"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"is not valid UTF-8 at character {error.start}"
    return None


def quoted_text(text: str, limit: int = MAX_SHOWN) -> str:
    """Return ``text`` as valid Unicode of at most ``limit`` characters, for a message.

    Longer text loses its middle, because the end of a path is more informative.
    """
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}{_LEFT_OUT}{text[half + 1 - limit :]}"
    return text if text.isascii() else text.encode(errors="replace").decode()


def bounded(message: str) -> str:
    """Return ``message`` with each long name cut to ``MAX_SHOWN`` characters and the whole cut to ``MAX_MESSAGE``."""
    message = cut(message)
    if not message.isascii():
        message = message.encode(errors="replace").decode()
    return message if len(message) <= MAX_SHOWN else _LONG_RUN.sub(_cut, message)


def cut(text: str, limit: int = MAX_MESSAGE) -> str:
    """Truncate ``text`` to ``limit`` characters, and append how many were removed."""
    return text if len(text) <= limit else f"{text[:limit]}{_LEFT_OUT} ({len(text) - limit} more characters)"


def _cut(found: re.Match[str]) -> str:
    run = found[0]
    quote = "'" if run[0] == "'" == run[-1] else ""
    return quoted_text(run[:-1] if quote else run) + quote
