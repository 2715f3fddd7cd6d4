"""Weighted routes: which arm of a route answers a request, by a key that sticks to its arm or by a coin.

A key is assigned by weighted rendezvous hashing: each arm draws a number from the hash of salt, arm and key, and the
arm with the best number, weighted, wins. So every replica assigns a key alike without coordination, and a change of
weights moves only the keys that the arms which gain gain. Over salts, an arm wins a key with the probability of its
share of the weights, which is the probability of the coin, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Final, NamedTuple

from nerite.config.sticky_key import StickyKey
from nerite.core.errors import InvalidArgument

MAX_ARMS: Final = 16
_MAX_WEIGHT: Final = 1e9
_SHADOW_RANGES: Final = (("tolerance", 0.0, 1e6), ("timeout", 0.001, 3600.0), ("concurrency", 1, 1024))
"""Values of a shadow's settings, from the least to the most."""
_BYTES: Final = 8
"""Size of hashes."""


class RouteArm(NamedTuple):
    """One of the models or versions that a route divides its requests among."""

    model: str
    version: str = ""
    """Version number; empty for the version that serves requests which name none."""
    weight: float = 1.0

    @property
    def label(self) -> str:
        """The arm as metrics, traces and messages name it."""
        return f"{self.model}:{self.version}" if self.version else self.model


class RouteShadow(NamedTuple):
    """An arm that is also sent a share of the requests of a route. Nobody gets its answers: they are compared."""

    arm: RouteArm
    share: float
    """Of the requests that another arm answers."""
    tolerance: float = 1e-3
    """Relative distance up to which numbers count as close."""
    timeout: float = 30.0
    """Seconds after which a request to it is cancelled, and for which one waits for it."""
    concurrency: int = 8
    """Maximum number of requests that it has at once."""
    samples: str = ""
    """File that the comparisons are appended to; empty for none."""
    contents: bool = False
    """Samples have the contents of requests and answers, too."""


@dataclass(frozen=True)
class WeightedRoute:
    """A name whose requests are divided among arms. The last arm is the candidate, the others are the baseline."""

    name: str
    """Name of a model, or a name of its own."""
    arms: tuple[RouteArm, ...]
    sticky: tuple[StickyKey, ...] = ()
    """The first that a request has is its key. Sequence ids come before them, idempotency keys after them."""
    salt: str = ""
    """Routes with equal salts assign keys alike; if empty, the name is the salt."""
    shadow: RouteShadow | None = None

    def __post_init__(self) -> None:
        """Raise ``InvalidArgument`` if the route has no meaning."""
        what = f"route '{self.name}'"
        if not 0 < len(self.arms) <= MAX_ARMS:
            raise InvalidArgument(f"{what} has {len(self.arms)} arms: it needs 1 to {MAX_ARMS}")
        labels = [arm.label for arm in self.arms]
        for arm in self.arms:
            if labels.count(arm.label) > 1:
                raise InvalidArgument(f"{what} has the arm '{arm.label}' twice: give it one weight")
        if self.shadow is not None:
            self._check_shadow(what, self.shadow)
        for arm in self.targets:
            if not 0 <= arm.weight <= _MAX_WEIGHT:
                raise InvalidArgument(
                    f"{what}: the weight {arm.weight} of arm '{arm.label}' is not between 0 and {_MAX_WEIGHT:.0e}"
                )
            if not arm.model:
                raise InvalidArgument(f"{what} has an arm without a model")
            if arm.version and not (arm.version.isascii() and arm.version.isdigit()):
                raise InvalidArgument(f"{what}: '{arm.version}' is not a version number")
            if arm.model == self.name and not arm.version:
                raise InvalidArgument(
                    f"{what}: the arm '{arm.label}' is the route itself. Name the version that the arm is"
                )
        if not any(arm.weight for arm in self.arms):
            raise InvalidArgument(f"all arms of {what} have weight 0: one must be positive")

    def _check_shadow(self, what: str, shadow: RouteShadow) -> None:
        if [arm.label for arm in self.by_weight] == [shadow.arm.label]:
            raise InvalidArgument(
                f"{what}: all requests go to '{shadow.arm.label}', so there is nothing to compare its answers with"
            )
        for name, least, most in _SHADOW_RANGES:
            if not least <= getattr(shadow, name) <= most:
                raise InvalidArgument(f"{what}: {name} of the shadow must be from {least:g} to {most:g}")
        if not 0 < shadow.share <= 1:
            raise InvalidArgument(f"{what}: the share of the shadow must be more than 0 % and at most 100 %")

    @property
    def targets(self) -> Sequence[RouteArm]:
        """The arms, and that of the shadow if there is one."""
        return self.arms if self.shadow is None else (*self.arms, self.shadow.arm)

    @property
    def candidate(self) -> RouteArm:
        """The arm that a rollout compares with the others."""
        return self.arms[-1]

    @property
    def by_weight(self) -> Sequence[RouteArm]:
        """The arms that get requests, the one with the largest share first."""
        return sorted((arm for arm in self.arms if arm.weight), key=lambda arm: -arm.weight)

    def cluster(self, key: bytes) -> int:
        """Return a number for a key that is never 0."""
        return int.from_bytes(blake2b(self._seed + key, digest_size=_BYTES).digest()) | 1

    @cached_property
    def _seed(self) -> bytes:
        return (self.salt or self.name).encode("utf-8", "surrogatepass") + b"\0"

    @cached_property
    def seeds(self) -> Sequence[bytes]:
        """What each arm's hashes begin with."""
        return [self._seed + arm.label.encode("utf-8", "surrogatepass") + b"\0" for arm in self.arms]


class ArmChoice:
    """Chooses among the arms of a route that are ready. Immutable."""

    __slots__ = ("_limits", "_open", "probabilities", "probability")

    def __init__(self, route: WeightedRoute, ready: Sequence[bool]) -> None:
        """``ready`` has a value for each arm; at least one arm with a weight must be ready."""
        weights = [arm.weight if is_ready else 0.0 for arm, is_ready in zip(route.arms, ready, strict=True)]
        total = math.fsum(weights)
        self.probabilities = [weight / total for weight in weights]
        """Of each arm."""
        self.probability = self.probabilities[-1]
        """That the candidate is chosen."""
        self._open = [
            (index, weight, blake2b(route.seeds[index], digest_size=_BYTES))
            for index, weight in enumerate(weights)
            if weight > 0
        ]
        reached = 0.0
        self._limits: list[tuple[float, int]] = []
        for index, weight, _ in self._open:
            reached += weight / total
            self._limits.append((reached, index))

    def by_coin(self, coin: float) -> int:
        """Return the index of an arm for a random number from 0 up to, but without, 1."""
        for limit, index in self._limits:
            if coin < limit:
                return index
        return self._limits[-1][1]  # the sum of the shares was rounded

    def by_key(self, key: bytes) -> int:
        """Return the index of the arm of a key."""
        if len(self._open) == 1:
            return self._open[0][0]
        best, chosen = -1.0, 0
        for index, weight, seed in self._open:
            digest = seed.copy()
            digest.update(key)
            drawn = (int.from_bytes(digest.digest()) + 0.5) / (1 << 8 * _BYTES)
            score = -weight / math.log(drawn) if drawn < 1 else math.inf
            if score > best:
                best, chosen = score, index
        return chosen
