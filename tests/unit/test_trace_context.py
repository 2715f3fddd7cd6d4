"""W3C Trace Context: what headers say, and what is said in headers."""

from __future__ import annotations

import pytest

from nerite.core.execution_observer import TraceContext, parse

TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TOLD = f"00-{TRACE:032x}-{SPAN:016x}"


@pytest.mark.parametrize(
    ("parent", "state", "expected"),
    [
        (f"{TOLD}-01", None, TraceContext(TRACE, SPAN)),
        (f" {TOLD}-01\t", " x=y ", TraceContext(TRACE, SPAN, "x=y")),
        (f"{TOLD}-00", None, TraceContext(TRACE, SPAN, sampled=False)),
        (f"{TOLD}-03", None, TraceContext(TRACE, SPAN)),
        (f"cc{TOLD[2:]}-01-what-comes-later", None, TraceContext(TRACE, SPAN)),
        (f"{TOLD}-01", "x" * 513, TraceContext(TRACE, SPAN)),
        (None, "x=y", None),
        ("", None, None),
        (f"{TOLD}-01-more", None, None),
        (f"ff{TOLD[2:]}-01", None, None),
        (f"{TOLD}-1", None, None),
        (f"{TOLD.upper()}-01", None, None),
        (f"00-{0:032x}-{SPAN:016x}-01", None, None),
        (f"00-{TRACE:032x}-{0:016x}-01", None, None),
    ],
)
def test_parse(parent: str | None, state: str | None, expected: TraceContext | None) -> None:
    assert parse(parent, state) == expected


def test_as_headers() -> None:
    assert TraceContext(5, SPAN).trace == "0" * 31 + "5"
    assert TraceContext(TRACE, SPAN).carrier == {"traceparent": f"{TOLD}-01"}
    assert TraceContext(TRACE, SPAN, "x=y").carrier == {"traceparent": f"{TOLD}-01", "tracestate": "x=y"}
