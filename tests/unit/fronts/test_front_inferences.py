"""Inferences that a front hands to the core, and what comes back: tensors, errors, cancellations, pauses."""

from __future__ import annotations

import gc
import socket
from typing import Any

import pytest
from front_channel import LARGE, Ends, FakeServer, Process, answered, asked, response, tell, tensor, values

from doubles import Caller
from nerite.core import errors
from nerite.core.errors import Internal, NeriteError, Unavailable
from nerite.core.execution_observer import TraceContext
from nerite.core.request import CancelReason, InferenceRequest, RepeatedRequest
from nerite.core.response import EMPTY, InferenceResponse


def reasons(server: FakeServer, patch: pytest.MonkeyPatch) -> list[CancelReason]:
    """Return the reasons with which the server's requests are cancelled, as far as they are."""
    found: list[CancelReason] = []
    cancel = InferenceRequest.cancel

    def noted(request: InferenceRequest, why: CancelReason = CancelReason.CANCELLED) -> None:
        if request in server.requests:
            found.append(why)
        cancel(request, why)

    patch.setattr(InferenceRequest, "cancel", noted)
    return found


@pytest.mark.parametrize("size", [0, 1, 100, LARGE])
@pytest.mark.parametrize("outputs", [(1,), (100, LARGE), ()])
def test_tensors_cross_both_ways(size: int, outputs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        caller = Caller()
        request = await ends.call(caller, asked(size, 3), tensor(size, 7), tensor(3, 8), id="é 1")
        (received,) = ends.server.requests
        assert (received.header.model_name, received.id, received.arrived_ns) == ("model", "é 1", 123)
        assert [spec.shape for spec in received.header.inputs] == [(size,), (3,)]
        assert values(received.data) == [tensor(size, 7), tensor(3, 8)]
        assert ends.core.calls_begun == len(ends.core.calls) == ends.front.in_flight == 1
        received.respond(response(*outputs, note=True))
        await ends.settle()
        ((answer, final),) = [(each, final) for _, each, final in caller.answers]
        assert answer.header is not None
        assert (final, answer.header.parameters, values(answer.data)) == (
            True,
            {"note": True},
            [tensor(each, 2) for each in outputs],
        )
        assert request.finished
        assert len(ends.core.calls) == ends.front.in_flight == 0

    tell(monkeypatch, story)


def test_a_header_crosses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        header, other = asked(8), asked(8, model="other", priority=3)
        for each in (header, header, other, header):
            await ends.call(Caller(), each, tensor(8))
        first, second, third, fourth = (request.header for request in ends.server.requests)
        assert first is second is fourth
        assert (third.model_name, third.priority) == ("other", 3)
        replied = answered(8)
        caller = Caller()
        await ends.call(caller, header, tensor(8))
        for value in (1, 2):
            ends.server.requests[-1].respond(InferenceResponse(replied, [tensor(8, value)]), final=value == 2)
        await ends.settle()
        assert caller.answers[0][1].header is caller.answers[1][1].header

    tell(monkeypatch, story)


def test_several_responses_arrive_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        caller = Caller()
        request = await ends.call(caller, asked(1), tensor(1))
        (received,) = ends.server.requests
        for value, size in enumerate((1, LARGE, 1)):
            received.respond(response(size, value=value), final=False)
        await ends.settle()
        assert not request.finished
        received.respond(EMPTY)
        await ends.settle()
        assert [(values(each.data), final) for _, each, final in caller.answers] == [
            ([tensor(1, 0)], False),
            ([tensor(LARGE, 1)], False),
            ([tensor(1, 2)], False),
            ([], True),
        ]
        assert caller.answers[-1][1].empty

    tell(monkeypatch, story)


@pytest.mark.parametrize("kind", errors.BY_NAME.values(), ids=errors.BY_NAME)
@pytest.mark.parametrize("submitting", [False, True])
def test_errors_stay_what_they_are(kind: type[NeriteError], submitting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        failure = kind("no, é", 3)
        failure.begun = True
        if submitting:
            ends.server.answers = lambda request: request.respond(InferenceResponse.failed(failure))
        caller = Caller()
        await ends.call(caller, asked(1), tensor(1))
        if not submitting:
            ends.server.requests[0].respond(InferenceResponse.failed(failure))
            await ends.settle()
        error = caller.answers[0][1].error
        assert type(error) is kind
        assert (error.message, error.retry_after, error.begun, error.refused) == ("no, é", 3, True, submitting)

    tell(monkeypatch, story)


def test_a_success_at_once_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        ends.server.answers = lambda request: request.respond(response(1))
        caller = Caller()
        await ends.call(caller, asked(1), tensor(1))
        ((_, answer, final),) = caller.answers
        assert (answer.error, values(answer.data), final) == (None, [tensor(1, 2)], True)

    tell(monkeypatch, story)


def test_a_request_that_cannot_be_packed_is_answered_by_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        caller = Caller()
        await ends.call(caller, asked(8), tensor(7))
        assert isinstance(caller.answers[0][1].error, Internal)
        assert (ends.server.requests, ends.front.in_flight) == ([], 0)
        await ends.call(caller, asked(8), tensor(8))  # the channel goes on
        assert len(ends.server.requests) == 1

    tell(monkeypatch, story)


def test_a_response_that_cannot_be_packed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        caller = Caller()
        await ends.call(caller, asked(8), tensor(8))
        ends.server.requests[0].respond(InferenceResponse(answered(8), [tensor(7)]))
        await ends.settle()
        ((_, answer, final),) = caller.answers
        assert final
        assert isinstance(answer.error, Internal)

    tell(monkeypatch, story)


@pytest.mark.parametrize("why", CancelReason)
def test_a_cancellation_keeps_its_reason(why: CancelReason, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        found = reasons(ends.server, monkeypatch)
        request = await ends.call(Caller(), asked(1), tensor(1))
        other = await ends.call(Caller(), asked(1), tensor(1))
        ends.front.cancel_reason = why  # the version notes it (``given_up``)
        request.cancel(why)
        request.cancel(why)
        await ends.settle()
        assert [each.cancelled for each in ends.server.requests] == [True, False]
        assert found == [why]
        other.cancel()
        await ends.settle()
        assert found == [why, CancelReason.CANCELLED], "a reason is of one request"

    tell(monkeypatch, story)


def test_a_cancelled_request_is_still_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        caller = Caller()
        request = await ends.call(caller, asked(1), tensor(1))
        request.cancel()
        await ends.settle()
        ends.server.requests[0].respond(InferenceResponse.failed(errors.Cancelled("cancelled")))
        ends.server.requests[0].respond(response(1))
        await ends.settle()
        assert [type(each.error) for _, each, _ in caller.answers] == [errors.Cancelled]
        assert ends.front.in_flight == 0

    tell(monkeypatch, story)


def test_a_cancellation_that_comes_too_late_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        caller = Caller()
        request = await ends.call(caller, asked(1), tensor(1))
        ends.server.requests[0].respond(response(1))
        request.cancel()  # the response is on its way
        await ends.settle()
        assert len(caller.answers) == 1
        assert ends.server.requests[0].cancelled is False

    tell(monkeypatch, story)


def test_pauses_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        request = await ends.call(Caller(), asked(1), tensor(1))
        seen: list[bool] = []
        ends.server.requests[0].on_pause = lambda _request, paused: seen.append(paused)
        for paused in (True, False, True):
            request.pause(paused)
        await ends.settle()
        assert seen == [True, False, True]
        ends.server.requests[0].respond(EMPTY)
        await ends.settle()
        request.pause(False)
        await ends.settle()
        assert seen == [True, False, True]

    tell(monkeypatch, story)


class Sink(Caller):
    """A sink of a transport."""

    protocol = "GRPC"
    began_ns = 77
    outer_span: TraceContext | None = TraceContext(2**127 + 1, 2**63 + 5, "vendor=é", False)


def test_the_sink_stands_for_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        await ends.call(Sink(), asked(1), tensor(1))
        await ends.call(Caller(), asked(1), tensor(1))
        first, second = (request.sink for request in ends.server.requests)
        spans: list[Any] = [getattr(sink, "outer_span", 0) for sink in (first, second)]
        assert spans == [Sink.outer_span, None], "a span is of the next request only"
        assert [getattr(sink, "protocol", "") for sink in (first, second)] == ["GRPC", "HTTP"]
        assert [getattr(sink, "began_ns", 0) for sink in (first, second)] == [77, 0]

    tell(monkeypatch, story)


def test_a_request_that_repeats_a_prompt_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        ends.front.call(RepeatedRequest(asked(1), [tensor(1)], Sink(), 0))
        await ends.call(Sink(), asked(1), tensor(1))
        assert [each.repeats for each in ends.server.requests] == [True, False]
        assert {getattr(each.sink, "protocol", "") for each in ends.server.requests} == {"GRPC"}

    tell(monkeypatch, story)


def test_tokens_return_with_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        caller = Caller()
        await ends.call(caller, asked(LARGE), tensor(LARGE))
        assert ends.live == [0, 1]
        ends.server.requests.pop().respond(response(LARGE))
        await ends.settle()
        assert values(caller.answers[0][1].data) == [tensor(LARGE, 2)]
        caller.answers.clear()
        gc.collect()
        await ends.call(caller, asked(1), tensor(1))
        assert ends.live[0] == 0
        ends.server.requests.pop().respond(response(1))
        await ends.settle()
        assert ends.live == [0, 0]

    tell(monkeypatch, story)


def test_tokens_return_after_a_while_if_there_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        caller = Caller()
        await ends.call(caller, asked(LARGE), tensor(LARGE))
        ends.server.requests.pop().respond(response(LARGE))
        await ends.settle()
        caller.answers.clear()
        gc.collect()
        await ends.settle()
        assert ends.live[0] == 1
        await ends.pass_time(1.0)
        assert ends.live == [0, 0]

    tell(monkeypatch, story)


@pytest.mark.parametrize("sizes", [(), (0,), (5,), (8, 3)])
@pytest.mark.parametrize("count", [1, 2, 700])
def test_many_small_requests_of_a_turn(sizes: tuple[int, ...], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        header, replied = asked(*sizes), answered(*sizes)
        await ends.call(Caller(), header, *map(tensor, sizes))  # from now on it is known
        ends.server.requests.pop().respond(InferenceResponse(replied, [*map(tensor, sizes)]))
        await ends.settle()
        callers = [Caller() for _ in range(count)]
        for number, caller in enumerate(callers):
            data = [tensor(size, number & 255) for size in sizes]
            ends.front.call(InferenceRequest(header, data, caller, number))
        while len(ends.server.requests) < count:
            await ends.settle()
        for number, request in enumerate(ends.server.requests):
            assert request.arrived_ns == number
            assert values(request.data) == [tensor(size, number & 255) for size in sizes]
            request.respond(InferenceResponse(replied, request.data))
        while ends.front.in_flight:
            await ends.settle()
        for number, caller in enumerate(callers):
            ((_, answer, final),) = caller.answers
            assert final
            assert values(answer.data) == [tensor(size, number & 255) for size in sizes]

    tell(monkeypatch, story)


def test_what_happens_in_one_turn_happens_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        header = asked(8)
        await ends.call(Caller(), header, tensor(8))
        requests = [InferenceRequest(header, [tensor(8, number)], Caller(), 0) for number in range(4)]
        for request in requests[:3]:
            ends.front.call(request)
        requests[1].cancel()
        ends.front.call(requests[3])
        requests[3].cancel()
        await ends.settle()
        received = ends.server.requests[1:]
        assert [(request.data[0][0], request.cancelled) for request in received] == [
            (0, False),
            (1, True),
            (2, False),
            (3, True),
        ]

    tell(monkeypatch, story)


def test_a_refusal_of_many_requests_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        header, caller = asked(8), Caller()
        await ends.call(Caller(), header, tensor(8))
        error = Unavailable("not now", 2)
        ends.server.answers = lambda request: request.respond(InferenceResponse.failed(error))
        for _ in range(3):
            ends.front.call(InferenceRequest(header, [tensor(8)], caller, 0))
        await ends.settle()
        refused = [answer.error for _, answer, _ in caller.answers]
        assert [(each.message, each.retry_after, each.refused) for each in refused if each] == [
            ("not now", 2, True)
        ] * 3

    tell(monkeypatch, story)


def test_an_input_that_comes_back_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        caller = Caller()
        buffer = ends.front.receive_buffer(LARGE)
        assert buffer is not None
        buffer[:] = tensor(LARGE, 5)
        await ends.call(caller, asked(LARGE), buffer)
        received = ends.server.requests.pop()
        received.respond(InferenceResponse(answered(LARGE), [received.data[0]]))
        await ends.settle()
        assert ends.live[0] == 0, "nothing is written to the core's memory"
        (answer,) = caller.answers[0][1].data
        buffer[0] = 9
        assert bytes(answer[:2]) == b"\x09\x05"

    tell(monkeypatch, story)


def test_all_of_a_turn_leaves_in_one_system_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        caller = Caller()
        core, front = ends.sockets
        before = front.sends
        for _ in range(20):
            ends.front.call(InferenceRequest(asked(8), [tensor(8)], caller, 0))
        ends.front.closed(1)
        assert front.sends == before
        await ends.settle()
        assert front.sends == before + 1
        assert len(ends.server.requests) == 20
        before = core.sends
        for request in ends.server.requests:
            request.respond(response(8))
        ends.core.ask_figures()
        await ends.settle()
        assert core.sends == before + 1
        assert len(caller.answers) == 20

    tell(monkeypatch, story)


def test_more_than_the_socket_takes_at_once_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        caller = Caller()
        size = 30_000  # below what goes through shared memory
        for number in range(60):
            ends.front.call(InferenceRequest(asked(size), [tensor(size, number)], caller, 0))
        while len(ends.server.requests) < 60:
            await ends.settle()
        assert [request.data[0][0] for request in ends.server.requests] == list(range(60))

    tell(monkeypatch, story)


def test_a_lost_front_cancels_its_calls_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        found = reasons(ends.server, monkeypatch)
        for _ in range(3):
            await ends.call(Caller(), asked(1), tensor(1))
        ends.server.requests[0].respond(response(1))
        await ends.settle()
        ends.sockets[1].shutdown(socket.SHUT_RDWR)
        await ends.settle()
        assert ends.owner.told.count("lost") == 1
        assert found == [CancelReason.DISCONNECTED] * 2
        assert len(ends.core.calls) == 0
        ends.server.requests[1].respond(response(LARGE))  # nobody waits
        await ends.settle()
        assert ends.live[0] == 0

    tell(monkeypatch, story)


def test_a_front_notices_that_the_core_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        ends.sockets[0].shutdown(socket.SHUT_RDWR)
        await ends.settle()
        assert ends.events.told.count("lost") == 1

    tell(monkeypatch, story)


def test_a_front_that_talks_nonsense_is_killed(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    async def story(ends: Ends) -> None:
        ends.sockets[1].send(b"\x18\0\0\0\x40\0\0\0" + b"\xff" * 16)  # a call with 4 billion tokens
        await ends.settle()
        assert isinstance(ends.process, Process)
        assert ends.process.killed == "the server could not go on talking to it, see the log"
        assert ends.owner.told.count("lost") == 1

    tell(monkeypatch, story)
    assert len(caplog.records) == 1


def test_an_unavailable_server_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        def refuse(request: InferenceRequest) -> None:
            request.respond(InferenceResponse.failed(Unavailable("not now")))

        ends.server.answers = refuse
        caller = Caller()
        await ends.call(caller, asked(LARGE), tensor(LARGE))
        assert caller.answers[0][1].error is not None
        assert ends.live[0] == 0

    tell(monkeypatch, story)
