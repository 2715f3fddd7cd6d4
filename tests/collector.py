"""A collector of OpenTelemetry for tests: takes spans over OTLP/HTTP, and reads them with the official messages."""

from __future__ import annotations

import base64
import gzip
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serving import eventually


@dataclass
class Span:
    """A span, as far as tests look at it."""

    name: str
    kind: int
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, int]]
    links: list[tuple[str, str]]
    status: tuple[int, str]
    state: str
    resource: dict[str, Any]
    scope: str

    @property
    def moments(self) -> list[str]:
        """The names of its events, in their order."""
        return [name for name, _ in self.events]


@dataclass
class Post:
    """A request that came."""

    path: str
    headers: dict[str, str]
    spans: list[Span]


@dataclass
class Collector:
    """What has come so far, and what is answered: each entry of ``refusals`` once, status and headers, then 200."""

    port: int = 0
    posts: list[Post] = field(default_factory=list)
    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    refused: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    @property
    def spans(self) -> list[Span]:
        return [span for post in self.posts for span in post.spans]

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def wait(self, count: int) -> list[Span]:
        """Return the spans, once there are so many."""
        eventually(lambda: len(self.spans) >= count, what=f"{count} spans, not {[span.name for span in self.spans]}")
        return self.spans

    def children(self, parent: Span) -> list[Span]:
        """The spans under another, by when they begin."""
        return sorted((span for span in self.spans if span.parent == parent.id), key=lambda span: span.start)

    def tree(self, root: Span) -> Any:
        """The names of a span and of those under it."""
        return (root.name, [self.tree(child) for child in self.children(root)])


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port of 127.0.0.1."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            if self.headers.get("transfer-encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers["content-length"]))
            status, headers = 200, {}
            if collector.refusals:
                status, headers = collector.refusals.pop(0)
                collector.refused += 1
            else:
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                spans = read(message(body, self.headers["content-type"]))
                collector.posts.append(Post(self.path, dict(self.headers.items()), spans))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def message(body: bytes, content_type: str) -> ExportTraceServiceRequest:
    """A body as a message: in JSON, ids are in hexadecimal, where protobuf expects base64."""
    if content_type != "application/json":
        return ExportTraceServiceRequest.FromString(body)
    text = re.sub(
        r'"(traceId|spanId|parentSpanId)"\s*:\s*"([0-9a-f]*)"',
        lambda found: f'"{found[1]}":"{base64.b64encode(bytes.fromhex(found[2])).decode()}"',
        body.decode(),
    )
    return json_format.Parse(text, ExportTraceServiceRequest())


def read(asked: ExportTraceServiceRequest) -> list[Span]:
    """The spans of a message."""
    found = []
    for of_resource in asked.resource_spans:
        resource = attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            found += [
                Span(
                    span.name,
                    span.kind,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    attributes(span.attributes),
                    [(event.name, event.time_unix_nano) for event in span.events],
                    [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                    (span.status.code, span.status.message),
                    span.trace_state,
                    resource,
                    of_scope.scope.name,
                )
                for span in of_scope.spans
            ]
    return found


def attributes(pairs: Any) -> dict[str, Any]:
    """Attributes as a dictionary."""
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}
