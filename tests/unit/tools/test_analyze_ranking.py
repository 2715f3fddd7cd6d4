"""Which finding is the best: the most answers within the limits, and otherwise the nearest to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nerite.tools.analyze.finding import (
    HEADINGS,
    REFUSED,
    AnalyzeHeading,
    Figure,
    Finding,
    Goal,
    combined,
    render,
    verdict,
)
from nerite.tools.bench.noise import half_width
from nerite.tools.bench.provenance import Provenance


def finding(*figures: tuple[int, float, float], memory: int = 100, **changes: int) -> Finding:
    return Finding(changes, tuple(Figure(level, rate, p99, p99) for level, rate, p99 in figures), memory)


def test_the_most_answers_within_the_limits() -> None:
    quiet, fast = finding((1, 100.0, 5.0), a=1), finding((1, 50.0, 1.0), (8, 400.0, 30.0), a=2)
    assert Goal().ranked([quiet, fast]) == [fast, quiet]
    assert Goal(p99=10).ranked([quiet, fast]) == [quiet, fast]
    assert Goal().best_figure(fast).concurrency == 8
    assert Goal(p99=10).best_figure(fast).concurrency == 1


def test_other_objectives() -> None:
    slow, quick = finding((1, 100.0, 5.0), (8, 700.0, 20.0), memory=50, a=1), finding((1, 50.0, 1.0), a=2)
    assert Goal("latency").ranked([slow, quick]) == [quick, slow]
    assert Goal("memory").ranked([slow, quick]) == [slow, quick]
    enough = Goal("latency", rate=80)
    assert enough.ranked([slow, quick]) == [slow, quick]
    assert enough.best_figure(slow).concurrency == 1
    assert not enough.kept(quick)


def test_a_limit_is_kept_where_it_is_reached() -> None:
    assert Goal(p99=10.0, memory=100, rate=1.0).kept(finding((1, 1.0, 10.0)))
    assert not Goal(p99=10.0).kept(finding((1, 1.0, 10.1)))
    assert not Goal(memory=100).kept(finding((1, 1.0, 1.0), memory=101))
    assert not Goal(rate=1.1).kept(finding((1, 1.0, 1.0)))


def test_beyond_the_limits_the_nearest_is_the_best() -> None:
    near, far = finding((1, 1.0, 12.0), a=1), finding((1, 900.0, 40.0), a=2)
    refused = Finding({"a": 3}, refused="no")
    goal = Goal(p99=10)
    assert goal.ranked([far, refused, near]) == [near, far]
    assert goal.score(refused) == REFUSED < goal.score(far) < goal.score(near)


def test_of_equals_the_one_with_fewer_changes() -> None:
    one, two = finding((1, 5.0, 1.0), a=1), finding((1, 5.0, 1.0), a=1, b=2)
    assert Goal().ranked([two, one]) == [one, two]


def test_what_is_as_good_with_fewer_changes_wins() -> None:
    best = finding((1, 100.0, 1.0), a=1, b=2, c=3)
    simple, simpler, worse = finding((1, 99.0, 1.0), a=1, b=2), finding((1, 98.5, 1.0), a=1), finding((1, 97.0, 1.0))
    assert Goal().winners([best, worse, simple, simpler]) == [simpler, best, simple, worse]
    assert Goal("latency").winners([finding((1, 9.0, 1.0), a=1), finding((1, 9.0, 1.01))])[0].changes == {}
    # What does not keep to the limits is not as good.
    kept, exceeding = finding((1, 100.0, 9.0), a=1), finding((1, 100.0, 11.0))
    assert Goal(p99=10).winners([exceeding, kept])[0] is kept


def test_who_wins_was_measured_again_where_some_were() -> None:
    lucky, sure, now = finding((1, 120.0, 1.0), a=1), finding((1, 100.0, 1.0), a=2), finding((1, 50.0, 1.0))
    assert Goal().winners([lucky, replace(sure, turns=3), replace(now, turns=3)])[0].changes == {"a": 2}
    # Those that no longer keep to the limits do not win, however often they were measured.
    exceeding = finding((1, 100.0, 11.0), a=2)
    assert Goal(p99=10).winners([lucky, replace(exceeding, turns=3)])[0] == lucky


def test_contenders_are_few_and_near_the_best() -> None:
    found = [finding((1, 100.0 - 4 * at, 1.0), a=at) for at in range(5)]
    assert Goal().contenders(found) == found[:3]
    many = [finding((1, 100.0, 1.0), a=at) for at in range(9)]
    assert len(Goal().contenders(many)) == 3


def test_several_turns_are_medians_and_one_refusal_is_enough() -> None:
    first = finding((1, 10.0, 1.0), (8, 90.0, 2.0), memory=5, a=1)
    turns = [first, finding((8, 60.0, 3.0), memory=7, a=1), finding((8, 70.0, 9.0), memory=9, a=1)]
    together = combined(turns)
    low, high = together.figures
    assert (low, replace(high, error=0.0)) == (Figure(1, 10.0, 1.0, 1.0), Figure(8, 70.0, 3.0, 3.0))
    assert high.error == pytest.approx(half_width([90.0, 60.0, 70.0]))
    assert (together.memory, together.turns, together.changes) == (7, 3, {"a": 1})
    assert combined([first, Finding({"a": 1}, refused="died")]).refused == "died"


def test_several_models_count_by_their_geometric_mean() -> None:
    figure = Figure.of_several({"a": Figure(8, 100.0, 1.0, 2.0, 1), "b": Figure(8, 4.0, 3.0, 5.0)})
    assert figure.rate == pytest.approx(20.0)
    assert figure == Figure(8, figure.rate, 3.0, 5.0, 1, {"a": 100.0, "b": 4.0})
    both = Finding({}, (figure,))
    assert Goal(rate=4.0, p99=5.0).kept(both)
    assert not Goal(rate=4.1).kept(both)


def test_as_json() -> None:
    whole = finding((1, 5.0, 1.0), (2, 6.0, 2.0), a=1)
    assert Finding.from_json(whole.to_json()) == whole
    with pytest.raises(KeyError):
        Finding.from_json({})


def test_the_error_of_several_models_is_that_of_their_mean() -> None:
    figure = Figure.of_several({name: Figure(8, 100.0, 1.0, 2.0, error=10.0) for name in "ab"})
    assert figure.rate == pytest.approx(100) and figure.error == pytest.approx(10 / 2**0.5)


def test_the_current_configuration_may_be_the_best() -> None:
    now, near, worse = finding((8, 99.0, 1.0)), finding((8, 100.0, 1.0), a=1), finding((8, 50.0, 1.0), a=2)
    said = "The current configuration is the best of 3: no other is better by more than 2%."
    assert verdict([now, near, worse], Goal()) == said
    heading = AnalyzeHeading("m", (), Provenance.now("nerite analyze m"))
    page = render(heading, [now, near, worse], Goal(), [HEADINGS], "")
    assert said in page and "with the current configuration" not in page and "nerite analyze m" in page
    assert verdict([worse, near, now], Goal(p99=0.5)) == "No configuration meets the limits."
    assert "1.98 times the throughput" in verdict([finding((8, 50.5, 1.0)), near], Goal())
