"""Forms: bodies of type ``multipart/form-data``, which have a part for each input."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from nerite.core.client_text import checked
from nerite.core.errors import InvalidArgument
from nerite.core.tensor import Buffer
from nerite.transports.http.head import MAX_HEAD, bytes_of, text_of

TYPE: Final = "multipart/form-data"
_BOUNDARY: Final = re.compile(r';\s*boundary=(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
_NAME: Final = re.compile(r';\s*name=(?:"([^"]*)"|([^\s;"]+))', re.IGNORECASE)
_FILE_NAME: Final = re.compile(r";\s*filename\*?=", re.IGNORECASE)
_MOST_PARTS: Final = 1024
_UNKNOWN: Final = "application/octet-stream"
"""The type of a file that says none."""


class Part(NamedTuple):
    """A part of a form, or a body that is all there is."""

    name: str
    media_type: str
    """Empty for a field that is filled in, and no file."""
    data: Buffer


def media_type(content_type: str) -> str:
    """Return a content type in small letters, without parameters."""
    return content_type.partition(";")[0].strip().lower()


def parse(content_type: str, body: Buffer) -> list[Part]:
    """Take a form apart. Raises ``InvalidArgument`` where that can not be done."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise InvalidArgument(f"a body of type {TYPE} needs a boundary in its Content-Type, got: {content_type}")
    delimiter = b"\r\n--" + bytes_of(found[1] or found[2])
    # The first delimiter may have no line before it.
    _, *pieces = b"".join((b"\r\n", body)).split(delimiter, _MOST_PARTS + 1)
    if pieces and delimiter in pieces[-1]:
        raise InvalidArgument(f"the form has more than {_MOST_PARTS} parts")
    if not pieces or not pieces[-1].startswith(b"--"):
        raise InvalidArgument(f"the body is no complete form of type {TYPE}: the boundary that ends it is missing")
    return [_part(number, piece) for number, piece in enumerate(pieces[:-1], start=1)]


def _part(number: int, piece: bytes) -> Part:
    end = piece.find(b"\r\n\r\n")
    headers: dict[str, str] = {}
    text = checked(text_of(piece[: max(end, 0)]), f"the head of part {number} of the form", MAX_HEAD)
    for line in text.splitlines():
        key, _, value = line.partition(":")
        headers[key.strip().lower()] = value.strip()
    disposition = headers.get("content-disposition", "")
    name = _NAME.search(disposition)
    if name is None:
        raise InvalidArgument(f"part {number} of the form has no name: it needs the name of an input")
    given = media_type(headers.get("content-type", ""))
    if not given and _FILE_NAME.search(disposition):
        given = _UNKNOWN
    return Part(name[1] or name[2] or "", given, memoryview(piece)[end + 4 :])
