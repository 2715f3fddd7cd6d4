"""Heads of HTTP requests."""

from __future__ import annotations

import contextlib
import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.core.byte_budget import HTTP_HEADS
from nerite.core.errors import InvalidArgument
from nerite.transports.http.head import BadHead, HeadCache, field_line, header_bytes_of, parse_head, request_line


def head(*lines: str, request: str = "POST /v2/models/m/infer HTTP/1.1") -> bytes:
    return "\r\n".join((request, *lines)).encode("latin-1") + b"\r\n\r\n"


def test_what_a_head_says() -> None:
    of = parse_head(head("Host: here", "Content-Length: 12", "X-One:  two  ", "Accept-Encoding: gzip"))
    assert (of.method, of.path, of.version) == ("POST", "/v2/models/m/infer", "1.1")
    assert of.headers == {"host": "here", "content-length": "12", "x-one": "two", "accept-encoding": "gzip"}
    assert (of.content_length, of.chunked, of.keep_alive, of.expects_continue) == (12, False, True, False)


def test_fields_keep_the_names_as_they_were_written() -> None:
    assert parse_head(head("X-One: a", "x-ONE: b")).fields == [("X-One", "a"), ("x-ONE", "b")]


def test_values_are_utf8_and_other_bytes_are_kept() -> None:
    raw = b"GET / HTTP/1.1\r\nA: gr\xc3\xbcn\r\nB: gr\xfcn\r\n\r\n"
    parsed = parse_head(raw)
    assert parsed.headers["a"] == "grün"
    assert [header_bytes_of(parsed.headers[name]) for name in ("a", "b")] == [b"gr\xc3\xbcn", b"gr\xfcn"]


def test_of_a_name_that_stands_twice_the_first_counts() -> None:
    assert parse_head(head("A: 1", "a: 2")).headers["a"] == "1"


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v2", "/v2"),
        ("/v2?verbose=1&x=/y", "/v2"),
        ("/v2/", "/v2/"),
        ("/v2/models/a%20b", "/v2/models/a%20b"),
        ("http://here:8000/v2/health/live", "/v2/health/live"),
        ("http://here:8000/v2?x=1", "/v2"),
        ("http://here:8000", "/"),
    ],
)
def test_path(target: str, path: str) -> None:
    assert parse_head(head(request=f"GET {target} HTTP/1.1")).path == path


@pytest.mark.parametrize(
    ("version", "connection", "kept"),
    [
        ("1.1", "", True),
        ("1.1", "keep-alive", True),
        ("1.1", "close", False),
        ("1.1", "Close", False),
        ("1.1", "TE, close", False),
        ("1.0", "", False),
        ("1.0", "keep-alive", True),
        ("1.0", "close", False),
        ("0.9", "", False),
    ],
)
def test_who_keeps_the_connection(version: str, connection: str, kept: bool) -> None:
    lines = [f"Connection: {connection}"] if connection else []
    of = parse_head(head(*lines, request=f"GET /v2 HTTP/{version}"))
    assert (of.version, of.keep_alive) == (version, kept)


def test_with_a_body_it_is_the_same() -> None:
    assert not parse_head(head("Connection: close", "Content-Length: 5")).keep_alive
    assert not parse_head(head("Connection: close", "Transfer-Encoding: chunked")).keep_alive
    assert parse_head(head("Content-Length: 5")).keep_alive


def test_an_upgrade_is_not_granted() -> None:
    of = parse_head(head("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", request="GET /v2 HTTP/1.1"))
    assert (of.method, of.path, of.keep_alive) == ("GET", "/v2", True)


def test_chunks_and_expectations() -> None:
    of = parse_head(head("Transfer-Encoding: chunked", "Expect: 100-continue"))
    assert (of.chunked, of.content_length, of.expects_continue) == (True, 0, True)
    assert parse_head(head("Transfer-Encoding: Chunked", "Expect: 100-Continue")).expects_continue


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Length: x"],
        ["Content-Length: -1"],
        ["Content-Length: +5"],
        ["Content-Length: 5 5"],
        ["Content-Length: 0x5"],
        ["Content-Length: \xb2"],
        ["Content-Length: 5", "Content-Length: 6"],
        ["Content-Length: 5", "Content-Length: 5"],
        ["Content-Length: 18446744073709551616"],
        ["Content-Length: 5", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked", "Content-Length: 5"],
        # Who does not know where the body ends must not guess: the rest would be taken for another request.
        ["Transfer-Encoding: gzip"],
        ["Transfer-Encoding: gzip", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked", "Transfer-Encoding: gzip"],
        ["Transfer-Encoding: gzip, chunked"],
        ["Transfer-Encoding: xchunked"],
        ["Transfer-Encoding: identity", "Content-Length: 5"],
        ["no colon"],
        [": no name"],
        ["a b: c"],
        ["a : c"],
        ["A: \0"],
    ],
)
def test_heads_that_are_wrong(lines: list[str]) -> None:
    with pytest.raises(BadHead):
        parse_head(head(*lines))


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET  HTTP/1.1\r\n\r\n",
        b"GET /v2 HTTP/3.7\r\n\r\n",
        b"GET /v2 FTP/1.1\r\n\r\n",
        b"frob /v2 HTTP/1.1\r\n\r\n",
        b"FROB  HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
        b"GET /a b HTTP/1.1\r\n\r\n",
    ],
)
def test_bytes_that_are_no_head(raw: bytes) -> None:
    with pytest.raises(BadHead):
        parse_head(raw)


@pytest.mark.parametrize("method", ["FROB", "GETX", "PROPFIND", "A_B"])
def test_a_method_of_any_name(method: str) -> None:
    head = parse_head(f"{method} /v2?x HTTP/1.1\r\nContent-Length: 3\r\n\r\n".encode())
    assert (head.method, head.path, head.content_length, head.keep_alive) == (method, "/v2", 3, True)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_head_or_refused(raw: bytes) -> None:
    for candidate in (raw + b"\r\n\r\n", b"GET /v2 HTTP/1.1\r\n" + raw + b"\r\n\r\n"):
        with contextlib.suppress(BadHead):
            parse_head(candidate)


def test_the_same_bytes_are_the_same_head() -> None:
    cache = HeadCache()
    one = cache.get(head("A: 1"))
    assert cache.get(head("A: 1")) is one
    assert cache.get(head("A: 2")) is not one


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HTTP_HEADS, "limit", 256 * 1024)
    cache = HeadCache()
    heads = []
    for number in range(1000):
        heads.append(cache.get(head(f"X: {number}")))
        assert HTTP_HEADS.used <= HTTP_HEADS.limit
    assert cache.get(head("X: 999")) is heads[-1]
    assert cache.get(head("X: 0")) is not heads[0]
    for large in (head("X: " + "x" * 90_000), head(*(f"{number}: 1" for number in range(1000)))):
        assert cache.get(large) is not cache.get(large)


@pytest.mark.parametrize("raw", [head("Host: here"), head("Upgrade: h2c", "Connection: upgrade"), b"no head\r\n\r\n"])
def test_nothing_is_left_for_the_collector(raw: bytes) -> None:
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(BadHead):
            parse_head(raw)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_bad_head_is_bad_again() -> None:
    cache = HeadCache()
    for _ in range(2):
        with pytest.raises(BadHead):
            cache.get(b"hello\r\n\r\n")


def test_what_is_written_is_read_again() -> None:
    raw = request_line("POST", "/v2/models/a%20b/infer?x=y") + field_line("X-One", "gr\xfcn \t \udcff") + b"\r\n"
    assert raw == b"POST /v2/models/a%20b/infer?x=y HTTP/1.1\r\nX-One: gr\xc3\xbcn \t \xff\r\n\r\n"
    assert parse_head(raw).headers == {"x-one": "gr\xfcn \t \udcff"}


@pytest.mark.parametrize("odd", ["\r", "\n", "\0", "\x1f", "\x7f"])
def test_no_control_character_is_written(odd: str) -> None:
    for target in (f"/a{odd}b", f"/a{odd}", odd):
        with pytest.raises(InvalidArgument):
            request_line("GET", target)
    with pytest.raises(InvalidArgument):
        request_line(f"GET{odd}", "/")
    for name, value in ((f"X{odd}", "1"), ("X", f"1{odd}2"), ("X", odd)):
        with pytest.raises(InvalidArgument):
            field_line(name, value)


def test_no_blank_is_written_into_a_request_line() -> None:
    for method, target in (("GET", "/a b"), ("GET", ""), ("", "/"), ("GET /", "/")):
        with pytest.raises(InvalidArgument):
            request_line(method, target)
