"""Errors of the endpoints under /v1: in OpenAI's format, and in Anthropic's for the Messages API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import orjson

from nerite.core.errors import DeadlineExceeded, NeriteError, QuotaExceeded, Restricted, Unsupported
from nerite.core.text import quoted_text
from nerite.transports.http import routes
from nerite.transports.http.reply import Reply, retry_line


def reply_for(path: str) -> Callable[[NeriteError], Reply]:
    """Return what makes the replies for errors of a path: in Anthropic's format for its API, otherwise in OpenAI's."""
    return anthropic_reply_of if routes.is_anthropic(path) else reply_of


# Errors in OpenAI's format: a message, a type, the parameter at fault, and a code for programs to match on

_OPENAI_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES: Final = {401: "invalid_auth", 422: "idempotency_key_reused", 429: "rate_limit_exceeded"}


class ApiError(NeriteError):
    """An error of the OpenAI API, with the parameter at fault and OpenAI's code."""

    code = "INVALID_ARG"

    def __init__(self, message: str, param: str | None = None, api_code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = None if param is None else quoted_text(param)
        self.api_code = api_code
        self.status = status


def status_of(error: NeriteError) -> int:
    """Return the HTTP status of an error.

    It differs from that of the other APIs where OpenAI's clients would react wrongly: they retry after any status of
    500 and above, and expect 401 for a missing key.
    """
    if isinstance(error, ApiError):
        return error.status
    if isinstance(error, Restricted):
        return 401
    return 400 if isinstance(error, Unsupported) else error.http_status


def body_of(error: NeriteError) -> bytes:
    """Return an error as JSON in OpenAI's format."""
    status = status_of(error)
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = api_code = None
    if isinstance(error, ApiError):
        param, api_code = error.param, error.api_code
    else:
        api_code = _CODES.get(status)
    return orjson.dumps({"error": {"message": error.message, "type": kind, "param": param, "code": api_code}})


def reply_of(error: NeriteError) -> Reply:
    """Return the HTTP reply for an error in OpenAI's format."""
    headers = retry_line(error.retry_after)
    if isinstance(error, QuotaExceeded | DeadlineExceeded) and not headers:  # the status alone would make clients retry
        headers = b"x-should-retry: false\r\n"
    return Reply(status_of(error), body_of(error), "application/json", headers)


# Errors in Anthropic's format: a type and a message

_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body_of(error: NeriteError) -> bytes:
    """Return an error as JSON in Anthropic's format."""
    status = status_of(error)
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})


def anthropic_reply_of(error: NeriteError) -> Reply:
    """Return the HTTP reply for an error in Anthropic's format."""
    return Reply(status_of(error), anthropic_body_of(error), "application/json", retry_line(error.retry_after))
