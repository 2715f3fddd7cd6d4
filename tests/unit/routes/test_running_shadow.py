"""The shadow of a route: which requests it gets and when, and what becomes of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from arms import Entry, FakeVersion, head

from doubles import FakeLoop, written
from nerite.core.errors import Cancelled, Internal, InvalidArgument, NeriteError, Overloaded
from nerite.core.request import MIXED, InferenceRequest, RequestedOutput, RequestHeader, SharedMemoryInput
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import from_array
from nerite.routes import shadow as shadow_module
from nerite.routes.shadows import RunningShadows
from nerite.scheduling import shadow_queue
from nerite.scheduling.weighted_route import RouteArm, RouteShadow, WeightedRoute

MS = 1_000_000


def answer(*values: float) -> InferenceResponse:
    spec, data = from_array("OUT", np.array([values], np.float32))
    return InferenceResponse(ResponseHeader("m", "1", [spec]), [data])


class ShadowedVersion(FakeVersion):
    """Keeps its requests, which are begun once ``running`` says so."""

    lowest_priority = 3

    def __init__(self, name: str, version: str, dims: int = -1) -> None:
        super().__init__(name, version, dims)
        self.waiting = 0
        """Requests of others that wait."""
        self.holds = False
        """What it is given waits."""

    @property
    def pending(self) -> int:
        return self.waiting + (self.open if self.holds else 0)

    @property
    def open(self) -> int:
        return sum(not request.finished for request in self.requests)

    def begun(self, request: InferenceRequest) -> bool:
        return not self.holds

    def given_up(self, why: Any) -> None:
        pass


class Shadowed(Entry):
    """Version 1 answers, version 2 is the shadow."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.versions = {("m", number): ShadowedVersion("m", number) for number in "12"}
        self.loop = FakeLoop()
        self.loop.rule(patch, shadow_module)
        self.shadows = RunningShadows(self.routes, self._running, lambda: self.loop)  # type: ignore[arg-type, return-value]
        self.put()

    def _changed(self) -> None:
        self.shadows.follow()
        super()._changed()

    def put(self, *weights: float, **settings: Any) -> None:
        arms = tuple(RouteArm("m", str(number), weight) for number, weight in enumerate(weights or (1,), 1))
        shadow = RouteShadow(RouteArm("m", "2", 0), **{"share": 1.0, "timeout": 10.0, **settings})
        self.routes.put(WeightedRoute("m", arms, (), "", shadow))

    @property
    def shadow(self) -> ShadowedVersion:
        return self.versions["m", "2"]  # type: ignore[return-value]

    @property
    def status(self) -> dict[str, Any]:
        found = self.routes.shadow_status("m")
        assert found is not None
        return found

    def serve(self, response: InferenceResponse | None = None, **fields: Any) -> InferenceRequest:
        """Have a request answered."""
        request = self.ask(head(**fields))
        request.respond(response or answer(1))
        self.loop.settle()
        return request


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Shadowed:
    return Shadowed(monkeypatch)


def test_the_shadow_is_asked_once_the_caller_has_the_answer(entry: Shadowed) -> None:
    request = entry.ask(head())
    entry.loop.settle()
    assert entry.shadow.requests == []
    request.respond(answer(1, 2))
    assert entry.shadow.requests == []
    entry.loop.settle()
    (asked,) = entry.shadow.requests
    assert asked.data is request.data
    asked.respond(answer(1, 2.5))
    entry.loop.settle()
    status = entry.status
    assert (status["requests"], status["compared"], status["differing"]) == (1, {"different": 1}, 1)
    assert (status["largest"], status["agreement"], status["held"], status["held_bytes"]) == (0.5, 0.0, 0, 0)
    page = written(entry.shadows.write_metrics).decode()
    assert 'nerite_shadow_compared_total{arm="m:2",result="different",route="m"} 1\n' in page
    assert 'nerite_shadow_distance_bucket{arm="m:2",route="m",le="1"} 1\n' in page


def test_what_is_the_callers_is_left_out(entry: Shadowed) -> None:
    place = SharedMemoryInput("region", 0, 4)
    own = RequestHeader("m", "", head().inputs, priority=1, timeout_us=5, parameters={"a": 1}, sticky_fields={"x": "y"})
    request = InferenceRequest(own, [b"\1\0\0\0a"], entry.ask(head()).sink, 0, "name")
    entry.infer(request)
    request.respond(answer(1))
    entry.loop.settle()
    made = entry.shadow.requests[-1].header
    assert (made.model_version, made.priority, made.timeout_us, made.caller) == ("2", 3, 0, MIXED)
    assert (made.sticky_fields, made.idempotency_key, made.assignment, made.parameters) == (None, None, None, {"a": 1})
    assert entry.shadow.requests[-1].background
    own = RequestHeader("m", "", head().inputs, [RequestedOutput("OUT", classification=2, place=place)])
    entry.shadow.signature.outputs["OUT"] = None  # type: ignore[assignment]
    entry.versions["m", "1"].signature.outputs["OUT"] = None  # type: ignore[assignment]
    request = InferenceRequest(own, [b"\1\0\0\0a"], request.sink, 0)
    entry.infer(request)
    request.respond(answer(1))
    entry.loop.settle()
    made = entry.shadow.requests[-1].header
    assert ([(each.name, each.place) for each in made.outputs], made.shared, made.classifies) == (
        [("OUT", None)], False, False,
    )  # fmt: skip


def test_only_a_share_is_chosen(entry: Shadowed) -> None:
    entry.put(share=0.25, concurrency=1000)
    for _ in range(2000):
        entry.serve()
        for request in entry.shadow.requests:
            request.respond(answer(1))
        entry.loop.settle()
    assert abs(len(entry.shadow.requests) / 2000 - 0.25) < 6 * (0.25 * 0.75 / 2000) ** 0.5


def test_requests_that_the_shadow_answers_itself_are_not_chosen(entry: Shadowed) -> None:
    entry.put(1, 1)
    for _ in range(40):
        entry.serve()
    assert entry.status["requests"] < 40
    asked = Counter(request.background for request in entry.shadow.requests)
    assert asked[False] > 0
    assert asked[True] + asked[False] <= 40


def test_sequences_are_left_out(entry: Shadowed) -> None:
    entry.serve(sequence_id=7, sequence_start=True)
    assert (entry.shadow.requests, entry.status["dropped"]) == ([], {"sequence": 1})


def test_a_request_that_was_cancelled_is_left_out(entry: Shadowed) -> None:
    entry.serve(InferenceResponse.failed(Cancelled("")))
    assert entry.status["dropped"] == {"cancelled": 1}


@pytest.mark.parametrize(
    ("ours", "theirs", "result"),
    [
        (None, Internal("a"), "shadow_failed"),
        (Internal("a"), None, "route_failed"),
        (Internal("a"), Internal("b"), "both_failed"),
    ],
)
def test_failures_are_compared(
    entry: Shadowed, ours: NeriteError | None, theirs: NeriteError | None, result: str
) -> None:
    entry.serve(InferenceResponse.failed(ours) if ours else None)
    entry.shadow.requests[0].respond(InferenceResponse.failed(theirs) if theirs else answer(1))
    entry.loop.settle()
    assert entry.status["compared"] == {result: 1}


def test_a_request_that_the_shadow_does_not_understand_is_its_failure(entry: Shadowed) -> None:
    entry.versions["m", "2"] = ShadowedVersion("m", "2", dims=5)
    entry.serve()
    assert entry.status["compared"] == {"shadow_failed": 1}


def test_a_shadow_that_refuses_is_not_compared(entry: Shadowed) -> None:
    entry.serve()
    entry.shadow.requests[0].respond(InferenceResponse.failed(Overloaded("a")))
    assert entry.status["dropped"] == {"refused": 1}


def test_no_more_than_so_many_run_and_are_kept(entry: Shadowed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_queue, "MAX_HELD", 5)
    entry.put(concurrency=2)
    for _ in range(9):
        entry.serve()
    status = entry.status
    assert (len(entry.shadow.requests), status["waiting"], status["held"]) == (2, 3, 5)
    assert status["dropped"] == {"queue_full": 4}
    entry.shadow.requests[0].respond(answer(1))
    entry.loop.settle()
    assert len(entry.shadow.requests) == 3


def test_bytes_are_bounded(entry: Shadowed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_queue, "MAX_BYTES", 40)
    entry.serve(answer(*range(100)))
    assert (entry.status["dropped"], entry.status["held_bytes"]) == ({"bytes": 1}, 0)
    entry.serve()
    entry.shadow.requests[0].respond(answer(*range(100)), False)
    entry.shadow.requests[0].respond(answer(1))
    assert (entry.status["dropped"], entry.status["held_bytes"]) == ({"bytes": 2}, 0)
    assert entry.shadow.requests[0].cancelled


def test_others_come_first(entry: Shadowed) -> None:
    entry.shadow.waiting = 1
    entry.serve()
    entry.loop.advance(100 * MS)
    assert entry.shadow.requests == []
    entry.shadow.waiting = 0
    entry.loop.advance(100 * MS)
    assert len(entry.shadow.requests) == 1


def test_its_own_requests_do_not_hold_each_other_up(entry: Shadowed) -> None:
    entry.shadow.holds = True
    for _ in range(3):
        entry.serve()
    assert len(entry.shadow.requests) == 3


def test_who_waits_for_too_long_is_dropped(entry: Shadowed) -> None:
    entry.shadow.waiting = 1
    entry.serve()
    entry.loop.advance(11_000 * MS)
    assert (entry.shadow.requests, entry.status["dropped"], entry.status["held"]) == ([], {"late": 1}, 0)


def test_a_shadow_that_hangs_is_cancelled(entry: Shadowed) -> None:
    entry.serve()
    entry.loop.advance(11_000 * MS)
    (hanging,) = entry.shadow.requests
    assert hanging.cancelled
    assert entry.status["dropped"] == {"timeout": 1}
    hanging.respond(InferenceResponse.failed(Cancelled("")))
    entry.loop.settle()
    assert (entry.status["dropped"], entry.status["running"], entry.status["held"]) == ({"timeout": 1}, 0, 0)


def test_an_arm_that_is_not_ready_gets_nothing(entry: Shadowed) -> None:
    entry.shadow.usable = False
    entry.serve()
    del entry.versions["m", "2"]
    entry.serve()
    assert entry.status["dropped"] == {"not_ready": 2}


def test_inputs_that_were_changed_in_place_are_noticed_and_copied_from_then_on(entry: Shadowed) -> None:
    def ask() -> None:
        request = InferenceRequest(head(), [bytearray(b"\1\0\0\0a")], first.sink, 0)
        entry.infer(request)
        request.data[0][4] = ord("b")  # type: ignore[index]
        request.respond(answer(1))
        entry.loop.settle()

    first = entry.serve()
    ask()
    assert entry.status["dropped"] == {"changed": 1}
    ask()
    assert entry.shadow.requests[-1].data == [b"\1\0\0\0a"]
    assert len(entry.shadow.requests) == 2


def test_a_sink_that_fails_gives_the_place_back(entry: Shadowed) -> None:
    def fail(request: InferenceRequest) -> None:
        raise OSError("gone")

    request = entry.ask(head())
    sink: Any = request.sink
    sink.behind.answered = fail
    request.respond(answer(1))
    entry.loop.settle()
    assert request.finished
    for each in entry.shadow.requests:
        each.respond(answer(1))
    entry.loop.settle()
    assert entry.status["held"] == 0


def test_results_outlive_a_change_of_the_share(entry: Shadowed) -> None:
    entry.serve()
    entry.serve()
    entry.shadow.requests[0].respond(answer(1))
    entry.loop.settle()
    entry.put(share=0.5)
    assert entry.status["compared"] == {"equal": 1}
    assert entry.shadow.requests[1].cancelled


def test_a_shadow_is_stopped_with_its_route(entry: Shadowed) -> None:
    entry.serve()
    entry.routes.remove("m")
    assert entry.shadow.requests[0].cancelled
    assert entry.routes.shadow_status("m") is None
    assert written(entry.shadows.write_metrics) == b""


def test_a_route_without_a_shadow_changes_no_sink(entry: Shadowed) -> None:
    entry.route(1)
    request = entry.ask(head())
    assert entry.routes.shadow_status("m") is None
    assert request.sink.__class__.__name__ == "Caller"


def test_weights_change_without_a_new_shadow(entry: Shadowed) -> None:
    entry.serve()
    entry.put(3, 1)
    entry.shadow.requests[0].respond(answer(1))
    entry.loop.settle()
    assert entry.status["compared"] == {"equal": 1}


def test_nothing_is_sent_once_the_server_stops(entry: Shadowed) -> None:
    request = entry.ask(head())
    entry.shadows.stop()
    request.respond(answer(1))
    entry.loop.settle()
    assert entry.shadow.requests == []


def test_a_shadow_is_no_other_route(entry: Shadowed) -> None:
    entry.route(1, name="other")
    shadow = RouteShadow(RouteArm("other", "", 0), 1.0)
    with pytest.raises(InvalidArgument, match="'third' leads to 'other', which is a route itself"):
        entry.routes.check(WeightedRoute("third", (RouteArm("m", "1"),), (), "", shadow))
