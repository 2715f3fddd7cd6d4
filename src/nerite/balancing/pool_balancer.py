"""Chooses the member of a pool for each request, and knows exactly what is under way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import count
from operator import attrgetter
from random import Random
from typing import Final, NamedTuple
from zlib import crc32

from nerite.balancing.affinity import Affinity, Candidates
from nerite.balancing.hash_ring import HashRing
from nerite.balancing.member import AttemptEnd, LoadReport, Member, RoutedRequest
from nerite.balancing.member_load import MemberLoad, compare_speeds
from nerite.balancing.model_figures import LEAST_WORK, ModelFigures
from nerite.balancing.outliers import OutlierDetector
from nerite.balancing.policy import ChoicePolicy, PoolPolicy
from nerite.balancing.response_ids import member_tag
from nerite.balancing.retries import PoolRetryBudget
from nerite.balancing.sequence_table import SequenceTable
from nerite.balancing.stalls import MemberStallDetector

_TICK_NS: Final = 250_000_000
_WINDOW_NS: Final = 2_000_000_000
"""Time over which speeds are compared."""
_REST: Final = 1 / 8
"""Share of an answer's expected tokens that an answer has at least still to come, however long it is."""
_TYPICAL_WEIGHT: Final = 0.05
"""Of the newest request in the average of their work."""
_MOST_MODELS: Final = 1024
"""Models whose members are kept in lists. Clients may invent names."""
_FALLBACKS: Final = 2
_SCORE: Final = attrgetter("score")


class Pick(NamedTuple):
    """The choice of a member."""

    member: Member
    fallbacks: tuple[Member, ...]
    """Others that would do, the best first."""
    reason: str
    """Why this one, as a word for metrics and traces."""


class NoMember(NamedTuple):
    """Why no member can take a request."""

    status: int
    """503: none is ready. 429: all that are ready are full. 410: the sequence was on a member that is gone."""
    text: str
    retry_after: int = 1
    """Seconds."""


class MemberAttempt:
    """A request at a member, from its beginning to its end. ``PoolBalancer`` ends it exactly once."""

    __slots__ = ("began_ns", "ended", "load", "member", "prefill", "request", "rest", "seen_ns", "tokens", "work")

    def __init__(self, request: RoutedRequest, load: MemberLoad, prefill: float, answer: float, began_ns: int) -> None:
        self.request = request
        self.load = load
        self.member = load.member
        self.prefill = prefill
        """Work before the first token of the answer."""
        self.work = max(prefill + answer, LEAST_WORK)
        """Tokens that are still to be computed, as far as is known."""
        self.rest = min(answer * _REST, self.work)
        self.tokens = 0.0
        """Of the answer, until now."""
        self.began_ns = began_ns
        self.seen_ns = began_ns
        """When the last part of the answer came."""
        self.ended = False


class PoolBalancer:
    """The members of one pool. Times are in nanoseconds of a monotonic clock."""

    def __init__(self, name: str, policy: PoolPolicy | None = None, seed: int = 0) -> None:
        """``policy`` None: the defaults. ``seed`` is that of random choices; give each router another one."""
        self.name = name
        self.policy = policy or PoolPolicy()
        self.budget = PoolRetryBudget(self.policy.retry_share, self.policy.retry_floor)
        self.outliers = OutlierDetector(self.policy.ejection)
        self._stalls = MemberStallDetector()
        self._members: dict[str, MemberLoad] = {}
        self._tags: dict[str, str] = {}
        """Names of members by the tags in the ids of the responses that they keep."""
        self._tickets = count(1)
        self._random = Random(seed)
        self._affinity = Affinity(self.policy)
        self._sequences = SequenceTable(self.policy.max_sequences, self.policy.sequence_idle)
        self._figures = ModelFigures(self.policy.hedge_quantile)
        self._fits: dict[str, Candidates] = {}
        """Members that can take requests, by model."""
        self._known = True
        """The load of all members is."""
        self._typical = LEAST_WORK
        """Work of a request when it begins, on average."""
        self._tick_ns = 0
        """When to look at everything that changes with time."""
        self._window_ns = 0
        """When the window began over which speeds are compared."""

    @property
    def members(self) -> Iterable[MemberLoad]:
        """All members."""
        return self._members.values()

    @property
    def index_bytes(self) -> int:
        """Memory that is used for what members hold."""
        return self._affinity.index.used

    @property
    def sequences(self) -> int:
        """Sequences that are kept on their members."""
        return len(self._sequences)

    def set_members(self, members: Sequence[Member]) -> None:
        """Take what discovery has found. Who is gone gets no new requests; what is under way there goes on."""
        known, self._members = self._members, {}
        for each in members:
            load = known.get(each.name)
            if load is None or (load.member.http, load.member.grpc) != (each.http, each.grpc):
                load = MemberLoad(each, next(self._tickets))
            load.set_member(each)
            self._members[each.name] = load
        self._tags = {member_tag(name): name for name in self._members}
        self.outliers.set_members(self._members)
        self._affinity.ring = HashRing({each.name: each.capacity for each in members})
        self._eject()
        self._changed()

    def set_ready(self, name: str, ready: bool, models: Collection[str] | None = None) -> bool:
        """Take what a health check has found; return whether that is new."""
        load = self._members.get(name)
        if load is None or (load.ready, load.models) == (ready, models):
            return False
        load.ready = ready
        load.models = models
        self._changed()
        return True

    def restarted(self, name: str) -> None:
        """Note that a member is another process than before: its caches are empty and its sequences are lost."""
        if load := self._members.get(name):
            load.ticket = next(self._tickets)
            load.computed = 0.0
            self._changed()

    def report(self, name: str, report: LoadReport, now_ns: int) -> None:
        """Take what a member says of its load: as soon as the head of an answer has come, or by polling."""
        if load := self._members.get(name):
            load.take_report(report, self._typical / 2, now_ns)

    def pick(
        self,
        request: RoutedRequest,
        now_ns: int,
        *,
        tried: Collection[str] = (),
        subset: Collection[str] | None = None,
    ) -> Pick | NoMember:
        """Choose a member. ``tried``: those that have failed it. ``subset``: choose among these names only."""
        if now_ns >= self._tick_ns:
            self._tick(now_ns)
        fit = everyone = self._fits.get(request.model) or self._fit(request.model)
        if request.sequence and (found := self._pick_sequence(request, now_ns, tried, subset)):
            return found
        if request.stored_at and (keeper := self._keeper(request, tried, subset)):
            return Pick(keeper.member, (), "stored")
        if tried or subset is not None or self.policy.max_requests:
            fit = self._narrowed(request.model, fit, tried, subset)
        loads = fit.loads
        if not loads:
            return self._none(request.model, tried, subset)
        if not tried:
            self.budget.add_request()
        if request.sequence:
            whose = f"{request.tenant}\0" if request.tenant else ""
            key = crc32(f"{request.model}\0{whose}{request.sequence}".encode())
            return Pick(next(self._affinity.ring.walk(key, fit.by_name)).member, (), "sequence")
        if self.policy.choice is ChoicePolicy.ROUND_ROBIN:
            load, reason = loads[0], "round_robin"
        else:
            loads.sort(key=_SCORE)
            load, reason = self._affinity.choose(request, fit) or self._least(loads)
        if load.ticket in everyone.by_ticket:
            # Among equals, the one that was chosen least recently comes first: sorting keeps their order.
            everyone.loads.remove(load)
            everyone.loads.append(load)
        others = [other.member for other in loads[: _FALLBACKS + 1] if other is not load]
        return Pick(load.member, tuple(others[:_FALLBACKS]), reason)

    def _least(self, loads: list[MemberLoad]) -> tuple[MemberLoad, str]:
        if len(loads) < 2 or (self.policy.choice is ChoicePolicy.LEAST_WORK and self._known):
            return loads[0], "least_work"
        # Not ``sample``, which takes as long as the rest of a choice.
        first, second = int(self._random.random() * len(loads)), int(self._random.random() * (len(loads) - 1))
        return loads[min(first, second + (second >= first))], "power_of_two"

    def _pick_sequence(
        self, request: RoutedRequest, now_ns: int, tried: Collection[str], subset: Collection[str] | None
    ) -> Pick | NoMember | None:
        """Return the member that has the sequence, or why it cannot go on. None: it goes to a new place."""
        place = self._sequences.find(request)
        if place is None or request.sequence_start:
            obstacle = self._sequences.obstacle(request.tenant, now_ns)
            return NoMember(429, f"pool '{self.name}' {obstacle}") if obstacle and place is None else None
        name = place.member
        text = f"sequence '{request.sequence}' of model '{request.model}' is on member '{name}' of pool '{self.name}'"
        load = self._members.get(name)
        if load is None or load.ticket != place.ticket:
            why = "has left the pool" if load is None else "was restarted"
            return NoMember(410, f"{text}, which {why}: its state is lost, begin a new sequence", 0)
        if not load.ready or name in tried or (subset is not None and name not in subset):
            why = "failed this request" if name in tried else "is not ready"
            return NoMember(503, f"{text}, which {why}: try again, or begin a new sequence")
        return Pick(load.member, (), "sequence")

    def keeps(self, request: RoutedRequest) -> bool:
        """Return whether a member is ready that keeps the response which a request names or continues."""
        return self._keeper(request, (), None) is not None

    def _keeper(
        self, request: RoutedRequest, tried: Collection[str], subset: Collection[str] | None
    ) -> MemberLoad | None:
        """Return the member that keeps a response. None: any other one may have it, if they share a database."""
        name = self._tags.get(request.stored_at, "")
        load = self._members.get(name)
        if load is None or not load.ready or name in tried or (subset is not None and name not in subset):
            return None
        return load if load.models is None or not request.model or request.model in load.models else None

    def _serving(self, model: str) -> list[MemberLoad]:
        serving = [
            load
            for load in self._members.values()
            if load.ready and (load.models is None or not model or model in load.models)
        ]
        return [load for load in serving if not load.draining] or serving

    def _fit(self, model: str) -> Candidates:
        """Return the members that can take requests to a model: ejected and stalled ones only if there are no others.

        A stalled one comes before an ejected one.
        """
        serving = self._serving(model)
        if len(self._fits) >= _MOST_MODELS:
            self._fits.clear()
        sound = [load for load in serving if not load.ejected] or serving
        fit = self._fits[model] = _candidates([load for load in sound if not load.stalled] or sound)
        return fit

    def _narrowed(
        self, model: str, fit: Candidates, tried: Collection[str], subset: Collection[str] | None
    ) -> Candidates:
        """Return those that have not failed this request, are among the named ones and not full; else any."""
        most = self.policy.max_requests

        def is_left(load: MemberLoad) -> bool:
            name = load.member.name
            named = name not in tried and (subset is None or name in subset)
            return named and not 0 < most * load.member.capacity <= load.requests

        return _candidates(list(filter(is_left, fit.loads)) or list(filter(is_left, self._serving(model))))

    def _none(self, model: str, tried: Collection[str], subset: Collection[str] | None) -> NoMember:
        left = self._serving(model)
        if subset is not None:
            left = [load for load in left if load.member.name in subset]
        if not left:
            among = "" if subset is None else " of the ones that were named"
            return NoMember(503, f"no member{among} of pool '{self.name}' is ready for model '{model}'")
        left = [load for load in left if load.member.name not in tried]
        if not left:
            names = ", ".join(sorted(tried))
            return NoMember(503, f"every ready member of pool '{self.name}' has failed this request: {names}")
        return NoMember(429, f"all ready members of pool '{self.name}' are full: {len(left)}, by max-requests")

    def begin(self, request: RoutedRequest, member: Member, now_ns: int, *, yields: bool = False) -> MemberAttempt:
        """Note that a request is sent to a member. ``end`` must follow.

        ``yields``: it leaves the member for others, so that its work delays nobody and hardly counts.
        """
        load = self._members.get(member.name) or MemberLoad(member, 0)
        prefill = self._affinity.begin(request, load)
        if yields:
            attempt = MemberAttempt(request, load, 0.0, 0.0, now_ns)
        else:
            attempt = MemberAttempt(request, load, prefill, self._figures.answer_tokens(request), now_ns)
            self._typical += _TYPICAL_WEIGHT * (attempt.work - self._typical)
        load.begin(attempt.work, now_ns)
        if request.sequence:
            self._sequences.put(request, member.name, load.ticket, now_ns)
        return attempt

    def progress(self, attempt: MemberAttempt, tokens: float, now_ns: int) -> None:
        """Note that a part of the answer has come, of about so many tokens."""
        if attempt.ended:
            return
        if self._stalls.heard(attempt.load, now_ns):
            self._fits.clear()
        done = tokens + attempt.prefill
        attempt.prefill = 0.0
        if attempt.tokens:
            attempt.load.time_tokens(attempt.request.model, tokens, now_ns - attempt.seen_ns)
        attempt.seen_ns = now_ns
        attempt.tokens += tokens
        left = max(attempt.work - done, attempt.rest)
        attempt.load.advance(done, attempt.work - left)
        attempt.work = left

    def end(self, attempt: MemberAttempt, how: AttemptEnd, report: LoadReport | None, now_ns: int) -> None:
        """Note the end of a request at a member. Repeated calls have no effect."""
        if attempt.ended:
            return
        attempt.ended = True
        load, request = attempt.load, attempt.request
        if report is not None:
            load.take_report(report, self._typical / 2, now_ns)
        if how not in (AttemptEnd.LOST, AttemptEnd.CANCELLED) and self._stalls.heard(load, now_ns):
            self._fits.clear()
        if how is AttemptEnd.ANSWERED:
            spent_ns = now_ns - attempt.began_ns
            load.advance(max(attempt.prefill, 0.0 if attempt.tokens else LEAST_WORK), 0.0)
            self._figures.answered(request.model, attempt.tokens, spent_ns)
            if not (attempt.tokens or request.prompt_tokens):
                load.time_tokens(request.model, LEAST_WORK, spent_ns)
            if request.sequence_end:
                self._sequences.remove(request)
        load.end(attempt.work, now_ns)
        if self._members.get(load.member.name) is load:
            if how is AttemptEnd.ANSWERED:
                self.outliers.answered(load.member.name)
            elif how in (AttemptEnd.FAILED, AttemptEnd.LOST) and self.outliers.failed(load.member.name, now_ns):
                self._eject()

    def take_retry(self, now_ns: int) -> bool:
        """Whether the retry budget allows one more retry or hedge now. It is spent if so."""
        return self.budget.take(now_ns)

    def hedge_delay_ns(self, request: RoutedRequest) -> int | None:
        """Return after how long without an answer to send a request to a second member, too; None: never.

        When the time has come, ask ``take_retry`` first. End the attempt that loses as ``CANCELLED``.
        """
        return self._figures.hedge_delay_ns(request) if len(self._members) > 1 else None

    def _changed(self) -> None:
        self._fits.clear()
        self._tick_ns = 0

    def _eject(self) -> None:
        out = self.outliers.ejected
        for name, load in self._members.items():
            load.ejected = name in out
        self._fits.clear()

    def _tick(self, now_ns: int) -> None:
        self._tick_ns = now_ns + _TICK_NS
        if self.outliers.advance(now_ns):
            self._eject()
        loads = self._members.values()
        if self._stalls.advance(loads, now_ns):
            self._fits.clear()
        for load in loads:
            load.refresh(now_ns)
        self._known = all(load.is_known(now_ns) for load in loads)
        others = sum(load.others for load in loads)
        work = others + sum(load.work for load in loads)
        self._affinity.set_share_of_others(others / work if work else 0.0)
        if now_ns - self._window_ns >= _WINDOW_NS:
            compare_speeds(loads, now_ns - self._window_ns, now_ns)
            self._window_ns = now_ns


def _candidates(loads: list[MemberLoad]) -> Candidates:
    by_name = {load.member.name: load for load in loads}
    return Candidates(loads, {load.ticket: load for load in loads}, by_name)
