"""Values of configuration parameters and backend settings, which are all strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from nerite.backends.interface import ModelContext
from nerite.core.errors import InvalidArgument, NeriteError

_T = TypeVar("_T")
_TRUE = frozenset({"true", "on", "1"})
_FALSE = frozenset({"false", "off", "0"})
_LARGEST: Final = 2**31 - 1
"""Frameworks take no larger numbers."""


def boolean(text: str) -> bool:
    """Read ``true``, ``on``, ``1`` or their opposites. Raises ``InvalidArgument`` for anything else."""
    lowered = text.lower()
    if lowered not in _TRUE | _FALSE:
        raise InvalidArgument(f"failed to convert '{text}' to boolean")
    return lowered in _TRUE


def integer(text: str) -> int:
    """Read a whole number of 32 bits. Raises ``InvalidArgument`` for anything else."""
    try:
        number = int(text)
    except ValueError:
        number = _LARGEST + 1
    if abs(number) > _LARGEST:
        raise InvalidArgument(f"failed to convert '{text}' to integral number")
    return number


def parameter(context: ModelContext, key: str, default: str, read: Callable[[str], _T], expected: str) -> _T:
    """Return a model's parameter as ``read`` reads it. Raises ``InvalidArgument``, with ``expected``: what it takes."""
    try:
        return read(context.parameter(key, default))
    except InvalidArgument as error:
        raise placed(error, context, key, expected) from None


def flag(context: ModelContext, key: str, *, default: bool) -> bool:
    """Return a model's parameter that is true or false. Raises ``InvalidArgument``."""
    return parameter(context, key, str(default), boolean, "true or false")


def thread_count(context: ModelContext, key: str) -> int:
    """Return a model's parameter for a number of threads, 0 where it does not say. Raises ``InvalidArgument``."""
    return parameter(context, key, "0", integer, "a number of threads, or 0")


def placed(error: NeriteError, context: ModelContext, key: str, expected: str, accelerator: str = "") -> NeriteError:
    """Return an error about a value, with the parameter of the model, or its accelerator, and what that takes."""
    owner = f"accelerator '{accelerator}' of " if accelerator else ""
    return error.prefixed("", f", in parameter '{key}' of {owner}model '{context.name}', which takes {expected}")


def setting(context: ModelContext, key: str, default: str, read: Callable[[str], _T], expected: str) -> _T:
    """Return what ``--backend-config`` says, as ``read`` reads it. Raises ``InvalidArgument``, as ``parameter``."""
    try:
        return read(context.settings.get(key, default))
    except InvalidArgument as error:
        backend = context.config.get("backend", "")
        raise error.prefixed("", f", in --backend-config={backend},{key}=…, which takes {expected}") from None


def default_batch_size(context: ModelContext, default: int) -> int:
    """Return the ``max_batch_size`` of models that can batch and do not say how much. Raises ``InvalidArgument``."""
    return setting(context, "default-max-batch-size", str(default), integer, "a number of rows")
