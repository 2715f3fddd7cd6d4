"""Which front gets a new connection, and which one is to pass some on, with loads of the test's own."""

from __future__ import annotations

import pytest

from nerite.fronts.balancer import FrontBalancer, FrontLoad, Move


class Fronts:
    """Fronts whose requests per second a test sets. A measurement is a second."""

    def __init__(self, *rates: float | None) -> None:
        self.rates = list(rates)
        self.balancer = FrontBalancer(len(rates))
        self._calls = [0.0] * len(rates)

    def loads(self) -> list[FrontLoad | None]:
        return [
            None if rate is None else FrontLoad(round(calls), 0, 2)
            for rate, calls in zip(self.rates, self._calls, strict=True)
        ]

    def measure(self, times: int = 1) -> list[Move | None]:
        found = []
        for _ in range(times):
            for index, rate in enumerate(self.rates):
                self._calls[index] += rate or 0
            found.append(self.balancer.measured(self.loads(), 1.0))
        return found

    def moved(self, times: int) -> list[int | None]:
        """Measure; return the front of each move."""
        return [move and move.front for move in self.measure(times)]

    def replace(self, index: int) -> None:
        self._calls[index] = 0
        self.balancer.restarted(index)


def idle(*connections: int | None) -> list[FrontLoad | None]:
    return [None if count is None else FrontLoad(0, 0, count) for count in connections]


def test_the_front_with_the_fewest_connections_is_chosen_until_loads_are_known() -> None:
    balancer = FrontBalancer(3)
    assert balancer.choose(idle(2, 1, 3)) == 1
    assert balancer.choose(idle(2, None, 3)) == 0
    assert balancer.choose([FrontLoad(0, 2, 1), FrontLoad(0, 1, 1), FrontLoad(0, 3, 1)]) == 1


def test_no_front_is_chosen_when_there_is_none() -> None:
    assert FrontBalancer(2).choose(idle(None, None)) is None


def test_the_front_with_the_fewest_requests_is_chosen_whatever_its_connections() -> None:
    fronts = Fronts(1000, 200, 600)
    fronts.measure(8)
    balancer = fronts.balancer
    loads = [FrontLoad(0, 0, 1), FrontLoad(0, 0, 50), FrontLoad(0, 0, 1)]
    assert balancer.choose(loads) == 1


def test_a_new_connection_counts_as_an_average_one_until_the_next_measurement() -> None:
    fronts = Fronts(300, 100)
    fronts.measure(12)
    # 100 requests per second and connection: the second front gets two, and then both are equal.
    chosen = [fronts.balancer.choose([FrontLoad(0, 0, 1), FrontLoad(0, 0, 3 + 4 * (turn > 1))]) for turn in range(3)]
    assert chosen[:2] == [1, 1]
    fronts.measure()
    assert fronts.balancer.choose(fronts.loads()) == 1


def test_a_move_needs_three_measurements_in_a_row() -> None:
    fronts = Fronts(500, 500)
    fronts.measure(8)
    fronts.rates = [2000, 500]
    assert fronts.moved(2) == [None, None]
    fronts.rates = [500, 2000]  # the difference was of the moment
    assert fronts.moved(4)[0] is None
    fronts = Fronts(2000, 500)
    assert fronts.moved(3) == [None, None, 0]


def test_five_measurements_pass_after_a_move() -> None:
    fronts = Fronts(2000, 500)
    assert fronts.moved(11) == [None, None, 0, *[None] * 5, None, None, 0]


def test_a_move_tells_what_is_too_much_and_what_would_be_no_gain() -> None:
    fronts = Fronts(900, 300, 0)
    fronts.measure(20)
    moves = [move for move in fronts.measure(8) if move]
    assert len(moves) == 1
    assert moves[0].front == 0
    assert moves[0].share == pytest.approx(500 / 900, rel=0.01)
    assert moves[0].most == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("rates", [(90, 0), (1000, 900), (1000, 1000, 700), (5000,), (0, 0)])
def test_differences_that_do_not_matter_move_nothing(rates: tuple[float, ...]) -> None:
    assert Fronts(*rates).moved(30) == [None] * 30


def test_several_busy_fronts_take_turns() -> None:
    """The busiest may have one connection alone, which must not keep the others from passing on theirs."""
    fronts = Fronts(1000, 800, 0, 0)
    assert [each for each in fronts.moved(32) if each is not None] == [0, 1, 0, 1]


def test_an_absent_front_neither_moves_nor_counts_for_the_mean() -> None:
    fronts = Fronts(1000, 1000, 1000)
    fronts.measure(8)
    fronts.rates = [None, 1000, 1000]
    assert fronts.moved(20) == [None] * 20
    fronts.rates = [None, 2000, 500]
    assert {each for each in fronts.moved(20) if each is not None} == {1}


def test_a_restarted_front_begins_anew() -> None:
    fronts = Fronts(1000, 1000)
    fronts.measure(8)
    fronts.replace(0)
    assert fronts.balancer.rates[0] == 0
    fronts.measure(2)
    assert 500 <= fronts.balancer.rates[0] <= 1000
    assert fronts.balancer.choose(fronts.loads()) == 0
