"""The access log: one line for whatever becomes of a request or a call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from test_grpc_connection import Peer as GrpcPeer
from test_grpc_connection import message
from test_grpc_stream import OK, StreamPeer

from http_peer import Peer as HttpPeer
from http_peer import chunked, request
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.observability.log import log
from nerite.transports.grpc.listener import LoggedGrpcConnection
from nerite.transports.http.listener import LoggedHttpConnection


class LoggedHttpPeer(HttpPeer):
    kind = LoggedHttpConnection


class LoggedGrpcPeer(GrpcPeer):
    kind = LoggedGrpcConnection


class LoggedStreamPeer(StreamPeer):
    kind = LoggedGrpcConnection


class Lines:
    """What was logged since the last time."""

    def __init__(self, captured: pytest.CaptureFixture[str]) -> None:
        self._captured = captured

    @property
    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._captured.readouterr().out.splitlines()]

    @property
    def brief(self) -> list[tuple[Any, ...]]:
        return [(line["path"], line["status"], line["request_bytes"], line["response_bytes"]) for line in self.all]


@pytest.fixture
def lines(capfd: pytest.CaptureFixture[str]) -> Iterator[Lines]:
    before = log.settings
    log.change({"log_format": "json"})
    yield Lines(capfd)
    log.change(before)


@pytest.fixture
def http(lines: Lines) -> HttpPeer:
    return LoggedHttpPeer()


@pytest.fixture
def grpc(lines: Lines) -> GrpcPeer:
    return LoggedGrpcPeer()


def test_an_exchange(http: HttpPeer, lines: Lines) -> None:
    http.send(request("/v2/models/m/versions/3/infer", b"body"))
    (line,) = lines.all
    assert line.pop("milliseconds") > 0
    text = line.pop("message")
    assert text.startswith("127.0.0.1:5000 POST /v2/models/m/versions/3/infer 200 4 34 ") and text.endswith(" ms m/3")
    for key in ("time", "level", "file", "line", "pid"):
        del line[key]
    assert line == {
        "peer": "127.0.0.1:5000",
        "method": "POST",
        "path": "/v2/models/m/versions/3/infer",
        "status": 200,
        "request_bytes": 4,
        "response_bytes": 34,
        "model": "m",
        "version": "3",
    }


def test_what_the_console_reads_is_left_out_unless_it_is_refused(http: HttpPeer, lines: Lines) -> None:
    http.send(request("/ui/metrics") + request("/ui") + request("/ui/refuse") + request("/v2"))
    assert [path for path, *_ in lines.brief] == ["/ui/refuse", "/v2"]


def test_requests_sent_ahead(http: HttpPeer, lines: Lines) -> None:
    http.send(request("/a", b"1") + request("/later", b"22") + request("/c", b"333"))
    assert lines.brief == [("/a", 200, 1, 4)]
    http.handler.answer_next()
    assert lines.brief == [("/later", 200, 2, 9), ("/c", 200, 3, 6)]


def test_a_request_that_comes_again(http: HttpPeer, lines: Lines) -> None:
    for _ in range(2):
        http.send(request("/again", b"askdata"))
    assert http.handler.known == 1
    assert lines.brief == [("/again", 200, 7, 14)] * 2


def test_a_request_that_does_not_come_on(http: HttpPeer, lines: Lines) -> None:
    http.send(request("/slow", b"body")[:-1])
    for now in (0, 59, 60):
        http.connection.check(now, 60)
    assert [(path, status) for path, status, *_ in lines.brief] == [("/slow", 408)]


def test_bodies_in_pieces(http: HttpPeer, lines: Lines) -> None:
    whole = request("/large", bytes(1000))
    http.send(whole[:500])
    assert lines.all == []
    http.send(whole[500:])
    http.send(chunked("/chunks", b"12", b"345"))
    http.send(request("/next"))
    assert lines.brief == [("/large", 200, 1000, 1007), ("/chunks", 200, 5, 13), ("/next", 200, 0, 6)]


def test_what_is_refused(http: HttpPeer, lines: Lines) -> None:
    http.send(request("/refuse", b"body"))
    http.send(b"no HTTP\r\n\r\n")
    assert lines.brief == [("/refuse", 403, 4, 7), ("-", 400, 0, 0)]


def test_a_client_that_goes(http: HttpPeer, lines: Lines) -> None:
    http.send(request("/later", b"body"))
    http.lose()
    assert lines.brief == [("/later", 499, 4, 0)]
    http.handler.answer_next()
    assert lines.all == []


def test_a_client_that_goes_when_it_has_its_answer(http: HttpPeer, lines: Lines) -> None:
    http.send(request("/a"))
    http.lose()
    assert lines.brief == [("/a", 200, 0, 3)]


def test_a_reply_in_chunks(http: HttpPeer, lines: Lines) -> None:
    http.send(request("/later"))
    asked = InferenceRequest(RequestHeader("m", "7", []), [], http.connection, 0, "me")
    http.connection.request = asked
    http.connection.open(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"12")
    http.connection.send_chunk(b"345")
    http.connection.close_reply()
    (line,) = lines.all
    assert (line["status"], line["response_bytes"], line["model"], line["version"]) == (200, 5, "m", "7")
    assert line["request_id"] == "me"


def test_calls(grpc: GrpcPeer, lines: Lines) -> None:
    for path in ("/echo", "/fail", "/refuse", "/nowhere"):
        grpc.call(path, message(b"body"))
        grpc.flush()
    assert [(line["method"], line["path"], line["status"]) for line in lines.all if "path" in line] == [
        ("gRPC", "/echo", "OK"),
        ("gRPC", "/fail", "INVALID_ARGUMENT"),
        ("gRPC", "/refuse", "INVALID_ARGUMENT"),
        ("gRPC", "/nowhere", "INTERNAL"),
    ]


def test_bytes_of_a_call_in_pieces(grpc: GrpcPeer, lines: Lines) -> None:
    grpc.call("/echo", message(bytes(30000)))
    grpc.flush()
    assert lines.brief == [("/echo", "OK", 30005, 30005)]


def test_a_call_that_its_client_gives_up(grpc: GrpcPeer, lines: Lines) -> None:
    stream = grpc.call("/later", message(b"body"))
    grpc.flush()
    grpc.client.reset_stream(stream, 8)
    grpc.flush()
    assert lines.brief == [("/later", "CANCELLED", 9, 0)]


def test_a_stream(lines: Lines) -> None:
    peer = LoggedStreamPeer()
    peer.say("one", "refuse", "decoupled")
    first, second = peer.streams.asked
    first.respond(OK)
    second.respond(OK, False)
    second.respond(OK)
    assert lines.all == []
    peer.say(end=True)
    (line,) = lines.all
    assert (line["status"], line["requests"], line["responses"]) == ("OK", 3, 4)
    assert line["request_bytes"] == len("onerefusedecoupled") + 15
    assert line["message"].endswith(" ms 3 requests 4 responses")


def test_a_stream_that_is_lost(lines: Lines) -> None:
    peer = LoggedStreamPeer()
    peer.say("one")
    peer.connection.connection_lost(None)
    assert [(line["status"], line["requests"]) for line in lines.all] == [("CANCELLED", 1)]
