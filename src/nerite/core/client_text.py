"""The check that all text of clients passes where its protocol is read: names, ids, keys, parameters, header values.

``checked`` is for one text, with its limit; ``check_document`` is for all texts of a JSON document that was decoded
leniently.
"""

from __future__ import annotations

import json
import posixpath
from pathlib import PurePath
from typing import Any, Final, TypeAlias

from nerite.core.errors import InvalidArgument
from nerite.core.text import MAX_NAME, quoted_text, text_error

_MOST_MEMBERS: Final = 20_000
"""Members and elements among which ``check_document`` looks for a wrong one, lists without text left out."""
_HOLDS_TEXT: Final = frozenset((str, list, dict))
_UTF8: Final = "Write text as UTF-8; only the data of a BYTES input may be other bytes."
_Path: TypeAlias = "tuple[_Path, str | int] | None"


def checked(text: str, what: str, limit: int = MAX_NAME) -> str:
    """Return ``text``, which can be encoded and has at most ``limit`` characters.

    Raises ``InvalidArgument`` for any other, which begins with ``what``: the field, as its protocol calls it.
    """
    # The usual text first: this runs several times for each request whose data is in its JSON.
    if (len(text) <= limit and text.isascii()) or (mistake := text_error(text, limit)) is None:
        return text
    raise InvalidArgument(f"{what} {mistake}")


def check_document(document: Any) -> None:
    """Raise ``InvalidArgument``, with the path of the member, for a text that is not valid UTF-8.

    Member names are texts, too. ``document`` is what a JSON parser returns.
    """
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        pass
    else:
        return
    containers: list[tuple[_Path, Any]] = [(None, [document])]
    left = _MOST_MEMBERS
    while containers:
        path, container = containers.pop()
        left -= len(container)
        if left < 0:
            raise InvalidArgument(
                f"the JSON is not valid UTF-8, and has more than {_MOST_MEMBERS} members beside data of inputs. {_UTF8}"
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
        if path is not None:  # the first stands for the document itself
            where = (f".{quoted_text(key)}" if isinstance(key, str) else f"[{key}]") + where
    what = "member '" + where.removeprefix(".") + "'" if where else "the JSON"
    raise InvalidArgument(f"{what} {that}{mistake}. {_UTF8}")


# File names that a configuration gives, which have to stay within the directory that they belong in.


def escapes_directory(name: str) -> bool:
    """Return whether a path leads out of the directory that it is relative to.

    Links are not followed: those who write a repository make them, and a configuration may be a client's.
    """
    normal = posixpath.normpath(name)
    return normal == ".." or normal.startswith(("/", "../")) or "\0" in name


def check_inside_directory(name: str, what: str, directory: PurePath | str) -> None:
    """Raise ``InvalidArgument`` if ``name`` leads out of ``directory``; ``what`` says what it is the name of."""
    if escapes_directory(name):
        raise InvalidArgument(f"{what} must stay within {directory}")
