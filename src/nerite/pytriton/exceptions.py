"""Exceptions of the serving side, with PyTriton's names."""

from __future__ import annotations


class PyTritonError(Exception):
    """Base of all of them."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._message = message

    @property
    def message(self) -> str:
        """The text."""
        return self._message


class PyTritonValidationError(PyTritonError):
    """Outputs or arguments do not fit what was declared."""


class PyTritonInvalidOperationError(PyTritonError):
    """The operation is not possible, or not at this time."""


class PyTritonBadParameterError(PyTritonError):
    """An argument of a decorator is wrong."""


class PyTritonModelConfigError(PyTritonError):
    """The configuration of a model is wrong."""


class PyTritonUnrecoverableError(PyTritonError):
    """Raised by an inference callable: no further inference is possible, and the server stops."""


class PyTritonRuntimeError(PyTritonError):
    """The inputs of a call do not fit a decorator."""
