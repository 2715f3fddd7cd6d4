"""All errors that a request can be answered with.

Each class has its status for each protocol, so a transport maps an error by reading two attributes.
The message is Triton's own text, because clients match on it; our additions follow it.
No traceback reaches a client: an unexpected exception becomes ``Internal`` where it is caught, and the traceback
goes to the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

from nerite.core.text import bounded


class NeriteError(Exception):
    """An error with a status. May be raised anywhere; the transport of the request sends it."""

    code: ClassVar[str] = "UNKNOWN"
    """Triton's error code, as models and the C API spell it."""
    http_status: ClassVar[int] = 400
    grpc_status: ClassVar[int] = 2

    plain: ClassVar[bool] = False
    """Keeps its own status even where Triton uses one status for every failure, because Triton has no such error."""
    place: tuple[str, int, int] | None = None
    """File, line and column of the code that raised it, if that is a model's own code."""
    retry_after: int = 0
    """Seconds after which a retry may succeed, sent to the client. 0: unknown."""

    begun: bool = False
    """The request was already executing, so this is the result of its execution and not a rejection."""
    refused: bool = False
    """The request was rejected when it was submitted, in another process than the one that answers its client."""

    def __init__(self, message: str, retry_after: int = 0) -> None:
        """Cut ``message``, and each long name in it, to a bounded length: it may quote a client."""
        message = bounded(message)
        super().__init__(message)
        self.message = message
        if retry_after:
            self.retry_after = retry_after

    def without_frames(self) -> Self:
        """Drop traceback, cause and context, and return self.

        For code that keeps a caught error: its frames hold the request and its tensors, and refer back to the error, so
        only the cycle collector would free them.
        """
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self

    def prefixed(self, prefix: str, note: str = "") -> NeriteError:
        """Return a copy of the error with ``prefix`` before its text and ``note`` after it."""
        error = type(self)(prefix + self.message + note, self.retry_after)
        error.place = self.place
        return error


class Unknown(NeriteError):
    """Triton's UNKNOWN: an error of no other class."""


class InvalidArgument(NeriteError):
    """A mistake of the caller: wrong input, shape or parameter."""

    code = "INVALID_ARG"
    http_status = 400
    grpc_status = 3


class NotFound(NeriteError):
    """A model, version or region that does not exist."""

    code = "NOT_FOUND"
    http_status = 404
    grpc_status = 5


class AlreadyExists(NeriteError):
    """The name is already in use."""

    code = "ALREADY_EXISTS"
    http_status = 400
    grpc_status = 6


class Internal(NeriteError):
    """A failure of the server or of a model."""

    code = "INTERNAL"
    http_status = 500
    grpc_status = 13


class RefusedData(Internal):
    """A store refuses the values of a row, whenever it is written: only other values can be stored."""


class Unsupported(NeriteError):
    """A valid request for a feature that the server does not support."""

    code = "UNSUPPORTED"
    http_status = 501
    grpc_status = 12


class NotInstalled(Unsupported):
    """A package or device is missing on this machine; another machine may have it."""


class Unavailable(NeriteError):
    """A temporary failure: queue full, queue timeout, model not ready, server stopping."""

    code = "UNAVAILABLE"
    http_status = 503
    grpc_status = 14


class NotLoaded(Unavailable):
    """The model is not in memory; a request for it causes its load. Callers that can wait do so, others report this."""

    model = ""

    @classmethod
    def of(cls, model: str, retry_after: int = 0) -> NotLoaded:
        """Return the error for a model whose load is likely to take ``retry_after`` seconds."""
        error = cls(f"model '{model}' is not loaded; it is loaded on demand", retry_after)
        error.model = model
        return error


class QueueFull(Unavailable):
    """Rejected because the model's queue has its maximum size."""


class QueueTimeout(Unavailable):
    """The request has waited longer than the queue policy allows."""


class Overloaded(Unavailable):
    """Rejected by load shedding: more work is queued than the policy allows."""

    plain = True


class NoIdleRoom(Overloaded):
    """A request of the idle class was rejected or preempted: others need the capacity."""


class QuotaExceeded(NeriteError):
    """The caller has used up its own quota; other callers are not affected."""

    plain = True
    code = "UNAVAILABLE"
    http_status = 429
    grpc_status = 8


class Exhausted(NeriteError):
    """A limit of the server is reached: for all clients together, or for one message."""

    plain = True
    code = "UNAVAILABLE"
    http_status = 429
    grpc_status = 8


class TooLarge(NeriteError):
    """The request exceeds what the model can ever accept, so a retry is pointless."""

    plain = True
    code = "INVALID_ARG"
    http_status = 413
    grpc_status = 3


class KeyReused(NeriteError):
    """The idempotency key was already used by a different request."""

    plain = True
    code = "INVALID_ARG"
    http_status = 422
    grpc_status = 9


class Conflict(NeriteError):
    """The state of the resource does not allow the request; it may be allowed in another state."""

    plain = True
    code = "INVALID_ARG"
    http_status = 409
    grpc_status = 9


class DeadlineExceeded(NeriteError):
    """The deadline has passed or could not be met."""

    plain = True
    code = "UNAVAILABLE"
    http_status = 503
    grpc_status = 4


class Cancelled(NeriteError):
    """The caller disconnected or cancelled, so usually no client receives this."""

    code = "CANCELLED"
    http_status = 400
    grpc_status = 1


class Forbidden(NeriteError):
    """Not allowed on this server, whatever key the caller has."""

    plain = True
    code = "UNAVAILABLE"
    http_status = 403
    grpc_status = 7


class Restricted(NeriteError):
    """The endpoint needs a key (``--http-restricted-api``, ``--grpc-restricted-protocol``)."""

    code = "UNAVAILABLE"
    http_status = 403
    grpc_status = 14


BY_CODE: dict[str, type[NeriteError]] = {
    kind.code: kind
    for kind in (
        Unknown,
        InvalidArgument,
        NotFound,
        AlreadyExists,
        Internal,
        Unsupported,
        Unavailable,
        Cancelled,
    )
}
"""Error classes by the code that a model or a worker reports."""


def _all_kinds(kind: type[NeriteError]) -> Iterator[type[NeriteError]]:
    for each in kind.__subclasses__():
        yield each
        yield from _all_kinds(each)


BY_NAME: dict[str, type[NeriteError]] = {kind.__name__: kind for kind in _all_kinds(NeriteError)}
"""Every error class of this module by its name."""
