"""Several servers with one database of batches: who runs what, who takes over, and what of the dead does not count."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from test_batch_runner import UNLIMITED, Executor, ended, good, house

from nerite.batches.records import BatchRecord, BatchSchema, BatchStatus, ItemState
from nerite.batches.service import BatchLimits
from nerite.batches.store import BatchLease, BatchStore, BatchTakenOver, ItemAnswerRow
from nerite.storage.database import Database

SHORT = BatchLimits(lease_seconds=0.4)


def test_each_batch_is_run_by_one_server(postgres: str, tmp_path: Path) -> None:
    async def run() -> None:
        one, other = Executor(), Executor()
        one.answers = other.answers = good
        async with (
            house(postgres, one, SHORT, str(tmp_path)) as here,
            house(postgres, other, SHORT, str(tmp_path)) as there,
        ):
            batches = [await home.create(60) for home in (here, there, here, there)]
            for batch in batches:
                record = await here.until(batch.id, ended)
                assert (record.status, record.completed) == (BatchStatus.COMPLETED, 60)
                output = await there.content(record.output_file_id)
                assert [each["custom_id"] for each in output] == [f"item-{n}" for n in range(60)]
            assert len(one.seen) == len(other.seen) == 120

    asyncio.run(run())


def test_the_batches_of_a_server_that_stops_go_on_elsewhere_at_once(postgres: str, tmp_path: Path) -> None:
    async def run() -> None:
        one, other = Executor(), Executor()
        other.answers = good
        async with house(postgres, other, BatchLimits(lease_seconds=600), str(tmp_path)) as there:
            async with house(postgres, one, BatchLimits(lease_seconds=600), str(tmp_path)) as here:
                batch = await here.create(10)
                await here.under_way(1)
                one.answer()
                await here.until(batch.id, lambda record: record.completed == 1)
            record = await there.until(batch.id, ended)
            assert record.completed == 10
            assert len(other.seen) == 9

    asyncio.run(run())


def test_a_batch_is_cancelled_through_another_server(postgres: str, tmp_path: Path) -> None:
    async def run() -> None:
        one = Executor()
        async with (
            house(postgres, one, SHORT, str(tmp_path)) as here,
            house(postgres, Executor(), SHORT, str(tmp_path)) as there,
        ):
            batch = await here.create(10)
            await here.under_way(1)
            await there.batches.cancel("acme", batch.id)
            record = await there.until(batch.id, ended)
            assert record.status is BatchStatus.CANCELLED
            assert one.cancelled == 1

    asyncio.run(run())


def test_a_server_that_has_slept_changes_nothing_of_what_others_have_taken(postgres: str, tmp_path: Path) -> None:
    def store(owner: str, seconds: float) -> BatchStore:
        return BatchStore(database, BatchLease(owner, seconds, sole=False), UNLIMITED)

    async def run() -> None:
        asleep, awake = store("asleep", 0.0), store("awake", 600.0)
        executor = Executor()
        async with house(postgres, executor, SHORT, str(tmp_path)) as home:
            batch = await home.create(2)
            await home.under_way(1)
        assert batch.id in await asleep.claim()
        assert batch.id in await awake.claim()
        assert batch.id not in await asleep.claim()
        rows = [ItemAnswerRow(batch.id, 1, ItemState.COMPLETED, b"{}")]
        assert await asleep.commit(rows) == {batch.id}
        for change in (
            asleep.change(batch.id, status=BatchStatus.FAILED),
            asleep.finish(batch.id, [], status=BatchStatus.COMPLETED),
            asleep.begin(batch.id, [], "m", 0.0),
        ):
            with pytest.raises(BatchTakenOver, match=batch.id):
                await change
        assert await awake.commit(rows) == set()
        record = await awake.by_id(batch.id)
        assert (record.status, record.completed) == (BatchStatus.IN_PROGRESS, 1)

    database = Database(postgres, [BatchSchema()])
    try:
        asyncio.run(run())
    finally:
        database.close()


def test_nothing_runs_once_the_lease_is_over_and_the_database_away(postgres: str, tmp_path: Path) -> None:
    async def run() -> None:
        executor, other = Executor(), Executor()
        other.answers = good
        async with house(postgres, executor, SHORT, str(tmp_path)) as home:
            batch = await home.create(5)
            await home.under_way(1)
            database = Database(postgres, [])
            database.call(lambda each: each.execute("ALTER TABLE batches RENAME TO hidden"))
            await home.under_way(0)
            assert executor.cancelled == 1
            assert home.batches.runner.items.under_way == 0
            database.call(lambda each: each.execute("ALTER TABLE hidden RENAME TO batches"))
            database.close()
            await home.under_way(1)
            executor.answers = good
            executor.answer()
            record: BatchRecord = await home.until(batch.id, ended)
            assert record.completed == 5

    asyncio.run(run())
