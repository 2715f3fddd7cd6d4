"""The turnstile: what the gate decides is done, whatever clients and models do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from doubles import Caller as Sink
from doubles import FakeLoop, request, samples
from nerite.admission import queue as module
from nerite.admission import tenants as tenant_admission_module
from nerite.admission.policy import parse_policy
from nerite.admission.tenants import TenantAdmission
from nerite.core.errors import Cancelled, DeadlineExceeded, Internal, NeriteError, QuotaExceeded, Unavailable
from nerite.core.execution_observer import ExecutionObserver
from nerite.core.model_calls import ChildRequest
from nerite.core.request import Caller, InferenceRequest
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.observability.statistics import RequestOutcome, VersionStatistics

POLICY = """
[classes.high]
order = 1
[classes.low]
order = 2
[tenants.a]
keys = ["ka"]
class = "high"
[tenants.b]
keys = ["kb"]
requests_per_minute = 60
requests_burst = 2
[models."*"]
max_requests = 1
queue_length = 2
[models.free]
max_requests = 0
"""
MS = 1_000_000
ANSWER = InferenceResponse(ResponseHeader("m", "1", []))


class Queue:
    """A queue that answers when it is told to."""

    def __init__(self) -> None:
        self.entered: list[InferenceRequest] = []
        self.drained: list[Callable[[], None]] = []
        self.abandoned: list[NeriteError] = []
        self.pending = 0

    @property
    def in_flight(self) -> int:
        return len(self.entered)

    def submit(self, entering: InferenceRequest) -> None:
        self.entered.append(entering)

    def answer(self, response: InferenceResponse = ANSWER, final: bool = True) -> InferenceRequest:
        first = self.entered.pop(0) if final else self.entered[0]
        first.respond(response, final)
        return first

    def when_drained(self, call: Callable[[], None]) -> None:
        self.drained.append(call)

    def abandon(self, error: NeriteError) -> None:
        self.abandoned.append(error)


class House:
    """A turnstile between clients and a queue."""

    def __init__(self, loop: FakeLoop, policy: str = POLICY, model: str = "m") -> None:
        self.loop = loop
        self.statistics = VersionStatistics()
        self.queue = Queue()
        tenant_admission = TenantAdmission(parse_policy(policy), loop)  # type: ignore[arg-type]
        admission_queue = tenant_admission.admission_queue(model, self.queue, self.statistics)
        assert admission_queue is not None
        self.tenant_admission, self.admission_queue = tenant_admission, admission_queue
        self.sink = Sink()

    def ask(self, tenant: str = "a", patience_ms: int = 0, sink: Any = None, **fields: Any) -> InferenceRequest:
        asked = request(sink=sink or self.sink, arrived_ns=self.loop.now(), **fields)
        asked.header.caller = Caller(tenant, patience_ns=patience_ms * MS)
        self.admission_queue.submit(asked)
        return asked

    def error(self, asked: InferenceRequest) -> NeriteError | None:
        (response,) = self.sink.of(asked)
        return response.error

    def use(self, tenant: str, level: str = "low") -> Any:
        return self.admission_queue.controller.usage.of(tenant, level)


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    loop = FakeLoop()
    loop.rule(monkeypatch, module, tenant_admission_module)
    return House(loop)


def test_one_after_the_other(house: House) -> None:
    first, second, third = (house.ask() for _ in range(3))
    assert house.queue.entered == [first]
    assert (house.admission_queue.pending, house.admission_queue.in_flight) == (2, 3)
    house.queue.answer()
    assert house.queue.entered == [], "the next one comes when the answers have left"
    house.loop.settle()
    assert house.queue.entered == [second]
    house.queue.answer()
    house.loop.settle()
    assert house.queue.answer() is third
    assert [house.error(each) for each in (first, second, third)] == [None] * 3
    assert (house.admission_queue.pending, house.admission_queue.controller.running) == (0, 0)
    assert house.use("a", "high").finished == {"complete": 3}


def test_who_is_refused_hears_it(house: House) -> None:
    runs = house.ask()
    for _ in range(2):
        house.ask("b")
    over = house.ask("b")
    error = house.error(over)
    assert isinstance(error, QuotaExceeded)
    assert (error.retry_after, house.statistics.failures[RequestOutcome.NOT_LET_IN]) == (1, 1)
    assert house.queue.entered == [runs]


def test_who_matters_more_takes_a_place(house: House) -> None:
    house.ask()
    waits, last = house.ask("nobody"), house.ask("nobody")
    house.ask("a")
    assert isinstance(house.error(last), Unavailable)
    assert not house.sink.of(waits)
    house.queue.answer()
    house.loop.settle()
    assert house.queue.entered[0].header.caller == Caller("a")


def test_a_client_that_goes_while_it_waits(house: House) -> None:
    house.ask()
    waits, next_one = house.ask("b"), house.ask("a")
    waits.cancel()
    assert isinstance(house.error(waits), Cancelled)
    assert (house.use("b").withdrawn, house.admission_queue.pending) == (1, 1)
    assert house.statistics.failures[RequestOutcome.CANCELED] == 1
    house.queue.answer()
    house.loop.settle()
    assert house.queue.entered == [next_one]


def test_clients_that_go_because_another_is_answered(house: House) -> None:
    """Whoever hears a refusal may cancel others, who were let in at that very moment."""
    house.ask()
    late = house.ask("nobody", 10)
    waits = house.ask("a")

    class Hangs:
        def respond(self, asked: InferenceRequest, response: InferenceResponse, final: bool) -> None:
            waits.cancel()

    late.sink = Hangs()
    house.loop.pass_time(20 * MS)
    house.queue.answer()
    house.loop.settle()
    assert house.queue.entered == [waits], "the queue drops it, and says so"
    house.queue.answer(InferenceResponse.failed(Cancelled("")))
    assert house.use("a", "high").finished == {"complete": 1, "cancelled": 1}


def test_a_deadline_passes_while_it_waits(house: House) -> None:
    house.ask()
    waits = house.ask(patience_ms=30)
    timeout = house.ask("nobody", timeout_us=40_000)
    house.loop.advance(29 * MS)
    assert not house.sink.of(waits)
    house.loop.advance(2 * MS)
    assert isinstance(house.error(waits), DeadlineExceeded)
    assert not house.sink.of(timeout)
    house.loop.advance(10 * MS)
    assert isinstance(house.error(timeout), DeadlineExceeded)
    assert house.admission_queue.pending == 0


def test_a_deadline_passes_while_it_runs(house: House) -> None:
    """Whoever has the request may answer at once that it is cancelled; its client hears why."""
    late = house.ask(patience_ms=30)
    house.queue.entered[0].on_cancel = lambda each: each.respond(InferenceResponse.failed(Cancelled("")))
    house.loop.advance(29 * MS)
    assert not house.sink.of(late)
    house.loop.advance(2 * MS)
    assert isinstance(house.error(late), DeadlineExceeded)
    assert (house.use("a", "high").finished, house.admission_queue.controller.running) == ({"deadline": 1}, 0)
    house.queue.entered.clear()
    slow = house.ask(patience_ms=30)
    house.loop.advance(31 * MS)
    assert isinstance(house.error(slow), DeadlineExceeded), "though a model cannot be stopped"
    house.queue.entered.clear()
    fast = house.ask(patience_ms=30)
    house.queue.answer()
    house.loop.advance(31 * MS)
    assert house.error(fast) is None


def test_how_requests_end(house: House) -> None:
    for response, reason in (
        (ANSWER, "complete"),
        (EMPTY, "complete"),
        (InferenceResponse.failed(Cancelled("")), "cancelled"),
        (InferenceResponse.failed(DeadlineExceeded("")), "deadline"),
        (InferenceResponse.failed(Internal("")), "failed"),
    ):
        before = house.use("a", "high").finished.get(reason, 0)
        house.ask()
        house.queue.answer(response)
        assert house.use("a", "high").finished[reason] == before + 1
    house.ask()
    house.queue.answer(final=False)
    assert house.admission_queue.controller.running == 1
    house.queue.answer(EMPTY)
    assert house.admission_queue.controller.running == 0


def test_a_client_that_goes_while_it_runs(house: House) -> None:
    gone = house.ask()
    gone.cancel()
    house.queue.answer()
    assert house.use("a", "high").finished == {"cancelled": 1}


def test_what_another_request_needs_is_let_in(house: House) -> None:
    parent = house.ask()
    for _ in range(3):
        child = ChildRequest(parent, parent.header, [b"1234"], Sink(), 0)
        house.admission_queue.submit(child)
        assert house.queue.entered[-1] is child
    assert house.admission_queue.controller.running == 1


def test_news_of_how_a_request_runs_pass(house: House) -> None:
    class Told(Sink, ExecutionObserver):
        pass

    house.ask(sink=Told())
    assert isinstance(house.queue.entered[0].sink, ExecutionObserver)


def test_drained_when_nobody_waits(house: House) -> None:
    house.ask(), house.ask()
    house.admission_queue.when_drained(lambda: None)
    assert not house.queue.drained
    house.queue.answer()
    house.loop.settle()
    assert len(house.queue.drained) == 1
    house.admission_queue.when_drained(lambda: None)
    assert len(house.queue.drained) == 2


def test_abandoned(house: House) -> None:
    house.ask()
    waits = [house.ask(), house.ask()]
    house.admission_queue.when_drained(lambda: None)
    error = Unavailable("the server stops")
    house.admission_queue.abandon(error)
    assert [house.error(each) for each in waits] == [error, error]
    assert house.queue.abandoned == [error]
    assert len(house.queue.drained) == 1


def test_another_policy(house: House) -> None:
    house.ask()
    waits = [house.ask(), house.ask()]
    house.tenant_admission.follow(parse_policy(POLICY.replace("max_requests = 1", "max_requests = 3")))
    house.loop.settle()
    assert house.queue.entered[1:] == waits
    assert house.tenant_admission.policy.tenant("b").requests.burst == 2


def test_without_a_policy_nobody_has_to_be_let_in() -> None:
    loop: Any = SimpleNamespace()
    tenant_admission = TenantAdmission(None, loop)
    assert not tenant_admission.in_force
    assert tenant_admission.quota() == {"tenants": [], "models": [], "use": []}
    assert samples(tenant_admission.write_metrics) == {}


def test_quota(house: House) -> None:
    house.ask("b"), house.ask("b"), house.ask("b")
    told = orjson.loads(orjson.dumps(house.tenant_admission.quota()))
    (b,) = [each for each in told["tenants"] if each["tenant"] == "b"]
    assert (b["under_way"], b["rates"]) == (
        2,
        [{"limit": "requests_per_minute", "per_minute": 60, "burst": 2, "left": 0}],
    )
    assert told["models"] == [{"model": "m", "running": 1, "waiting": 1}]
    (use,) = told["use"]
    assert (use["tenant"], use["class"], use["offered"], use["admitted"]) == ("b", "low", 3, 1)
    assert (use["refused"], use["input_bytes"]) == ({"requests_per_minute": 1}, 0)
    house.queue.answer()
    (use,) = house.tenant_admission.quota()["use"]
    assert use["input_bytes"] == 4


def test_metrics(house: House) -> None:
    house.ask("b"), house.ask("b"), house.ask("b")
    house.queue.answer()
    found = {
        name.removeprefix("nerite_admission_"): values
        for name, values in samples(house.tenant_admission.write_metrics).items()
    }
    use = 'class="low",model="m",tenant="b"'
    assert found["offered"] == {use: 3}
    assert found["refused"] == {'class="low",model="m",reason="requests_per_minute",tenant="b"': 1}
    assert found["finished"] == {'class="low",model="m",reason="complete",tenant="b"': 1}
    assert found["waiting"] == {'model="m"': 1}
    assert found["rate_left"]['limit="requests_per_minute",tenant="b"'] == 0
    assert found["output_tokens"] == {}


def test_what_was_used_stays_used_when_a_model_is_loaded_again(house: House) -> None:
    house.ask()
    house.queue.answer()
    again = house.tenant_admission.admission_queue("m", house.queue, house.statistics)
    assert again is not None
    assert again.controller.usage.of("a", "high").admitted == 1


def test_a_request_that_nobody_waits_for_counts_for_no_quota(house: House) -> None:
    runs = house.ask()
    nobody = Background(runs.header, runs.data, house.sink, house.loop.now())
    house.admission_queue.submit(nobody)
    assert house.queue.entered == [runs, nobody]
    assert (house.use("a", "high").offered, house.admission_queue.controller.running) == (1, 1)


class Background(InferenceRequest):
    background = True
