"""What becomes of the requests of a route: one outcome each, and another arm for those that their arm has lost."""

from __future__ import annotations

from time import monotonic_ns

import pytest
from arms import Entry, head

from doubles import Caller
from nerite.core.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NeriteError,
    Overloaded,
    QueueFull,
    QueueTimeout,
    QuotaExceeded,
)
from nerite.core.execution_observer import ForwardingSink
from nerite.core.request import InferenceRequest
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.judge.outcome import Outcome, Stratum
from nerite.routes.observation import ArmFallback

PART = InferenceResponse(ResponseHeader("m", "1", ()))


@pytest.fixture
def entry() -> Entry:
    made = Entry()
    made.route(0, 1)
    return made


@pytest.fixture
def outcomes(entry: Entry) -> list[Outcome]:
    taken: list[Outcome] = []
    entry.routes.observe("m", lambda outcome, _counted: taken.append(outcome))
    return taken


def test_an_answer_is_one_outcome(entry: Entry, outcomes: list[Outcome]) -> None:
    request = entry.ask(head())
    (under_way,) = entry.routes.under_way("m")
    now = under_way.outcome(monotonic_ns())
    assert (now.candidate, now.probability, now.error) == (True, 1.0, "")
    assert now.latency_us == now.first_us > 0
    request.respond(PART)
    request.respond(PART)
    ((candidate, probability, at_ns, latency, first, token, error, stratum, cluster),) = outcomes
    assert (candidate, probability, error, token, cluster) == (True, 1.0, "", 0.0, 0)
    assert latency == first == at_ns / 1e3
    assert stratum == Stratum("<16 B")
    assert entry.routes.under_way("m") == []


def test_a_stream_has_the_time_of_its_first_answer_and_between_two(entry: Entry, outcomes: list[Outcome]) -> None:
    request = entry.ask(head())
    for _ in range(3):
        request.respond(PART, False)
    now = entry.routes.under_way("m")[0].outcome(monotonic_ns())
    assert now.first_us < now.latency_us
    request.respond(EMPTY)
    (outcome,) = outcomes
    assert 0 < outcome.first_us < outcome.latency_us
    assert 0 < outcome.token_us <= (outcome.latency_us - outcome.first_us) / 2


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Internal("a"), "error"),
        (InvalidArgument("a"), "error"),
        (Cancelled(""), "cancelled"),
        (DeadlineExceeded("a"), "timeout"),
        (QueueTimeout("a"), "timeout"),
        (QueueFull("a"), "refused"),
        (Overloaded("a"), "refused"),
        (QuotaExceeded("a"), "refused"),
    ],
)
def test_a_failure_is_named(entry: Entry, outcomes: list[Outcome], error: NeriteError, kind: str) -> None:
    entry.ask(head()).respond(InferenceResponse.failed(error))
    assert [outcome.error for outcome in outcomes] == [kind]
    assert entry.routes.counters("m")["m:2"].errors == (kind != "cancelled")


def test_a_client_that_has_gone_has_cancelled_whatever_the_answer(entry: Entry, outcomes: list[Outcome]) -> None:
    request = entry.ask(head())
    request.cancelled = True
    request.respond(PART)
    assert [outcome.error for outcome in outcomes] == ["cancelled"]


def test_a_header_that_the_arm_refuses_is_its_error(entry: Entry, outcomes: list[Outcome]) -> None:
    entry.versions["m", "2"].signature.inputs.clear()
    entry.ask(head())
    assert [(outcome.candidate, outcome.error) for outcome in outcomes] == [(True, "error")]


def test_requests_with_one_key_are_one_cluster(entry: Entry, outcomes: list[Outcome]) -> None:
    entry.route(1, 1, sticky=("prompt:3",))
    for text in (b"one a", b"one b", b"two"):
        entry.ask(head(), text).respond(PART)
    one, same, other = (outcome.cluster for outcome in outcomes)
    assert one == same != other
    assert one and other


def test_a_sequence_has_the_probability_with_which_it_began(entry: Entry, outcomes: list[Outcome]) -> None:
    entry.route(3, 1)
    entry.ask(head(sequence_id=4, sequence_start=True)).respond(PART)
    entry.route(0, 1)
    entry.ask(head(sequence_id=4)).respond(PART)
    entry.ask(head(sequence_id=4, sequence_end=True)).respond(PART)
    assert [outcome.probability for outcome in outcomes] == [0.25] * 3
    assert len({outcome.candidate for outcome in outcomes}) == 1
    entry.ask(head(sequence_id=4, sequence_start=True)).respond(PART)
    assert outcomes[-1].probability == 1.0


def test_what_was_counted_under_way_comes_with_the_outcome(entry: Entry) -> None:
    taken: list[int] = []
    entry.routes.observe("m", lambda _outcome, counted: taken.append(counted))
    request = entry.ask(head())
    entry.routes.under_way("m")[0].counted = 5
    request.respond(PART)
    entry.ask(head()).respond(PART)
    assert taken == [5, 0]


def test_an_observer_that_fails_fails_no_request(entry: Entry) -> None:
    def fail(_outcome: Outcome, _counted: int) -> None:
        raise ValueError("a judge with a bug")

    entry.routes.observe("m", fail)
    request = entry.ask(head())
    caller = request.sink.behind  # type: ignore[attr-defined]
    request.respond(PART)
    assert [final for _, _, final in caller.answers] == [True]


def test_nobody_observes_any_more(entry: Entry, outcomes: list[Outcome]) -> None:
    entry.routes.observe("m", None)
    request = entry.ask(head())
    assert type(request.sink) is Caller
    request.respond(PART)
    assert outcomes == []


class Stage(ForwardingSink):
    """What a stage of a queue puts in front of a sink: it has to see the end of the request."""

    ended = 0

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        self.ended += final
        self._sink.respond(request, response, final)


def lost(entry: Entry, *, observed: bool = False) -> tuple[InferenceRequest, Caller, Stage]:
    """A request that arm 2 has and that is to be handed over to arm 1."""
    entry.route(0.001, 1000)
    request = entry.ask(head())
    caller = request.sink.behind if observed else request.sink  # type: ignore[attr-defined]
    stage = request.sink = Stage(request.sink)
    split = entry.split("m")
    assert split is not None and split.has_other(request)
    ArmFallback(request, split.again)
    return request, caller, stage


def test_a_lost_request_is_answered_by_the_other_arm(entry: Entry) -> None:
    request, caller, stage = lost(entry)
    request.respond(InferenceResponse.failed(Internal("the worker died")))
    assert request in entry.versions["m", "1"].requests
    assert (stage.ended, caller.answers, request.finished) == (1, [], False)
    request.respond(PART)
    assert [response for _, response, _ in caller.answers] == [PART]
    assert entry.routes.counters("m")["m:2"].handed_over == 1


def test_a_request_is_handed_over_once(entry: Entry) -> None:
    request, _, _ = lost(entry)
    request.respond(InferenceResponse.failed(Internal("the worker died")))
    split = entry.split("m")
    assert split is not None and not split.has_other(request)


def test_without_another_arm_the_error_is_the_answer(entry: Entry) -> None:
    request = entry.ask(head())
    caller = request.sink
    assert isinstance(caller, Caller)
    ArmFallback(request, lambda _: False)
    request.respond(error := InferenceResponse.failed(Internal("the worker died")))
    assert [response for _, response, _ in caller.answers] == [error]
    assert request.finished


def test_a_client_that_has_gone_needs_no_other_arm(entry: Entry) -> None:
    request, caller, _ = lost(entry)
    request.cancelled = True
    request.respond(InferenceResponse.failed(Internal("the worker died")))
    assert len(caller.answers) == 1
    assert entry.versions["m", "1"].requests == []


def test_what_an_arm_loses_is_its_error_although_another_answers(entry: Entry, outcomes: list[Outcome]) -> None:
    request, caller, _ = lost(entry, observed=True)
    request.respond(InferenceResponse.failed(Internal("the worker died")))
    assert outcomes == []
    request.respond(PART)
    assert [(outcome.candidate, outcome.error) for outcome in outcomes] == [(True, "error")]
    assert [response.error for _, response, _ in caller.answers] == [None]
