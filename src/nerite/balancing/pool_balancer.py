"""Chooses the member of a pool with the least expected work for each request, and knows exactly what is under way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from nerite.balancing.member import AttemptEnd, LoadReport, Member, RoutedRequest
from nerite.balancing.policy import PoolPolicy

_LEAST_WORK: Final = 1.0
"""Tokens that a request of tensors counts for."""


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
    """503: none is ready. 429: all that are ready are full."""
    text: str
    retry_after: int = 1
    """Seconds."""


class MemberAttempt:
    """A request at a member, from its beginning to its end. ``PoolBalancer`` ends it exactly once."""

    __slots__ = ("began_ns", "ended", "member", "request", "work")

    def __init__(self, request: RoutedRequest, member: Member, work: float, began_ns: int) -> None:
        self.request = request
        self.member = member
        self.work = work
        """Tokens that are still to be computed, as far as is known."""
        self.began_ns = began_ns
        self.ended = False


class MemberLoad:
    """What is known of a member."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.ready = False
        self.draining = False
        """Gets no new requests."""
        self.models: Collection[str] | None = None
        """What it serves; None: not known, so anything."""
        self.work = 0.0
        """Tokens under way."""
        self.requests = 0
        """Requests under way."""
        self.report = LoadReport()

    @property
    def available(self) -> bool:
        """Whether it may get requests."""
        return self.ready and not self.draining


class PoolBalancer:
    """The members of one pool."""

    def __init__(self, name: str, policy: PoolPolicy | None = None, seed: int = 0) -> None:
        """``policy`` None: the defaults. ``seed`` is that of random choices; give each router another one."""
        self.name = name
        self.policy = policy or PoolPolicy()
        self._members: dict[str, MemberLoad] = {}

    @property
    def members(self) -> Iterable[MemberLoad]:
        """All members."""
        return self._members.values()

    def set_members(self, members: Sequence[Member]) -> None:
        """Take what discovery has found. Who is gone gets no new requests; what is under way there goes on."""
        known = self._members
        self._members = {each.name: known.get(each.name) or MemberLoad(each) for each in members}
        for each in members:
            self._members[each.name].member = each

    def set_ready(self, name: str, ready: bool, models: Collection[str] | None = None) -> None:
        """Take what a health check has found."""
        if load := self._members.get(name):
            load.ready = ready
            load.models = models

    def drain(self, name: str, draining: bool = True) -> None:
        """Give a member no new requests, or give it some again."""
        if load := self._members.get(name):
            load.draining = draining

    def pick(
        self,
        request: RoutedRequest,
        now_ns: int,
        *,
        tried: Collection[str] = (),
        subset: Collection[str] | None = None,
    ) -> Pick | NoMember:
        """Choose a member. ``tried``: those that have failed it. ``subset``: choose among these names only."""
        fit = [
            load
            for load in self._members.values()
            if load.available
            and load.member.name not in tried
            and (subset is None or load.member.name in subset)
            and (load.models is None or request.model in load.models)
        ]
        if not fit:
            return NoMember(503, f"no member of pool '{self.name}' is ready for model '{request.model}'")
        fit.sort(key=lambda load: (load.work / load.member.capacity, load.requests, load.member.name))
        best, *others = (load.member for load in fit)
        return Pick(best, tuple(others[:2]), "least_work")

    def begin(self, request: RoutedRequest, member: Member, now_ns: int) -> MemberAttempt:
        """Note that a request is sent to a member. ``end`` must follow."""
        work = max(request.prompt_tokens + request.answer_tokens, _LEAST_WORK)
        if load := self._members.get(member.name):
            load.work += work
            load.requests += 1
        return MemberAttempt(request, member, work, now_ns)

    def progress(self, attempt: MemberAttempt, tokens: float, now_ns: int) -> None:
        """Note that a part of the answer has come, of about so many tokens."""
        done = min(tokens, attempt.work)
        attempt.work -= done
        if load := self._members.get(attempt.member.name):
            load.work = max(0.0, load.work - done)

    def end(self, attempt: MemberAttempt, how: AttemptEnd, report: LoadReport | None, now_ns: int) -> None:
        """Note the end of a request at a member. Repeated calls have no effect."""
        if attempt.ended:
            return
        attempt.ended = True
        if load := self._members.get(attempt.member.name):
            load.work = max(0.0, load.work - attempt.work)
            load.requests -= 1
            if report is not None:
                load.report = report

    def report(self, name: str, report: LoadReport, now_ns: int) -> None:
        """Take what a member says of its load: as soon as the head of an answer has come, or by polling."""
        if load := self._members.get(name):
            load.report = report

    def restarted(self, name: str) -> None:
        """Note that a member is another process than before: its caches are empty and its sequences are lost."""

    def take_retry(self, now_ns: int) -> bool:
        """Whether the retry budget allows one more retry or hedge now. It is spent if so."""
        return True

    def hedge_delay_ns(self, request: RoutedRequest) -> int | None:
        """Return after how long without an answer to send a request to a second member, too; None: never.

        When the time has come, ask ``take_retry`` first. End the attempt that loses as ``CANCELLED``.
        """
        return None
