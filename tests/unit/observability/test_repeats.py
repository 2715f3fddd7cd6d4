"""Lines that repeat themselves: which are written, and what is said of the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nerite.observability.log import BURST, SECOND, SUMMARY_INTERVAL, RepeatLimiter
from nerite.observability.log_records import LogLevel, LogRecord

MS = 1_000_000


def line(message: str = "it failed", **extras: object) -> LogRecord:
    return LogRecord(LogLevel.ERROR, message, "guard.py", 35, 1, 0, extras=extras)


def test_a_few_are_written_and_the_rest_is_told_with_the_count() -> None:
    repeats = RepeatLimiter()
    written = [repeats.admits(line("it failed\nTraceback", instance="m_0"), at * MS) for at in range(1000)]
    assert (written[:BURST], any(written[BURST:])) == ([True] * BURST, False)
    assert repeats.next_time() == SECOND
    assert repeats.due(SECOND - 1) == []
    (told,) = repeats.due(SECOND)
    assert told.message == "it failed (repeated 990 times in 1 s)"
    assert told.extras == {"instance": "m_0", "repeated": 990}
    assert (repeats.next_time(), repeats.due(SUMMARY_INTERVAL)) == (None, [])


def test_while_it_goes_on_there_is_one_now_and_then_and_afterwards_it_begins_anew() -> None:
    repeats = RepeatLimiter()
    for at in range(30):
        repeats.admits(line(), at * MS)
    assert len(repeats.due(SECOND)) == 1
    assert not repeats.admits(line(), SECOND + MS)
    assert not repeats.admits(line(), SECOND + 2 * MS)
    assert repeats.next_time() == SECOND + SUMMARY_INTERVAL
    (told,) = repeats.due(SECOND + SUMMARY_INTERVAL)
    assert told.message == "it failed (repeated 2 times in 10 s)"
    assert not repeats.admits(line(), SECOND + 2 * SUMMARY_INTERVAL - 1)
    (told,) = repeats.due(SECOND + 2 * SUMMARY_INTERVAL)
    assert told.message == "it failed (repeated once in 10 s)"
    assert repeats.admits(line(), SECOND + 3 * SUMMARY_INTERVAL), "it had stopped"


def test_what_comes_now_and_then_is_always_written() -> None:
    repeats = RepeatLimiter()
    assert all(repeats.admits(line(), at * SECOND // 5) for at in range(100))
    assert repeats.due(100 * SECOND) == []


def test_others_are_not_held_back() -> None:
    repeats = RepeatLimiter()
    for _ in range(BURST + 1):
        repeats.admits(line(instance="a"), 0)
    assert not repeats.admits(line(instance="a"), 0)
    assert repeats.admits(line(instance="b"), 0)
    assert repeats.admits(line("it failed again", instance="a"), 0)


def test_the_ids_of_the_requests() -> None:
    repeats = RepeatLimiter()
    for number in range(BURST + 20):
        repeats.admits(line(request_id=f"r{number}"), 0)
    (told,) = repeats.due(SECOND)
    assert told.extras["request_id"] == "r10, r11, r12, r13, r14, r15, r16, r17, …"
    for number in range(2):
        repeats.admits(line(request_id=f"s{number}"), SECOND)
    (told,) = repeats.due(SECOND + SUMMARY_INTERVAL)
    assert told.extras["request_id"] == "s0, s1"


def test_no_more_are_watched_than_there_is_room_for() -> None:
    repeats = RepeatLimiter()
    for number in range(5000):
        assert repeats.admits(line(f"{number}"), 0)
    assert all(repeats.admits(line("4999"), 0) for _ in range(100))
    assert repeats.admits(line("new"), SECOND)
    assert len(repeats.lines) == 1, "those of before are forgotten"


@given(st.lists(st.tuples(st.integers(0, 3 * SECOND), st.sampled_from("ab"))))
def test_every_line_is_written_or_counted(gaps: list[tuple[int, str]]) -> None:
    repeats, now, seen = RepeatLimiter(), 0, 0
    for gap, message in gaps:
        for _ in range(7):
            due = repeats.next_time()
            if due is not None and due <= now:
                seen += sum(int(str(told.extras["repeated"])) for told in repeats.due(now))
            seen += repeats.admits(line(message), now)
        now += gap
    seen += sum(int(str(told.extras["repeated"])) for told in repeats.due(now + SUMMARY_INTERVAL))
    assert seen == 7 * len(gaps)
