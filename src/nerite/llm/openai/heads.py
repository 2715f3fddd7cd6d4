"""Finds the endpoint of a request to the OpenAI API, and rejects requests whose head alone is reason for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from nerite.core.errors import InvalidArgument, Restricted
from nerite.llm.openai.fields import ApiError
from nerite.transports import access
from nerite.transports.access import Lock
from nerite.transports.http import routes

if TYPE_CHECKING:
    from nerite.transports.http.head import RequestHead

PREFIX: Final = "/v1/"
"""The paths of the API begin with it."""


def route_of(head: RequestHead, locks: Mapping[str, Lock], max_input_size: int) -> routes.Route:
    """Return the route of a request under ``/v1``. Raises ``NeriteError`` if it is to be rejected whatever its body is.

    ``locks`` has the key check of each restricted category of endpoints.
    """
    route = routes.find_route(head.path.partition("?")[0])
    if route is None:
        raise ApiError(f"Unknown request URL: {head.method} {head.path}", None, "unknown_url", 404)
    endpoint = route.endpoint
    if head.method not in endpoint.methods:
        allowed = ", ".join(endpoint.methods)
        raise ApiError(f"Method not allowed for {head.path}: it takes {allowed}", None, "method_not_allowed", 405)
    if access.key_refusal(locks, endpoint.category, head) is not None:
        header = locks[endpoint.category].header
        raise Restricted(f"This API is restricted, expecting header '{header}' with valid value")
    if head.content_length > max_input_size:
        limit = f"the maximum allowed input size of {max_input_size} bytes (--http-max-input-size)"
        size = head.content_length
        raise ApiError(f"The body of {size} bytes exceeds {limit}.", None, "content_too_large", 413)
    if head.headers.get("content-encoding", "identity") != "identity":
        raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
    return route
