"""Limits for text from clients and models, bounded quoting of such text in messages, and tables of text.

Every name, id and key of a client goes through ``client_text.checked_name`` where its protocol is parsed, and every
other text, such as the value of a parameter, through ``client_text.checked``. After that, text is valid Unicode of
bounded length, and names have no control characters: they can be encoded, stored, logged, used as labels and sent on
without another check. ``quoted_text`` quotes client text in a message; ``bounded`` is applied to each
message as a whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
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
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that end lines and fields, move cursors or are refused by databases, so that no name may have them."""


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


def name_error(text: str, limit: int = MAX_NAME) -> str | None:
    """Return why ``text`` is no valid name, id or key, as ``text_error`` does: control characters are refused, too."""
    if (mistake := text_error(text, limit)) is not None:
        return mistake
    found = None if text.isprintable() else _CONTROL.search(text)
    return None if found is None else f"has the control character U+{ord(found[0]):04X} at character {found.start()}"


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


# Tables for the log and the terminal: ``+---+`` lines, one row of headings, cells of one or more lines.

UNLIMITED_WIDTH: Final = 500
"""Width in columns if the output is no terminal."""


def render_table(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int = UNLIMITED_WIDTH) -> str:
    """Draw a table no wider than ``width``, unless that leaves less than one character per column.

    A column that needs less than an equal share leaves the rest to wider ones. Longer lines are wrapped.
    """
    cells = [[cell.split("\n") for cell in row] for row in (headings, *rows)]
    natural = [max(len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)]
    widths = share(natural, width - 3 * len(headings) - 1)
    divider = "+" + "".join("-" * (size + 2) + "+" for size in widths)
    head, *body = ["\n".join(_lines(row, widths)) for row in cells]
    return "\n".join([divider, head, divider, *body, divider])


def share(natural: Sequence[int], available: int) -> list[int]:
    """Divide ``available`` columns of text among cells, whose widths without a limit are ``natural``."""
    widths = [0] * len(natural)
    left = max(available, len(natural))
    by_need = sorted(range(len(natural)), key=lambda index: natural[index])
    for position, index in enumerate(by_need):
        widths[index] = max(1, min(natural[index], left // (len(by_need) - position)))
        left -= widths[index]
    return widths


def terminal_width() -> int:
    """Return the width of the terminal behind stdout, or ``UNLIMITED_WIDTH`` if it is no terminal."""
    try:
        return os.get_terminal_size(1).columns or UNLIMITED_WIDTH
    except OSError:
        return UNLIMITED_WIDTH


def _lines(row: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    wrapped = [
        [line[at : at + size] for line in cell for at in range(0, len(line) or 1, size)]
        for cell, size in zip(row, widths, strict=True)
    ]
    height = max(map(len, wrapped))
    return [
        "|"
        + "".join(f" {cell[at] if at < len(cell) else '':{size}} |" for cell, size in zip(wrapped, widths, strict=True))
        for at in range(height)
    ]
