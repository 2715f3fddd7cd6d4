"""Requests before the queue of a model: which of them the model sees, and that each gets the answer that is its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import Caller, header
from nerite.cache.frontend import ResponseCacheFrontend
from nerite.cache.interface import Found, ResponseCache
from nerite.cache.local import LocalCache
from nerite.config.options import TraceOptions
from nerite.core import tensor as dtypes
from nerite.core.errors import Cancelled, Internal, InvalidArgument, NeriteError, Unavailable
from nerite.core.execution_observer import ExecutionObserver, ExecutionTimes
from nerite.core.request import MIXED, InferenceRequest, RequestHeader
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.core.tensor import TensorSpec
from nerite.observability.exposition import Page
from nerite.observability.statistics import RequestOutcome, VersionStatistics
from nerite.observability.trace import Trace
from nerite.observability.tracing import Tracing, trace_events

HEADER = ResponseHeader("model", "1", [TensorSpec("OUT", dtypes.UINT8, (4,))])
PLAIN = header()
URGENT = header(priority=1)


class FakeQueue:
    """Holds requests until the test has an answer for them."""

    def __init__(self) -> None:
        self.held: list[InferenceRequest] = []
        self.seen: list[InferenceRequest] = []
        self.on_drained: list[Callable[[], None]] = []

    @property
    def pending(self) -> int:
        return len(self.held)

    in_flight = pending

    def submit(self, request: InferenceRequest) -> None:
        request.on_cancel = lambda each: self.answer(each, InferenceResponse.failed(Cancelled("")))
        self.held.append(request)
        self.seen.append(request)

    def answer(self, request: InferenceRequest, response: InferenceResponse) -> None:
        self.held.remove(request)
        request.respond(response)
        if not self.held:
            for call in self.on_drained:
                call()

    def when_drained(self, call: Callable[[], None]) -> None:
        if self.held:
            self.on_drained.append(call)
        else:
            call()

    def abandon(self, error: NeriteError) -> None:
        for request in list(self.held):
            self.answer(request, InferenceResponse.failed(error))


class SlowCache:
    """Answers when the test says so."""

    def __init__(self, *, shared: bool = True) -> None:
        self.shared = shared
        self.asked: list[tuple[bytes, Found]] = []
        self.kept: dict[bytes, InferenceResponse] = {}

    def lookup(self, key: bytes, found: Found) -> None:
        self.asked.append((key, found))

    def answer(self) -> None:
        key, found = self.asked.pop(0)
        found(self.kept.get(key))

    def insert(self, key: bytes, response: InferenceResponse) -> None:
        self.kept[key] = response

    def write_metrics(self, page: Page) -> None:
        pass

    def close(self) -> None:
        pass


class Bench:
    def __init__(self, cache: ResponseCache) -> None:
        self.queue = FakeQueue()
        self.statistics = VersionStatistics()
        self.caller = Caller()
        self.gate = ResponseCacheFrontend(cache, self.queue, self.statistics, ["OUT"])
        self.gate.renew(lambda: "model/1/1")

    def ask(self, value: int = 0, of: RequestHeader = PLAIN) -> InferenceRequest:
        asked = InferenceRequest(of, [bytes([value] * 4)], self.caller, 0)
        self.gate.submit(asked)
        return asked

    def compute(self, value: int | NeriteError = 0) -> InferenceRequest:
        """Have the first request in the queue answered."""
        asked = self.queue.held[0]
        if isinstance(value, NeriteError):
            self.queue.answer(asked, InferenceResponse.failed(value))
        else:
            self.queue.answer(asked, response(value))
        return asked

    def told(self, asked: InferenceRequest) -> int | str:
        """What a request was answered: the value, or the words of the error."""
        (answer,) = self.caller.of(asked)
        return answer.error.message if answer.error is not None else answer.data[0][0]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Successes, hits and misses."""
        of = self.statistics
        return of.success.count, of.cache_hit.count, of.cache_miss.count


def response(value: int) -> InferenceResponse:
    return InferenceResponse(HEADER, [memoryview(bytes([value] * 4))])


@pytest.fixture
def bench() -> Bench:
    return Bench(LocalCache(100_000))


@pytest.fixture
def slow() -> SlowCache:
    return SlowCache()


@pytest.fixture
def remote(slow: SlowCache) -> Bench:
    return Bench(slow)


def test_a_question_is_computed_once(bench: Bench) -> None:
    first = bench.ask(1)
    bench.compute(7)
    second = bench.ask(1)
    assert (bench.told(first), bench.told(second)) == (7, 7)
    assert bench.queue.seen == [first]
    assert bench.counts == (1, 1, 1), "the queue counts what it has computed"
    other = bench.ask(2)
    assert bench.queue.held == [other]


def test_a_failure_is_not_kept(bench: Bench) -> None:
    for _ in range(2):
        asked = bench.ask()
        bench.compute(InvalidArgument("no"))
        assert bench.told(asked) == "no"
    assert bench.counts == (0, 0, 2)


def test_equal_requests_wait_for_the_first(bench: Bench) -> None:
    asked = [bench.ask() for _ in range(3)]
    assert bench.queue.held == asked[:1]
    assert (bench.gate.pending, bench.gate.in_flight) == (3, 3)
    bench.compute(5)
    assert [bench.told(each) for each in asked] == [5, 5, 5]
    assert bench.counts == (2, 2, 1)
    assert bench.gate.in_flight == 0


def test_each_learns_its_own_fate_when_the_first_fails(bench: Bench) -> None:
    asked = [bench.ask() for _ in range(3)]
    bench.compute(Internal("first"))
    assert bench.queue.held == asked[1:]
    bench.compute(Internal("second"))
    bench.compute(3)
    assert [bench.told(each) for each in asked] == ["first", "second", 3]


def test_the_next_is_computed_when_the_first_is_cancelled(bench: Bench) -> None:
    asked = [bench.ask() for _ in range(3)]
    asked[0].cancel()
    assert bench.queue.held == [asked[1]]
    bench.compute(4)
    assert [bench.told(each) for each in asked] == ["", 4, 4]


def test_what_was_computed_for_nobody_is_not_believed(bench: Bench) -> None:
    """The model may have noticed that its caller is gone, and have left the work."""
    first, second = bench.ask(), bench.ask()
    first.on_cancel = None  # the queue cannot stop it
    first.cancel()
    bench.compute(1)
    assert bench.queue.held == [second]
    bench.compute(2)
    third = bench.ask()
    assert (bench.told(second), bench.told(third)) == (2, 2)


def test_one_that_waits_may_be_cancelled(bench: Bench) -> None:
    asked = [bench.ask() for _ in range(3)]
    asked[1].cancel()
    assert bench.told(asked[1]) == ""
    assert bench.statistics.failures[RequestOutcome.CANCELED] == 1
    bench.compute(6)
    assert [bench.told(each) for each in asked] == [6, "", 6]


def test_nobody_waits_for_what_is_less_urgent(bench: Bench) -> None:
    first = bench.ask()
    urgent = bench.ask(of=URGENT)
    assert bench.queue.held == [first, urgent]
    bench.compute(1)
    bench.compute(2)
    assert (bench.told(first), bench.told(urgent)) == (1, 2)
    assert bench.told(bench.ask(of=URGENT)) == 1, "whatever the urgency, there is one answer"


def test_a_response_before_the_end_of_responses(bench: Bench) -> None:
    asked = bench.ask()
    asked.respond(response(8), final=False)
    bench.queue.answer(asked, EMPTY)
    assert bench.told(bench.ask()) == 8


def test_other_origin_other_answers(bench: Bench) -> None:
    bench.ask()
    bench.compute(1)
    bench.gate.renew(lambda: "model/1/1")
    assert bench.told(bench.ask()) == 1
    bench.gate.renew(lambda: "model/1/2")
    bench.ask()
    bench.compute(2)
    assert bench.told(bench.ask()) == 2


def test_nothing_is_kept_as_long_as_the_origin_is_not_known(bench: Bench) -> None:
    bench.gate.renew(lambda: "")
    for value in (1, 2):
        asked = bench.ask()
        bench.compute(value)
        assert bench.told(asked) == value
    assert bench.counts == (0, 0, 0)


def test_what_is_for_several_tenants_is_neither_kept_nor_shared(bench: Bench) -> None:
    mixed = RequestHeader("model", "", PLAIN.inputs, caller=MIXED)
    both = [bench.ask(of=mixed), bench.ask(of=mixed)]
    for value in (1, 2):
        bench.compute(value)
    assert [bench.told(each) for each in both] == [1, 2]
    third = bench.ask()
    bench.compute(3)
    assert bench.told(third) == 3


def test_a_client_that_writes_into_its_memory_too_early(bench: Bench) -> None:
    shared = RequestHeader("model", "", PLAIN.inputs, shared=True)
    memory = bytearray(4)
    asked = InferenceRequest(shared, [memory], bench.caller, 0)
    bench.gate.submit(asked)
    follower = bench.ask()
    memory[0] = 1
    bench.compute(9)
    assert bench.queue.held == [follower], "nobody gets the answer to another question"
    bench.compute(3)
    assert bench.told(follower) == 3
    asked = bench.ask()
    assert bench.queue.held == [asked], "and nothing was kept"


def test_a_slow_cache(remote: Bench, slow: SlowCache) -> None:
    first, second = remote.ask(), remote.ask()
    assert len(slow.asked) == 1, "one question to the cache is enough"
    assert (remote.queue.held, remote.gate.in_flight) == ([], 2)
    slow.answer()
    assert (remote.queue.held, remote.gate.in_flight) == ([first], 2)
    remote.compute(2)
    assert (remote.told(first), remote.told(second)) == (2, 2)
    third, fourth = remote.ask(), remote.ask()
    slow.answer()
    assert (remote.told(third), remote.told(fourth)) == (2, 2)
    assert remote.counts == (3, 3, 1)


def test_cancelled_while_the_cache_is_asked(remote: Bench, slow: SlowCache) -> None:
    first, second = remote.ask(), remote.ask()
    first.cancel()
    slow.answer()
    assert remote.queue.held == [second]
    third = remote.ask(1)
    third.cancel()
    slow.answer()
    assert (remote.queue.held, remote.told(third)) == ([second], "")
    late = remote.ask(1)
    slow.answer()
    assert late in remote.queue.held


def test_drained_when_the_last_lookup_and_the_last_execution_are_over(remote: Bench, slow: SlowCache) -> None:
    drained: list[int] = []
    remote.ask()
    remote.gate.when_drained(lambda: drained.append(1))
    slow.answer()
    assert drained == []
    remote.compute()
    assert drained == [1]
    remote.ask()
    remote.gate.when_drained(lambda: drained.append(2))
    slow.answer()
    assert drained == [1, 2], "found: there is nothing to wait for"
    remote.gate.when_drained(lambda: drained.append(3))
    assert drained == [1, 2, 3]


def test_abandoned(remote: Bench, slow: SlowCache) -> None:
    asked = [remote.ask(), remote.ask(), remote.ask(1)]
    slow.answer()
    remote.gate.abandon(Unavailable("gone"))
    slow.answer()
    assert [remote.told(each) for each in asked] == ["gone"] * 3
    assert (remote.gate.in_flight, remote.queue.held) == (0, [])


def test_traces(bench: Bench, tmp_path: Path) -> None:
    """What the queue says of an execution gets to the trace, whatever listens before it; a hit has no execution."""
    tracing = Tracing(TraceOptions(levels=("TIMESTAMPS",), rate=1, file=str(tmp_path / "t")), lambda: None)
    names = []
    for _ in range(2):
        asked = InferenceRequest(PLAIN, [bytes(4)], bench.caller, 0)
        tracing.begin(asked, 1, tracing.settings.sampler(""))
        trace = asked.sink
        assert isinstance(trace, Trace)
        bench.gate.submit(asked)
        if bench.queue.held:
            seen = asked.sink
            assert isinstance(seen, ExecutionObserver)
            seen.parted(asked, ExecutionTimes())
            bench.compute(1)
            seen.ran(asked, ExecutionTimes())
        names.append({name for _, name in trace_events(trace)})
    assert names[1] == {"REQUEST_START", "QUEUE_START", "INFER_RESPONSE_COMPLETE", "REQUEST_END"}
    assert "COMPUTE_START" in names[0]


class Event:
    """What may happen next, in any order."""

    ASK, LOOK, COMPUTE, FAIL, CANCEL = range(5)


EVENTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=60)


@given(EVENTS, st.booleans())
def test_every_request_is_answered_once_and_with_its_own_answer(events: list[tuple[int, int]], local: bool) -> None:
    slow = SlowCache()
    bench = Bench(LocalCache(2_000) if local else slow)
    asked: list[InferenceRequest] = []
    for event, which in events:
        if event == Event.ASK:
            asked.append(bench.ask(which))
        elif event == Event.LOOK and slow.asked:
            slow.answer()
        elif event == Event.COMPUTE and bench.queue.held:
            bench.compute(bench.queue.held[0].data[0][0])
        elif event == Event.FAIL and bench.queue.held:
            bench.compute(Internal("no"))
        elif event == Event.CANCEL and asked:
            asked[which % len(asked)].cancel()
    waiting = sum(not each.finished for each in asked)
    assert bench.gate.in_flight == waiting

    def finish() -> None:
        while slow.asked:
            slow.answer()
        while bench.queue.held:
            bench.compute(bench.queue.held[0].data[0][0])

    finish()
    for each in asked:
        assert bench.told(each) in (each.data[0][0], "no", "")
    assert bench.gate.in_flight == 0
    # A lookup that was left behind would be joined, and never end.
    again = [bench.ask(which) for which in range(3)]
    finish()
    assert [bench.told(each) for each in again] == [each.data[0][0] for each in again]


def test_the_origin_may_become_known_later(remote: Bench, slow: SlowCache) -> None:
    origin = ""
    remote.gate.renew(lambda: origin)
    remote.ask()
    assert (len(slow.asked), len(remote.queue.held)) == (0, 1)
    origin = "model/1/sha256:1"
    remote.ask()
    assert (len(slow.asked), len(remote.queue.held)) == (1, 1)
