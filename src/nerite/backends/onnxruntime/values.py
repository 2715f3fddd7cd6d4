"""Values of configuration parameters, which are all strings."""

from __future__ import annotations

from nerite.core.errors import InvalidArgument

_TRUE = frozenset({"true", "on", "1"})
_FALSE = frozenset({"false", "off", "0"})


def boolean(text: str) -> bool:
    """Read ``true``, ``on``, ``1`` or their opposites. Raises ``InvalidArgument`` for anything else."""
    lowered = text.lower()
    if lowered not in _TRUE | _FALSE:
        raise InvalidArgument(f"failed to convert '{text}' to boolean")
    return lowered in _TRUE


def integer(text: str) -> int:
    """Read a whole number. Raises ``InvalidArgument`` for anything else."""
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"failed to convert '{text}' to integral number") from None
