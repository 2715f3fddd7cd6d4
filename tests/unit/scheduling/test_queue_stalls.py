"""When requests have waited beside an idle instance for too long."""

from __future__ import annotations

import pytest

from nerite.scheduling.stall_detectors import QueueStallDetector

SECOND = 1_000_000_000


def found(*audits: tuple[bool, int | None, int]) -> list[bool]:
    """Audit once a second; return what was found."""
    detector = QueueStallDetector()
    return [detector.check(waits, due, begun, at * SECOND) for at, (waits, due, begun) in enumerate(audits, 1)]


def test_requests_that_wait_from_one_audit_to_the_next_are_found() -> None:
    assert found((True, None, 7), (True, None, 7)) == [False, True]


@pytest.mark.parametrize(
    "second",
    [
        pytest.param((False, None, 7), id="nothing waits"),
        pytest.param((True, 3 * SECOND, 7), id="they wait for others to join their batch"),
        pytest.param((True, None, 8), id="a batch has begun meanwhile"),
    ],
)
def test_what_is_no_stall(second: tuple[bool, int | None, int]) -> None:
    assert found((True, None, 7), second, (True, None, second[2])) == [False, False, second[2] == 8]


def test_what_is_overdue_is_found() -> None:
    assert found((True, SECOND // 2, 7), (True, SECOND // 2, 7)) == [False, True]
