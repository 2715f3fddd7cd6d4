"""The bytes of replies."""

from __future__ import annotations

import orjson
import pytest

from nerite.core import errors
from nerite.transports.http import reply
from nerite.transports.http.reply import Reply


def test_a_reply() -> None:
    assert Reply(200, b"hello", "text/plain", b"A: b\r\n").encode() == (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nA: b\r\nContent-Length: 5\r\n\r\nhello"
    )


def test_a_reply_without_content_says_nothing_of_it() -> None:
    assert Reply(204, headers=b"A: b\r\n").encode() == b"HTTP/1.1 204 No Content\r\nA: b\r\n\r\n"


def test_json() -> None:
    assert reply.json_reply({"a": 1}).encode() == (
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n{"a":1}'
    )
    assert reply.json_reply([], 400).status == 400


@pytest.mark.parametrize(
    "kind",
    [*errors.BY_CODE.values(), errors.Restricted, errors.QuotaExceeded, errors.TooLarge, errors.DeadlineExceeded],
)
def test_every_error_has_a_status_with_a_reason(kind: type[errors.NeriteError]) -> None:
    answer = reply.error_reply(kind('what "is" é wrong'))
    assert answer.status == kind.http_status
    assert orjson.loads(answer.body) == {"error": 'what "is" é wrong'}
    assert answer.content_type == "application/json"
    assert answer.encode().startswith(b"HTTP/1.1 %d " % kind.http_status)
    assert reply.error_reply(kind("x"), reply.PLAIN).content_type == "text/plain"
    assert b"Retry-After" not in answer.encode()


def test_who_may_come_again_is_told_when() -> None:
    head = reply.error_reply(errors.Unavailable("full", retry_after=3)).encode().partition(b"\r\n\r\n")[0]
    assert b"Retry-After: 3" in head.split(b"\r\n")


def test_an_error_of_half_a_character_is_told() -> None:
    assert orjson.loads(reply.error_reply(errors.Internal("a\ud800b")).body) == {"error": "a?b"}


def test_with_one_more_header() -> None:
    first = Reply(200, b"a\r\n\r\nb").encode()
    assert reply.with_header(first, b"Connection: close") == (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 6\r\nConnection: close\r\n\r\na\r\n\r\nb"
    )


def test_answers_that_are_always_the_same() -> None:
    assert (reply.EMPTY.status, reply.EMPTY.body) == (200, b"")
    assert (reply.NOT_ALLOWED.status, reply.NOT_ALLOWED.body) == (405, b'{"error":"Method Not Allowed"}')
    assert reply.CONTINUE == b"HTTP/1.1 100 Continue\r\n\r\n"
