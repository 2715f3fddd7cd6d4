"""Which connections a front passes on, and where they end up after a while, in simulated seconds."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest

from doubles import FakeLoop
from nerite.fronts.balancer import FrontBalancer, FrontLoad
from nerite.fronts.connection_retirement import ConnectionRetirement, choose_connections
from nerite.transports.limits import ConnectionTable


def chosen(rates: list[float], wanted: float, most: float) -> list[float]:
    found = choose_connections(dict(enumerate(rates)), wanted, most)
    assert len(set(found)) == len(found)
    return sorted((rates[each] for each in found), reverse=True)


@pytest.mark.parametrize(
    ("rates", "wanted", "most", "expected"),
    [
        ([30, 10], 20, 40, [10]),
        ([50, 25, 25], 45, 100, [25, 25]),
        ([60, 50], 50, 100, [50]),
        ([50, 40], 30, 60, [40]),  # 50 and 70 are better than 90 and 30
        ([100, 5], 47.5, 105, [5]),
        ([100], 50, 100, []),  # it would be as busy elsewhere
        ([100, 0, 0], 50, 100, []),
        ([], 50, 100, []),
        ([10, 10], 0, 0, []),
        ([80, 7], 20, 30, [7]),
        ([9, 8, 7, 6], 13, 26, [7, 6]),
    ],
)
def test_the_choice_comes_closest(rates: list[float], wanted: float, most: float, expected: list[float]) -> None:
    found = chosen(rates, wanted, most)
    assert sum(found) == sum(expected)
    assert len(found) <= len(expected)


def test_a_thousand_small_connections() -> None:
    rates = [1 + each % 3 for each in range(1000)]
    found = chosen(rates, 500, 1000)
    assert 497 <= sum(found) <= 500
    assert 3 in found


class Retirable:
    busy = True

    def __init__(self) -> None:
        self.served = 0
        self.drained = 0

    def retire(self) -> None:
        raise AssertionError("the connection is in use")

    def drain(self) -> None:
        self.drained += 1


def retirement_of(*rates: int) -> tuple[FakeLoop, ConnectionRetirement, list[Retirable], Any]:
    """A front whose connections have these requests per second; the function that is returned makes a second pass."""
    loop: Any = FakeLoop()
    table = ConnectionTable(0, 0)
    connections = [Retirable() for _ in rates]
    for each in connections:
        each.served = 10_000
        table.add(each, 0)

    def second() -> None:
        for each, rate in zip(connections, rates, strict=True):
            each.served += rate
        loop.advance(1_000_000_000)

    return loop, ConnectionRetirement(table, loop), connections, second


def test_connections_are_measured_for_a_second_and_told_once() -> None:
    loop, retirement, connections, second = retirement_of(300, 200, 100)
    retirement.begin(1 / 3, 1.0)
    retirement.begin(1.0, 1.0)  # the first is under way
    assert [each.drained for each in connections] == [0, 0, 0]
    second()
    assert [each.drained for each in connections] == [0, 1, 0]
    assert loop.next_timer is None
    # The connection goes on, with a stream: others have to go.
    retirement.begin(1 / 2, 1.0)
    second()
    assert [each.drained for each in connections] == [1, 1, 0]


def test_a_connection_that_came_meanwhile_stays() -> None:
    loop: Any = FakeLoop()
    table = ConnectionTable(0, 0)
    retirement = ConnectionRetirement(table, loop)
    retirement.begin(1.0, 1.0)
    late = Retirable()
    late.served = 5000
    table.add(late, 0)
    loop.advance(1_000_000_000)
    assert late.drained == 0


class Simulation:
    """Clients with one connection each, which they open anew as soon as they are told to."""

    def __init__(self, fronts: int, rates: list[float], placed: list[int]) -> None:
        self.rates = rates
        self.placed = placed
        self.balancer = FrontBalancer(fronts)
        self.calls = [0.0] * fronts
        self.moves: list[tuple[int, int]] = []
        """Second and client."""

    def loads(self) -> list[FrontLoad | None]:
        return [FrontLoad(round(calls), 0, self.placed.count(front)) for front, calls in enumerate(self.calls)]

    def run(self, seconds: int, noise: random.Random | None = None) -> None:
        for second in range(seconds):
            for front, rate in zip(self.placed, self.rates, strict=True):
                self.calls[front] += rate * (noise.uniform(0.95, 1.05) if noise else 1)
            move = self.balancer.measured(self.loads(), 1.0)
            if move is None:
                continue
            own = {client: rate for client, rate in enumerate(self.rates) if self.placed[client] == move.front}
            total = sum(own.values())
            for client in choose_connections(own, move.share * total, move.most * total):
                self.moves.append((second, client))
                self.placed[client] = -1
                front = self.balancer.choose(self.loads())
                assert front is not None
                self.placed[client] = front

    @property
    def imbalance(self) -> float:
        """The busiest front in proportion to the mean."""
        return imbalance_of(self.rates, self.placed, len(self.calls))

    @property
    def no_move_helps(self) -> bool:
        """Whether any connection of the busiest front would make another one as busy: only a swap could help."""
        loads = [0.0] * len(self.calls)
        for rate, front in zip(self.rates, self.placed, strict=True):
            loads[front] += rate
        busiest = loads.index(max(loads))
        own = [rate for rate, front in zip(self.rates, self.placed, strict=True) if front == busiest]
        return min(loads) + min(own) >= max(loads)


def imbalance_of(rates: list[float], placed: Any, fronts: int) -> float:
    loads = [0.0] * fronts
    for rate, front in zip(rates, placed, strict=True):
        loads[front] += rate
    return max(loads) / (sum(loads) / fronts)


EIGHT = {
    "equal": [500.0] * 8,
    "falling": [800.0, 700, 600, 500, 400, 300, 200, 100],
    "two large": [900.0, 900, 100, 100, 100, 100, 100, 100],
    "one large": [3000.0, 100, 100, 100, 100, 100, 100, 100],
    "powers": [1280.0, 640, 320, 160, 80, 40, 20, 10],
    "close": [530.0, 510, 490, 470, 450, 430, 410, 390],
}


@pytest.mark.parametrize("start", ["first", "spread", "halves"])
@pytest.mark.parametrize("fronts", [2, 4])
@pytest.mark.parametrize("kind", EIGHT)
def test_eight_connections_spread_over_the_fronts(kind: str, fronts: int, start: str) -> None:
    rates = EIGHT[kind]
    placed = {
        "first": [0] * 8,
        "spread": [each % fronts for each in range(8)],
        "halves": [each // 4 for each in range(8)],
    }
    simulation = Simulation(fronts, rates, placed[start])
    simulation.run(150)
    assert simulation.imbalance <= max(1.25 if simulation.no_move_helps else 1.2, 1.1 * best_of(kind, fronts))
    settled = len(simulation.moves)
    simulation.run(300)
    assert len(simulation.moves) == settled, "connections go back and forth"


@cache
def best_of(kind: str, fronts: int) -> float:
    """The least imbalance of any placing."""
    return min(imbalance_of(EIGHT[kind], placed, fronts) for placed in product((0,), *[range(fronts)] * 7))


@pytest.mark.parametrize("seed", range(20))
def test_loads_that_vary_do_not_make_connections_go_back_and_forth(seed: int) -> None:
    rng = random.Random(seed)
    fronts = rng.choice((2, 3, 4, 8))
    rates = [rng.choice((10, 100, 300, 1000)) * rng.uniform(0.5, 1.5) for _ in range(rng.choice((8, 30, 200)))]
    simulation = Simulation(fronts, rates, [rng.randrange(fronts) for _ in rates])
    simulation.run(200, rng)
    before, settled = simulation.imbalance, len(simulation.moves)
    simulation.run(400, rng)
    assert len(simulation.moves) - settled <= 2
    assert simulation.imbalance <= max(1.2, before)


def test_each_move_makes_the_busiest_front_less_busy() -> None:
    simulation = Simulation(2, EIGHT["falling"], [0] * 8)
    seen = []
    for _ in range(100):
        simulation.run(1)
        seen.append(simulation.imbalance)
    assert all(later <= earlier for earlier, later in pairwise(seen))
    assert seen[-1] < seen[0]
