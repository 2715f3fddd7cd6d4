"""Load reports of members in trailers of gRPC: what a server writes is read, and nothing else does harm."""

from __future__ import annotations

import math
import struct
from base64 import b64encode

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.balancing.member import LoadReport
from nerite.core.engine_report import EngineReport
from nerite.router.load_reports import BINARY, load_report, load_report_in
from nerite.transports.engine_load import load_trailer_of


def written(*reports: EngineReport) -> bytes | None:
    """Return the trailer that a server writes."""
    write = load_trailer_of(b"bin", lambda model: reports if model == "m" else ())
    assert write is not None
    assert write("other") == b""
    return dict(hpack.Decoder().decode(write("m"), raw=True)).get(BINARY)


def test_what_a_server_writes_is_read() -> None:
    trailer = written(EngineReport(running=2, waiting=1), EngineReport(running=3, waiting=4))
    assert trailer is not None
    assert b"=" not in trailer, "gRPC sends no padding"
    told = load_report_in(trailer)
    assert told is not None
    assert (told.running, told.waiting) == (5, 5)


@pytest.mark.parametrize("form", [None, b"", b"text", b"BIN"])
def test_nothing_is_written_for_those_who_do_not_ask(form: bytes | None) -> None:
    assert load_trailer_of(form, lambda _: ()) is None
    assert load_trailer_of(b"bin", None) is None


def test_other_fields_are_passed_over() -> None:
    usual = b"\x09" + b"\0" * 8  # cpu_utilization
    entry = b"\x0a\x14num_requests_waiting\x11" + b"\0\0\0\0\0\0\x08\x40"
    message = usual + b"\x42" + bytes((len(entry),)) + entry + b"\x22\0"
    told = load_report_in(b64encode(message))
    assert told is not None
    assert told.waiting == 3.0
    assert math.isnan(told.running)


@pytest.mark.parametrize("trailer", [b"", b"!", b"AAAA" * 2000, b64encode(b"\x42\x7f"), b64encode(b"\x09" * 9)])
def test_what_says_nothing(trailer: bytes) -> None:
    assert load_report_in(trailer) is None


@given(st.binary(max_size=200))
def test_any_message(message: bytes) -> None:
    told = load_report_in(b64encode(message))
    assert told is None or isinstance(told, LoadReport)


@pytest.mark.parametrize("number", ["1e309", "-inf", "nan", "-1", "1e30", "1000001"])
def test_figures_that_no_server_can_mean_are_not_taken(number: str) -> None:
    assert load_report(f"TEXT named_metrics.num_requests_waiting={number}".encode()) is None
    told = load_report(f"TEXT num_requests_waiting={number},num_requests_running=2,kv_cache_usage_perc=1.5".encode())
    assert told is not None
    assert told.running == 2
    assert math.isnan(told.waiting)
    assert math.isnan(told.kv_used)
    entry = b"\x0a\x14num_requests_waiting\x11" + struct.pack("<d", float(number))
    assert load_report_in(b64encode(b"\x42" + bytes((len(entry),)) + entry)) is None
