"""Requests that wait for a model: who goes on first, how many and how long they wait, and that each ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from time import monotonic_ns
from typing import Any

import pytest

from nerite.core.errors import Cancelled, DeadlineExceeded, NeriteError, NotLoaded, Overloaded, Unavailable
from nerite.core.request import Caller, InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.repository.load_waits import LoadWaits, retry_seconds

ABSENT = NotLoaded.of("m", 7)


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


class Client:
    """Whoever waits."""

    def __init__(self) -> None:
        self.went_on: list[str] = []
        self.told: list[NeriteError] = []
        self.wanted: list[tuple[str, dict[str, int]]] = []
        self.ended = asyncio.Event()

    def waits(self, seconds: float = 60.0, most: int = 100) -> LoadWaits:
        made = LoadWaits(seconds, most)
        made.on_wanted = lambda model, claims: self.wanted.append((model, dict(claims)))
        made.order_of = lambda caller: 0 if caller is None else int(caller.wanted_class or 0)
        made.obstacle_to = lambda model: "its load has not ended"
        return made

    def give_up(self, error: NeriteError) -> None:
        self.told.append(error)
        self.ended.set()

    def hold(
        self, waits: LoadWaits, name: str = "", order: int = 0, absent: NotLoaded = ABSENT, tenant: str = "t"
    ) -> None:
        caller = Caller(tenant, str(order))
        waits.hold(absent, caller, monotonic_ns(), lambda: self.went_on.append(name), self.give_up)


@on_loop
async def test_the_best_class_goes_on_first_and_within_a_class_whoever_came_first() -> None:
    client = Client()
    waits = client.waits()
    for name, order in (("a", 2), ("b", 1), ("c", 2), ("d", 1)):
        client.hold(waits, name, order)
    assert client.wanted == [("m", {"t": 2}), ("m", {"t": 1})], (
        "the load is asked for once, and again for a better class"
    )
    waits.offer(lambda model: False)
    assert client.went_on == []
    waits.offer(lambda model: True)
    assert client.went_on == ["b", "d", "a", "c"]
    assert (len(waits), client.wanted[-1]) == (0, ("m", {}))


@on_loop
async def test_a_load_is_asked_for_again_for_each_tenant() -> None:
    client = Client()
    waits = client.waits()
    for tenant, order in (("alice", 1), ("alice", 1), ("bob", 2), ("bob", 1)):
        client.hold(waits, order=order, tenant=tenant)
    assert client.wanted == [("m", {"alice": 1}), ("m", {"alice": 1, "bob": 2}), ("m", {"alice": 1, "bob": 1})]


@on_loop
async def test_a_tenant_takes_no_more_places_than_others_while_they_need_them() -> None:
    client = Client()
    waits = client.waits(most=10)
    for number in range(15):
        client.hold(waits, f"alice {number}", tenant="alice")
    assert len(client.told) == 5, "one alone may have all places, and no more"
    for number in range(8):
        client.hold(waits, f"bob {number}", tenant="bob")
    waits.offer(lambda model: True)
    assert client.went_on == [*(f"alice {number}" for number in range(5)), *(f"bob {number}" for number in range(5))]
    assert (
        str(client.told[5]) == "model 'm' is not loaded, and 10 requests, most of them of this client, wait for models"
    )


@on_loop
async def test_when_too_many_wait_the_newest_of_the_worst_class_gives_way() -> None:
    client = Client()
    waits = client.waits(most=2)
    client.hold(waits, "idle", 9)
    client.hold(waits, "usual", 1)
    client.hold(waits, "better", 0)
    assert [str(error) for error in client.told] == [
        "model 'm' is not loaded, and 2 more important requests wait for models"
    ]
    client.hold(waits, "late", 1)
    assert isinstance(client.told[-1], Overloaded)
    assert client.told[-1].retry_after == 7
    waits.offer(lambda model: True)
    assert client.went_on == ["better", "usual"]
    assert waits.refused == 2


@on_loop
async def test_a_load_that_fails_ends_the_wait() -> None:
    client = Client()
    waits = client.waits()
    client.hold(waits)
    client.hold(waits, absent=NotLoaded.of("other"))
    waits.fail("m", Unavailable("no such file"))
    assert [error.message for error in client.told] == ["no such file"]
    assert waits.models == ["other"]


@on_loop
async def test_a_wait_has_an_end() -> None:
    client = Client()
    client.hold(client.waits(seconds=0.01))
    await client.ended.wait()
    (error,) = client.told
    assert isinstance(error, Unavailable)
    assert error.message == ("model 'm' was not loaded within 0.01 s (--demand-wait-seconds): its load has not ended")
    assert client.wanted[-1] == ("m", {})


@on_loop
async def test_the_deadline_of_a_request_ends_its_wait() -> None:
    client = Client()
    waits = client.waits()
    waits.hold(ABSENT, Caller("t", patience_ns=10_000_000), monotonic_ns(), lambda: None, client.give_up)
    await client.ended.wait()
    assert isinstance(client.told[0], DeadlineExceeded)


class Answers:
    """Takes the responses to a request."""

    def __init__(self) -> None:
        self.taken: list[NeriteError | None] = []

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        assert final
        self.taken.append(response.error)


def request(answers: Answers) -> InferenceRequest:
    return InferenceRequest(RequestHeader("m", "", ()), [], answers, monotonic_ns())


@on_loop
async def test_a_cancelled_request_waits_no_longer_and_ends_once() -> None:
    client = Client()
    waits, answers, went_on = client.waits(), Answers(), []
    asked = request(answers)
    waits.hold_request(ABSENT, asked, lambda: went_on.append(1))
    asked.cancel()
    waits.offer(lambda model: True)
    waits.fail("m", Unavailable("late"))
    assert [type(error) for error in answers.taken] == [Cancelled]
    assert went_on == []
    assert client.wanted == [("m", {"": 0}), ("m", {})]


@on_loop
async def test_a_request_goes_on_with_its_cancellation_left_to_others() -> None:
    waits, answers, went_on = Client().waits(), Answers(), []
    asked = request(answers)
    waits.hold_request(ABSENT, asked, lambda: went_on.append(asked.on_cancel))
    waits.offer(lambda model: True)
    assert went_on == [None]


@on_loop
async def test_when_the_server_stops_all_waits_end_and_none_begins() -> None:
    client = Client()
    waits = client.waits()
    client.hold(waits)
    waits.stop(Unavailable("stopping"))
    client.hold(waits)
    assert [error.message for error in client.told] == ["stopping", "stopping"]


@on_loop
async def test_a_call_with_a_task_waits_for_the_load_or_its_failure() -> None:
    waits = Client().waits()
    first, second = (asyncio.ensure_future(waits.until_loaded(NotLoaded.of(name))) for name in ("m", "other"))
    await asyncio.sleep(0)
    waits.offer(lambda model: model == "m")
    waits.fail("other", Unavailable("no"))
    await first
    with pytest.raises(Unavailable, match="no"):
        await second
    third = asyncio.ensure_future(waits.until_loaded(ABSENT))
    await asyncio.sleep(0)
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    assert len(waits) == 0


def test_a_retry_is_worth_it_after_the_load() -> None:
    assert [retry_seconds(seconds) for seconds in (0, 0.2, 3.1)] == [5, 1, 4]
