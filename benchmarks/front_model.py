"""Requests per second by number of front processes and of processors: a closed queueing network, event by event.

    python benchmarks/front_model.py [--clients C] [--workers W] [--json FILE --load NAME] [--TIME MICROSECONDS ...]

Clients send a request, and the next one when it is answered. A request passes a front, the core, a worker, the core and
the front. All processes share P processors, which they get in turns of at most ``--turn`` microseconds. A process takes
all messages that wait for it when it wakes up, and each wake-up costs something once; what it makes of them leaves as
one group. So batches become larger as load grows, and a wake-up costs less for a request.

Times are those of one request, in microseconds: of a front (``--front-in``, ``--front-out``), the core (``--core-in``,
``--core-out``), a worker (``--worker``), and of a wake-up (``--wake``). --json takes them from the file that
`benchmarks/fronts.py --json` writes, for the load whose name begins with --load: half of a process's time is that of a
request, half that of its answer. Its times include wake-ups, so --wake is taken out of them as often as the process
slept. The last column of the second table is the bound without queues: min(N / front, W / worker, 1 / core,
P / total).
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

PROCESSORS: Final = (4, 8, 16, 32, 64)
FRONTS: Final = tuple(range(1, 17))
_WARM_UP: Final = 0.2
"""Part of the simulated time that does not count."""


class ServiceTimes(NamedTuple):
    """Microseconds of processor time."""

    front_in: float = 9.0
    front_out: float = 7.0
    core_in: float = 3.0
    core_out: float = 3.0
    worker: float = 4.0
    wake: float = 4.0
    """Of each wake-up of a process: system calls, and a turn of its loop."""

    @property
    def front(self) -> float:
        """Of a front for a request."""
        return self.front_in + self.front_out

    @property
    def core(self) -> float:
        """Of the core for a request."""
        return self.core_in + self.core_out

    @property
    def total(self) -> float:
        """Of all processes for a request, without wake-ups."""
        return self.front + self.core + self.worker


class Network(NamedTuple):
    """What is simulated."""

    clients: int
    fronts: int
    workers: int
    processors: int
    times: ServiceTimes
    wire: float = 30.0
    """Mean of the microseconds from an answer to the next request of the client, on the wire and in the client."""
    turn: float = 3000.0
    """Microseconds after which a process lets another one have its processor."""


class Outcome(NamedTuple):
    """Figures of a simulation."""

    rate: float
    """Requests a second."""
    core: float
    """Share of one processor that the core had."""
    batch: float
    """Messages of the core per wake-up."""


def bound(network: Network) -> float:
    """Return the requests a second that no queueing can exceed."""
    times = network.times
    per_microsecond = min(
        network.fronts / times.front,
        network.workers / times.worker,
        1 / times.core,
        network.processors / times.total,
        network.clients / (times.total + network.wire),
    )
    return per_microsecond * 1e6


class Message(NamedTuple):
    """A request on its way, or its answer."""

    client: int
    answer: bool


@dataclass
class Process:
    """One process: what waits for it, and what it works on."""

    request: float
    """Microseconds for a request."""
    response: float
    """Microseconds for an answer."""
    waiting: deque[Message] = field(default_factory=deque)
    taken: list[Message] = field(default_factory=list)
    """What it took when it woke up."""
    left: float = 0.0
    """Microseconds until it is done with that."""
    queued: bool = False
    """It runs, or waits for a processor."""
    used: float = 0.0
    messages: int = 0
    wakes: int = 0

    def wake(self, cost: float) -> None:
        """Take all messages that wait."""
        self.taken = list(self.waiting)
        self.waiting.clear()
        self.left = cost + sum(self.response if message.answer else self.request for message in self.taken)
        self.messages += len(self.taken)
        self.wakes += 1


class Simulation:
    """Runs a network. Times in microseconds. Only the time on the wire is random: exponential, from a seed."""

    def __init__(self, network: Network, seed: int = 1) -> None:
        times = network.times
        self._network = network
        self._chance = random.Random(seed)
        self._fronts = [Process(times.front_in, times.front_out) for _ in range(network.fronts)]
        self._core = Process(times.core_in, times.core_out)
        self._workers = [Process(times.worker, times.worker) for _ in range(network.workers)]
        self._kinds = {id(self._core): "core"} | {id(each): "front" for each in self._fronts}
        self._ready: deque[Process] = deque()
        self._free = network.processors
        self._events: list[tuple[float, int, Process | int, float]] = []
        """When; number; a process whose turn ends, or a client that asks; and how long the turn was."""
        self._number = 0
        self._next_worker = 0
        self._now = 0.0
        self._answered = 0

    def run(self, seconds: float) -> Outcome:
        """Simulate for a time; return the figures of its later part."""
        network = self._network
        for client in range(network.clients):
            self._ask_later(client)
        begin, end = seconds * 1e6 * _WARM_UP, seconds * 1e6
        marks = self._run_until(begin)
        now = self._run_until(end)
        answered, used, messages, wakes = (late - early for late, early in zip(now, marks, strict=True))
        passed = (end - begin) / 1e6
        return Outcome(answered / passed, used / (end - begin), messages / wakes if wakes else 0.0)

    def _run_until(self, end: float) -> tuple[float, float, float, float]:
        while self._events and self._events[0][0] <= end:
            self._now, _, subject, turn = heapq.heappop(self._events)
            if isinstance(subject, int):
                self._send(self._fronts[subject % len(self._fronts)], Message(subject, False))
            else:
                self._turn_ended(subject, turn)
            self._give_processors()
        return self._answered, self._core.used, self._core.messages, self._core.wakes

    def _later(self, delay: float, subject: Process | int, turn: float) -> None:
        self._number += 1
        heapq.heappush(self._events, (self._now + delay, self._number, subject, turn))

    def _ask_later(self, client: int) -> None:
        self._later(self._chance.expovariate(1 / self._network.wire), client, 0.0)

    def _send(self, process: Process, message: Message) -> None:
        process.waiting.append(message)
        if not process.queued:
            process.queued = True
            self._ready.append(process)

    def _give_processors(self) -> None:
        while self._free and self._ready:
            process = self._ready.popleft()
            if not process.taken:
                process.wake(self._network.times.wake)
            self._free -= 1
            turn = min(process.left, self._network.turn)
            self._later(turn, process, turn)

    def _turn_ended(self, process: Process, turn: float) -> None:
        self._free += 1
        process.used += turn
        process.left -= turn
        if process.left <= 1e-9:
            taken, process.taken = process.taken, []
            for message in taken:
                self._pass_on(process, message)
        if process.taken or process.waiting:
            self._ready.append(process)
        else:
            process.queued = False

    def _pass_on(self, process: Process, message: Message) -> None:
        """Send a message to where it goes from a process."""
        kind = self._kinds.get(id(process), "worker")
        if kind == "worker":
            self._send(self._core, message._replace(answer=True))
        elif kind == "front" and message.answer:
            self._answered += 1
            self._ask_later(message.client)
        elif kind == "front":
            self._send(self._core, message)
        elif message.answer:
            self._send(self._fronts[message.client % len(self._fronts)], message)
        else:
            self._next_worker = (self._next_worker + 1) % len(self._workers)
            self._send(self._workers[self._next_worker], message)


def from_table(rows: Sequence[dict[str, float]], load: str, wake: float) -> ServiceTimes:
    """Return the times of the row of a load with most fronts. Raises ``ValueError`` if there is none."""
    found = [row for row in rows if str(row["load"]).startswith(load) and row["processes"] > 1]
    if not found:
        raise ValueError(f"no load with fronts begins with {load!r}")
    row = max(found, key=lambda each: each["processes"])

    def half(name: str) -> float:
        return max((row[name] - wake * row[f"{name}_sleeps"]) / 2, 0.1)

    return ServiceTimes(half("fronts"), half("fronts"), half("core"), half("core"), 2 * half("others"), wake)


def tables(template: Network, seconds: float) -> str:
    """Return the tables for all numbers of processors and fronts."""
    text = f"| processors | {' | '.join(map(str, FRONTS))} |\n|---|{'---|' * len(FRONTS)}\n"
    best = "| processors | best number of fronts | requests/s | share of the core | messages a wake-up | bound |\n"
    best += "|---|---|---|---|---|---|\n"
    for processors in PROCESSORS:
        networks = [template._replace(processors=processors, fronts=fronts) for fronts in FRONTS]
        outcomes = [Simulation(network).run(seconds) for network in networks]
        highest = max(outcome.rate for outcome in outcomes)
        # The least number that is within 2 % of the best.
        place = next(at for at, outcome in enumerate(outcomes) if outcome.rate >= 0.98 * highest)
        chosen = outcomes[place]
        text += f"| {processors} | {' | '.join(f'{outcome.rate:,.0f}' for outcome in outcomes)} |\n"
        best += f"| {processors} | {FRONTS[place]} | {chosen.rate:,.0f} | {chosen.core:.0%} | {chosen.batch:.1f} "
        best += f"| {bound(networks[place]):,.0f} |\n"
    return f"{text}\n{best}"


def main() -> None:
    """Read the times, simulate, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in ServiceTimes()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default, help="default: %(default)g")
    parser.add_argument("--clients", type=int, default=256, help="requests at a time (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--wire", type=float, default=30.0, help="default: %(default)g")
    parser.add_argument("--turn", type=float, default=3000.0, help="default: %(default)g")
    parser.add_argument("--seconds", type=float, default=0.2, help="of simulated time (default: %(default)g)")
    parser.add_argument("--json", type=Path, help="what fronts.py has written")
    parser.add_argument("--load", default="HTTP, binary, 64", help="a load of that file (default: %(default)s)")
    options = parser.parse_args()
    times = ServiceTimes(*(getattr(options, name) for name in ServiceTimes._fields))
    if options.json:
        times = from_table(json.loads(options.json.read_text()), options.load, options.wake)
    print("Microseconds: " + ", ".join(f"{name} {value:.1f}" for name, value in times._asdict().items()) + "\n")
    network = Network(options.clients, 1, options.workers, 1, times, options.wire, options.turn)
    print(tables(network, options.seconds))


if __name__ == "__main__":
    main()
