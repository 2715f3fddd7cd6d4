"""Exceptions of the clients, with PyTriton's names."""

from __future__ import annotations


class PyTritonClientError(Exception):
    """Base of all of them."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._message = message

    @property
    def message(self) -> str:
        """The text."""
        return self._message


class PyTritonClientValueError(PyTritonClientError):
    """An argument is wrong."""


class PyTritonClientInvalidUrlError(PyTritonClientValueError):
    """The URL of the server is wrong."""


class PyTritonClientTimeoutError(PyTritonClientError):
    """The server has not answered in time."""


class PyTritonClientModelUnavailableError(PyTritonClientError):
    """The model does not exist or is not ready."""


class PyTritonClientClosedError(PyTritonClientError):
    """The client was closed."""


class PyTritonClientModelDoesntSupportBatchingError(PyTritonClientError):
    """A batch was sent to a model without a batch dimension."""


class PyTritonClientInferenceServerError(PyTritonClientError):
    """The server refused or failed a request."""


class PyTritonClientQueueFullError(PyTritonClientError):
    """The queue of a client of futures is full."""
