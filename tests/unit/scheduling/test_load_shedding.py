"""Load shedding: whom it refuses, and whom it never does, with a model of its own pace."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

import pytest

from nerite.config.options import QueueOptions
from nerite.core.errors import Unavailable
from nerite.scheduling.load_shedding import FEW, LONGEST_PAUSE, LoadShedder

MS = 1_000_000
S = 1000 * MS
DEFAULT = QueueOptions()


class Model:
    """Runs a request every so often, behind a queue that is bounded. Time passes when a test says so."""

    def __init__(self, per_second: float, bounds: QueueOptions = DEFAULT, batch: int = 1) -> None:
        self.admission = LoadShedder(bounds, "model")
        self.takes = int(S * batch / per_second)
        self.batch = batch
        self.now = 0
        self.next = 0
        self.begun = 0
        self.granted = 0
        self.waiting: deque[int] = deque()
        self.waited: list[tuple[int, float]] = []
        """When each that ran came, and the seconds until it began."""
        self.refused: list[Unavailable] = []
        self.ran: Callable[[], None] = lambda: None
        """Called for each."""

    def ask(self) -> None:
        waiting = len(self.waiting)
        if not self.granted:
            self.granted = self.admission.grant(waiting, self.begun, self.now)
        if self.granted:
            self.granted -= 1
            self.waiting.append(self.now)
        else:
            self.refused.append(self.admission.refusal())

    def until(self, at: int) -> None:
        """Let time pass."""
        while self.next <= at:
            self.now = self.next
            for _ in range(min(self.batch, len(self.waiting))):
                came = self.waiting.popleft()
                self.begun += 1
                self.waited.append((came, (self.now - came) / S))
                self.ran()
            self.next += self.takes
        self.now = at

    def asked(self, per_second: float, seconds: float) -> None:
        """Ask at a steady pace, whatever is answered."""
        began = self.now
        for number in range(int(per_second * seconds)):
            self.until(began + int(number * S / per_second))
            self.ask()
        self.until(began + int(seconds * S))

    def waits(self, after: float) -> list[float]:
        """How long those waited that came later than ``after`` seconds from the beginning."""
        return [wait for came, wait in self.waited if came >= after * S]


@pytest.mark.parametrize("times", [1.2, 2, 10])
@pytest.mark.parametrize(("per_second", "batch"), [(300, 1), (2000, 8), (5000, 64)])
def test_an_overload_that_lasts(per_second: float, batch: int, times: float) -> None:
    of = Model(per_second, batch=batch)
    of.asked(per_second * times, 60)
    assert len(of.waited) >= 0.99 * per_second * 60, "the model had nothing to do"
    overload = times - 1
    lasts = min(DEFAULT.burst_seconds + 1 / overload, DEFAULT.max_requests / (overload * per_second))
    longest = max(overload * lasts, DEFAULT.max_seconds) * 1.3
    assert max(of.waits(0)) < longest
    later = of.waits(lasts + longest)
    assert len(later) > 10 * per_second
    assert max(later) < DEFAULT.max_seconds * 1.3


def test_twice_the_capacity_for_a_minute() -> None:
    of = Model(500)
    of.asked(1000, 60)
    in_time = sum(wait < 1 for wait in of.waits(0))
    assert in_time >= 0.9 * 500 * 60
    assert statistics.quantiles(of.waits(0), n=100)[98] < 4


def test_who_is_refused_is_told_why_and_when_to_come_again() -> None:
    of = Model(500)
    of.asked(1000, 3)
    assert of.refused == []
    of.asked(1000, 1)
    first, last = of.refused[0], of.refused[-1]
    assert first.message.startswith("Exceeds maximum queue size: ")
    assert "requests wait for model 'model', 3." in first.message
    assert first.retry_after == 4
    assert f"Try again in {last.retry_after} s" in last.message
    of.asked(1000, 20)
    assert of.refused[-1].retry_after == 1


@pytest.mark.parametrize("per_second", [1, 10, 1000])
def test_a_burst_is_let_in(per_second: float) -> None:
    of = Model(per_second)
    of.asked(5000, 1)
    assert of.refused == []
    assert len(of.waiting) + len(of.waited) == 5000


@pytest.mark.parametrize("per_second", [1, 100, 5000])
@pytest.mark.parametrize("batch", [1, 16])
def test_those_who_keep_a_constant_number_under_way_are_never_refused(per_second: float, batch: int) -> None:
    of = Model(per_second, batch=batch)
    of.ran = of.ask
    of.asked(2500, 2)
    of.until(60 * S)
    assert of.refused == []
    assert 4900 <= len(of.waiting) <= 5000


def test_a_burst_beside_a_load_that_the_model_can_do() -> None:
    of = Model(100)
    of.asked(50, 10)
    of.asked(3000, 1)
    of.asked(50, 120)
    assert of.refused == []
    assert not of.waiting


def test_one_burst_after_the_other() -> None:
    of = Model(10)
    of.asked(4000, 1)
    of.until(60 * S)
    of.asked(4000, 1)
    of.until(120 * S)
    of.asked(1000, 1)
    assert of.refused == []


def test_one_burst_on_top_of_the_other() -> None:
    of = Model(10)
    of.asked(4000, 1)
    of.until(10 * S)
    of.asked(4000, 1)
    assert len(of.waiting) < 4500
    assert len(of.refused) > 3000


def test_a_model_that_is_fast_may_have_a_long_queue() -> None:
    of = Model(100_000, QueueOptions(max_requests=0), batch=100)
    of.asked(20_000_000, 0.002)
    of.ran = of.ask
    of.until(20 * S)
    assert of.refused == []
    assert len(of.waiting) > 30_000


def test_a_few_may_wait_however_slow_the_model_is() -> None:
    of = Model(0.001)
    of.asked(1, FEW)
    assert of.refused == []


def test_a_model_that_stands_still() -> None:
    of = Model(0.0001)
    of.asked(1000, 3)
    assert of.refused == []
    of.asked(1000, 2)
    assert len(of.refused) > 1000
    assert {refusal.retry_after for refusal in of.refused} == {1}, "nobody knows"
    assert "s of work" not in of.refused[0].message


def test_more_than_may_ever_wait() -> None:
    of = Model(1)
    of.asked(1_000_000, 0.02)
    assert len(of.waiting) == DEFAULT.max_requests
    assert len(of.refused) == 20_000 - DEFAULT.max_requests - len(of.waited)


def test_when_all_is_over_it_begins_anew() -> None:
    of = Model(500)
    of.asked(1000, 10)
    assert of.refused
    of.until(of.now + 5 * S)
    assert not of.waiting
    of.refused.clear()
    of.asked(2000, 2)
    assert of.refused == []


def test_less_than_the_model_can_do_ends_it() -> None:
    of = Model(500)
    of.asked(1000, 10)
    of.asked(400, 20)
    of.refused.clear()
    of.asked(400, 20)
    assert of.refused == []


def test_nobody_is_sent_away_for_long() -> None:
    of = Model(1)
    of.asked(1000, 8)
    assert of.refused[-1].retry_after == LONGEST_PAUSE


def test_a_number_alone() -> None:
    of = Model(1, QueueOptions(max_requests=20, max_seconds=0))
    of.asked(10, 9.95)
    assert len(of.waiting) == 20
    assert len(of.refused) > 60
    assert 10 <= of.refused[-1].retry_after <= 40


def test_fewer_than_a_few() -> None:
    of = Model(10, QueueOptions(max_requests=3))
    of.asked(1000, 1)
    assert len(of.waiting) <= 3
    assert of.refused


def test_no_burst() -> None:
    of = Model(500, QueueOptions(burst_seconds=0))
    of.asked(1000, 10)
    assert max(of.waits(0)) < 0.8


def test_no_limit_at_all() -> None:
    of = Model(1, QueueOptions(max_requests=0, max_seconds=0))
    of.asked(50_000, 10)
    assert of.refused == []
