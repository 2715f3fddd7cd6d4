"""Text that comes from outside: what is a name, how long it may be, and how messages show it.

Every name, id, key and parameter that a client sends goes through ``client_text.checked`` where its protocol is read.
Behind that point text is valid Unicode of bounded length: it can be encoded, logged, used as a label and sent to a
worker without another check. ``shown`` is how a message quotes what a client wrote; ``bounded`` is applied to each
message as a whole.
"""

from __future__ import annotations

import re
from typing import Final

MAX_NAME: Final = 1024
"""Characters of a name, an id or a key."""
MAX_VALUE: Final = 1024 * 1024
"""Characters of the value of a parameter: grammars and JSON schemas are passed as parameters."""
MAX_SHOWN: Final = 200
"""Characters of a name, or of any other run of text without a space, in a message."""
MAX_MESSAGE: Final = 16 * 1024
"""Characters of a whole message: the text of an exception that a model raises may be of any length."""
MAX_RECORD: Final = 64 * 1024
"""Characters of the message of a log record."""

_LONG_RUN: Final = re.compile(rf"(?<!\w)'[^'\n]{{{MAX_SHOWN + 1},}}'|\S{{{MAX_SHOWN + 1},}}")
"""A quoted name, or a run without a space. A quote behind a letter or digit does not begin a name."""
_LEFT_OUT: Final = "…"


def text_error(text: str, limit: int = MAX_NAME) -> str | None:
    """Return why ``text`` is not valid client text, as the end of a sentence that begins with its field; None if it is.

    Lone surrogates stand for bytes that are not UTF-8: readers that keep such bytes decode them to these.
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
    """Return ``text`` as a message quotes it: valid Unicode of at most ``limit`` characters.

    What is too long loses its middle, as the end of a path says more than that.
    """
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}{_LEFT_OUT}{text[half + 1 - limit :]}"
    return text if text.isascii() else text.encode(errors="replace").decode()


def bounded(message: str) -> str:
    """Return ``message`` with each long name cut to ``MAX_SHOWN`` characters and the whole to ``MAX_MESSAGE``."""
    message = cut(message)
    if not message.isascii():
        message = message.encode(errors="replace").decode()
    return message if len(message) <= MAX_SHOWN else _LONG_RUN.sub(_cut, message)


def cut(text: str, limit: int = MAX_MESSAGE) -> str:
    """Return the first ``limit`` characters of ``text``, and how many were left out if there are more."""
    return text if len(text) <= limit else f"{text[:limit]}{_LEFT_OUT} ({len(text) - limit} more characters)"


def _cut(found: re.Match[str]) -> str:
    run = found[0]
    quote = "'" if run[0] == "'" == run[-1] else ""
    return quoted_text(run[:-1] if quote else run) + quote
