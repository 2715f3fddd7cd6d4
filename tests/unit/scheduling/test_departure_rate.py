from nerite.scheduling.load_shedding import DepartureRate

S = 1_000_000_000


def test_nothing_is_known_at_first() -> None:
    pace = DepartureRate()
    assert pace.per_second is None
    pace.note(100, 10 * S)
    assert pace.per_second is None
    pace.note(101, 10 * S + S // 100)
    assert pace.per_second is None, "too early to tell"


def test_those_that_left_over_the_time_that_passed() -> None:
    pace = DepartureRate()
    pace.note(100, 10 * S)
    pace.note(150, 10 * S + S // 2)
    assert pace.per_second == 100.0


def test_what_was_long_ago_is_forgotten() -> None:
    pace = DepartureRate()
    for second in range(10):
        pace.note(1000 * second, second * S)
    for second in range(10, 13):
        pace.note(9000 + 10 * (second - 9), second * S)
    assert pace.per_second == 10.0


def test_a_pause_counts_as_long_as_it_lasts() -> None:
    pace = DepartureRate()
    pace.note(0, 0)
    pace.note(10, S)
    for second in range(2, 11):
        pace.note(10, second * S)
    assert pace.per_second == 1.0
    pace.note(11, 11 * S)
    assert pace.per_second == 0.1


def test_begun_anew() -> None:
    pace = DepartureRate()
    pace.note(0, 0)
    pace.note(10, S)
    pace.forget()
    assert pace.per_second is None
    pace.note(11, 20 * S)
    pace.note(111, 21 * S)
    assert pace.per_second == 100.0
