"""Which executions are told of, by how long others took."""

from __future__ import annotations

from nerite.scheduling.stall_detectors import SlowBatchDetector


class Watched:
    """An instance that is looked at every second."""

    def __init__(self) -> None:
        self.watch = SlowBatchDetector(4.0)
        self.now = 100.0
        self.number = 0

    def execute(self, seconds: int) -> list[float]:
        """What is told of one more execution."""
        self.number += 1
        return self.check(self.number, seconds + 1)

    def check(self, number: int | None, times: int) -> list[float]:
        told = []
        for _ in range(times):
            lasted = self.watch.check(number, self.now)
            told += [] if lasted is None else [lasted]
            self.now += 1
        return told


def test_nothing_is_executed() -> None:
    assert Watched().check(None, 100) == []


def test_brief_ones_add_up_to_nothing() -> None:
    watched = Watched()
    assert [watched.execute(3) for _ in range(10)] == [[]] * 10


def test_a_long_one_is_told_once() -> None:
    assert Watched().execute(100) == [4.0]


def test_what_a_model_usually_takes_is_no_news() -> None:
    watched = Watched()
    assert watched.execute(10) == [4.0]
    assert [watched.execute(12) for _ in range(5)] == [[]] * 5
    assert watched.execute(100) == [24.0]


def test_what_came_before_a_pause_counts() -> None:
    watched = Watched()
    watched.execute(10)
    watched.check(None, 50)
    assert watched.execute(15) == []
