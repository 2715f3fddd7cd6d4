"""Reads files of models whole: regular files of bounded size, so that none of them can hold up or fill the process."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

MAX_TEXT: Final = 64 << 20
"""Bytes of a text of a model, such as its tokenizer's configuration."""


def read_bounded(path: Path, limit: int = MAX_TEXT) -> bytes:
    """Return the content of a file. Raises ``OSError``, also if it is no regular file or has more than ``limit`` bytes.

    A pipe is not waited for.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if found.st_size > limit:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, and at most {limit} are read", str(path))
        with open(handle, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    """Return the document in a JSON file. Raises ``OSError`` like ``read_bounded``, ``ValueError`` if it is invalid."""
    return json_of(read_bounded(path))


def json_of(text: bytes | str) -> Any:
    """Return the document in a text. Raises ``ValueError``, also if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
