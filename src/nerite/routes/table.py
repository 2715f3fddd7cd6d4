"""The routes of a server or of a front process: weights, observers, and what has been counted for each arm.

For the loop's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from nerite.config.sticky_key import KeySource
from nerite.core.errors import InvalidArgument, NotFound
from nerite.core.request import InferenceRequest, SequenceKey
from nerite.judge.outcome import Outcome
from nerite.scheduling.weighted_route import RouteArm, WeightedRoute

_MAX_SEQUENCES: Final = 65_536
"""Maximum number of sequences of a route whose arm is remembered. Others stay on theirs until weights change."""

TakeOutcome = Callable[[Outcome, int], None]
"""Takes how a request ended, and what was counted of it while it was under way."""


class ArmCounters:
    """What an arm of a route has been sent. Survives changes of weights."""

    __slots__ = ("errors", "handed_over", "requests")

    def __init__(self) -> None:
        self.requests = 0
        """Requests that were assigned to it."""
        self.errors = 0
        """Requests assigned to it that failed while the route was observed."""
        self.handed_over = 0
        """Requests assigned to it that another arm has answered, because it could not."""


class RequestUnderWay(Protocol):
    """A request of an observed route that has not ended."""

    @property
    def arrived_ns(self) -> int:
        """When it arrived, monotonic."""

    counted: int
    """What the observer has counted of it before its end; 0 at first. The observer gets it back with the outcome."""

    def outcome(self, now_ns: int) -> Outcome:
        """Return the outcome that the request would have if it succeeded now."""


class ShadowsRequests(Protocol):
    """The shadow of a route, which is also sent some of its requests."""

    def begin(self, request: InferenceRequest, arm: str) -> None:
        """Note a request to the route that the arm with the label ``arm`` is about to get. Never fails it."""

    def status(self) -> dict[str, Any]:
        """Return what the comparisons have shown so far."""


class PinnedSequence(NamedTuple):
    """Arm of a sequence that has begun, and the probability of the candidate when it did."""

    arm: str
    probability: float


class RouteState:
    """A route, and all that is kept for it when its weights change."""

    __slots__ = ("counters", "observer", "route", "sequences", "shadow", "under_way")

    def __init__(self, route: WeightedRoute) -> None:
        self.route = route
        self.observer: TakeOutcome | None = None
        """Takes what became of each request."""
        self.shadow: ShadowsRequests | None = None
        """Set by the process that owns the route, if it has a shadow."""
        self.counters: dict[str, ArmCounters] = {}
        """By the label of the arm."""
        self.under_way: set[RequestUnderWay] = set()
        """Requests that have begun while the route was observed, and have not ended."""
        self.sequences: dict[SequenceKey, PinnedSequence] = {}
        """Sequences that have begun and not ended, the one used last at the end."""

    def counter(self, arm: RouteArm) -> ArmCounters:
        """Return what is counted for an arm."""
        return self.counters.setdefault(arm.label, ArmCounters())

    def pin(self, sequence: SequenceKey, pinned: PinnedSequence) -> None:
        """Keep a sequence on its arm; forget the one that was not used for the longest time if there are too many."""
        sequences = self.sequences
        sequences.pop(sequence, None)
        sequences[sequence] = pinned
        if len(sequences) > _MAX_SEQUENCES:
            sequences.pop(next(iter(sequences)))


class RouteTable:
    """The routes by name."""

    def __init__(self) -> None:
        self._states: dict[str, RouteState] = {}
        self.on_changed: Callable[[], None] = _ignored
        """Called when a route was added, changed or removed. Set by the server."""
        self.header_names: Sequence[str] = ()
        """Names of the header fields, in lower case, that sticky keys are read from."""

    def __iter__(self) -> Iterator[WeightedRoute]:
        """Iterate over the routes."""
        return (state.route for state in list(self._states.values()))

    def __len__(self) -> int:
        """Return the number of routes."""
        return len(self._states)

    def put(self, route: WeightedRoute) -> None:
        """Add a route, or change the one of that name. Applies to the next request; sequences stay where they are.

        Raises ``InvalidArgument`` as ``check`` does.
        """
        self.check(route)
        state = self._states.get(route.name)
        if state is None:
            self._states[route.name] = RouteState(route)
        elif state.route == route:
            return
        else:
            state.route = route
        self._changed()

    def check(self, route: WeightedRoute) -> None:
        """Raise ``InvalidArgument`` if an arm of a route would be another route."""
        inner = next((arm.model for arm in route.targets if not arm.version and arm.model in self._states), "")
        outer = next((each.name for each in self for arm in each.targets if arm[:2] == (route.name, "")), "")
        if inner or outer:
            chain = f"'{route.name}' leads to '{inner}'" if inner else f"'{outer}' leads to '{route.name}'"
            raise InvalidArgument(f"routes cannot be chained: {chain}, which is a route itself. Name its arms instead")

    def remove(self, name: str) -> None:
        """Remove a route, if there is one: the name is that of a model again, or of nothing."""
        if self._states.pop(name, None) is not None:
            self._changed()

    def replace_all(self, routes: Sequence[WeightedRoute]) -> None:
        """Make ``routes`` the only ones: for the replica of a front process, whose owner applies the change."""
        self._states = {route.name: RouteState(route) for route in routes}
        self._find_header_names()

    def get(self, name: str) -> WeightedRoute | None:
        """Return the route of a name; None if it has none."""
        state = self._states.get(name)
        return None if state is None else state.route

    def state(self, name: str) -> RouteState | None:
        """Return all that is known of a route; None if there is none of that name."""
        return self._states.get(name)

    def observe(self, name: str, take: TakeOutcome | None) -> None:
        """Give ``take`` the outcome of each request to a route that begins from now on; None for nobody.

        Raises ``NotFound`` for a name without a route.
        """
        state = self._states.get(name)
        if state is not None:
            state.observer = take
            self._changed()
        elif take is not None:
            raise NotFound(f"'{name}' has no route that could be observed")

    def under_way(self, name: str) -> list[RequestUnderWay]:
        """Return the requests of an observed route that have not ended."""
        state = self._states.get(name)
        return [] if state is None else list(state.under_way)

    def counters(self, name: str) -> Mapping[str, ArmCounters]:
        """Return what was counted for each arm of a route, by its label."""
        state = self._states.get(name)
        return {} if state is None else {arm.label: state.counter(arm) for arm in state.route.arms}

    def shadow_status(self, name: str) -> dict[str, Any] | None:
        """Return what comparisons with the shadow of a route have shown; None if it has no shadow."""
        state = self._states.get(name)
        return None if state is None or state.shadow is None else state.shadow.status()

    def _changed(self) -> None:
        self._find_header_names()
        self.on_changed()

    def _find_header_names(self) -> None:
        keys = [key for route in self for key in route.sticky if key.source is KeySource.HEADER]
        self.header_names = tuple(dict.fromkeys(key.name for key in keys))


def _ignored() -> None:
    """Do nothing: the table has no owner."""
