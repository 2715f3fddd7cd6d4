"""Refusals in OpenAI's shape: a message, a type, the parameter that is wrong, and a code that programs can match on."""

from __future__ import annotations

from typing import Final

import orjson

from nerite.core.errors import NeriteError, QuotaExceeded, Restricted, TooLate, Unsupported
from nerite.core.text import shown
from nerite.transports.http.reply import Reply, retry_line

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES: Final = {401: "invalid_auth", 422: "idempotency_key_reused", 429: "rate_limit_exceeded"}


class ApiError(NeriteError):
    """A refusal that only this API knows."""

    code = "INVALID_ARG"

    def __init__(self, message: str, param: str | None = None, api_code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = None if param is None else shown(param)
        self.api_code = api_code
        self.status = status


def status_of(error: NeriteError) -> int:
    """Return the status of a refusal.

    It differs from that of the other APIs where OpenAI's clients would do the wrong thing with it: they ask again after
    any of 500 and above, and know 401 for a key that is missing.
    """
    if isinstance(error, ApiError):
        return error.status
    if isinstance(error, Restricted):
        return 401
    return 400 if isinstance(error, Unsupported) else error.http_status


def body_of(error: NeriteError) -> bytes:
    """Return a refusal as JSON."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = api_code = None
    if isinstance(error, ApiError):
        param, api_code = error.param, error.api_code
    else:
        api_code = _CODES.get(status)
    return orjson.dumps({"error": {"message": error.message, "type": kind, "param": param, "code": api_code}})


def reply_of(error: NeriteError) -> Reply:
    """Return the reply that a refusal is."""
    headers = retry_line(error.retry_after)
    if isinstance(error, QuotaExceeded | TooLate) and not headers:  # by their status alone clients would come again
        headers = b"x-should-retry: false\r\n"
    return Reply(status_of(error), body_of(error), "application/json", headers)
