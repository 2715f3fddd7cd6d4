"""What browsers send on behalf of pages: whose is taken, and under which names of the server."""

from __future__ import annotations

import pytest

from http_peer import replies
from nerite.config.options import HttpOptions
from nerite.core.errors import Forbidden
from nerite.transports.http import reply
from nerite.transports.http.head import RequestHead, parse_head
from nerite.transports.http.infer_request import HttpTarget
from nerite.transports.http.origins import BrowserGuard, GuardedRouter

APP = "https://app.example"
PUBLIC = BrowserGuard((), None)
LOCAL = BrowserGuard((), ("models.example",))
FOUND = HttpTarget(reply.EMPTY)


def head(*lines: str, method: str = "POST", host: str | None = "localhost:8000", path: str = "/v2") -> RequestHead:
    named = [] if host is None else [f"Host: {host}"]
    return parse_head("\r\n".join([f"{method} {path} HTTP/1.1", *named, *lines, "", ""]).encode())


def passes(guard: BrowserGuard, of: RequestHead) -> bool:
    try:
        guard.check(of)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["Sec-Fetch-Site: same-origin", "Origin: http://localhost:8000"],
        ["Sec-Fetch-Site: none"],
        ["Origin: http://localhost:8000"],
        ["Origin: http://LOCALHOST:8000"],
        # A proxy in front has another name; the browser says itself that the page is the server's own.
        ["Sec-Fetch-Site: same-origin", "Origin: https://behind.example"],
    ],
)
@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT", "PATCH", "GET"])
def test_what_is_from_the_servers_own_pages_or_from_none(lines: list[str], method: str) -> None:
    assert passes(PUBLIC, head(*lines, method=method))


@pytest.mark.parametrize(
    "lines",
    [
        ["Sec-Fetch-Site: cross-site", f"Origin: {APP}"],
        ["Sec-Fetch-Site: same-site", "Origin: http://localhost:3000"],
        ["Sec-Fetch-Site: cross-site"],
        ["Sec-Fetch-Site: Same-Origin"],
        ["Sec-Fetch-Site:"],
        [f"Origin: {APP}"],
        ["Origin: http://localhost"],
        ["Origin: http://localhost:80001"],
        ["Origin: localhost:8000"],
        ["Origin: null"],
        ["Origin:"],
    ],
)
def test_what_other_pages_send(lines: list[str]) -> None:
    for method in ("POST", "DELETE", "PUT", "PATCH", "TRACE"):
        assert not passes(PUBLIC, head(*lines, method=method))
    # What changes nothing is for CORS: without it a page does not get to see the answer.
    for method in ("GET", "HEAD", "OPTIONS"):
        assert passes(PUBLIC, head(*lines, method=method))
    assert passes(BrowserGuard(("*",), None), head(*lines))


@pytest.mark.parametrize(
    ("origin", "host"), [("https://a.example", "a.example:443"), ("http://a.example", "a.example:80")]
)
def test_a_usual_port_may_be_said_or_not(origin: str, host: str) -> None:
    assert passes(PUBLIC, head(f"Origin: {origin}", host=host))
    assert passes(PUBLIC, head(f"Origin: {origin}", host="a.example"))
    assert not passes(PUBLIC, head(f"Origin: {origin}", host="a.example:8000"))


def test_an_origin_that_is_allowed() -> None:
    guard = BrowserGuard((APP,), None)
    assert passes(guard, head(f"Origin: {APP}", "Sec-Fetch-Site: cross-site"))
    assert not passes(guard, head(f"Origin: {APP}.org", "Sec-Fetch-Site: cross-site"))


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "localhost.",
        "x.localhost:1",
        "127.0.0.1:8000",
        "192.168.0.7",
        "[::1]:8000",
        "[::1]",
        "models.example",
        "Models.Example.:8000",
        "",
        None,
    ],
)
def test_own_names(host: str | None) -> None:
    assert passes(LOCAL, head(host=host, method="GET"))


@pytest.mark.parametrize(
    "host", ["rebind.evil.example:8000", "models.example.evil.example", "nerite", "localhost.evil.example", "1.evil"]
)
def test_names_that_are_not_the_servers(host: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        # As a page has it that calls the server by this name: it looks like one of the server's own.
        of = head(f"Origin: http://{host}", "Sec-Fetch-Site: same-origin", host=host, method=method)
        assert not passes(LOCAL, of)
        assert passes(PUBLIC, of)
        assert passes(BrowserGuard((), ("*",)), of)


@pytest.mark.parametrize(
    ("address", "hosts", "checks"),
    [
        ("127.0.0.1", (), True),
        ("::1", (), True),
        ("localhost", (), True),
        ("127.1.2.3", ("models.example",), True),
        ("0.0.0.0", (), False),
        ("::", (), False),
        ("192.168.0.7", (), False),
        ("host.example", (), False),
        ("0.0.0.0", ("models.example",), True),
        ("127.0.0.1", ("*",), False),
    ],
)
def test_where_names_count(address: str, hosts: tuple[str, ...], checks: bool) -> None:
    guard = BrowserGuard.of(HttpOptions(allowed_hosts=hosts), address)
    assert passes(guard, head(host="evil.example")) is not checks


def test_a_refusal_says_what_why_and_what_to_do() -> None:
    router = GuardedRouter(LOCAL, lambda _: FOUND)
    assert router.target(head()) is FOUND

    def refused(of: RequestHead) -> bytes:
        refusal = router.target(of).refusal
        assert refusal is not None
        ((status, _, body),) = replies(refusal.encode())
        assert status == 403
        return body

    body = refused(head(f"Origin: {APP}"))
    assert body.startswith(b'{"error":"a web page of \'https://app.example\' may not send POST requests to this server')
    assert body.endswith(b'--http-cors-origin=https://app.example"}')
    assert refused(head("Origin: null")).endswith(b'--http-cors-origin=*"}')
    assert refused(head(host="evil.example:1")).endswith(b'--http-allowed-host=evil.example"}')
    assert len(refused(head("Origin: " + "x" * 5000))) < 1000
    for path in ("/v1/chat/completions", "/tokenize"):
        shaped = refused(head(f"Origin: {APP}", path=path))
        assert shaped.startswith(b'{"error":{"message":"a web page of') and b'"type":"permission_error"' in shaped
    shaped = refused(head(f"Origin: {APP}", path="/v1/messages"))
    assert shaped.startswith(b'{"type":"error","error":{"type":"permission_error","message":"a web page of')


@pytest.mark.parametrize(
    "host",
    ["localhost:4000/#@attacker.example", "[::1]evil", "127.0.0.1:21000/v2/health/live?", "localhost:4000,evil",
     "::1",     "user@localhost", "[::1", "[]", "[localhost]", "localhost:port", "localhost:123456", "localhost evil",
     "127.0.0.1\\x"],
)  # fmt: skip
def test_what_is_no_host(host: str) -> None:
    for guard in (LOCAL, PUBLIC):
        assert not passes(guard, head(host=host, method="GET"))
