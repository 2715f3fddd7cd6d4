"""Responses of members: heads as clients get them, and where bodies end, however they are cut into pieces."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.router.load_reports import load_report
from nerite.router.response_body import ChunkScanner, data_of
from nerite.router.response_head import BadResponse, ResponseHeads, parse_response_head


def head(*lines: str, status: str = "HTTP/1.1 200 OK") -> bytes:
    return "\r\n".join((status, *lines, "", "")).encode()


def test_hop_by_hop_fields_are_left_out() -> None:
    found = parse_response_head(
        head("Server: x", "Connection: keep-alive, X-Own", "X-Own: 1", "Keep-Alive: 5", "Content-Length: 3", "Date: d")
    )
    assert found.first == head("Server: x", "Content-Length: 3", "Date: d")
    assert (found.status, found.content_length, found.chunked, found.keeps) == (200, 3, False, True)


@pytest.mark.parametrize(
    ("raw", "chunked", "closes", "keeps"),
    [
        (head("Transfer-Encoding: chunked"), True, False, True),
        (head("Transfer-Encoding: chunked", "Connection: close"), True, False, False),
        (head(), False, True, False),
        (head("Content-Length: 0", status="HTTP/1.0 200 OK"), False, False, False),
        (head("Content-Length: 0", "Connection: keep-alive", status="HTTP/1.0 200 OK"), False, False, True),
        (head(status="HTTP/1.1 204 No Content"), False, False, True),
    ],
)
def test_framing(raw: bytes, chunked: bool, closes: bool, keeps: bool) -> None:
    found = parse_response_head(raw)
    assert (found.chunked, found.closes, found.keeps) == (chunked, closes, keeps)
    assert (b"Transfer-Encoding: chunked" in found.first) == (chunked or closes)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-x\r\n\r\n",
        head("Content-Length: 3", "Transfer-Encoding: chunked"),
        head("Content-Length: 3", "Content-Length: 4"),
        head("Transfer-Encoding: gzip"),
        head("Content-Length: -1"),
        head("Content-Length: 99999999999999999999"),
        head(status="HTTP/1.1 101 Switching Protocols"),
    ],
)
def test_what_is_no_response(raw: bytes) -> None:
    with pytest.raises(BadResponse):
        parse_response_head(raw)


def test_load_reports_are_no_part_of_the_head() -> None:
    heads = ResponseHeads()
    first, line = heads.get(head("endpoint-load-metrics: TEXT named_metrics.kv_cache_utilization=0.25", "A: b"))
    again, other = heads.get(head("Endpoint-Load-Metrics: TEXT named_metrics.num_requests_waiting=3", "A: b"))
    assert first is again
    assert b"load" not in first.first
    assert load_report(line) is not None
    report = load_report(line)
    assert report is not None
    assert report.kv_used == 0.25
    report = load_report(other)
    assert report is not None
    assert (report.waiting, math.isnan(report.kv_used)) == (3, True)
    report = load_report(b'JSON {"named_metrics":{"kv_cache_usage_perc":0.5}}')
    assert report is not None
    assert report.kv_used == 0.5


@pytest.mark.parametrize("line", [b"", b"BIN x", b"TEXT a", b"JSON {", b"JSON []", b"JSON {}", b"TEXT other=1"])
def test_load_reports_that_say_nothing(line: bytes) -> None:
    assert load_report(line) is None


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(1, 30), max_size=40))
def test_chunks_in_any_pieces(data: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(b"%x;a=b\r\n%b\r\n" % (len(each), each) for each in data) + b"0\r\nTrailer: x\r\n\r\n"
    whole = whole.replace(b";a=b", b"") if len(cuts) % 2 else whole
    text = whole + b"next"
    scanner = ChunkScanner()
    found = b""
    used = at = 0
    for cut in [*cuts, len(text)]:
        if scanner.complete:
            break
        piece = text[at : at + cut]
        at += len(piece)
        taken = scanner.feed(piece)
        used += taken
        found += data_of(piece, scanner)
    assert scanner.complete
    assert found == b"".join(data)
    assert used == len(whole)
    assert scanner.chunks == len(data)


@pytest.mark.parametrize(
    "text",
    [
        *(b"x\r\n", b"5\n", b"1\r\nab\r\n", b"-1\r\n", b"5" * 5000, b"1" * 16 + b"\r\n", b"1\r\naX\n"),
        b"0\r\n" + b"a: b\r\n" * 20_000,
    ],
)
def test_bad_chunks(text: bytes) -> None:
    with pytest.raises(BadResponse):
        ChunkScanner().feed(text)
