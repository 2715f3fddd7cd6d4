"""When an event loop stands still, and what is told of it."""

from __future__ import annotations

from nerite.scheduling.stall_detectors import LoopStallDetector, StallKind, StallReport

MS = 1_000_000
LIMIT = 1000 * MS


class Watched:
    """A loop that answers, or does not, every quarter of a second."""

    def __init__(self) -> None:
        self.now = 5 * LIMIT
        self.watch = LoopStallDetector(LIMIT, self.now)

    def run(self, times: int, *, answers: bool = True) -> list[StallReport]:
        news = []
        for _ in range(times):
            if answers:
                self.watch.answered(self.now + 1)
            self.now += self.watch.period
            found = self.watch.check(self.now)
            news += [found] if found is not None else []
        return news


def test_looking_is_bounded() -> None:
    assert LoopStallDetector(1, 0).period == 10 * MS


def test_nothing_happens() -> None:
    assert Watched().run(100) == []


def test_short_stalls_are_no_news() -> None:
    watched = Watched()
    for _ in range(20):
        assert watched.run(3, answers=False) == []
        assert watched.run(1) == []


def test_a_stall_is_told_once_and_when_it_is_over() -> None:
    watched = Watched()
    watched.run(3)
    (told,) = watched.run(100, answers=False)
    assert (told.kind, told.untold) == (StallKind.BLOCKED, 0)
    assert LIMIT < told.nanoseconds <= LIMIT + 2 * watched.watch.period
    (over,) = watched.run(3)
    assert over.kind is StallKind.ENDED
    assert over.nanoseconds == 101 * watched.watch.period


def test_the_next_ones_are_counted_for_a_while() -> None:
    watched = Watched()
    watched.run(8, answers=False)
    watched.run(4)
    for _ in range(3):
        assert watched.run(8, answers=False) == []
        assert watched.run(4) == [], "who was not told of it need not know that it is over"
    watched.run(4 * 60)
    (told,) = watched.run(8, answers=False)
    assert (told.kind, told.untold) == (StallKind.BLOCKED, 3)


def test_one_that_goes_on_when_others_may_be_told_again() -> None:
    watched = Watched()
    watched.run(8, answers=False)
    watched.run(4)
    (told,) = watched.run(4 * 100, answers=False)
    assert (told.kind, told.untold) == (StallKind.BLOCKED, 0)
    assert 50 * LIMIT < told.nanoseconds <= 60 * LIMIT
    (over,) = watched.run(3)
    assert over.kind is StallKind.ENDED


def test_a_process_that_was_stopped_is_no_stall_of_the_loop() -> None:
    watched = Watched()
    watched.run(1)
    watched.now += 30 * LIMIT
    news = watched.watch.check(watched.now)
    assert news == StallReport(StallKind.PROCESS_STALLED, 30 * LIMIT)
    assert watched.run(4) == []


def test_a_process_that_was_stopped_in_a_stall() -> None:
    watched = Watched()
    assert len(watched.run(8, answers=False)) == 1
    watched.now += 30 * LIMIT
    news = watched.watch.check(watched.now)
    assert news is not None and news.kind is StallKind.PROCESS_STALLED, "another kind of news"
    assert watched.run(10) == []
    watched.now += 30 * LIMIT
    assert watched.watch.check(watched.now) is None, "there was news of the kind just now"
