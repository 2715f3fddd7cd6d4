"""What differs between ports that speak Triton's HTTP: how an inference says its sizes, and how its refusals look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from nerite.core.errors import InvalidArgument, NeriteError
from nerite.transports.http import reply
from nerite.transports.http.head import RequestHead
from nerite.transports.http.reply import Reply


class Dialect(NamedTuple):
    """How inferences are written on a port."""

    json_size: Callable[[RequestHead], int]
    """Returns the bytes of the JSON part; -1: all; 0: none, the body is the tensor. Raises ``InvalidArgument``."""
    binary_headers: bytes
    """Content type and more of a reply with tensors behind its JSON part; %d is the size of that part."""
    compresses: bool
    """Content codings mean something."""
    early_type: str = reply.PLAIN
    """The content type of a refusal for which the body was not looked at."""
    status_of: Callable[[NeriteError], int] | None = None
    """Returns the status of a refusal, where it is not the usual one."""

    def binary_head(self, json_size: int, size: int) -> bytes:
        """Return status line and headers of a reply with tensors behind its JSON part."""
        return reply.status_line(200) + self.binary_headers % json_size + b"Content-Length: %d\r\n\r\n" % size

    def refusal(self, error: NeriteError, content_type: str) -> Reply:
        """Return the reply that a refusal is."""
        answer = reply.error_reply(error, content_type)
        return answer if self.status_of is None else answer._replace(status=self.status_of(error))


def _json_size(head: RequestHead) -> int:
    text = head.headers.get("inference-header-content-length")
    if text is None:
        return -1
    try:
        size = int(text)
    except ValueError:
        raise InvalidArgument(f"Unable to parse Inference-Header-Content-Length, got: {text}") from None
    if size < 0 or (size > head.content_length > 0 and not head.headers.get("content-encoding")):
        raise InvalidArgument(f"inference header size should be in range (0, {head.content_length}), got: {text}")
    return size


HTTP: Final = Dialect(
    json_size=_json_size,
    binary_headers=b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n",
    compresses=True,
)
