"""Delays that tests of clients ask for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nerite.core.errors import InvalidArgument
from nerite.transports.grpc import delays
from nerite.transports.grpc.delays import Delays

FIRST, SECOND = ("first", "response 1", False), ("second", "response 2", True)


class Clock:
    """What is to be done later, and when."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], object]]] = []

    def later(self, seconds: float, work: Callable[[], object]) -> None:
        self.due.append((seconds, work))

    def pass_by(self) -> list[float]:
        """Do what is due now; return after how long each piece was."""
        due, self.due = self.due, []
        for _, work in due:
            work()
        return [seconds for seconds, _ in due]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(delays, "call_later", clock.later)
    return clock


class Target:
    """A target, and the target of its stream, that notes what it is asked."""

    head, errors_end_it = b"", False
    stream = refusal = timeout = outer_span = None
    max_message = 0
    receive_buffer = too_large = write = write_refusal = load_trailer = None

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def start(self, *arguments: Any) -> None:
        self.asked.append(arguments)

    answer = start

    def infer(self, call: Any, framed: Any) -> bool:
        self.asked.append((call, framed))
        return True


class Call:
    """A call, unary or a stream, that is under way until it is over."""

    stream_id = 1

    def __init__(self) -> None:
        self.connection = SimpleNamespace(calls={1: self})
        self.request = "request"
        self.told: list[Any] = []

    def over(self) -> None:
        self.connection.calls.clear()
        self.request = ""

    def begin(self, request: Any, decoupled: bool) -> None:
        self.told.append(("begun", request, decoupled))

    def respond(self, *arguments: Any) -> None:
        self.told.append(arguments)

    def proceed(self) -> None:
        self.told.append("proceeds")


def test_nothing_is_in_the_way_without_a_variable(capfd: pytest.CaptureFixture[str]) -> None:
    target: Any = Target()
    none = Delays({"TRITONSERVER_DELAY_GRPC_PROCESS": "0", "PATH": "/bin"})
    none.report()
    assert none.target(target) is none.stream(target) is none.handler(target) is target
    assert capfd.readouterr() == ("", "")


def test_what_is_set_is_logged_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    Delays({delays.COMPLETE: "50ms", delays.ADMINISTRATION: "2", delays.WITHOUT_EFFECT[0]: "5"}).report()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(
        '"gRPC calls are delayed for tests of clients, as set in the environment: '
        "TRITONSERVER_SERVER_DELAY_GRPC_RESPONSE_SEC=2, TRITONSERVER_DELAY_GRPC_COMPLETE=50, "
        'TRITONSERVER_DELAY_GRPC_NOTIFICATION (ignored)"'
    )


@pytest.mark.parametrize("value", ["soon", "", "-5"])
def test_what_is_no_number_delays_nothing(value: str, capfd: pytest.CaptureFixture[str]) -> None:
    target: Any = Target()
    given = Delays({delays.PROCESS: value})
    given.report()
    assert given.target(target) is target
    complaint = f"Unable to parse the debug variable {delays.PROCESS}. Value provided: '{value}' is not"
    assert (complaint in capfd.readouterr().err) is (value != "-5")


def test_calls_begin_and_answer_late(clock: Clock) -> None:
    inner: Any = Target()
    environment = {delays.PROCESS: "300", delays.ENTRY: "200", delays.ANSWERS[0]: "20", delays.ANSWERS[1]: "30"}
    target: Any = Delays(environment).target(inner)
    call = Call()
    assert target.start_known(call, b"") is False
    target.start(call, "framed")
    assert inner.asked == []
    assert clock.pass_by() == [0.5]
    assert inner.asked == [(call, "framed")]
    target.answer(call, "request", "response")
    assert clock.pass_by() == [0.05]
    assert inner.asked[1:] == [(call, "request", "response")]
    target.start(call, "again")
    target.answer(call, "request", "again")
    call.over()
    clock.pass_by()
    assert len(inner.asked) == 2, "no client waits any more"


@pytest.mark.parametrize(("decoupled", "seconds"), [(False, 0.1), (True, 0.5)])
def test_responses_on_a_stream_come_late_and_one_after_the_other(clock: Clock, decoupled: bool, seconds: float) -> None:
    inner: Any = Target()
    stream: Any = Delays({delays.COMPLETE: "100", delays.RESPONSE: "400"}).stream(inner)
    call = Call()
    assert stream.infer(call, "framed") is True
    ((late, _),) = inner.asked
    late.begin("request", decoupled)
    late.respond(*FIRST)
    late.respond(*SECOND)
    assert call.told == [("begun", "request", decoupled)]
    assert clock.pass_by() == [pytest.approx(seconds)]
    assert call.told[1:] == [FIRST]
    assert clock.pass_by() == [pytest.approx(seconds)]
    assert call.told[1:] == [FIRST, SECOND]
    assert clock.due == []
    late.proceed()
    assert call.told[-1] == "proceeds"


def test_requests_on_a_stream_begin_late(clock: Clock) -> None:
    inner: Any = Target()
    stream: Any = Delays({delays.ENTRY: "100"}).stream(inner)
    call = Call()
    for _ in range(2):
        assert stream.infer(call, "framed") is False
    assert clock.due.pop()[0] == 0.1
    assert (clock.pass_by(), len(inner.asked), call.told) == ([0.1], 1, ["proceeds"])
    stream.infer(call, "framed")
    call.over()
    clock.pass_by()
    assert len(inner.asked) == 1


def test_other_methods_work_at_once_and_answer_late(clock: Clock) -> None:
    answers: list[Any] = []
    done = []

    def handle(request: Any, answer: Any) -> None:
        if request == "wrong":
            raise InvalidArgument("no")
        done.append(request)
        answer("reply")

    handler = Delays({delays.ADMINISTRATION: "3"}).handler(handle)
    handler("request", answers.append)
    handler("wrong", answers.append)
    assert (done, answers) == (["request"], [])
    assert clock.pass_by() == [3.0, 3.0]
    assert answers[0] == "reply"
    assert isinstance(answers[1], InvalidArgument)
