"""How often a client that subscribes to load reports gets one, and what a report of a quiet server says."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from nerite.core.errors import InvalidArgument
from nerite.transports.engine_load import LoadSource, PeriodicLoad
from nerite.transports.grpc.load_reports import LONGEST, SHORTEST, interval_of


def asked(seconds: int, nanos: int = 0) -> bytes:
    """Return an ``OrcaLoadReportRequest``, with the name of a cost behind the interval."""
    duration = Duration(seconds=seconds, nanos=nanos).SerializeToString()
    return bytes([1 << 3 | 2, len(duration)]) + duration + b"\x12\x01x"


@pytest.mark.parametrize(
    ("question", "seconds"),
    [
        (asked(2, 500_000_000), 2.5),
        (asked(0, 1), SHORTEST),
        (asked(10**9), LONGEST),
        (asked(-1), LONGEST),
        (b"", 30.0),
        (asked(0), 30.0),
    ],
)
def test_intervals(question: bytes, seconds: float) -> None:
    assert interval_of(question) == seconds


@given(st.binary(max_size=80))
def test_any_bytes_are_an_interval_or_refused(question: bytes) -> None:
    with suppress(InvalidArgument):
        assert SHORTEST <= interval_of(question) <= LONGEST


def test_too_many_fields_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="OrcaLoadReportRequest"):
        interval_of(b"\x12\x00" * 1000)


def test_the_rate_is_that_since_the_last_report() -> None:
    succeeded = [10]
    load = PeriodicLoad(LoadSource(lambda model: (), lambda: succeeded[0]), 100.0)

    def rate(at: float) -> float:
        report = load.report(at)
        place = report.find(bytes([6 << 3 | 1]) + struct.pack("<d", 15.0))
        return 15.0 if place >= 0 else 0.0

    succeeded[0] = 40
    assert rate(102.0) == 15.0
    assert rate(104.0) == 0.0
    succeeded[0] = 0  # a model was unloaded
    assert rate(106.0) == 0.0
    assert rate(106.0) == 0.0
