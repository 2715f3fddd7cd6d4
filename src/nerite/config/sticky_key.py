"""What keeps a caller on one version of a model: the part of a request that is its key."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from nerite.core.errors import InvalidArgument

MAX_PREFIX: Final = 65_536
"""Maximum number of bytes of a prompt that are a key."""


class KeySource(enum.Enum):
    """Part of a request that can be its sticky key."""

    HEADER = "header"
    """A header field of HTTP or an entry of gRPC metadata."""
    PARAMETER = "parameter"
    """A parameter of the request."""
    TENANT = "tenant"
    """The tenant that admission control has found."""
    IDEMPOTENCY_KEY = "idempotency-key"
    USER = "user"
    """The field ``user`` of OpenAI's API."""
    PROMPT = "prompt"
    """The first bytes of the prompt, or of the first tensor of a request without text."""


_NAMED: Final = (KeySource.HEADER, KeySource.PARAMETER)


class StickyKey(NamedTuple):
    """A source of keys, with the name of the field or the number of bytes."""

    source: KeySource
    name: str = ""
    size: int = 0

    @classmethod
    def parse(cls, text: str) -> StickyKey:
        """Return the key that ``text`` describes, such as ``header:x-user`` or ``prompt:256``.

        Raises ``InvalidArgument``.
        """
        kind, _, argument = text.partition(":")
        try:
            source = KeySource(kind)
        except ValueError:
            raise _not_sticky(text, "it is none of the sources of keys") from None
        if source in _NAMED:
            if not argument:
                raise _not_sticky(text, f"'{kind}' needs a name")
            return cls(source, argument.lower() if source is KeySource.HEADER else argument)
        if source is KeySource.PROMPT:
            if not (argument.isascii() and argument.isdigit() and 0 < int(argument[:9]) <= MAX_PREFIX):
                raise _not_sticky(text, f"'prompt' needs a number of bytes from 1 to {MAX_PREFIX}")
            return cls(source, size=int(argument))
        if argument:
            raise _not_sticky(text, f"'{kind}' takes no name")
        return cls(source)

    def __str__(self) -> str:
        argument = self.name or self.size
        return f"{self.source.value}:{argument}" if argument else self.source.value


def _not_sticky(text: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"'{text}' cannot be a sticky key: {why}. Use header:NAME, parameter:NAME, tenant, idempotency-key, user or "
        "prompt:BYTES"
    )


def sticky_keys(text: str) -> tuple[StickyKey, ...]:
    """Return the sticky keys in a text: sources separated by commas. Raises ``InvalidArgument``."""
    return tuple(StickyKey.parse(part.strip()) for part in text.split(",")) if text else ()
