"""Values of configuration parameters, which are all strings."""

from __future__ import annotations

from nerite.backends.interface import ModelContext
from nerite.core.errors import InvalidArgument, NeriteError

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


def thread_count(context: ModelContext, key: str) -> int:
    """Return a model's parameter for a number of threads, 0 where it does not say. Raises ``InvalidArgument``."""
    try:
        return integer(context.parameter(key, "0"))
    except InvalidArgument as error:
        raise placed(error, context, key, "a number of threads, or 0") from None


def placed(error: NeriteError, context: ModelContext, key: str, expected: str) -> NeriteError:
    """Return an error about a value, with the parameter that has it, and what that takes."""
    return error.prefixed("", f", in parameter '{key}' of model '{context.name}', which takes {expected}")
