"""How rows get into the database: together with times, again after a failure, summed up when too many wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from doubles import Caller as Sink
from doubles import header, samples
from fake_instance import OK, FakeInstance
from nerite.core.errors import Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import Caller, InferenceRequest
from nerite.ledger import ledger as ledger_module
from nerite.ledger import tables
from nerite.ledger.dead_rows import count_dead_rows, write_again
from nerite.ledger.ledger import Ledger
from nerite.ledger.meter import VersionMeter
from nerite.ledger.row import Amounts, LedgerRow, RowKey
from nerite.ledger.tables import LedgerSchema, equations, sums
from nerite.storage.database import Database, Transaction


@pytest.fixture(params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "ledger.db" if request.param == "sqlite" else request.getfixturevalue("postgres"))


class Busy:
    """An instance whose every request takes a millisecond."""

    def __init__(self, ledger: Ledger, instance: FakeInstance | None = None) -> None:
        self.meter: VersionMeter = ledger.meter("model", "1")
        self.instance = instance or FakeInstance()
        self.meter.opened(self.instance, time.monotonic_ns())

    def run(self, count: int, tenant: str = "acme", *, answered: bool = True) -> list[InferenceRequest]:
        asked = []
        for _ in range(count):
            request = InferenceRequest(header(), [], Sink(), time.monotonic_ns())
            request.header.caller = Caller(tenant)
            self.meter.open(request)
            timings = ExecutionTimes()
            self.meter.leased(self.instance, [request], timings.started_ns)
            while time.monotonic_ns() < timings.started_ns + 100_000:
                pass
            timings.end()
            self.meter.returned(self.instance, [request], timings, timings.ended_ns)
            if answered:
                request.respond(OK)
            asked.append(request)
        return asked


def ledger_in(folder: Path, max_rows: int = 1000) -> Ledger:
    return Ledger(str(folder / "ledger.db"), lambda caller: (caller.tenant, "standard"), max_rows)


def running(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def counts(transaction: Transaction) -> dict[str, int]:
    found = sums(transaction, 0, 9e9, ["tenant"])
    return {each.group["tenant"]: each.amounts.requests for each in found}


def rows(transaction: Transaction) -> int:
    return int(transaction.rows("SELECT COUNT(*) FROM ledger_rows")[0][0])


def test_what_is_read_has_everything_up_to_now(tmp_path: Path) -> None:
    async def work() -> None:
        ledger = ledger_in(tmp_path)
        busy = Busy(ledger)
        busy.run(3)
        assert await ledger.read(counts) == {"acme": 3}
        (open_one,) = busy.run(1, "other", answered=False)
        assert await ledger.read(counts) == {"acme": 3, "other": 1}
        (told,) = await ledger.read(lambda transaction: equations(transaction, 0, 10**6))
        assert abs(told.unaccounted) < 1e-6
        assert told.cut_short == 1
        open_one.respond(OK)
        (told,) = await ledger.read(lambda transaction: equations(transaction, 0, 10**6))
        assert (told.cut_short, await ledger.read(rows)) == (0, 4)
        await ledger.close()

    running(work())


def test_when_too_many_rows_wait_they_are_summed_up(tmp_path: Path) -> None:
    async def work() -> None:
        ledger = ledger_in(tmp_path, max_rows=10)
        busy = Busy(ledger)
        (shown,) = busy.run(1, answered=False)
        await ledger.flush()
        busy.run(25)
        shown.respond(OK)
        busy.run(4, "other")
        assert await ledger.read(counts) == {"acme": 26, "other": 4}
        (told,) = await ledger.read(lambda transaction: equations(transaction, 0, 10**6))
        assert abs(told.unaccounted) < 1e-6
        assert await ledger.read(rows) < 15
        assert samples(ledger.write_metrics)["nerite_ledger_summed_rows_total"][""] > 10
        await ledger.close()

    running(work())


def test_what_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    async def work() -> None:
        ledger = ledger_in(tmp_path, max_rows=10)
        busy = Busy(ledger)
        busy.run(2)
        other = Database(str(tmp_path / "ledger.db"), [LedgerSchema()])
        other.call(lambda transaction: transaction.execute("ALTER TABLE ledger_rows RENAME TO away"))
        with pytest.raises(Unavailable):
            await ledger.flush()
        busy.run(3)
        with pytest.raises(Unavailable):
            await ledger.flush()
        assert ledger.waiting_rows == 5
        busy.run(20)
        with pytest.raises(Unavailable):
            await ledger.flush()
        assert ledger.waiting_rows < 5, "they were summed up"
        other.call(lambda transaction: transaction.execute("ALTER TABLE away RENAME TO ledger_rows"))
        assert await ledger.read(counts) == {"acme": 25}
        assert samples(ledger.write_metrics)["nerite_ledger_failed_writes_total"][""] == 3
        other.close()
        await ledger.close()

    running(work())


def test_a_row_that_is_refused_stops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        ledger = ledger_in(tmp_path)
        busy = Busy(ledger)
        busy.run(3)
        busy.run(1, "mallory \ud800")
        busy.run(2, "bob")
        assert await ledger.read(counts) == {"acme": 3, "bob": 2}
        (told, dead) = await ledger.read(lambda transaction: equations(transaction, 0, 10**6))
        assert dead.rows > 0
        assert abs(told.unaccounted + dead.unaccounted) < 1e-6
        assert samples(ledger.write_metrics)["nerite_ledger_set_aside_rows_total"][""] == 1
        assert samples(ledger.write_metrics)["nerite_ledger_waiting_rows"][""] == 0
        assert await ledger.read(count_dead_rows) == 1
        await ledger.close()

    running(work())
    assert "1 rows of the ledger were set aside, the first because: " in caplog.text
    assert "lost" not in caplog.text


def _raise(*_: object, **__: object) -> None:
    raise TypeError("planted")


@pytest.mark.parametrize("broken", ["write_rows", "write_times", "running_rows", "times", "summed"])
def test_an_exception_in_one_step_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    places = {"write_rows": tables, "write_times": tables, "summed": ledger_module}

    async def work() -> None:
        ledger = ledger_in(tmp_path, max_rows=10)
        other = Busy(ledger, FakeInstance("other"))
        busy = Busy(ledger, FakeInstance("busy"))
        with monkeypatch.context() as patch:
            patch.setattr(places.get(broken, busy.meter), broken, _raise)
            busy.run(15)
            other.run(15, "bob")
            await ledger.flush()
            assert ledger.waiting_rows == 0
        if broken == "write_rows":
            assert (await ledger.read(write_again))[1] == 0
        assert await ledger.read(counts) == {"acme": 15, "bob": 15}
        (told,) = await ledger.read(lambda transaction: equations(transaction, 0, 10**6))
        assert abs(told.unaccounted) < 1e-6
        await ledger.close()

    running(work())


def test_the_end_of_a_version_is_written(tmp_path: Path) -> None:
    async def work() -> None:
        ledger = ledger_in(tmp_path)
        busy = Busy(ledger)
        busy.run(2)
        busy.meter.close()
        busy.meter.closed(busy.instance, time.monotonic_ns())
        again = Busy(ledger)
        again.run(1)
        assert abs(samples(ledger.write_metrics)["nerite_ledger_unaccounted_seconds"][""]) < 1e-9
        await ledger.close()

    running(work())
    database = Database(str(tmp_path / "ledger.db"), [LedgerSchema()])
    (told,) = database.call(lambda transaction: equations(transaction, 0, 10**6))
    assert abs(told.unaccounted) < 1e-6
    assert database.call(counts) == {"acme": 3}
    assert database.call(lambda transaction: transaction.rows("SELECT COUNT(*) FROM ledger_times")) == [(2,)]
    database.close()


def test_rows_that_the_database_refuses_keep_no_others_from_being_written(location: str) -> None:
    """A number that no column can have, and a text that PostgreSQL cannot store; SQLite can."""

    async def main() -> None:
        ledger = Ledger(location, lambda caller: (caller.tenant, "standard"))
        now = time.time()
        for number, tenant in enumerate(["bob"] * 50 + ["poison\0tenant"] + ["bob"] * 49):
            tokens = 1 << 70 if number in (3, 90) else 1
            ledger.add(LedgerRow(ledger.next_number(), now, now, RowKey(tenant), Amounts(prompt_tokens=tokens)))
        Busy(ledger).run(5, "alice")
        await ledger.flush()
        refused = 3 if location.startswith("postgres") else 2
        assert (ledger.waiting_rows, ledger.set_aside_rows, ledger.written_rows) == (0, refused, 105 - refused)
        found = await ledger.read(counts)
        assert (found["bob"], found["alice"]) == (97, 5)
        equation = (await ledger.read(lambda each: equations(each, 0, 99_999)))[0]
        assert abs(equation.unaccounted) < 1e-6
        dead = await ledger.read(lambda each: each.rows("SELECT content FROM ledger_dead_rows ORDER BY number"))
        assert len(dead) == refused
        ledger.add(LedgerRow(ledger.next_number(), now, now, RowKey("bob"), Amounts()))
        assert (await ledger.read(counts))["bob"] == 98
        await ledger.close()

    running(main())
