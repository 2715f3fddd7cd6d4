"""What a client names a request by, so that asking once more is not asking for more."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from nerite.core.errors import InvalidArgument

NAME: Final = "idempotency-key"
"""Of the header, of the metadata, and of the parameter of a request that stands in place of them."""
_MOST: Final = 255


class IdempotencyKey(NamedTuple):
    """The key that came with a request. Where a client asks for several things at once, each is a part of it."""

    text: str
    part: int = 0
    parts: int = 1

    def checked(self) -> IdempotencyKey:
        """Return the key as it is compared: with or without quotes it is the same. Raises ``InvalidArgument``."""
        text: Any = self.text
        if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] == '"':  # as the RFC's drafts write it
            text = text[1:-1]
        if not isinstance(text, str) or not 0 < len(text) <= _MOST:
            raise InvalidArgument(f"'{NAME}' has to be a text of 1 to {_MOST} characters, such as a UUID")
        return self._replace(text=text)
