"""Validates text from clients at the protocol boundary: names, ids, keys, parameters, header values, file names.

``checked_name`` validates a name, an id or a key, and ``checked`` any other text against a limit; ``check_document``
validates all texts of a JSON document that was decoded leniently, and ``nested_deeper`` its depth; ``target_error``
validates a path that another server will interpret.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import PurePath
from typing import Any, Final, TypeAlias

import numpy as np

from nerite.core.errors import InvalidArgument
from nerite.core.text import MAX_NAME, name_error, quoted_text, text_error

MAX_DEPTH: Final = 100
"""Maximum levels of lists and objects in JSON of clients. What is accepted can be written again: orjson writes 254."""
_MAX_MEMBERS: Final = 20_000
"""Members and elements that ``check_document`` searches for the invalid one, not counting lists without text."""
_HOLDS_TEXT: Final = frozenset((str, list, dict))
_MAX_FILE_NAME: Final = 255
"""Bytes that file systems allow."""
_UTF8: Final = "Write text as UTF-8; only the data of a BYTES input may be other bytes."
_Path: TypeAlias = "tuple[_Path, str | int] | None"


def checked_name(text: str, what: str, limit: int = MAX_NAME) -> str:
    """Return ``text`` if it is a name: like ``checked``, and without control characters."""
    # Fast path: this runs for the id of each request. Nothing printable is a control character or a lone surrogate.
    if (len(text) <= limit and text.isprintable()) or (mistake := name_error(text, limit)) is None:
        return text
    raise InvalidArgument(f"{what} {mistake}")


def checked(text: str, what: str, limit: int) -> str:
    """Return ``text`` if it is valid Unicode of at most ``limit`` characters.

    Otherwise raise ``InvalidArgument`` with a message that begins with ``what``, the protocol's name of the field.
    """
    # Fast path for short ASCII: this runs several times for each request whose data is in its JSON.
    if (len(text) <= limit and text.isascii()) or (mistake := text_error(text, limit)) is None:
        return text
    raise InvalidArgument(f"{what} {mistake}")


def check_document(document: Any) -> None:
    """Raise ``InvalidArgument`` with the path of the member if a value or member name is not valid UTF-8.

    ``document`` is the result of a JSON parser.
    """
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        pass
    else:
        return
    containers: list[tuple[_Path, Any]] = [(None, [document])]
    left = _MAX_MEMBERS
    while containers:
        path, container = containers.pop()
        left -= len(container)
        if left < 0:
            raise InvalidArgument(
                "the JSON is not valid UTF-8, and the invalid text was not located, because it has more than "
                f"{_MAX_MEMBERS} members outside input data. {_UTF8}"
            )
        for key, item in container.items() if isinstance(container, dict) else enumerate(container):
            member = (path, key)
            if isinstance(key, str):
                _check(key, member, "has a name that ")
            if isinstance(item, str):
                _check(item, member)
            elif isinstance(item, dict) or (isinstance(item, list) and not _HOLDS_TEXT.isdisjoint(map(type, item))):
                containers.append((member, item))


def _check(text: str, member: tuple[_Path, str | int], that: str = "") -> None:
    mistake = text_error(text, len(text))
    if mistake is None:
        return
    where = ""
    path: _Path = member
    while path is not None:
        path, key = path
        if path is not None:  # the outermost entry is the document itself
            where = (f".{quoted_text(key)}" if isinstance(key, str) else f"[{key}]") + where
    what = "member '" + where.removeprefix(".") + "'" if where else "the JSON"
    raise InvalidArgument(f"{what} {that}{mistake}. {_UTF8}")


# The depth of a JSON text, from its brackets outside strings.

_MARKS: Final = b'[]{}"'
_OTHERS: Final = bytes(set(range(256)) - set(_MARKS))
_STEPS: Final = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


def nested_deeper(text: bytes, limit: int = MAX_DEPTH) -> bool:
    """Return whether valid JSON has more levels of lists and objects than ``limit``. Takes 3 to 6 ms a megabyte."""
    if text.count(b"[") + text.count(b"{") <= limit:
        return False
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS)
    marks = np.frombuffer(bare, np.uint8)
    outside = ~np.cumsum(marks == ord('"'), dtype=np.uint8) & np.uint8(1)  # overflow does not change the parity
    depths = np.cumsum(_STEPS[marks] * outside.view(np.int8), dtype=np.int32)
    return bool((depths > limit).any())


# Paths of requests that are passed on. Whoever decodes or normalizes a path without mistake reads the same path.

_ODD_CHARACTER: Final = re.compile(r"[^!-~]|[?#\\]")
_ODD_ESCAPE: Final = re.compile(r"%(?:2[Ff]|5[Cc]|[01][0-9A-Fa-f]|7[Ff])")
_ODD_SEGMENT: Final = re.compile(r"//|.+/$|/(?:\.|%2[Ee]){1,2}(?=[/;]|$)", re.DOTALL)


def target_error(path: str) -> str | None:
    """Return why servers may disagree about the path of a request, as a predicate for a sentence about it, or None.

    ``path`` is without query and as the client sent it, with its percent-encoding.
    """
    if not path.startswith("/"):
        return "does not begin with '/'"
    if found := _ODD_CHARACTER.search(path):
        return f"has the character {found[0]!a}"
    if found := _ODD_ESCAPE.search(path):
        return f"has '{found[0]}', an encoded slash, backslash or control character"
    if _ODD_SEGMENT.search(path):
        return "has an empty segment, or a segment of dots"
    return None


# File names from configurations, archives and stores, which must stay within their directory.


def escapes_directory(name: str) -> bool:
    """Return whether a relative path escapes its directory.

    Symbolic links are not resolved: only repository owners create them, whereas a client may send a configuration.
    """
    normal = posixpath.normpath(name)
    return normal == ".." or normal.startswith(("/", "../")) or "\0" in name


def check_inside_directory(name: str, what: str, directory: PurePath | str) -> None:
    """Raise ``InvalidArgument`` if ``name`` escapes ``directory``; ``what`` names the setting in the message."""
    if escapes_directory(name):
        raise InvalidArgument(f"{what} must stay within {directory}")


def is_file_path(path: str) -> bool:
    """Return whether a path of others is safe to create below a directory: relative, plain and of bounded length."""
    parts = path.split("/")
    return (
        path.isprintable()
        and "\\" not in path
        and len(path.encode(errors="replace")) <= MAX_NAME
        and all(part not in ("", ".", "..") and len(part.encode(errors="replace")) <= _MAX_FILE_NAME for part in parts)
    )
