"""Ways to choose a member: Nerite's, and the usual ones beside it."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Collection
from typing import Final, Protocol
from zlib import crc32

from balancing_members import BYTES_PER_TOKEN, SimulatedMember, SimulatedRequest

from nerite.balancing.member import AttemptEnd, Member, RoutedRequest
from nerite.balancing.policy import PoolPolicy
from nerite.balancing.pool_balancer import Pick, PoolBalancer
from nerite.balancing.prefix_hashes import prefix_hashes, prefix_tokens


class Chooser(Protocol):
    """What chooses a member, and hears what becomes of the request. Times are in seconds."""

    def pick(self, request: SimulatedRequest, tried: Collection[str], now: float) -> str:
        """Choose."""

    def begin(self, request: SimulatedRequest, member: SimulatedMember, now: float) -> None:
        """Hear that it is sent there."""

    def progress(self, request: SimulatedRequest, tokens: int, now: float) -> None:
        """Hear that a part of the answer has come."""

    def end(self, request: SimulatedRequest, member: SimulatedMember, how: AttemptEnd, now: float) -> None:
        """Hear that it has ended there."""

    def set_ready(self, name: str, ready: bool) -> None:
        """Hear what a health check has found."""


class CountingChooser:
    """Knows who is ready, and how many requests each has."""

    def __init__(self, names: list[str], seed: int) -> None:
        self.requests = dict.fromkeys(names, 0)
        self.ready = list(names)
        self.random = random.Random(seed)

    def fit(self, tried: Collection[str]) -> list[str]:
        """Return who may be chosen."""
        return [name for name in self.ready if name not in tried] or self.ready

    def begin(self, request: SimulatedRequest, member: SimulatedMember, now: float) -> None:
        """Hear that it is sent there."""
        self.requests[member.name] += 1

    def progress(self, request: SimulatedRequest, tokens: int, now: float) -> None:
        """Nothing to learn."""

    def end(self, request: SimulatedRequest, member: SimulatedMember, how: AttemptEnd, now: float) -> None:
        """Hear that it has ended there."""
        self.requests[member.name] -= 1

    def set_ready(self, name: str, ready: bool) -> None:
        """Hear what a health check has found."""
        self.ready = [each for each in self.ready if each != name] + [name] * ready


class RoundRobin(CountingChooser):
    """The next one."""

    def pick(self, request: SimulatedRequest, tried: Collection[str], now: float) -> str:
        """Choose."""
        name = self.fit(tried)[0]
        self.ready.remove(name)
        self.ready.append(name)
        return name


class RandomChoice(CountingChooser):
    """Any one."""

    def pick(self, request: SimulatedRequest, tried: Collection[str], now: float) -> str:
        """Choose."""
        return self.random.choice(self.fit(tried))


class PowerOfTwo(CountingChooser):
    """The one with fewer requests of two drawn at random."""

    def pick(self, request: SimulatedRequest, tried: Collection[str], now: float) -> str:
        """Choose."""
        fit = self.fit(tried)
        return min(self.random.sample(fit, min(2, len(fit))), key=self.requests.__getitem__)


class LeastRequests(CountingChooser):
    """The one with the fewest requests."""

    def pick(self, request: SimulatedRequest, tried: Collection[str], now: float) -> str:
        """Choose."""
        fit = self.fit(tried)
        return min(fit, key=lambda name: (self.requests[name], self.random.random()))


class PrefixRing(CountingChooser):
    """Consistent hashing of the first bytes of the prompt with bounded load: 1.25 times the mean of requests."""

    BYTES: Final = 4096

    def __init__(self, names: list[str], seed: int) -> None:
        super().__init__(names, seed)
        self.ring = sorted((crc32(b"%s %d" % (name.encode(), point)), name) for name in names for point in range(100))

    def pick(self, request: SimulatedRequest, tried: Collection[str], now: float) -> str:
        """Choose."""
        fit = self.fit(tried)
        most = math.ceil(1.25 * (sum(self.requests[name] for name in fit) + 1) / len(fit))
        place = bisect_left(self.ring, (crc32(request.prompt[: self.BYTES]), ""))
        for step in range(len(self.ring)):
            name = self.ring[(place + step) % len(self.ring)][1]
            if name in fit and self.requests[name] < most:
                return name
        return fit[0]


class Nerite:
    """``PoolBalancer`` as the router uses it."""

    policy: PoolPolicy | None = None

    def __init__(self, names: list[str], seed: int) -> None:
        self.balancer = PoolBalancer("simulated", self.policy, seed)
        self.members = {name: Member(name, name) for name in names}
        self.balancer.set_members(list(self.members.values()))
        for name in names:
            self.balancer.set_ready(name, True)

    def pick(self, request: SimulatedRequest, tried: Collection[str], now: float) -> str:
        """Choose."""
        if request.routed is None:
            hashes = prefix_hashes(request.prompt)
            request.routed = RoutedRequest(
                "m",
                prompt_tokens=len(request.prompt) / BYTES_PER_TOKEN,
                prefix=hashes,
                prefix_tokens=prefix_tokens(len(hashes)),
            )
        found = self.balancer.pick(request.routed, round(now * 1e9), tried=tried)
        assert isinstance(found, Pick), found
        return found.member.name

    def begin(self, request: SimulatedRequest, member: SimulatedMember, now: float) -> None:
        """Hear that it is sent there."""
        request.attempt = self.balancer.begin(request.routed, self.members[member.name], round(now * 1e9))

    def progress(self, request: SimulatedRequest, tokens: int, now: float) -> None:
        """Hear that a part of the answer has come."""
        self.balancer.progress(request.attempt, tokens, round(now * 1e9))

    def end(self, request: SimulatedRequest, member: SimulatedMember, how: AttemptEnd, now: float) -> None:
        """Hear that it has ended there."""
        report = member.report if how is AttemptEnd.ANSWERED else None
        self.balancer.end(request.attempt, how, report, round(now * 1e9))

    def set_ready(self, name: str, ready: bool) -> None:
        """Hear what a health check has found."""
        self.balancer.set_ready(name, ready)


class NeriteWithoutPrefixes(Nerite):
    """Least expected work alone."""

    policy = PoolPolicy(prefix=False)


CHOOSERS: Final[dict[str, Callable[[list[str], int], Chooser]]] = {
    "round robin": RoundRobin,
    "random": RandomChoice,
    "power of two (requests)": PowerOfTwo,
    "least requests": LeastRequests,
    "ring of prompt hashes, load <= 1.25": PrefixRing,
    "Nerite, `prefix = false`": NeriteWithoutPrefixes,
    "**Nerite**": Nerite,
}
