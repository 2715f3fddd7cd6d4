"""Errors of the in-process interface, with Triton's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from nerite.core.errors import NeriteError


class TritonError(Exception):
    """Base of all of them."""


class UnknownError(TritonError):
    """An error of no other class."""


class InternalError(TritonError):
    """The model or the server has failed."""


class NotFoundError(TritonError):
    """There is no such model or version."""


class InvalidArgumentError(TritonError):
    """An argument, an input or an option is wrong."""


class UnavailableError(TritonError):
    """The server or the model is not ready."""


class UnsupportedError(TritonError):
    """The server cannot do that."""


class AlreadyExistsError(TritonError):
    """It exists already."""


_BY_CODE: Final[dict[str, type[TritonError]]] = {
    "INTERNAL": InternalError,
    "NOT_FOUND": NotFoundError,
    "INVALID_ARG": InvalidArgumentError,
    "UNAVAILABLE": UnavailableError,
    "UNSUPPORTED": UnsupportedError,
    "ALREADY_EXISTS": AlreadyExistsError,
}


def as_triton_error(error: NeriteError) -> TritonError:
    """Return the error of this package for one of the server."""
    return _BY_CODE.get(error.code, UnknownError)(error.message)


@contextmanager
def translated() -> Iterator[None]:
    """Raise errors of this package in place of those of the server."""
    try:
        yield
    except NeriteError as error:
        raise as_triton_error(error) from None
