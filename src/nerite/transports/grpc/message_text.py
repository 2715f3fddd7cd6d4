"""The lengths of all texts in the message of an administrative method, whichever fields it has."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import Message

from nerite.core.client_text import checked
from nerite.core.text import MAX_NAME, MAX_VALUE

_VALUES: Final = ("string_param", "value")
"""Fields that hold the value of a parameter or of a setting. All others hold names."""


def check(message: Message, where: str = "") -> None:
    """Raise ``InvalidArgument``, with the path of the field, for a text that is too long.

    That texts are UTF-8 is seen to when a message is parsed. ``where`` is the path of ``message``.
    """
    for field, value in message.ListFields():
        _check(f"{where}{field.name}", value, MAX_VALUE if field.name in _VALUES else MAX_NAME)


def _check(path: str, value: Any, limit: int) -> None:
    if isinstance(value, str):
        checked(value, f"'{path}'", limit)
    elif isinstance(value, Message):
        check(value, f"{path}.")
    elif hasattr(value, "items"):  # a map
        for key, item in value.items():
            _check(f"a key of {path}", key, MAX_NAME)
            _check(f"{path}[{key}]", item, limit)
    elif not isinstance(value, (bytes, int, float)):
        for item in value:
            _check(path, item, limit)
