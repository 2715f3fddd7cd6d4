"""The access log: one line per HTTP request and gRPC call, written when it is answered."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from nerite.core.errors import NeriteError
from nerite.observability.log import log, log_fields

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpWork


def peer_of(transport: asyncio.BaseTransport) -> str:
    """Return the address of a client in URL form."""
    name = transport.get_extra_info("peername") or ("-", 0)
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class AccessRecord:
    """Access log data of one exchange, filled in from its first byte on."""

    __slots__ = ("_began_ns", "method", "model", "path", "peer", "received", "request_id", "version")

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.method = self.path = "-"
        """HTTP method; for gRPC, ``gRPC`` and the path of the method."""
        self.received = 0
        """Bytes of the body; for gRPC, of the messages with their prefixes."""
        self.model = ""
        self.version = ""
        self.request_id = ""
        self._began_ns = time.monotonic_ns()

    def asks(self, request: HttpWork | None) -> None:
        """Record the inference that the exchange runs, if any."""
        if request is None or not request.header.model_name:
            return
        self.model, self.request_id = request.header.model_name, request.id
        self.version = request.header.model_version
        if request.header.route is not None:
            self.version = request.header.route.version.label

    def answered(self, status: int | str, sent: int = 0, **counts: int) -> None:
        """Write the line. ``sent`` is in bytes, like ``received``; ``counts`` are the totals of a stream."""
        milliseconds = round((time.monotonic_ns() - self._began_ns) / 1_000_000, 3)
        model = f"{self.model}/{self.version}" if self.version else self.model
        words = [self.peer, self.method, self.path, status, self.received, sent, f"{milliseconds} ms", model]
        words += [f"{count} {what}" for what, count in counts.items()]
        log.info(
            " ".join(str(word) for word in words if word != ""),
            peer=self.peer,
            method=self.method,
            path=self.path,
            status=status,
            request_bytes=self.received,
            response_bytes=sent,
            milliseconds=milliseconds,
            **({"model": self.model} if self.model else {}),
            **({"version": self.version} if self.version else {}),
            **counts,
            **log_fields(self.request_id),
        )


# Failed inferences are logged only in verbose mode: their clients get the error anyway.


def log_refusal(request_id: str, error: NeriteError) -> None:
    """Log an error reply to a request, as Triton does at verbosity 1."""
    if log.verbose_level >= 1:
        log.verbose(1, f"Infer failed: {error.message}", **log_fields(request_id))
