"""Every refusal, on one page.

Each class knows the status it has on each protocol, so a transport maps an error by reading two attributes.
The message is Triton's own text, because clients match on it; what we add stands after it.
Nothing here carries a traceback to a client: an unexpected exception becomes ``Internal`` at the edge where it
was caught, and the traceback goes to the log.
"""

from __future__ import annotations

from typing import ClassVar, Self

from nerite.core.text import bounded


class NeriteError(Exception):
    """A refusal with a status. Raised anywhere, answered by the transport that brought the request."""

    code: ClassVar[str] = "UNKNOWN"
    """Triton's error code, as models and the C API spell it."""
    http_status: ClassVar[int] = 400
    grpc_status: ClassVar[int] = 2

    plain: ClassVar[bool] = False
    """It keeps its status also where Triton has one status for whatever goes wrong: Triton knows no such refusal."""
    place: tuple[str, int, int] | None = None
    """File, line and column of the code that raised it, where that is a model's own."""
    retry_after: int = 0
    """Seconds after which it may be otherwise, where that is so; clients are told. 0: nobody knows."""

    begun: bool = False
    """The request was under way: this is its answer, however soon it came, and no refusal."""

    def __init__(self, message: str, retry_after: int = 0) -> None:
        """``message`` is cut to a bounded length, and so is each long name in it: it may quote what a client wrote."""
        message = bounded(message)
        super().__init__(message)
        self.message = message
        if retry_after:
            self.retry_after = retry_after

    def without_frames(self) -> Self:
        """Return it without the frames that it came through: they hold a request and its tensors, and this error.

        For code that keeps a caught error: its frames refer back to it, and would wait for the cycle collector.
        """
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self

    def prefixed(self, prefix: str, note: str = "") -> NeriteError:
        """Return the same error with ``prefix`` before its text and ``note`` after it."""
        error = type(self)(prefix + self.message + note, self.retry_after)
        error.place = self.place
        return error


class Unknown(NeriteError):
    """Triton's UNKNOWN: the cause has no better name."""


class InvalidArgument(NeriteError):
    """The caller's mistake: wrong input, wrong shape, wrong parameter."""

    code = "INVALID_ARG"
    http_status = 400
    grpc_status = 3


class NotFound(NeriteError):
    """A model, version or region that does not exist."""

    code = "NOT_FOUND"
    http_status = 404
    grpc_status = 5


class AlreadyExists(NeriteError):
    """A name that is taken."""

    code = "ALREADY_EXISTS"
    http_status = 400
    grpc_status = 6


class Internal(NeriteError):
    """The server's or the model's fault."""

    code = "INTERNAL"
    http_status = 500
    grpc_status = 13


class Unsupported(NeriteError):
    """Understood, and not offered."""

    code = "UNSUPPORTED"
    http_status = 501
    grpc_status = 12


class NotHere(Unsupported):
    """A package or a device is missing on this machine; another one may have it."""


class Unavailable(NeriteError):
    """Not now: queue full, deadline passed in the queue, model not ready, server stopping."""

    code = "UNAVAILABLE"
    http_status = 503
    grpc_status = 14


class Overloaded(Unavailable):
    """Not now: by the policy too much is to be done."""

    plain = True


class QuotaExceeded(NeriteError):
    """The caller has used up what it may use; others have not."""

    plain = True
    code = "UNAVAILABLE"
    http_status = 429
    grpc_status = 8


class Exhausted(NeriteError):
    """More than the server takes from all clients together, or in one message."""

    plain = True
    code = "UNAVAILABLE"
    http_status = 429
    grpc_status = 8


class TooLarge(NeriteError):
    """More than the model takes, however long the caller waits."""

    plain = True
    code = "INVALID_ARG"
    http_status = 413
    grpc_status = 3


class KeyReused(NeriteError):
    """The idempotency key of a request is that of another one."""

    plain = True
    code = "INVALID_ARG"
    http_status = 422
    grpc_status = 9


class TooLate(NeriteError):
    """It would not be answered in time, or was not."""

    plain = True
    code = "UNAVAILABLE"
    http_status = 503
    grpc_status = 4


class Cancelled(NeriteError):
    """The caller went away or gave up. Usually nobody reads this."""

    code = "CANCELLED"
    http_status = 400
    grpc_status = 1


class Forbidden(NeriteError):
    """Not allowed here, whatever key the caller has."""

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
"""From the code a model (or a worker) names to the class."""
