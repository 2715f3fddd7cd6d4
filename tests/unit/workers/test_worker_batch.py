"""Responses that leave a worker one by one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import NoReturn

import pytest

from doubles import request
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import EMPTY, InferenceResponse
from nerite.workers.child.hosted_model import WorkerBatch, WorkerRequest
from nerite.workers.child.io import Inbox
from nerite.workers.ipc import messages


def _fail(error: Exception) -> NoReturn:
    raise error


class Bench:
    """One batch of three requests, and the server's end of the channel."""

    def __init__(self) -> None:
        self.server, channel = socket.socketpair()
        self.channel = channel
        self.sent: list[tuple[int, InferenceResponse, bool]] = []
        self.done: list[int] = []
        self.inbox = Inbox(channel, self._control, _fail)
        self.timings: list[ExecutionTimes] = []
        self.batch = WorkerBatch(7, self.inbox, self._send, self.done.append)
        self.batch.timings = ExecutionTimes()
        self.requests: list[InferenceRequest] = []
        for _ in range(3):
            plain = request()
            asked = WorkerRequest(plain.header, [b"data"], self.batch, 0)
            self.requests.append(asked)
            self.batch.requests.append(asked)
        self.batch.begin()

    def _control(self, kind: int, count: int, body: memoryview) -> bool:
        if kind not in messages.OF_REQUEST:
            return False
        assert messages.read_batch(body)[0] == 7
        self.batch.receive(kind, count)
        return True

    def _send(self, batch: int, index: int, response: InferenceResponse, final: bool, timings: ExecutionTimes) -> None:
        assert batch == 7
        timings.end()
        self.timings.append(timings)
        self.sent.append((index, response, final))

    def say(self, kind: int, index: int = 0) -> None:
        self.server.sendall(messages.request_frame(kind, 7, index))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.server.close()
    made.channel.close()


OK = InferenceResponse(None)


def test_each_response_says_whose_it_is(bench: Bench) -> None:
    bench.requests[2].respond(OK, False)
    bench.requests[0].respond(EMPTY)
    assert bench.sent == [(2, OK, False), (0, EMPTY, True)]


def test_each_response_tells_its_times(bench: Bench) -> None:
    for asked in (bench.requests[0], bench.requests[1], bench.requests[0]):
        asked.respond(OK, False)
    first, other, second = bench.timings
    execution = bench.batch.timings
    assert {timings.started_ns for timings in bench.timings} == {execution.started_ns}
    assert first.inputs_ready_ns == other.inputs_ready_ns == execution.inputs_ready_ns
    assert second.inputs_ready_ns == first.ended_ns, "it is computed since the one before had left"
    for timings in bench.timings:
        assert timings.inputs_ready_ns <= timings.computed_ns <= timings.ended_ns


def test_a_batch_is_kept_until_the_last_response_of_each(bench: Bench) -> None:
    assert bench.batch.keep([OK, None, None])
    assert bench.requests[0].finished
    bench.requests[1].respond(EMPTY)
    assert bench.done == []
    bench.requests[2].respond(EMPTY)
    assert bench.done == [7]
    assert [list(each.data) for each in bench.requests] == [[], [], []], "the inputs are given back"


def test_a_batch_is_not_kept_if_everything_was_sent_before(bench: Bench) -> None:
    for asked in bench.requests:
        asked.respond(EMPTY)
    assert not bench.batch.keep([None, None, None])


def test_what_execute_has_answered_is_not_answered_again(bench: Bench) -> None:
    assert bench.batch.keep([OK, None, None])
    bench.requests[0].respond(OK)
    assert bench.sent == []


def test_a_model_that_asks_learns_that_nobody_waits(bench: Bench) -> None:
    assert not bench.requests[1].is_cancelled()
    bench.say(messages.CANCEL, 1)
    assert [each.is_cancelled() for each in bench.requests] == [False, True, False]


def test_whoever_sends_waits_while_there_is_more_than_enough(bench: Bench) -> None:
    bench.requests[0].respond(OK, False)
    bench.say(messages.PAUSE)
    sender = threading.Thread(target=bench.requests[0].respond, args=(OK, False))
    sender.start()
    bench.requests[1].respond(OK, False)
    bench.say(messages.RESUME)
    sender.join()
    assert bench.sent == [(0, OK, False), (1, OK, False), (0, OK, False)]


def test_the_first_response_of_an_execution_does_not_wait(bench: Bench) -> None:
    bench.say(messages.PAUSE)
    bench.requests[0].respond(OK, False)
    assert bench.sent == [(0, OK, False)]


def test_whoever_pauses_by_itself_is_told_and_does_not_wait(bench: Bench) -> None:
    told: list[bool] = []
    bench.requests[0].on_pause = lambda _request, paused: told.append(paused)
    bench.say(messages.PAUSE)
    bench.requests[0].respond(OK, False)
    bench.say(messages.RESUME)
    bench.batch.poll()
    bench.requests[0].respond(OK, True)
    assert told == [True, False]
    assert bench.sent == [(0, OK, False), (0, OK, True)]


def test_nobody_waits_for_a_client_that_is_gone(bench: Bench) -> None:
    bench.requests[0].respond(OK, False)
    bench.say(messages.PAUSE)
    bench.say(messages.CANCEL)
    bench.requests[0].respond(OK, False)
    assert bench.requests[0].is_cancelled()
    assert len(bench.sent) == 2


def test_many_threads_wait_and_one_of_them_reads(bench: Bench) -> None:
    for index in range(3):
        bench.requests[index].respond(OK, False)
        bench.say(messages.PAUSE, index)
    bench.batch.poll()
    senders = [threading.Thread(target=each.respond, args=(OK, False)) for each in bench.requests]
    for sender in senders:
        sender.start()
    for index in (2, 0, 1):
        bench.say(messages.RESUME, index)
        senders[index].join()
    assert [index for index, _, _ in bench.sent] == [0, 1, 2, 2, 0, 1]


def test_jobs_that_somebody_else_has_read_are_kept_in_order(bench: Bench) -> None:
    bench.server.sendall(messages.frame(messages.EXECUTE, b"first") + messages.frame(messages.IS_READY))
    bench.say(messages.CANCEL)
    assert bench.requests[0].is_cancelled()
    assert not bench.inbox.idle
    jobs = [bench.inbox.job(), bench.inbox.job()]
    assert [job[0] for job in jobs if job is not None] == [messages.EXECUTE, messages.IS_READY]
    assert bench.inbox.idle


def test_the_end_of_the_channel_ends_every_wait(bench: Bench) -> None:
    bench.requests[0].respond(OK, False)
    bench.say(messages.PAUSE)
    sender = threading.Thread(target=bench.requests[0].respond, args=(OK, False))
    sender.start()
    bench.server.close()
    sender.join()
    assert bench.inbox.job() is None


def test_what_is_said_before_the_batch_begins_takes_effect_when_it_does() -> None:
    server, channel = socket.socketpair()
    with server, channel:
        batch = WorkerBatch(7, Inbox(channel, lambda *_: False, _fail), lambda *_: None, lambda _: None)
        paused: list[bool] = []
        for kind, index in ((messages.CANCEL, 1), (messages.PAUSE, 0), (messages.RESUME, 0)):
            batch.receive(kind, index)
        first, second = (WorkerRequest(request().header, [], batch, 0) for _ in range(2))
        first.on_pause = lambda _, pause: paused.append(pause)
        batch.requests += [first, second]
        assert not second.cancelled
        batch.begin()
        assert second.cancelled
        assert not first.cancelled
        assert paused == [True, False]
