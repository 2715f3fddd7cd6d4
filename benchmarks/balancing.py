"""Hit rates of prefix caches and times to the first token, by the way in which members are chosen: simulated.

    python benchmarks/balancing.py [--seconds N] [--only WORD] [--print]

Members have a prefix cache of blocks with LRU, continuous batching and chunked prefill (``balancing_members.py``).
Requests arrive in an open loop, the same for all ways to choose. The last table is measured, not simulated: the
processor time of a decision.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from balancing_choosers import CHOOSERS, Chooser
from balancing_members import SimulatedMember, SimulatedRequest
from page import command_line, publish

from nerite.balancing.member import AttemptEnd, Member, RoutedRequest
from nerite.balancing.pool_balancer import Pick, PoolBalancer
from nerite.balancing.prefix_hashes import prefix_hashes, prefix_tokens

WARM_UP: Final = 40.0
"""Seconds at the beginning whose requests do not count."""
NOTICED_AFTER: Final = 2.0
"""Seconds until a health check finds a dead member."""
MEMBERS: Final = 6
ROUNDS: Final = 20_000
"""Decisions whose time is measured."""
BETWEEN_NS: Final = 500_000
"""Time between them: 2,000 requests a second."""
CACHED_TOKENS: Final = 100_000
"""Of each member's cache."""


class Scenario(NamedTuple):
    """What comes, and what happens to the members."""

    name: str
    about: str
    prompts: Callable[[random.Random], Iterator[tuple[bytes, int]]]
    """Yields prompts with the lengths of their answers."""
    rate: float
    """Requests a second."""
    slowness: float = 1.0
    """Of the first member."""
    killed: bool = False
    """The first member dies in the middle."""
    direct: float = 0.0
    """Requests a second that the first member gets past the router."""
    routers: int = 1
    """Each gets an equal part of the requests, and knows nothing of the others."""


def words(kind: str, number: int, tokens: int) -> bytes:
    """Text that is different from the beginning on for each kind and number."""
    return (f"{kind} {number} " * (tokens * 4 // (len(kind) + 3) + 1)).encode()[: tokens * 4]


def answer(chance: random.Random) -> int:
    """Return the length of an answer."""
    return max(8, min(1000, round(chance.lognormvariate(4.7, 0.8))))


def distinct(chance: random.Random) -> Iterator[tuple[bytes, int]]:
    """Yield prompts that share nothing."""
    number = 0
    while True:
        number += 1
        yield words("prompt", number, max(50, min(6000, round(chance.lognormvariate(6.9, 0.8))))), answer(chance)


def documents(chance: random.Random, hot: float = 0.0) -> Iterator[tuple[bytes, int]]:
    """Questions on 60 documents of 6,000 tokens, some of which are asked for more often."""
    weights = [1 / rank**0.7 for rank in range(1, 61)]
    number = 0
    while True:
        number += 1
        which = 0 if chance.random() < hot else chance.choices(range(60), weights)[0]
        yield words("system", 0, 500) + words("document", which, 6000) + words("question", number, 100), answer(chance)


def hot_documents(chance: random.Random) -> Iterator[tuple[bytes, int]]:
    """Yield questions of which half are on one document."""
    return documents(chance, 0.5)


def conversations(chance: random.Random) -> Iterator[tuple[bytes, int]]:
    """Turns of 120 conversations, each with all that was said before. One that gets too long is replaced."""
    said = [b""] * 120
    names = list(range(120))
    number = 120
    while True:
        which = chance.randrange(120)
        if not said[which] or len(said[which]) > 24_000:
            number += 1
            names[which] = number
            said[which] = words("system", 0, 300)
        said[which] += words(f"turn {len(said[which])} of", names[which], 150)
        length = answer(chance)
        yield said[which], length
        said[which] += words(f"answer {len(said[which])} of", names[which], length)


SCENARIOS: Final = (
    Scenario("distinct prompts", "nothing is shared; 1,000 tokens in the median", distinct, 24.0),
    Scenario("shared documents", "60 documents of 6,000 tokens, of which a member caches 16", documents, 8.0),
    Scenario("shared documents, more load", "as before", documents, 24.0),
    Scenario("conversations", "120 at a time, up to 6,000 tokens", conversations, 16.0),
    Scenario("hot document", "half of all requests ask for one document", hot_documents, 14.0),
    Scenario("slow member", "shared documents; one of six members has a quarter of the speed", documents, 7.0, 4.0),
    Scenario("killed member", "shared documents; one dies, found after 2 s", documents, 7.0, killed=True),
    Scenario("load past the router", "distinct; one member gets 3 requests/s directly", distinct, 18.0, direct=3.0),
    Scenario("three routers", "shared documents; no router knows of the others", documents, 8.0, routers=3),
    Scenario("three routers, more load", "as before", documents, 18.0, routers=3),
)


class Result(NamedTuple):
    """Of one run."""

    hit_rate: float
    ttft: np.ndarray
    """Seconds."""
    failed: int
    unanswered: int


class Simulation:
    """A run of one scenario with one way to choose."""

    def __init__(self, scenario: Scenario, make: Callable[[list[str], int], Chooser], seconds: float) -> None:
        self.scenario = scenario
        self.members = {
            f"m{number}": SimulatedMember(f"m{number}", CACHED_TOKENS, 1.0 if number else scenario.slowness)
            for number in range(MEMBERS)
        }
        self.choosers = [make(list(self.members), seed) for seed in range(scenario.routers)]
        self.requests: list[SimulatedRequest] = []
        self.end = seconds + WARM_UP
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._chooser: dict[int, Chooser] = {}

    def at(self, when: float, event: Callable[[float], None]) -> None:
        """Call ``event`` at this time."""
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))

    def run(self) -> Result:
        """Play the scenario."""
        chance = random.Random(f"{self.scenario.name}")
        prompts = self.scenario.prompts(chance)
        now = 0.0
        while (now := now + chance.expovariate(self.scenario.rate)) < self.end:
            prompt, length = next(prompts)
            request = SimulatedRequest(prompt, length, now)
            self.requests.append(request)
            chooser = self.choosers[len(self.requests) % len(self.choosers)]
            self.at(now, partial(self._send, request, chooser))
        if self.scenario.direct:
            self._add_direct_requests(random.Random("direct"))
        if self.scenario.killed:
            self.at(self.end / 2, self._kill)
        while self._events and self._events[0][0] < self.end + 60:
            when, _, event = heapq.heappop(self._events)
            event(when)
        counted = [each for each in self.requests if each.arrived >= WARM_UP]
        answered = [each for each in counted if not math.isinf(each.first)]
        return Result(
            sum(each.cached for each in answered) / sum(each.tokens for each in answered),
            np.array([each.first - each.arrived for each in answered]),
            sum(each.failed for each in counted),
            len(counted) - len(answered),
        )

    def _add_direct_requests(self, chance: random.Random) -> None:
        prompts = distinct(chance)
        now = 0.0
        member = self.members["m0"]
        while (now := now + chance.expovariate(self.scenario.direct)) < self.end:
            prompt, length = next(prompts)
            request = SimulatedRequest(b"direct" + prompt, length, now, direct=True)

            def arrive(when: float, request: SimulatedRequest = request) -> None:
                member.waiting.append(request)
                self._step(member, when)

            self.at(now, arrive)

    def _send(self, request: SimulatedRequest, chooser: Chooser, now: float) -> None:
        name = chooser.pick(request, request.tried, now)
        member = self.members[name]
        chooser.begin(request, member, now)
        self._chooser[id(request)] = chooser
        if member.alive:
            member.waiting.append(request)
            self._step(member, now)
        else:
            self._lose(request, member, now)

    def _notice(self, chooser: Chooser, now: float) -> None:
        chooser.set_ready("m0", False)

    def _lose(self, request: SimulatedRequest, member: SimulatedMember, now: float) -> None:
        chooser = self._chooser[id(request)]
        chooser.end(request, member, AttemptEnd.LOST, now)
        if not math.isinf(request.first):
            request.failed = True
            return
        request.tried = (*request.tried, member.name)
        request.prefill = 0
        self.at(now + 0.001, lambda when: self._send(request, chooser, when))

    def _step(self, member: SimulatedMember, now: float) -> None:
        if not member.stepping and (member.waiting or member.running):
            member.stepping = True
            self.at(now + member.plan_step(), lambda when: self._end_step(member, when))

    def _end_step(self, member: SimulatedMember, now: float) -> None:
        if not member.alive:
            return

        def progressed(request: SimulatedRequest, tokens: int) -> None:
            if not request.direct:
                self._chooser[id(request)].progress(request, tokens, now)

        member.stepping = False
        for request in member.end_step(now, progressed):
            if not request.direct:
                self._chooser[id(request)].end(request, member, AttemptEnd.ANSWERED, now)
        self._step(member, now)

    def _kill(self, now: float) -> None:
        member = self.members["m0"]
        member.alive = False
        lost = [*member.running, *member.waiting]
        member.running, member.waiting = [], type(member.waiting)()
        for request in lost:
            self._lose(request, member, now)
        for chooser in self.choosers:
            self.at(now + NOTICED_AFTER, partial(self._notice, chooser))


def simulated(scenario: Scenario, seconds: float) -> str:
    """Return the table of a scenario."""
    lines = [
        f"**{scenario.name.capitalize()}**: {scenario.about}; {scenario.rate:g} requests/s.\n",
        "| choice | cached | TTFT p50 | p95 | p99 | failed in their answers |",
        "|---|---|---|---|---|---|",
    ]
    for name, make in CHOOSERS.items():
        result = Simulation(scenario, make, seconds).run()
        p50, p95, p99 = (f"{value:,.2f} s" for value in np.quantile(result.ttft, (0.5, 0.95, 0.99)))
        never = f", {result.unanswered} without an answer" if result.unanswered else ""
        lines.append(f"| {name} | {result.hit_rate:.0%} | {p50} | {p95} | {p99} | {result.failed}{never} |")
    return "\n".join(lines) + "\n"


def decision_times() -> str:
    """Measure picks and what belongs to them, with half of the members' places taken."""
    lines = [
        "| members | tensors: pick | begin, end | prompt of 2,000 tokens: pick | begin, end |",
        "|---|---|---|---|---|",
    ]
    for count in (3, 16, 128):
        balancer = PoolBalancer("p")
        balancer.set_members([Member(f"m{number}", f"m{number}") for number in range(count)])
        for number in range(count):
            balancer.set_ready(f"m{number}", True)
        cells = []
        for number_of_prompts in (0, 200):
            prefixes = [prefix_hashes(words("document", each, 2000)) for each in range(number_of_prompts)]
            requests = [
                RoutedRequest("m", prompt_tokens=2000.0, prefix=each, prefix_tokens=prefix_tokens(len(each)))
                for each in prefixes
            ] or [RoutedRequest("m")]
            cells += [f"{cost:.1f} us" for cost in costs(balancer, requests, 4 * count)]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    lines += ["", "| prompt | its hashes take |", "|---|---|"]
    for size in (800, 8_000, 400_000, 4_000_000):
        text = words("document", 1, size // 4)
        best = min(timed(partial(prefix_hashes, text, "m")) for _ in range(50))
        lines.append(f"| {size:,} bytes | {best * 1e6:.0f} us |")
    return "\n".join(lines) + "\n"


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def costs(balancer: PoolBalancer, requests: list[RoutedRequest], under_way: int) -> tuple[float, float]:
    """Return the processor time of a pick, and of the calls that follow it, in microseconds."""
    places = random.Random(1).choices(range(under_way), k=ROUNDS)
    attempts = [balancer.begin(requests[0], found(balancer, requests[0], 0).member, 0) for _ in range(under_way)]
    start = time.process_time()
    for turn, place in enumerate(places):
        now = turn * BETWEEN_NS
        request = requests[turn % len(requests)]
        balancer.end(attempts[place], AttemptEnd.ANSWERED, None, now)
        attempts[place] = balancer.begin(request, found(balancer, request, now).member, now)
    all_calls = time.process_time() - start
    start = time.process_time()
    for turn in range(ROUNDS):
        found(balancer, requests[turn % len(requests)], (ROUNDS + turn) * BETWEEN_NS)
    picks = time.process_time() - start
    for attempt in attempts:
        balancer.end(attempt, AttemptEnd.ANSWERED, None, 2 * ROUNDS * BETWEEN_NS)
    return picks / ROUNDS * 1e6, (all_calls - picks) / ROUNDS * 1e6


def found(balancer: PoolBalancer, request: RoutedRequest, now_ns: int) -> Pick:
    """Pick a member."""
    choice = balancer.pick(request, now_ns)
    assert isinstance(choice, Pick)
    return choice


if __name__ == "__main__":
    flags = command_line(__doc__, 120.0, 1)
    flags.add_argument("--only", default="", help="scenarios whose name has this in it")
    given = flags.parse_args()
    parts = [simulated(each, given.seconds) for each in SCENARIOS if given.only in each.name]
    if not given.only:
        parts.append(
            "Processor time of a decision, with four requests for each member under way:\n\n" + decision_times()
        )
    publish("balancing", "\n".join(parts), given)
