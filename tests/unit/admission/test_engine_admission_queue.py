"""The turnstile of an engine: what it tells puts right what was guessed, and those that wait outlive it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from doubles import Caller as Sink
from doubles import FakeLoop, samples
from nerite.admission import queue as base
from nerite.admission import queue as module
from nerite.admission import tenants as tenant_admission_module
from nerite.admission.policy import parse_policy
from nerite.admission.tenants import TenantAdmission
from nerite.config.options import QueueOptions
from nerite.core import tensor as dtypes
from nerite.core.engine_report import EngineReport, RequestBegun, RequestEnded, RequestProgress
from nerite.core.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    Overloaded,
    QuotaExceeded,
    TooLarge,
    Unavailable,
)
from nerite.core.model_calls import ChildRequest
from nerite.core.request import Caller, InferenceRequest, RepeatedRequest, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import TensorSpec, decode_bytes, join_bytes
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.load_shedding import LoadShedder

RUNNER: Any = object()
ANSWER = InferenceResponse(ResponseHeader("llm", "1", []))
PROMPT = TensorSpec("text_input", dtypes.BYTES, (1,))
SAMPLING = TensorSpec("sampling_parameters", dtypes.BYTES, (1,))
IMAGES = TensorSpec("image", dtypes.BYTES, (2,))
MS = 1_000_000
POLICY = """
[tenants.a]
input_tokens_per_minute = 600
output_tokens_per_minute = 600
concurrency = 1
[llms.llm]
max_input_tokens = 100
max_output_tokens = 50
"""


class Engine:
    """The queue, and the engine behind it."""

    def __init__(self) -> None:
        self.has: list[InferenceRequest] = []
        self.pending = 0

    @property
    def in_flight(self) -> int:
        return len(self.has)

    def submit(self, request: InferenceRequest) -> None:
        self.has.append(request)

    def when_drained(self, call: Any) -> None:
        call()

    def abandon(self, error: Any) -> None:
        raise AssertionError


class House:
    """A turnstile before an engine."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, policy: str = "", most: int = 2, bounds: QueueOptions | None = None
    ) -> None:
        self.loop = FakeLoop()
        self.loop.rule(monkeypatch, module, base, tenant_admission_module)
        self.engine = Engine()
        self.tenant_admission = TenantAdmission(parse_policy(policy) if policy else None, self.loop)  # type: ignore[arg-type]
        self.most = most
        admission = LoadShedder(bounds or QueueOptions(), "llm")
        self.admission_queue = self.tenant_admission.engine_admission_queue(
            "llm", self.engine, VersionStatistics(), admission
        )
        self.gate = self.admission_queue.controller
        self.sink = Sink()
        self.step()

    def ask(
        self,
        tenant: str = "a",
        prompt: bytes = b"12345678",
        parent: InferenceRequest | None = None,
        images: tuple[bytes, ...] = (),
        kind: type[InferenceRequest] = InferenceRequest,
        **sampling: Any,
    ) -> InferenceRequest:
        inputs = [PROMPT, SAMPLING, *([IMAGES] if images else [])]
        header = RequestHeader("llm", "", inputs, caller=Caller(tenant) if parent is None else None)
        data = [join_bytes([prompt]), join_bytes([json.dumps(sampling).encode()])]
        data += [join_bytes(images)] if images else []
        now = self.loop.now()
        if parent is None:
            asked = kind(header, data, self.sink, now)
        else:
            asked = ChildRequest(parent, header, data, self.sink, now)
        self.admission_queue.submit(asked)
        return asked

    def step(self, *progress: RequestProgress, free: int = 100) -> None:
        self.loop.pass_time(MS)
        report = EngineReport(0, 0, 100, free, 10, 1000, self.most, progress=progress)
        self.admission_queue.reported(RUNNER, report)
        self.loop.settle()

    def use(self, tenant: str = "a") -> Any:
        return self.gate.usage.of(tenant, "default")


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    return House(monkeypatch)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> House:
    return House(monkeypatch, POLICY)


def test_as_many_as_the_engine_runs(house: House) -> None:
    first, second, third = (house.ask() for _ in range(3))
    assert house.engine.has == [first, second]
    house.step(RequestProgress(first, 3, RequestBegun(0, 5), RequestEnded.STOP))
    assert house.engine.has[2:] == [third], "though the last response is still to come: its reader may be slow"
    first.respond(ANSWER)
    assert (house.gate.running, house.use("default").finished) == (2, {"complete": 1})


def test_a_request_that_may_wait_longer(house: House) -> None:
    first, _, low, usual = (house.ask(**said) for said in ({}, {}, {"priority": 1}, {}))
    house.step(RequestProgress(first, 3, RequestBegun(0, 5), RequestEnded.STOP))
    assert house.engine.has[2:] == [usual]
    assert low not in house.engine.has


def test_several_sequences(house: House) -> None:
    house.ask(n=2)
    waits = house.ask()
    assert waits not in house.engine.has
    assert house.gate.running == 2


def test_without_a_policy_memory_counts(house: House) -> None:
    house.step()
    long = house.ask(prompt=b"x" * 1600, max_tokens=100)
    house.step(RequestProgress(long, 1, RequestBegun(0, 900)), free=10)
    waits = house.ask(max_tokens=100)
    assert waits not in house.engine.has
    house.step(RequestProgress(long, 1, None, RequestEnded.LENGTH))
    assert waits in house.engine.has
    assert house.tenant_admission.quota()["use"][0]["input_tokens"] == 900, "the other has had no token yet"


def paid(house: House) -> dict[str, int]:
    """Return what tenant ``a`` has left of its rates."""
    (standing,) = [each for each in house.tenant_admission.quota()["tenants"] if each["tenant"] == "a"]
    return {str(rate["limit"]): rate["left"] for rate in standing["rates"]}


def test_what_the_engine_counts_is_what_is_paid(strict: House) -> None:
    first = strict.ask(prompt=b"x" * 160, max_tokens=20)
    assert paid(strict) == {"input_tokens_per_minute": 520, "output_tokens_per_minute": 580}, "two bytes a token"
    strict.step(RequestProgress(first, 0, RequestBegun(0, 30, 10)))
    assert (paid(strict)["input_tokens_per_minute"], strict.use().input_tokens) == (570, 0)
    strict.step(RequestProgress(first, 5))
    assert strict.use().input_tokens == 30
    strict.step(RequestProgress(first, 1, None, RequestEnded.STOP))
    first.respond(ANSWER)
    assert paid(strict) == {"input_tokens_per_minute": 570, "output_tokens_per_minute": 594}
    assert (strict.use().output_tokens, strict.use().wasted_tokens) == (6, 0)


def test_images_are_tokens_too(house: House) -> None:
    """What an image becomes is learned from those before, apart from the text."""
    for _ in range(8):
        asked = house.ask("default", b"x" * 20, images=(b"one", b"two"), max_tokens=1)
        house.step(RequestProgress(asked, 1, RequestBegun(0, 410, image_tokens=400), RequestEnded.STOP))
        asked.respond(ANSWER)
    use = house.use("default")
    assert use.input_tokens == 8 * 410
    for images, expected in (((b"one", b"two"), 420), ((), 20)):
        before = use.input_tokens
        asked = house.ask("default", b"x" * 40, images=images, max_tokens=1)
        house.step(RequestProgress(asked, 1, None, RequestEnded.STOP))
        assert use.input_tokens - before == expected


def test_a_prompt_that_turns_out_to_be_too_long(strict: House) -> None:
    asked = strict.ask(prompt=b"x" * 150)
    strict.step(RequestProgress(asked, 0, RequestBegun(0, 101)))
    (answer,) = strict.sink.of(asked)
    assert isinstance(answer.error, TooLarge)
    assert "max_input_tokens of model 'llm' is 100, now 101" in answer.error.message
    assert asked.cancelled, "the engine is told"
    assert strict.use().refused == {"max_input_tokens": 1}
    assert strict.use().finished == {"refused": 1}
    assert strict.gate.running == 0
    (standing,) = [each for each in strict.tenant_admission.quota()["tenants"] if each["tenant"] == "a"]
    assert (standing["under_way"], standing["rates"][0]["left"]) == (0, 600)
    assert strict.use().input_tokens == 0


def test_what_an_engine_refuses_costs_no_tokens(strict: House) -> None:
    asked = strict.ask(prompt=b"x" * 100, temperature="hot")
    asked.respond(InferenceResponse.failed(InvalidArgument("'temperature' has to be a number")))
    assert (strict.use().input_tokens, strict.use().finished) == (0, {"failed": 1})
    assert set(paid(strict).values()) == {600}


def test_several_answers_to_a_prompt_pay_for_it_once(strict: House) -> None:
    for kind in (InferenceRequest, RepeatedRequest):
        asked = strict.ask(max_tokens=5, kind=kind)
        strict.step(RequestProgress(asked, 5, RequestBegun(0, 30), RequestEnded.LENGTH))
        asked.respond(ANSWER)
    assert (strict.use().input_tokens, strict.use().output_tokens) == (30, 10)
    assert paid(strict) == {"input_tokens_per_minute": 570, "output_tokens_per_minute": 590}


def test_who_is_surely_too_long_does_not_come_to_the_engine(strict: House) -> None:
    for _ in range(8):
        asked = strict.ask("default", b"x" * 20, max_tokens=1)
        strict.step(RequestProgress(asked, 1, RequestBegun(0, 20), RequestEnded.STOP))
        asked.respond(ANSWER)
    refused = strict.ask("default", b"x" * 250)
    (answer,) = strict.sink.of(refused)
    assert isinstance(answer.error, TooLarge)
    assert refused not in strict.engine.has
    perhaps = strict.ask("default", b"x" * 150)
    assert perhaps in strict.engine.has


def test_a_long_estimate_does_not_keep_a_tenant_out_for_good(strict: House) -> None:
    asked = strict.ask(prompt=b"x" * 2000)
    assert asked in strict.engine.has


@pytest.mark.parametrize(("said", "told"), [({"max_tokens": None}, 50), ({"max_tokens": None, "n": 2}, 25)])
def test_who_asks_for_all_there_is_asks_for_what_the_policy_allows(
    strict: House, said: dict[str, Any], told: int
) -> None:
    asked = strict.ask(**said)
    (text,) = decode_bytes(asked.data[1], 1)
    assert json.loads(bytes(text)) == {**said, "max_tokens": told}


@pytest.mark.parametrize(("said", "told"), [({}, 10), ({"n": 2}, 5)])
def test_who_says_nothing_gets_what_the_policy_allows(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], told: int
) -> None:
    house = House(monkeypatch, "[llms.llm]\nmax_output_tokens = 10")
    asked = house.ask(**said)
    assert asked in house.engine.has
    (text,) = decode_bytes(asked.data[1], 1)
    assert json.loads(bytes(text)) == {**said, "max_tokens": told}


@pytest.mark.parametrize("said", [{"max_tokens": 7}, {}, {"max_tokens": "x"}])
def test_who_asks_for_less_is_left_alone(strict: House, said: dict[str, Any]) -> None:
    asked = strict.ask(**said)
    assert asked in strict.engine.has
    assert bytes(asked.data[1])[4:] == json.dumps(said).encode()


def test_more_than_the_policy_allows(strict: House) -> None:
    asked = strict.ask(max_tokens=51)
    (answer,) = strict.sink.of(asked)
    assert answer.error is not None
    assert "max_output_tokens of model 'llm' is 50, now 51" in answer.error.message


def test_a_client_that_goes(house: House) -> None:
    asked = house.ask()
    house.step(RequestProgress(asked, 2, RequestBegun(0, 4)))
    asked.cancel()
    house.step(RequestProgress(asked, 3))
    house.step(RequestProgress(asked, 0, None, RequestEnded.CANCELLED))
    use = house.use("default")
    assert (use.output_tokens, use.wasted_tokens, use.finished) == (5, 3, {"cancelled": 1})


@pytest.mark.parametrize(("ended", "reason"), [(RequestEnded.TOO_LATE, "deadline"), (RequestEnded.FAILED, "failed")])
def test_how_requests_end(house: House, ended: RequestEnded, reason: str) -> None:
    asked = house.ask()
    house.step(RequestProgress(asked, 0, RequestBegun(0, 4), ended))
    asked.respond(InferenceResponse.failed(DeadlineExceeded("")))
    assert house.use("default").finished == {reason: 1}


def test_those_that_wait_outlive_the_engine(house: House) -> None:
    first, second, third = (house.ask() for _ in range(3))
    house.admission_queue.reported(RUNNER, None)
    house.admission_queue.set_ready(False)
    for died in (first, second):
        died.respond(InferenceResponse.failed(Internal("died")))
    house.loop.settle()
    assert third not in house.engine.has
    assert house.admission_queue.pending == 1
    house.admission_queue.set_ready(True)
    house.loop.settle()
    assert third in house.engine.has
    assert house.use("default").finished == {"failed": 2}


def test_the_queue_has_the_bounds_of_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(monkeypatch, bounds=QueueOptions(max_requests=1))
    for _ in range(2):
        house.ask()
    waits, over = house.ask(), house.ask()
    assert not house.sink.of(waits)
    (answer,) = house.sink.of(over)
    assert isinstance(answer.error, Unavailable)
    assert "Exceeds maximum queue size: 1 requests wait for model 'llm'" in answer.error.message


def test_what_an_ensemble_asks_is_charged_to_whoever_asks_the_ensemble(strict: House) -> None:
    outer = InferenceRequest(RequestHeader("rag", "", [], caller=Caller("a")), [], Sink(), 0)
    asked = [strict.ask(parent=outer), strict.ask(parent=outer)]
    assert strict.engine.has == asked, "it counts as no request of its own"
    strict.step(RequestProgress(asked[0], 590, RequestBegun(0, 5), RequestEnded.STOP))
    assert strict.use().output_tokens == 590
    more = strict.ask(parent=outer, max_tokens=50)
    (answer,) = strict.sink.of(more)
    assert isinstance(answer.error, QuotaExceeded)


def test_metrics_are_there_without_a_policy(house: House) -> None:
    house.ask()
    found = samples(house.tenant_admission.write_metrics)
    assert found["nerite_admission_running"] == {'model="llm"': 1}
    assert found["nerite_admission_rate_left"] == {}


class Background(InferenceRequest):
    background = True


def test_a_request_that_nobody_waits_for_is_refused_while_others_need_the_engine(house: House) -> None:
    first = house.ask()
    shadow = house.ask(kind=Background)
    assert house.engine.has == [first, shadow]
    assert house.gate.running == 1
    house.ask()
    (refused,) = house.sink.of(house.ask(kind=Background))
    assert isinstance(refused.error, Overloaded)
    waiting = house.ask()
    (refused,) = house.sink.of(house.ask(kind=Background))
    assert isinstance(refused.error, Overloaded)
    assert waiting not in house.engine.has


def test_a_request_that_nobody_waits_for_has_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(monkeypatch, POLICY)
    first = house.ask(kind=Background, max_tokens=None)
    assert json.loads(decode_bytes(first.data[1], 1)[0])["max_tokens"] == 50
