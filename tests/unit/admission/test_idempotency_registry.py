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
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    KeyReused,
    NeriteError,
    QuotaExceeded,
    Unsupported,
)
from nerite.core.execution_observer import ExecutionObserver
from nerite.core.model_calls import ChildRequest
from nerite.core.queue_stage import QueueStage
from nerite.core.request import (
    NAME,
    Caller,
    IdempotencyKey,
    InferenceRequest,
    RequestedOutput,
    RequestHeader,
    SharedMemoryRequest,
)
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.core.tensor import DeviceBuffer, TensorData, join_bytes

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
        following = self.in_front(self.admission_queue)
        self.entry = self.tenant_admission.idempotent_queue(following, self.admission_queue.controller)
        self.paused: list[bool] = []

    def in_front(self, admission_queue: QueueStage) -> QueueStage:
        """Return the stage that the stage of keys passes requests to."""
        return admission_queue

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
def bls_server(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_a_retry_hears_all_of_it(bls_server: Desk) -> None:
    first = bls_server.asked()
    bls_server.say(b"one ")
    bls_server.say(b"two ")
    first.cancel()
    assert isinstance(bls_server.error(first), Cancelled)
    bls_server.say(b"three ")
    assert not bls_server.carrier.cancelled
    second = bls_server.asked()
    assert bls_server.heard(second) == b"one two three "
    bls_server.say(b"four", final=True)
    assert (bls_server.heard(second), second.finished) == (b"one two three four.", True)
    assert bls_server.heard(first) == b"one two "
    assert len(bls_server.engine.has) == 1
    assert (bls_server.use("default").offered, bls_server.use("default").joined) == (1, 1)


def test_both_hear_it_where_the_first_is_still_there(bls_server: Desk) -> None:
    first = bls_server.asked()
    bls_server.say(b"one ")
    second = bls_server.asked()
    bls_server.say(b"two", final=True)
    assert bls_server.heard(first) == bls_server.heard(second) == b"one two."


def test_what_is_complete_is_said_again(bls_server: Desk) -> None:
    first = bls_server.asked()
    bls_server.say(b"all", final=True)
    bls_server.loop.advance(29 * SECOND)
    again = bls_server.asked()
    assert bls_server.heard(again) == bls_server.heard(first) == b"all."
    assert len(bls_server.engine.has) == 1
    bls_server.loop.advance(SECOND)
    bls_server.asked()
    assert len(bls_server.engine.has) == 2


def test_who_waits_is_joined(bls_server: Desk) -> None:
    for number in range(2):
        bls_server.asked(f"{number}")
    waits, joins = bls_server.asked(), bls_server.asked()
    assert bls_server.admission_queue.pending == 1
    waits.cancel()
    bls_server.engine.has[0].respond(EMPTY)
    bls_server.loop.settle()
    bls_server.say(b"late", final=True)
    assert bls_server.heard(joins) == b"late."


def test_after_the_grace_it_is_stopped(bls_server: Desk) -> None:
    first = bls_server.asked()
    bls_server.step(RequestProgress(bls_server.carrier, 2, RequestBegun(0, 4)))
    first.cancel()
    bls_server.step(RequestProgress(bls_server.carrier, 3))
    bls_server.loop.advance(31 * SECOND)
    carrier = bls_server.carrier
    assert carrier.cancelled
    bls_server.step(RequestProgress(carrier, 1))
    bls_server.step(RequestProgress(carrier, 0, None, RequestEnded.CANCELLED))
    use = bls_server.use("default")
    assert (use.output_tokens, use.wasted_tokens, use.finished) == (6, 1, {"cancelled": 1})
    bls_server.asked()
    assert bls_server.carrier is not carrier


def test_who_comes_back_has_as_long_again(bls_server: Desk) -> None:
    bls_server.asked().cancel()
    bls_server.loop.advance(29 * SECOND)
    second = bls_server.asked()
    bls_server.loop.advance(29 * SECOND)
    second.cancel()
    bls_server.loop.advance(29 * SECOND)
    assert not bls_server.carrier.cancelled
    bls_server.loop.advance(2 * SECOND)
    assert bls_server.carrier.cancelled


@pytest.mark.parametrize(
    "other",
    [{"prompt": b"twice"}, {"parameters": {"seed": 1}}, {"parts": (0, 2)}, {"outputs": [RequestedOutput("text")]}],
)
def test_the_key_of_another_request(bls_server: Desk, other: dict[str, Any]) -> None:
    bls_server.asked()
    error = bls_server.error(bls_server.asked(**other))
    assert isinstance(error, KeyReused)
    assert (error.http_status, error.grpc_status) == (422, 9)
    assert "the idempotency key 'k' belongs to a different request to model 'llm'" in error.message
    assert len(bls_server.engine.has) == 1


def test_who_asks_and_how_urgently_does_not_matter(bls_server: Desk) -> None:
    bls_server.asked()
    bls_server.asked(caller=Caller("a", "", 5 * SECOND, retry=True), priority=3, timeout_us=5)
    bls_server.asked('"k"')
    assert len(bls_server.engine.has) == 1


def test_each_part_has_an_answer_of_its_own(bls_server: Desk) -> None:
    for part in (0, 1):
        bls_server.asked(parts=(part, 2))
    assert len(bls_server.engine.has) == 2


def test_tenants_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bls_server = Desk(monkeypatch, ONCE)
    for tenant in ("a", "b"):
        bls_server.asked(caller=Caller(tenant))
    assert len(bls_server.engine.has) == 2
    assert isinstance(bls_server.error(bls_server.asked("other")), QuotaExceeded), "there is a request a minute"
    first = bls_server.engine.has[0]
    joins = bls_server.asked()
    bls_server.say(b"all", final=True, carrier=first)
    assert bls_server.heard(joins) == b"all."
    assert (bls_server.use("a").offered, bls_server.use("a").joined, bls_server.use("a").admitted) == (2, 1, 1)


def test_what_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bls_server = Desk(monkeypatch, ONCE)
    bls_server.asked("x")
    assert isinstance(bls_server.error(bls_server.asked()), QuotaExceeded)
    bls_server.loop.advance(60 * SECOND)
    first = bls_server.asked()
    bls_server.carrier.respond(InferenceResponse.failed(Internal("it broke")))
    assert isinstance(bls_server.error(first), Internal)
    bls_server.asked(caller=Caller("b"))
    assert len(bls_server.engine.has) == 3


def test_without_a_key_nothing_is_kept(bls_server: Desk) -> None:
    first = bls_server.asked(None)
    assert bls_server.carrier is first
    first.cancel()
    assert bls_server.asked(None) is bls_server.carrier


def test_a_key_among_the_parameters(bls_server: Desk) -> None:
    bls_server.asked(None, parameters={NAME: "p"})
    bls_server.asked("k", parameters={NAME: "p"})
    assert len(bls_server.engine.has) == 1, "what a request says counts before what its connection says"


@pytest.mark.parametrize("key", ["", "x" * 256, '""', 5, "a\0b"])
def test_keys_that_are_none(bls_server: Desk, key: Any) -> None:
    error = bls_server.error(bls_server.asked(None, parameters={NAME: key}))
    assert isinstance(error, InvalidArgument)
    assert "must be a string of 1 to 255 printable characters" in error.message


@pytest.mark.parametrize("prompt", [join_bytes([b"once"]), DeviceBuffer(0, 1 << 20, 8, None)])
def test_memory_that_may_go_with_its_client(bls_server: Desk, prompt: TensorData) -> None:
    header = RequestHeader("llm", "", [PROMPT, SAMPLING], caller=Caller("a"), idempotency_key=IdempotencyKey("k"))
    request = SharedMemoryRequest(header, [prompt, b""], bls_server.sink, bls_server.loop.now())
    bls_server.entry.submit(request)
    bls_server.loop.settle()
    error = bls_server.error(request)
    assert isinstance(error, Unsupported)
    assert "'k'" in error.message


def test_what_another_request_needs_has_no_key(bls_server: Desk) -> None:
    parent = InferenceRequest(RequestHeader("rag", "", [], caller=Caller("a")), [], Sink(), 0)
    for _ in range(2):
        header = RequestHeader("llm", "", [PROMPT], parameters={NAME: "p"})
        bls_server.entry.submit(ChildRequest(parent, header, [join_bytes([b"once"])], bls_server.sink, 0))
    assert len(bls_server.engine.has) == 2


def test_who_reads_slowly_holds_up_nobody_else(bls_server: Desk) -> None:
    slow, quick = bls_server.asked(), bls_server.asked()
    slow.pause(True)
    bls_server.say(b"one ")
    assert (bls_server.heard(slow), bls_server.heard(quick), bls_server.paused) == (b"", b"one ", [])
    quick.pause(True)
    assert bls_server.paused == [True]
    bls_server.say(b"two ")
    quick.pause(False)
    bls_server.loop.settle()
    assert (bls_server.heard(quick), bls_server.paused[-1]) == (b"one two ", False)
    bls_server.say(b"three", final=True)
    assert (bls_server.heard(slow), slow.finished) == (b"", False)
    slow.pause(False)
    bls_server.loop.settle()
    assert (bls_server.heard(slow), slow.finished) == (b"one two three.", True)


def test_it_goes_on_when_the_slow_one_leaves(bls_server: Desk) -> None:
    slow = bls_server.asked()
    bls_server.say(b"one ")
    slow.pause(True)
    slow.cancel()
    assert bls_server.paused == [True, False]


def test_a_long_answer_is_said_again_in_several_turns(bls_server: Desk) -> None:
    bls_server.asked()
    for _ in range(100):
        bls_server.say(b".")
    turns = bls_server.loop.turns
    again = bls_server.asked()
    assert bls_server.loop.turns - turns == 4
    bls_server.say(b"!", final=True)
    assert bls_server.heard(again) == b"." * 100 + b"!."


def test_an_answer_too_long_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bls_server = Desk(monkeypatch, "[idempotency]\nmax_bytes = 2000")
    first, second = bls_server.asked(), bls_server.asked()
    bls_server.say(b"x" * 1000)
    first.pause(True)
    long = bls_server.carrier
    bls_server.say(b"y" * 1000)
    assert bls_server.paused[-1], "nothing more is kept, so that it waits for the slowest"
    assert bls_server.heard(second) == b"x" * 1000 + b"y" * 1000
    third = bls_server.asked()
    assert bls_server.carrier is not long, "nobody can join"
    third.cancel()
    first.pause(False)
    bls_server.loop.settle()
    assert bls_server.heard(first) == b"x" * 1000 + b"y" * 1000
    bls_server.say(b"z", carrier=long)
    first.cancel()
    second.cancel()
    assert long.cancelled, "nobody can come back to it"


def test_the_header_of_an_answer_counts_where_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    bls_server = Desk(monkeypatch, "[idempotency]\nmax_bytes = 100_000")
    bls_server.asked()
    long = bls_server.carrier
    for _ in range(100):
        bls_server.say(b"x")
    bls_server.asked()
    assert bls_server.carrier is long
    large = ResponseHeader("llm", "1", [], {"finish_reason": "y" * 30_000})
    long.respond(InferenceResponse(large, []), False)
    bls_server.asked()
    assert bls_server.carrier is not long, "it is too long to be kept"


@pytest.mark.parametrize("header", [{"timeout_us": 1_000_000}, {"caller": Caller("a", "", SECOND)}])
def test_a_deadline_is_that_of_who_asks(monkeypatch: pytest.MonkeyPatch, header: dict[str, Any]) -> None:
    bls_server = Desk(monkeypatch, ONCE)
    first = bls_server.asked(**header)
    bls_server.say(b"one ")
    bls_server.loop.advance(SECOND)
    error = bls_server.error(first)
    assert isinstance(error, DeadlineExceeded)
    assert not bls_server.carrier.cancelled
    second = bls_server.asked()
    bls_server.say(b"two", final=True)
    assert bls_server.heard(second) == b"one two."
    bls_server.loop.advance(2 * SECOND)
    assert bls_server.error(second) is None


def test_a_deadline_and_the_grace_end_it(bls_server: Desk) -> None:
    bls_server.asked(timeout_us=1_000_000)
    bls_server.loop.advance(32 * SECOND)
    assert bls_server.carrier.cancelled


def test_a_model_that_is_unloaded(bls_server: Desk) -> None:
    follows = bls_server.asked("follows")
    bls_server.asked("gone").cancel()
    bls_server.entry.when_drained(lambda: None)
    first, gone = bls_server.engine.has
    assert (first.cancelled, gone.cancelled) == (False, True)
    follows.cancel()
    assert first.cancelled


def test_a_server_that_stops(bls_server: Desk) -> None:
    follows = bls_server.asked()
    bls_server.tenant_admission.stop()
    bls_server.say(b"one", final=True)
    assert bls_server.heard(follows) == b"one."
    later = bls_server.asked()
    later.cancel()
    assert bls_server.carrier.cancelled


def test_those_who_want_to_know_are_told_how_it_ran(bls_server: Desk) -> None:
    class Trace(Sink, ExecutionObserver):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[tuple[str, InferenceRequest]] = []

        def ran(self, request: InferenceRequest, timings: Any) -> None:
            self.told.append(("ran", request))

        def parted(self, request: InferenceRequest, timings: Any) -> None:
            self.told.append(("parted", request))

    trace = Trace()
    request = bls_server.asked(sink=trace)
    bls_server.asked()
    sink = bls_server.carrier.sink
    assert isinstance(sink, ExecutionObserver)
    sink.ran(bls_server.carrier, None)
    sink.parted(bls_server.carrier, None)
    assert trace.told == [("ran", request), ("parted", request)]
