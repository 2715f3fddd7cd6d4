"""Which finding is the best: the most answers within the limits, and otherwise the nearest to them."""

from __future__ import annotations

import pytest

from nerite.analyze.finding import Figure, Finding
from nerite.analyze.ranking import REFUSED, Limits, best_figure, kept, ranked, score


def finding(*figures: tuple[int, float, float], memory: int = 100, **changes: int) -> Finding:
    return Finding(changes, tuple(Figure(level, rate, p99, p99) for level, rate, p99 in figures), memory)


def test_the_most_answers_within_the_limits() -> None:
    quiet, fast = finding((1, 100.0, 5.0), a=1), finding((1, 50.0, 1.0), (8, 400.0, 30.0), a=2)
    assert ranked([quiet, fast], Limits()) == [fast, quiet]
    assert ranked([quiet, fast], Limits(p99=10)) == [quiet, fast]
    assert best_figure(fast, Limits()).concurrency == 8
    assert best_figure(fast, Limits(p99=10)).concurrency == 1


def test_a_limit_is_kept_where_it_is_reached() -> None:
    assert kept(finding((1, 1.0, 10.0)), Limits(p99=10.0, memory=100))
    assert not kept(finding((1, 1.0, 10.1)), Limits(p99=10.0))
    assert not kept(finding((1, 1.0, 1.0), memory=101), Limits(memory=100))


def test_beyond_the_limits_the_nearest_is_the_best() -> None:
    near, far = finding((1, 1.0, 12.0), a=1), finding((1, 900.0, 40.0), a=2)
    refused = Finding({"a": 3}, refused="no")
    assert ranked([far, refused, near], Limits(p99=10)) == [near, far]
    assert score(refused, Limits(p99=10)) == REFUSED < score(far, Limits(p99=10)) < score(near, Limits(p99=10))


def test_of_equals_the_one_with_fewer_changes() -> None:
    one, two = finding((1, 5.0, 1.0), a=1), finding((1, 5.0, 1.0), a=1, b=2)
    assert ranked([two, one], Limits()) == [one, two]


def test_as_json() -> None:
    whole = finding((1, 5.0, 1.0), (2, 6.0, 2.0), a=1)
    assert Finding.from_json(whole.to_json()) == whole
    with pytest.raises(KeyError):
        Finding.from_json({})
