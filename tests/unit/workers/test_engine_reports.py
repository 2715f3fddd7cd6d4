"""Reports of engines: what is packed is what is read; and what leaves a worker together leaves in order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from doubles import request
from nerite.core.engine_report import AdapterUse, EngineReport, RequestBegun, RequestEnded, RequestProgress
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import EMPTY
from nerite.workers.child.io import Outbox
from nerite.workers.child.worker import EngineReporter
from nerite.workers.ipc import messages


def test_what_is_packed_is_what_is_read() -> None:
    batches = {0x0107: [request(), request()], 0x0207: [request()]}
    places = {each: (number, index) for number, batch in batches.items() for index, each in enumerate(batch)}
    (first, second), (third,) = batches.values()
    begun = RequestBegun(2**63, 1_000_000, 999_999, 40, 576)
    report = EngineReport(
        3, 2, 4096, 17, 32, 100, 16, 60, 9, prefix_queries=2**40, preemptions=0,
        progress=[
            RequestProgress(first, 5, begun),
            RequestProgress(second, ended=RequestEnded.FAILED),
            RequestProgress(third, 1),
        ],
    )  # fmt: skip
    packed = messages.report_frame(7, report, places.get)
    _, kind, seat = messages.FRAME.unpack_from(packed)
    assert (kind, seat, len(packed) % 8) == (messages.REPORT, 7, 0)
    assert messages.read_report(memoryview(packed)[messages.FRAME.size :], batches.get) == report


def test_adapters_are_packed_with_the_state() -> None:
    known = request()
    report = EngineReport(progress=[RequestProgress(known, 2)], adapters=AdapterUse(4, ("ä", "b,c"), ("d",)))
    packed = messages.report_frame(0, report, {known: (256, 0)}.get)
    assert messages.read_report(memoryview(packed)[messages.FRAME.size :], {256: [known]}.get) == report


def test_what_is_not_known_any_more_is_left_out() -> None:
    known, gone = request(), request()
    report = EngineReport(progress=[RequestProgress(gone, 1), RequestProgress(known, 2)])
    packed = messages.report_frame(0, report, {known: (256, 0)}.get)
    body = memoryview(packed)[messages.FRAME.size :]
    assert messages.read_report(body, {256: [known]}.get).progress == [RequestProgress(known, 2)]
    assert messages.read_report(body, {512: [known]}.get) == EngineReport(progress=[])


class Line:
    """A worker's way out, and what the server receives in one go."""

    def __init__(self) -> None:
        self._server, self._channel = socket.socketpair()
        self._mine, self._theirs = socket.socketpair()
        self._server.setblocking(False)
        self.outbox = Outbox(self._channel, self._theirs)

    def received(self) -> list[int]:
        """Return the kinds of the messages that are here."""
        try:
            data = self._server.recv(1 << 20)
        except BlockingIOError:
            return []
        kinds = []
        while data:
            length, kind, _ = messages.FRAME.unpack_from(data)
            kinds.append(kind)
            data = data[length:]
        return kinds

    def close(self) -> None:
        for each in (self._server, self._channel, self._mine, self._theirs):
            each.close()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()


def part(line: Line, final: bool = False) -> None:
    line.outbox.part(256, 0, EMPTY, final, ExecutionTimes())


def test_what_is_said_together_leaves_together(line: Line) -> None:
    with line.outbox.together():
        line.outbox.send(messages.report_frame(0, EngineReport(), _nowhere))
        part(line)
        part(line, final=True)
        assert line.received() == []
    assert line.received() == [messages.REPORT, messages.PART, messages.LAST]
    part(line)
    assert line.received() == [messages.PART]


def test_another_thread_does_not_wait_and_overtakes_nothing(line: Line) -> None:
    with line.outbox.together():
        part(line)
        other = threading.Thread(target=line.outbox.send, args=(messages.frame(messages.DONE),))
        other.start()
        other.join()
        assert line.received() == [messages.PART, messages.DONE]
        part(line, final=True)
    assert line.received() == [messages.LAST]


def test_what_was_said_leaves_even_if_what_follows_fails(line: Line) -> None:
    def fail() -> None:
        with line.outbox.together():
            part(line)
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert line.received() == [messages.PART]


def test_a_reporter_says_where_it_is(line: Line) -> None:
    reporter = EngineReporter(3, line.outbox)
    with reporter.together():
        reporter.report(EngineReport(running=1))
        assert line.received() == []
    assert line.received() == [messages.REPORT]


def _nowhere(_request: InferenceRequest) -> Any:
    return None
