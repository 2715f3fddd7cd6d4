"""Who asks once more with the same key: joins what is under way, behind the turnstile of an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_engine_admission_queue import PROMPT, SAMPLING, House

from doubles import Caller as Sink
from nerite.admission import idempotency as module
from nerite.core.engine_report import RequestBegun, RequestEnded, RequestProgress
from nerite.core.errors import (
    Cancelled,
    Internal,
    InvalidArgument,
    KeyReused,
    NeriteError,
    QuotaExceeded,
    TooLate,
    Unsupported,
)
from nerite.core.execution_observer import ExecutionObserver
from nerite.core.model_calls import ChildRequest
from nerite.core.request import (
    NAME,
    Caller,
    IdempotencyKey,
    InferenceRequest,
    RequestedOutput,
    RequestHeader,
    SharedMemoryInput,
)
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.core.tensor import join_bytes

HEADER = ResponseHeader("llm", "1", [])
SECOND = 1_000_000_000
ONCE = """
[tenants.a]
requests_per_minute = 1
[tenants.b]
"""


class Desk(House):
    """A turnstile that is asked with keys."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: str = "", **given: Any) -> None:
        super().__init__(monkeypatch, policy, **given)
        self.loop.rule(monkeypatch, module)
        self.entry = self.reception.keyed(self.turnstile)
        self.paused: list[bool] = []

    def asked(
        self,
        key: str | None = "k",
        prompt: bytes = b"once",
        sink: Any = None,
        caller: Caller | None = None,
        parts: tuple[int, int] = (0, 1),
        **header: Any,
    ) -> InferenceRequest:
        header = {"caller": caller or Caller("a"), **header}
        if key is not None:
            header["idempotency_key"] = IdempotencyKey(key, *parts)
        data = [join_bytes([prompt]), join_bytes([json.dumps({"max_tokens": 20}).encode()])]
        made = RequestHeader("llm", "", [PROMPT, SAMPLING], **header)
        request = InferenceRequest(made, data, sink or self.sink, self.loop.now())
        self.entry.submit(request)
        self.loop.settle()
        return request

    @property
    def carrier(self) -> InferenceRequest:
        """What was let in last."""
        return self.engine.has[-1]

    def say(self, text: bytes, final: bool = False, carrier: InferenceRequest | None = None) -> None:
        carrier = carrier or self.carrier
        carrier.on_pause = lambda _request, paused: self.paused.append(paused)
        carrier.respond(InferenceResponse(HEADER, [bytearray(text)]), False)
        if final:
            carrier.respond(EMPTY)
        self.loop.settle()

    def heard(self, request: InferenceRequest) -> bytes:
        said = [response for response in self.sink.of(request) if response.error is None]
        return b"".join(b"".join(bytes(each) for each in response.data) or b"." for response in said)

    def error(self, request: InferenceRequest) -> NeriteError | None:
        return self.sink.of(request)[-1].error


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_a_retry_hears_all_of_it(desk: Desk) -> None:
    first = desk.asked()
    desk.say(b"one ")
    desk.say(b"two ")
    first.cancel()
    assert isinstance(desk.error(first), Cancelled)
    desk.say(b"three ")
    assert not desk.carrier.cancelled
    second = desk.asked()
    assert desk.heard(second) == b"one two three "
    desk.say(b"four", final=True)
    assert (desk.heard(second), second.finished) == (b"one two three four.", True)
    assert desk.heard(first) == b"one two "
    assert len(desk.engine.has) == 1
    assert (desk.use("default").offered, desk.use("default").joined) == (1, 1)


def test_both_hear_it_where_the_first_is_still_there(desk: Desk) -> None:
    first = desk.asked()
    desk.say(b"one ")
    second = desk.asked()
    desk.say(b"two", final=True)
    assert desk.heard(first) == desk.heard(second) == b"one two."


def test_what_is_complete_is_said_again(desk: Desk) -> None:
    first = desk.asked()
    desk.say(b"all", final=True)
    desk.loop.advance(29 * SECOND)
    again = desk.asked()
    assert desk.heard(again) == desk.heard(first) == b"all."
    assert len(desk.engine.has) == 1
    desk.loop.advance(SECOND)
    desk.asked()
    assert len(desk.engine.has) == 2


def test_who_waits_is_joined(desk: Desk) -> None:
    for number in range(2):
        desk.asked(f"{number}")
    waits, joins = desk.asked(), desk.asked()
    assert desk.turnstile.pending == 1
    waits.cancel()
    desk.engine.has[0].respond(EMPTY)
    desk.loop.settle()
    desk.say(b"late", final=True)
    assert desk.heard(joins) == b"late."


def test_after_the_grace_it_is_stopped(desk: Desk) -> None:
    first = desk.asked()
    desk.step(RequestProgress(desk.carrier, 2, RequestBegun(0, 4)))
    first.cancel()
    desk.step(RequestProgress(desk.carrier, 3))
    desk.loop.advance(31 * SECOND)
    carrier = desk.carrier
    assert carrier.cancelled
    desk.step(RequestProgress(carrier, 1))
    desk.step(RequestProgress(carrier, 0, None, RequestEnded.CANCELLED))
    use = desk.use("default")
    assert (use.output_tokens, use.wasted_tokens, use.finished) == (6, 1, {"cancelled": 1})
    desk.asked()
    assert desk.carrier is not carrier


def test_who_comes_back_has_as_long_again(desk: Desk) -> None:
    desk.asked().cancel()
    desk.loop.advance(29 * SECOND)
    second = desk.asked()
    desk.loop.advance(29 * SECOND)
    second.cancel()
    desk.loop.advance(29 * SECOND)
    assert not desk.carrier.cancelled
    desk.loop.advance(2 * SECOND)
    assert desk.carrier.cancelled


@pytest.mark.parametrize(
    "other",
    [{"prompt": b"twice"}, {"parameters": {"seed": 1}}, {"parts": (0, 2)}, {"outputs": [RequestedOutput("text")]}],
)
def test_the_key_of_another_request(desk: Desk, other: dict[str, Any]) -> None:
    desk.asked()
    error = desk.error(desk.asked(**other))
    assert isinstance(error, KeyReused)
    assert (error.http_status, error.grpc_status) == (422, 9)
    assert "the idempotency key 'k' is that of another request to model 'llm'" in error.message
    assert len(desk.engine.has) == 1


def test_who_asks_and_how_urgently_does_not_matter(desk: Desk) -> None:
    desk.asked()
    desk.asked(caller=Caller("a", "", 5 * SECOND, retry=True), priority=3, timeout_us=5)
    desk.asked('"k"')
    assert len(desk.engine.has) == 1


def test_each_part_has_an_answer_of_its_own(desk: Desk) -> None:
    for part in (0, 1):
        desk.asked(parts=(part, 2))
    assert len(desk.engine.has) == 2


def test_tenants_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, ONCE)
    for tenant in ("a", "b"):
        desk.asked(caller=Caller(tenant))
    assert len(desk.engine.has) == 2
    assert isinstance(desk.error(desk.asked("other")), QuotaExceeded), "there is a request a minute"
    first = desk.engine.has[0]
    joins = desk.asked()
    desk.say(b"all", final=True, carrier=first)
    assert desk.heard(joins) == b"all."
    assert (desk.use("a").offered, desk.use("a").joined, desk.use("a").admitted) == (2, 1, 1)


def test_what_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, ONCE)
    desk.asked("x")
    assert isinstance(desk.error(desk.asked()), QuotaExceeded)
    desk.loop.advance(60 * SECOND)
    first = desk.asked()
    desk.carrier.respond(InferenceResponse.failed(Internal("it broke")))
    assert isinstance(desk.error(first), Internal)
    desk.asked(caller=Caller("b"))
    assert len(desk.engine.has) == 3


def test_without_a_key_nothing_is_kept(desk: Desk) -> None:
    first = desk.asked(None)
    assert desk.carrier is first
    first.cancel()
    assert desk.asked(None) is desk.carrier


def test_a_key_among_the_parameters(desk: Desk) -> None:
    desk.asked(None, parameters={NAME: "p"})
    desk.asked("k", parameters={NAME: "p"})
    assert len(desk.engine.has) == 1, "what a request says counts before what its connection says"


@pytest.mark.parametrize("key", ["", "x" * 256, '""', 5])
def test_keys_that_are_none(desk: Desk, key: Any) -> None:
    error = desk.error(desk.asked(None, parameters={NAME: key}))
    assert isinstance(error, InvalidArgument)
    assert "has to be a text of 1 to 255 characters" in error.message


def test_memory_that_may_go_with_its_client(desk: Desk) -> None:
    error = desk.error(desk.asked(outputs=[RequestedOutput("text", place=SharedMemoryInput("r", 0, 8))]))
    assert isinstance(error, Unsupported)
    assert "'k'" in error.message


def test_what_another_request_needs_has_no_key(desk: Desk) -> None:
    parent = InferenceRequest(RequestHeader("rag", "", [], caller=Caller("a")), [], Sink(), 0)
    for _ in range(2):
        header = RequestHeader("llm", "", [PROMPT], parameters={NAME: "p"})
        desk.entry.submit(ChildRequest(parent, header, [join_bytes([b"once"])], desk.sink, 0))
    assert len(desk.engine.has) == 2


def test_who_reads_slowly_holds_up_nobody_else(desk: Desk) -> None:
    slow, quick = desk.asked(), desk.asked()
    slow.pause(True)
    desk.say(b"one ")
    assert (desk.heard(slow), desk.heard(quick), desk.paused) == (b"", b"one ", [])
    quick.pause(True)
    assert desk.paused == [True]
    desk.say(b"two ")
    quick.pause(False)
    desk.loop.settle()
    assert (desk.heard(quick), desk.paused[-1]) == (b"one two ", False)
    desk.say(b"three", final=True)
    assert (desk.heard(slow), slow.finished) == (b"", False)
    slow.pause(False)
    desk.loop.settle()
    assert (desk.heard(slow), slow.finished) == (b"one two three.", True)


def test_it_goes_on_when_the_slow_one_leaves(desk: Desk) -> None:
    slow = desk.asked()
    desk.say(b"one ")
    slow.pause(True)
    slow.cancel()
    assert desk.paused == [True, False]


def test_a_long_answer_is_said_again_in_several_turns(desk: Desk) -> None:
    desk.asked()
    for _ in range(100):
        desk.say(b".")
    turns = desk.loop.turns
    again = desk.asked()
    assert desk.loop.turns - turns == 4
    desk.say(b"!", final=True)
    assert desk.heard(again) == b"." * 100 + b"!."


def test_an_answer_too_long_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, "[idempotency]\nmax_bytes = 2000")
    first, second = desk.asked(), desk.asked()
    desk.say(b"x" * 1000)
    first.pause(True)
    long = desk.carrier
    desk.say(b"y" * 1000)
    assert desk.paused[-1], "nothing more is kept, so that it waits for the slowest"
    assert desk.heard(second) == b"x" * 1000 + b"y" * 1000
    third = desk.asked()
    assert desk.carrier is not long, "nobody can join"
    third.cancel()
    first.pause(False)
    desk.loop.settle()
    assert desk.heard(first) == b"x" * 1000 + b"y" * 1000
    desk.say(b"z", carrier=long)
    first.cancel()
    second.cancel()
    assert long.cancelled, "nobody can come back to it"


def test_the_header_of_an_answer_counts_where_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, "[idempotency]\nmax_bytes = 100_000")
    desk.asked()
    long = desk.carrier
    for _ in range(100):
        desk.say(b"x")
    desk.asked()
    assert desk.carrier is long
    large = ResponseHeader("llm", "1", [], {"finish_reason": "y" * 30_000})
    long.respond(InferenceResponse(large, []), False)
    desk.asked()
    assert desk.carrier is not long, "it is too long to be kept"


@pytest.mark.parametrize("header", [{"timeout_us": 1_000_000}, {"caller": Caller("a", "", SECOND)}])
def test_a_deadline_is_that_of_who_asks(monkeypatch: pytest.MonkeyPatch, header: dict[str, Any]) -> None:
    desk = Desk(monkeypatch, ONCE)
    first = desk.asked(**header)
    desk.say(b"one ")
    desk.loop.advance(SECOND)
    error = desk.error(first)
    assert isinstance(error, TooLate)
    assert not desk.carrier.cancelled
    second = desk.asked()
    desk.say(b"two", final=True)
    assert desk.heard(second) == b"one two."
    desk.loop.advance(2 * SECOND)
    assert desk.error(second) is None


def test_a_deadline_and_the_grace_end_it(desk: Desk) -> None:
    desk.asked(timeout_us=1_000_000)
    desk.loop.advance(32 * SECOND)
    assert desk.carrier.cancelled


def test_a_model_that_is_unloaded(desk: Desk) -> None:
    follows = desk.asked("follows")
    desk.asked("gone").cancel()
    desk.entry.when_drained(lambda: None)
    first, gone = desk.engine.has
    assert (first.cancelled, gone.cancelled) == (False, True)
    follows.cancel()
    assert first.cancelled


def test_a_server_that_stops(desk: Desk) -> None:
    follows = desk.asked()
    desk.reception.stop()
    desk.say(b"one", final=True)
    assert desk.heard(follows) == b"one."
    later = desk.asked()
    later.cancel()
    assert desk.carrier.cancelled


def test_those_who_want_to_know_are_told_how_it_ran(desk: Desk) -> None:
    class Trace(Sink, ExecutionObserver):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[tuple[str, InferenceRequest]] = []

        def ran(self, request: InferenceRequest, marks: Any) -> None:
            self.told.append(("ran", request))

        def parted(self, request: InferenceRequest, marks: Any) -> None:
            self.told.append(("parted", request))

    trace = Trace()
    request = desk.asked(sink=trace)
    desk.asked()
    sink = desk.carrier.sink
    assert isinstance(sink, ExecutionObserver)
    sink.ran(desk.carrier, None)
    sink.parted(desk.carrier, None)
    assert trace.told == [("ran", request), ("parted", request)]
