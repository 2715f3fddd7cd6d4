"""The row that a router makes of a request: whoever got it, however it ended, once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from typing import cast

import pytest
from test_exchange import Client, exchange, made_pool

from nerite.balancing.member import AttemptEnd
from nerite.ledger.ledger import Ledger
from nerite.ledger.row import LedgerRow, WallClock
from nerite.router.accounting import RouterLedger
from nerite.router.exchange import RoutedExchange
from nerite.router.pools import PoolTable, RouterPool


class Rows:
    """Stands in for a ledger."""

    session = 255
    wall = WallClock(0)

    def __init__(self) -> None:
        self.rows: list[LedgerRow] = []
        self.add = self.rows.append
        self.wall = WallClock(time.time_ns() - time.monotonic_ns())
        self._numbers = count(1)

    def next_number(self) -> int:
        return next(self._numbers)


def begun(rows: Rows, *pools: RouterPool, tokens: bool = True, model: str = "m") -> tuple[Client, RoutedExchange]:
    client = Client()
    made = exchange(client, *pools, model=model)
    ledger = RouterLedger(cast(Ledger, rows), PoolTable(pools), tenants=True)
    made.account = ledger.open("acme", made.request, 1, tokens=tokens)
    made.begin(1)
    return client, made


def end(how: AttemptEnd, code: str) -> Callable[[RoutedExchange], None]:
    return lambda made: made.done(how, code)


@pytest.mark.parametrize(
    ("ends", "ending"),
    [
        (end(AttemptEnd.ANSWERED, "200"), "answered"),
        (end(AttemptEnd.ANSWERED, "OK"), "answered"),
        (end(AttemptEnd.ANSWERED, "404"), "refused"),
        (end(AttemptEnd.ANSWERED, "INVALID_ARGUMENT"), "refused"),
        (end(AttemptEnd.ANSWERED, "DEADLINE_EXCEEDED"), "cancelled"),
        (end(AttemptEnd.REFUSED, "429"), "refused"),
        (end(AttemptEnd.FAILED, "500"), "failed"),
        (end(AttemptEnd.FAILED, "504"), "cancelled"),
        (lambda made: made.cancel(), "cancelled"),
        (lambda made: made.failed(AttemptEnd.LOST, "broke"), "failed"),
    ],
)
def test_how_a_request_ended(ends: Callable[[RoutedExchange], None], ending: str) -> None:
    rows = Rows()

    async def run() -> None:
        _, made = begun(rows, made_pool("main", "one"))
        ends(made)
        made.cancel()

    asyncio.run(run())
    (row,) = rows.rows
    assert row.key.ending == ending
    assert (row.key.tenant, row.key.model, row.key.pool, row.key.member) == ("acme", "m", "main", "one")
    assert (row.number, row.request_id, row.amounts.attempts) == (1, "ff-1", 1)


def test_without_a_member() -> None:
    rows = Rows()

    async def run() -> None:
        pool = made_pool("main", "one")
        pool.set_ready("one", False, ("m",))
        begun(rows, pool)

    asyncio.run(run())
    (row,) = rows.rows
    assert (row.key.ending, row.key.pool, row.key.member, row.amounts.attempts) == ("refused", "", "", 0)
    assert row.key.source == "router"


def test_tokens_are_those_of_the_member_or_the_parts() -> None:
    rows = Rows()

    async def run() -> None:
        for tokens, told in ((True, True), (True, False), (False, False)):
            _, made = begun(rows, made_pool("main", "one"), tokens=tokens)
            made.answer_begins()
            made.progress(3)
            if told:
                made.used(5, 7, 2)
            made.done(AttemptEnd.ANSWERED, "200")

    asyncio.run(run())
    found = [(row.amounts.prompt_tokens, row.amounts.cached_tokens, row.amounts.answer_tokens) for row in rows.rows]
    assert found == [(5, 2, 7), (0, 0, 3), (0, 0, 0)]
    assert all(row.amounts.first_byte_ns > 0 for row in rows.rows)


def test_a_member_with_a_ledger_of_its_own_makes_the_row_a_copy() -> None:
    rows = Rows()

    async def run() -> None:
        pool = made_pool("main", "one", "two")
        pool.metered = {"two"}
        client, made = begun(rows, pool)
        made.failed(AttemptEnd.LOST, "broke")
        made.done(AttemptEnd.ANSWERED, "200")
        assert len(client.calls) == 2

    asyncio.run(run())
    (row,) = rows.rows
    assert row.amounts.attempts == 2
    assert row.key.source == ("copy" if row.key.member == "two" else "router")


def test_of_two_exchanges_the_one_that_answers_makes_the_row() -> None:
    rows = Rows()

    async def run() -> None:
        _, first = begun(rows, made_pool("main", "one", "two"))
        account = first.account
        second = first.again(Client())
        assert second is not None and account is not None
        second.begin()
        other = {"one", "two"} - {account.member}
        second.take_over(first)
        first.cancel()
        assert rows.rows == []
        second.done(AttemptEnd.ANSWERED, "200")
        (row,) = rows.rows
        assert row.key.ending == "answered"
        assert {row.key.member} == other
        assert row.amounts.attempts == 2

    asyncio.run(run())


def test_the_second_exchange_goes_on_with_the_account_when_the_first_is_refused() -> None:
    rows = Rows()

    async def run() -> None:
        client, first = begun(rows, made_pool("main", "one", "two"))
        second = first.again(Client())
        assert second is not None
        second.begin()
        first.attempts = 0
        first.failed(AttemptEnd.LOST, "broke")
        assert first.over and len(client.told) == 1
        assert rows.rows == []
        second.take_over(first)  # as its relay does when the second one answers
        second.done(AttemptEnd.ANSWERED, "200")

    asyncio.run(run())
    (row,) = rows.rows
    assert (row.key.ending, row.amounts.attempts) == ("answered", 2)


def named(pool: RouterPool, *models: str, code: str = "404") -> list[str]:
    """Return the models that rows name of requests for these, which all end with a status."""
    rows = Rows()

    async def run() -> None:
        client = Client()
        ledger = RouterLedger(cast(Ledger, rows), PoolTable([pool]), tenants=True)
        for model in models:
            made = exchange(client, pool, model=model, version="7")
            made.account = ledger.open("acme", made.request, 1, tokens=True)
            made.begin(1)
            if not made.over:
                made.done(AttemptEnd.ANSWERED, code)

    asyncio.run(run())
    assert {row.key.version for row in rows.rows if row.key.ending != "answered"} <= {""}
    return [row.key.model for row in rows.rows]


def test_rows_name_no_model_that_is_not_served() -> None:
    junk = [f"junk-{number}" for number in range(5)]
    assert named(made_pool("main", "one"), "m", *junk) == ["m"], "of what is not sent there are no rows"
    anything = made_pool("main", "one")
    anything.set_ready("one", True, None)
    assert named(anything, *junk) == [""] * 5
    assert named(anything, *junk, code="200") == junk
    names = named(anything, *(f"junk-{number}" for number in range(1500)), code="200")
    assert (len(names), len({*names})) == (1500, 1001)
