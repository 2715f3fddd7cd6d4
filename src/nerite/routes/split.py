"""Divides the requests to a route among its arms: what a header's route leads to in place of a version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Final

from nerite.core.byte_budget import ROUTES, Memo
from nerite.core.errors import NeriteError, NotLoaded, Unavailable
from nerite.core.failures import report
from nerite.core.headers import request_header_bytes
from nerite.core.request import (
    Assignment,
    CancelReason,
    InferenceRequest,
    RequestHeader,
    RequestRoute,
    SequenceKey,
)
from nerite.core.response import InferenceResponse
from nerite.core.servable_version import ServableVersion
from nerite.core.signature import Signature
from nerite.routes.keys import key_of
from nerite.routes.observation import ObservedSink, StrataOfHeader
from nerite.routes.table import PinnedSequence, RouteState, TakeOutcome
from nerite.scheduling.weighted_route import ArmChoice, RouteArm

_ENTRY: Final = 256
"""Bytes of an entry of the memo without the headers."""
FindArm = Callable[[str, str], ServableVersion]
"""Returns the running version of a model and version. Raises ``NeriteError``."""


class ReadyArm:
    """An arm whose version runs."""

    __slots__ = ("assignment", "counters", "index", "label", "model", "route", "version", "version_text")

    def __init__(
        self,
        index: int,
        arm: RouteArm,
        version: ServableVersion,
        assignment: Assignment,
        state: RouteState,
        epoch: object,
    ) -> None:
        self.index = index
        self.label = arm.label
        self.model = arm.model
        self.version_text = arm.version
        self.version = version
        self.assignment = assignment
        """The assignment of requests without a key."""
        self.counters = state.counter(arm)
        self.route = RequestRoute(epoch, version)


class ArmHeaders:
    """What follows from the header of a request to a route."""

    __slots__ = ("__weakref__", "arm", "by_arm", "by_coin", "cluster", "dynamic", "strata")

    def __init__(self, arm: ReadyArm | None, cluster: int, arms: int, *, dynamic: bool) -> None:
        self.arm = arm
        """The arm of all requests with the header; None if each is assigned by itself."""
        self.cluster = cluster
        self.dynamic = dynamic
        """The key depends on the request, not just on its header."""
        self.by_coin = arm is None and not dynamic
        self.by_arm: list[RequestHeader | None] = [None] * arms
        """The header that each arm gets."""
        self.strata: StrataOfHeader | None = None
        """Set once the route is observed."""


class RouteSplit:
    """The arms of a route that are ready, until the set of them, or a weight, changes. For the loop's thread only.

    Implements ``ServedVersion``: ``submit`` chooses the arm, replaces the header of the request by that of the arm, and
    passes it on. Where it stands for a version otherwise, it is the arm with the largest share.
    """

    __slots__ = (
        "_arms",
        "_choice",
        "_coin",
        "_headers",
        "_heaviest",
        "_high",
        "_limit",
        "_low",
        "_open",
        "_owns",
        "_pinned",
        "_plain",
        "_route",
        "_shadow",
        "_state",
        "_take",
        "absent",
    )  # fmt: skip

    absent: list[NotLoaded]
    """For each arm that is not loaded, but will be if that is waited for."""

    def __init__(self, state: RouteState, find: FindArm, epoch: object, coin: Random, *, owns: bool) -> None:
        """``owns``: this process counts, observes, and keeps sequences on their arms. Fronts do not.

        Raises ``Unavailable`` if no arm runs.
        """
        route = self._route = state.route
        versions: list[ServableVersion | None] = []
        refusals: list[str] = []
        self.absent: list[NotLoaded] = []
        for arm in route.arms:
            try:
                versions.append(find(arm.model, arm.version))
            except NeriteError as error:
                if isinstance(error, NotLoaded) and arm.weight > 0:
                    self.absent.append(error.without_frames())
                versions.append(None)
                refusals.append(f"{arm.label} ({error.message})")
        usable = [version is not None and version.usable for version in versions]
        open_arms = [is_usable and arm.weight > 0 for is_usable, arm in zip(usable, route.arms, strict=True)]
        if not any(open_arms):  # without an instance anywhere, requests wait for one, as they would without a route
            open_arms = [
                version is not None and arm.weight > 0 for version, arm in zip(versions, route.arms, strict=True)
            ]
            if not any(open_arms):
                if self.absent:
                    raise self.absent.pop(0)  # not kept in this frame, which the error refers to
                raise Unavailable(f"route '{route.name}' has no arm that is ready: {'; '.join(refusals)}")
        self._state = state
        self._owns = owns
        self._take = state.observer if owns else None
        self._shadow = state.shadow if owns else None
        self._plain = self._take is None and self._shadow is None
        self._pinned: PinnedSequence | None = None
        """Of the request of a sequence that is being submitted."""
        self._choice = ArmChoice(route, open_arms)
        self._arms: list[ReadyArm | None] = [None] * len(versions)
        for index, (arm, version) in enumerate(zip(route.arms, versions, strict=True)):
            if version is not None and (usable[index] or open_arms[index]):
                assignment = Assignment(route.name, arm.label, arm == route.candidate, self._choice.probability)
                self._arms[index] = ReadyArm(index, arm, version, assignment, state, epoch)
        self._open = [arm for arm, is_open in zip(self._arms, open_arms, strict=True) if arm is not None and is_open]
        share = self._choice.probabilities
        self._heaviest = max(self._open, key=lambda arm: share[arm.index])
        self._coin = coin.random
        self._low, self._high = self._open[0], self._open[-1]
        self._limit = share[self._low.index] if len(self._open) <= 2 else -1.0
        """Share of the first of two arms; negative if there are more."""
        self._headers: Memo[RequestHeader, ArmHeaders] = Memo()

    # What transports ask of a version

    @property
    def version(self) -> ServableVersion:
        """The version of the arm with the largest share."""
        return self._heaviest.version

    @property
    def label(self) -> str:
        """The version number of the arm with the largest share."""
        return self.version.label

    @property
    def decoupled(self) -> bool:
        """Whether a request may get several responses from one of the arms."""
        return any(arm.version.decoupled for arm in self._open)

    @property
    def stream_input(self) -> str:
        """Name of the input that a request for several responses sets; empty if it may get several without."""
        names = {arm.version.stream_input for arm in self._open if arm.version.decoupled}
        return names.pop() if len(names) == 1 else ""

    @property
    def signature(self) -> Signature:
        """Inputs and outputs of the arm with the largest share."""
        return self.version.signature

    def given_up(self, why: CancelReason) -> None:
        """Count a request that was not passed on."""
        self.version.given_up(why)

    def traced_one(self, whole_ns: int, trace_id: int, at: int) -> None:
        """Do nothing: requests are traced by the versions that they are passed on to."""

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return nothing: requests are held by the versions that they are passed on to."""
        return ()

    def begun(self, request: InferenceRequest) -> bool:
        """Return False: requests are held by the versions that they are passed on to."""
        return False

    # Requests

    def submit(self, request: InferenceRequest) -> None:
        """Choose an arm for a request, and submit it there. Raises only unforeseen exceptions."""
        headers = self._headers.get(request.header) or self._prepare(request)
        if headers.by_coin:
            coin = self._coin()
            arm = self._low if coin < self._limit else self._high if self._limit >= 0 else self._by_coin(coin)
        else:
            arm = headers.arm or self._by_request(request)
        header = headers.by_arm[arm.index]
        arm.counters.requests += 1
        if header is not None and self._plain:
            request.header = header
        elif not self._begin(request, headers, arm):
            return
        arm.version.submit(request)

    def enqueue(self, requests: Iterable[InferenceRequest]) -> None:
        """Choose an arm for each request, whose data were checked, and enqueue it there."""
        chosen: dict[ReadyArm, list[InferenceRequest]] = {}
        for request in requests:
            try:
                headers = self._headers.get(request.header) or self._prepare(request)
                arm = headers.arm or self._by_request(request)
                arm.counters.requests += 1
                if self._begin(request, headers, arm):
                    chosen.setdefault(arm, []).append(request)
            except Exception as error:
                failure = report("admission", error, f"of a request to route '{self._route.name}'", request.id)
                request.respond(InferenceResponse.failed(failure))
        for arm, those in chosen.items():
            arm.version.enqueue(those)

    def assign(self, request: InferenceRequest) -> tuple[ServableVersion, str, str, Assignment]:
        """Choose the arm of a call before its requests are made; return its version, and what its headers have to name.

        ``request`` has what the key is made from. It is not submitted.
        """
        key = key_of(self._route, request).value
        arm = self._at(self._choice.by_key(key) if key else self._choice.by_coin(self._coin()))
        assignment = arm.assignment._replace(cluster=self._route.cluster(key) if key else 0)
        return arm.version, arm.model, arm.version_text, assignment

    def has_other(self, request: InferenceRequest) -> bool:
        """Return whether a request that its arm has lost can go to another arm, and has not done so before."""
        header = request.header
        assignment, route = header.assignment, header.route
        first = RouteArm(header.model_name, header.model_version).label
        if assignment is None or assignment.arm != first or route is None:
            return False
        return any(arm.version is not route.version for arm in self._open)

    def again(self, request: InferenceRequest) -> bool:
        """Submit a request that its arm has lost to another arm; return False if none is ready."""
        lost = request.header.route
        others = [arm for arm in self._open if lost is None or arm.version is not lost.version]
        if not others:
            return False
        arm = max(others, key=lambda arm: self._choice.probabilities[arm.index])
        assignment = request.header.assignment
        if assignment is not None and (counters := self._state.counters.get(assignment.arm)) is not None:
            counters.handed_over += 1
        header = request.header.readdressed(arm.model, arm.version_text, assignment)
        try:
            arm.version.signature.bind(header, request.id)
        except NeriteError:
            return False
        header.route = arm.route
        request.header = header
        arm.version.submit(request)
        return True

    def _by_coin(self, coin: float) -> ReadyArm:
        return self._at(self._choice.by_coin(coin))

    def _at(self, index: int) -> ReadyArm:
        arm = self._arms[index]
        assert arm is not None, "only arms that are ready are chosen"
        return arm

    def _prepare(self, request: InferenceRequest) -> ArmHeaders:
        """Return what follows from a header that is not remembered."""
        header, route = request.header, self._route
        key = key_of(route, request)
        assigned = self._assigned(header)
        dynamic = not key.lasting or bool(header.sequence_id and self._owns)
        arm, cluster = None, 0
        if not dynamic and key.value:
            arm, cluster = self._at(self._choice.by_key(key.value)), route.cluster(key.value)
        if assigned is not None and not (header.sequence_id and self._owns):
            arm = assigned
        headers = ArmHeaders(arm, cluster, len(self._arms), dynamic=dynamic)
        ROUTES.put(self._headers, header, headers, _ENTRY + 2 * request_header_bytes(header))
        return headers

    def _assigned(self, header: RequestHeader) -> ReadyArm | None:
        """Return the arm that was chosen before, if it still takes requests."""
        assignment = header.assignment
        return None if assignment is None else next((arm for arm in self._open if arm.label == assignment.arm), None)

    def _by_request(self, request: InferenceRequest) -> ReadyArm:
        """Return the arm of a request whose header does not decide it."""
        header = request.header
        if header.sequence_id and self._owns:
            return self._by_sequence(request, header.sequence_key)
        key = key_of(self._route, request).value
        return self._at(self._choice.by_key(key) if key else self._choice.by_coin(self._coin()))

    def _by_sequence(self, request: InferenceRequest, sequence: SequenceKey) -> ReadyArm:
        """Return the arm on which a sequence has begun if it is ready; else the arm of its key."""
        header, state = request.header, self._state
        pinned = None if header.sequence_start else state.sequences.get(sequence)
        arm = None
        if pinned is not None:
            arm = next((each for each in self._arms if each is not None and each.label == pinned.arm), None)
        if arm is None or pinned is None:
            arm = self._assigned(header) or self._at(self._choice.by_key(key_of(self._route, request).value))
            pinned = PinnedSequence(arm.label, self._choice.probability)
        self._pinned = pinned
        if header.sequence_end:
            state.sequences.pop(sequence, None)
        else:
            state.pin(sequence, pinned)
        return arm

    def _begin(self, request: InferenceRequest, headers: ArmHeaders, arm: ReadyArm) -> bool:
        """Give a request the header of its arm; return False if that is not valid there, and the request refused."""
        own = request.header
        header = headers.by_arm[arm.index]
        if header is None:
            assignment = own.assignment
            if assignment is None or (own.sequence_id and self._owns):  # a front does not know where it has begun
                assignment = arm.assignment._replace(cluster=headers.cluster)
            header = own.readdressed(arm.model, arm.version_text, assignment)
            header.route = arm.route
        assert header.assignment is not None
        if self._shadow is not None:
            self._shadow.begin(request, arm.label)
        if self._take is not None:
            self._observe(request, headers, header.assignment, self._take)
        request.header = header
        if headers.by_arm[arm.index] is None:
            try:
                arm.version.signature.bind(header, request.id)
            except NeriteError as error:
                request.respond(InferenceResponse.failed(error.without_frames()))
                return False
            headers.by_arm[arm.index] = header
        return True

    def _observe(
        self, request: InferenceRequest, headers: ArmHeaders, assignment: Assignment, take: TakeOutcome
    ) -> None:
        if headers.dynamic:
            if not assignment.cluster:
                key = key_of(self._route, request).value
                assignment = assignment._replace(cluster=self._route.cluster(key) if key else 0)
            if request.header.sequence_id and self._pinned is not None:
                assignment = assignment._replace(probability=self._pinned.probability)
        strata = headers.strata
        if strata is None:
            strata = headers.strata = StrataOfHeader(request.header)
        ObservedSink(request, assignment, self._state, take, strata.of(request))
