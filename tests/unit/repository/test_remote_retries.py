from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest

from nerite.core.errors import Internal, Unavailable
from nerite.repository.remote.store import TRIES, TransientFailure, retried


class Clockless(Event):
    """Notes how long somebody would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return self.is_set()


def failing(times: int, *, progressed: bool = False) -> Callable[[], str]:
    left = [TransientFailure("no", progressed=progressed)] * times

    def attempt() -> str:
        if left:
            raise left.pop()
        return "done"

    return attempt


def test_pauses_grow() -> None:
    stopped = Clockless()
    assert retried("reading", failing(TRIES - 1), stopped) == "done"
    assert stopped.waits == [0.0, 0.5, 1.0, 2.0, 4.0]


def test_it_ends() -> None:
    with pytest.raises(Internal, match=f"reading failed {TRIES} times: no"):
        retried("reading", failing(TRIES), Clockless())


def test_progress_counts_as_a_new_beginning() -> None:
    stopped = Clockless()
    assert retried("reading", failing(10 * TRIES, progressed=True), stopped) == "done"
    assert set(stopped.waits) == {0.0}


def test_other_errors_are_final() -> None:
    def attempt() -> str:
        raise Internal("never")

    with pytest.raises(Internal, match="never"):
        retried("reading", attempt, Clockless())


def test_nothing_is_tried_once_the_server_stops() -> None:
    stopped = Clockless()
    stopped.set()
    with pytest.raises(Unavailable, match="reading was cancelled: the server is stopping"):
        retried("reading", failing(0), stopped)
