"""What browsers are told about pages of other origins."""

from __future__ import annotations

import pytest

from http_peer import request
from nerite.transports.http.head import RequestHead, parse_head
from nerite.transports.http.origins import Cors

APP = "https://app.example"
EXPOSE = b"Access-Control-Expose-Headers: Inference-Header-Content-Length, Content-Encoding, Retry-After"
ONE = Cors([APP, "http://localhost:3000"], ["X-Key"])
ANY = Cors(["*"], [])


def head(*headers: str, method: str = "POST") -> RequestHead:
    return parse_head(request("/v2", b"", *headers, method=method))


@pytest.mark.parametrize("origin", [APP, "http://localhost:3000"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
def test_an_allowed_origin(origin: str, method: str) -> None:
    told = ONE.lines(head(f"Origin: {origin}", method=method))
    assert told == b"Access-Control-Allow-Origin: " + origin.encode() + b"\r\n" + EXPOSE + b"\r\nVary: Origin"


@pytest.mark.parametrize("origin", ["https://app.example.org", "http://app.example", "null", "*", "", APP + ":444"])
def test_an_origin_that_is_not_allowed(origin: str) -> None:
    assert ONE.lines(head(f"Origin: {origin}")) == b""
    assert ONE.lines(head(f"Origin: {origin}", method="GET")) == b"Vary: Origin"


def test_no_origin() -> None:
    assert ONE.lines(head()) == b""
    assert ONE.lines(head(method="GET")) == b"Vary: Origin"
    assert ANY.lines(head(method="GET")) == b""


@pytest.mark.parametrize("origin", [APP, "null"])
def test_any_origin(origin: str) -> None:
    assert ANY.lines(head(f"Origin: {origin}")) == b"Access-Control-Allow-Origin: *\r\n" + EXPOSE


def test_a_preflight() -> None:
    asked = head(
        f"Origin: {APP}",
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: content-type,x-key, traceparent,a:b",
        method="OPTIONS",
    )
    answer = ONE.preflight(asked, ("GET", "POST"))
    assert answer is not None
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers.split(b"\r\n") == [
        b"Access-Control-Allow-Methods: GET, POST",
        b"Access-Control-Allow-Headers: Content-Type, Content-Encoding, Inference-Header-Content-Length, X-Key, "
        b"traceparent",
        b"Access-Control-Max-Age: 7200",
        b"",
    ]


def test_what_is_no_preflight() -> None:
    wanted = "Access-Control-Request-Method: POST"
    assert ONE.preflight(head(f"Origin: {APP}", wanted), ("POST",)) is None
    assert ONE.preflight(head(f"Origin: {APP}", method="OPTIONS"), ("POST",)) is None
    assert ONE.preflight(head(wanted, method="OPTIONS"), ("POST",)) is None
    assert ONE.preflight(head("Origin: https://else", wanted, method="OPTIONS"), ("POST",)) is None
