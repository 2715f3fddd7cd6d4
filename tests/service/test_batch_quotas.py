"""What one tenant may take of a server's batches: open ones, items, bytes, and items at once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from test_batch_runner import UNLIMITED, URL, Executor, ended, good, house, lines

from nerite.admission.policy import AdmissionPolicy, parse_policy
from nerite.batches import runner, service
from nerite.batches.records import BatchSchema, BatchStatus, FileRecord
from nerite.batches.running_batch import ItemAnswer
from nerite.batches.service import BatchLimits, NewBatch
from nerite.batches.store import BatchLease, BatchStore, BatchUse, PageRequest
from nerite.core.errors import Conflict, QuotaExceeded, TooLarge
from nerite.storage.database import Database

FILE = 4096
"""Bytes that count for a file beside its own."""
POLICY = parse_policy("[tenants.alice]\n[tenants.bob]")


@pytest.fixture(params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "batches.db" if request.param == "sqlite" else request.getfixturevalue("postgres"))


async def use(location: Path | str, tenant: str | None = None) -> BatchUse:
    database = Database(str(location), [BatchSchema()])
    try:
        return await BatchStore(database, BatchLease("one", 15.0, sole=False), UNLIMITED).use(tenant)
    finally:
        database.close()


def new(file: str, window: str = "1h") -> NewBatch:
    return NewBatch(file, URL, window, {})


@pytest.mark.parametrize("limit", ["open", "items"])
def test_one_tenant_cannot_take_all_batches(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_OPEN", 20 if limit == "open" else 1000)
    monkeypatch.setattr(service, "MAX_OPEN_ITEMS", 60 if limit == "items" else 1_000_000)

    async def run() -> None:
        async with house(tmp_path / "batches.db", Executor(capacity=0), policy=POLICY) as home:
            file = await home.batches.upload("alice", "in.jsonl", "batch", lines(3))
            refused: list[str] = []
            for _ in range(22):
                try:
                    await home.batches.create("alice", new(file.id))
                except QuotaExceeded as error:
                    refused.append(error.message)
            assert len(refused) == 12
            what = "10 batches" if limit == "open" else "30 items in batches"
            free = 10 if limit == "open" else 30
            assert refused[0].startswith(
                f"tenant 'alice' has {what} that have not ended, and may have no more than are free, which are {free}: "
            )
            assert refused[0].endswith(("Wait for one, or cancel one", "Wait for batches, or cancel some"))
            await home.create(3, tenant="bob")
            open_batches, _ = await home.batches.list_batches("alice", PageRequest(1))
            await home.batches.cancel("alice", open_batches[0].id)
            await home.until(open_batches[0].id, ended, tenant="alice")
            await home.batches.create("alice", new(file.id))

    asyncio.run(run())


def test_each_tenant_finds_as_much_as_the_others_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_OPEN", 20)

    async def run() -> None:
        async with house(tmp_path / "batches.db", Executor(capacity=0), policy=POLICY) as home:
            for tenant, most in (("alice", 10), ("bob", 5), ("default", 3), ("carol", 1)):
                for _ in range(most):
                    await home.create(1, tenant=tenant)
                with pytest.raises(QuotaExceeded, match=f"tenant '{tenant}' has {most} batches"):
                    await home.create(1, tenant=tenant)

    asyncio.run(run())


def test_all_tenants_together_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_OPEN", 4)
    policy = parse_policy("[tenants.alice]\nopen_batches = 9\n[tenants.bob]")

    async def run() -> None:
        async with house(tmp_path / "batches.db", Executor(capacity=0), policy=policy) as home:
            for _ in range(4):
                await home.create(1, tenant="alice")
            with pytest.raises(
                Conflict, match="all together have 4 batches that have not ended, and may have 4: not 1"
            ):
                await home.create(1, tenant="bob")

    asyncio.run(run())


def test_without_a_policy_there_is_one_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_OPEN", 4)

    async def run() -> None:
        executor = Executor()
        async with house(tmp_path / "batches.db", executor, BatchLimits(concurrency=4)) as home:
            for _ in range(4):
                await home.create(4)
            with pytest.raises(Conflict, match="all together have 4 batches"):
                await home.create(1)
            for answered in (1, 2):
                await home.under_way(answered)
                executor.answer(answered)
            await home.under_way(4)

    asyncio.run(run())


def test_the_limits_of_the_policy(tmp_path: Path) -> None:
    policy = parse_policy(
        "[tenants.alice]\nopen_batches = 1\nbatch_items = 5\nbatch_bytes = 20_000\n[default]\nopen_batches = 0"
    )

    async def run() -> None:
        async with house(tmp_path / "batches.db", Executor(capacity=0), policy=policy) as home:
            with pytest.raises(
                QuotaExceeded, match=r"has 0 items in batches .* may have 5 \(batch_items\): not 6 more"
            ):
                await home.create(6, tenant="alice")
            await home.create(5, tenant="alice")
            with pytest.raises(QuotaExceeded, match=r"has 1 batches .* may have 1 \(open_batches\)"):
                await home.create(1, tenant="alice")
            with pytest.raises(QuotaExceeded, match=r"may have 20000 \(batch_bytes\): not .* more. Delete"):
                await home.batches.upload("alice", "x", "user_data", bytes(20_000))
            with pytest.raises(QuotaExceeded, match="may have 0"):
                await home.create(1, tenant="default")

    asyncio.run(run())


def test_nothing_is_written_of_what_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with house(tmp_path / "b.db", Executor(), BatchLimits(storage_bytes=40_000), policy=POLICY) as home:
            await home.batches.upload("alice", "x", "user_data", bytes(10_000))
            writes: list[int] = []
            begin = home.batches.files.begin
            home.batches.files.begin = lambda name: writes.append(1) or begin(name)  # type: ignore[method-assign, func-returns-value]
            with pytest.raises(QuotaExceeded, match="tenant 'alice' has 14096 bytes"):
                await home.batches.upload("alice", "x", "user_data", bytes(10_000))
            assert writes == []
            # Those that arrive at once are counted together.
            results = await asyncio.gather(
                *(home.batches.upload("bob", "x", "user_data", bytes(4000)) for _ in range(8)), return_exceptions=True
            )
            assert sum(isinstance(each, FileRecord) for each in results) == 2
            assert len(writes) < 8
            assert (await use(tmp_path / "b.db", "bob")).bytes == 2 * (4000 + FILE)

    asyncio.run(run())


def test_rows_answers_and_outputs_count(location: str, tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor()
        async with house(location, executor, directory=str(tmp_path / "files"), policy=POLICY) as home:
            content = lines(10)
            rows = sum(200 + len(f"item-{n}") for n in range(10))
            file = await home.batches.upload("alice", "in.jsonl", "batch", content)
            assert await use(location, "alice") == BatchUse(0, 0, len(content) + FILE)
            batch = await home.batches.create("alice", new(file.id))
            assert await use(location, "alice") == BatchUse(1, 10, len(content) + FILE + rows)
            await home.under_way(1)
            executor.answer()
            await home.until(batch.id, lambda record: record.completed == 1, tenant="alice")
            with_answer = (await use(location, "alice")).bytes - len(content) - FILE - rows
            assert with_answer > 50
            executor.answers = good
            await home.eventually(lambda: bool(executor.waiting))
            executor.answer(len(executor.waiting))
            record = await home.until(batch.id, ended, tenant="alice")
            assert record.output_file_id is not None
            output = await home.batches.file("alice", record.output_file_id)
            assert output.size > 10 * with_answer - 200
            assert await use(location, "alice") == BatchUse(0, 0, len(content) + output.size + 2 * FILE)
            assert (await use(location)).bytes == (await use(location, "alice")).bytes
            await home.batches.delete_file("alice", output.id)
            await home.batches.delete_file("alice", file.id)
            assert await use(location) == BatchUse(0, 0, 0)

    asyncio.run(run())


def test_a_batch_whose_answers_have_no_room_waits_for_it(tmp_path: Path) -> None:
    limits = BatchLimits(storage_bytes=200_000, concurrency=4)

    def large(_: object) -> ItemAnswer:
        return ItemAnswer(200, b'"' + b"x" * 10_000 + b'"')

    async def run() -> None:
        executor = Executor()
        executor.answers = large
        async with house(tmp_path / "batches.db", executor, limits, policy=POLICY) as home:
            ballast = await home.batches.upload("alice", "x", "user_data", bytes(80_000))
            batch = await home.create(4, tenant="alice")
            executor.answers = None
            await home.until(batch.id, lambda record: record.total == 4, tenant="alice")
            await home.eventually(lambda: bool(executor.waiting) or not home.batches.runner.batches)
            _request, done = executor.waiting.pop()
            done(ItemAnswer(200, b'"' + b"x" * 30_000 + b'"'))
            await home.eventually(lambda: "alice" in home.batches.runner.items.full)
            record = await home.batches.batch("alice", batch.id)
            assert [each["code"] for each in record.errors] == ["storage_full"]
            executor.answers = good
            while executor.waiting:
                executor.answer()
            other = await home.create(5, tenant="bob")
            assert (await home.until(other.id, ended, tenant="bob")).completed == 5
            assert not (await home.batches.batch("alice", batch.id)).status.is_end
            assert home.batches.loop.waiting == 0
            await home.batches.delete_file("alice", ballast.id)
            record = await home.until(batch.id, ended, tenant="alice")
            assert (record.status, record.completed) == (BatchStatus.COMPLETED, 4)

    asyncio.run(run())


def test_items_of_one_tenant_leave_places_for_others(tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor()
        async with house(tmp_path / "batches.db", executor, BatchLimits(concurrency=8), policy=POLICY) as home:
            await home.create(40, tenant="alice", model="a")
            await home.under_way(1)
            while len(executor.waiting) < 6:
                executor.answer()
                await asyncio.sleep(0.01)
            await home.create(40, tenant="bob", model="b")
            await home.eventually(lambda: any(request.tenant == "bob" for request, _ in executor.waiting))
            assert sum(request.tenant == "alice" for request, _ in executor.waiting) == 6

    asyncio.run(run())


def test_the_oldest_of_many_ended_batches_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST_ENDED", 3)
    monkeypatch.setattr(runner, "SWEEP_SECONDS", 0.1)

    async def run() -> None:
        executor = Executor()
        executor.answers = good
        async with house(tmp_path / "batches.db", executor, policy=POLICY) as home:
            names = []
            for _ in range(5):
                names.append((await home.create(1, tenant="alice")).id)
                await home.until(names[-1], ended, tenant="alice")
            other = await home.create(1, tenant="bob")
            await home.until(other.id, ended, tenant="bob")

            async def left() -> list[str]:
                found, _ = await home.batches.list_batches("alice", PageRequest(10))
                return [each.id for each in found]

            deadline = time.monotonic() + 30
            while await left() != names[:1:-1]:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert (await home.batches.batch("bob", other.id)).completed == 1

    asyncio.run(run())


def test_the_memory_of_loaded_items_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many batches only the first for each model loads an item when others have loaded much."""
    monkeypatch.setattr(runner, "TENANT_BYTES", 3000)

    async def run() -> None:
        executor = Executor(capacity=0)
        async with house(tmp_path / "batches.db", executor, policy=POLICY) as home:
            file = await home.batches.upload("alice", "in.jsonl", "batch", lines(100))
            batches = [await home.batches.create("alice", new(file.id)) for _ in range(20)]
            for batch in batches:
                await home.until(batch.id, lambda record: record.total == 100, tenant="alice")
            other = await home.create(100, tenant="alice", model="other")
            running = home.batches.runner.batches
            await home.eventually(lambda: other.id in running and bool(running[other.id].ready))
            assert sum(each.ready_bytes for each in running.values()) < 4000
            executor.capacity = 1000
            executor.answers = good
            for batch in (*batches, other):
                record = await home.until(batch.id, ended, tenant="alice")
                assert record.completed == 100

    asyncio.run(run())


def test_too_large_a_file_for_all_of_them(tmp_path: Path) -> None:
    policy = AdmissionPolicy()

    async def run() -> None:
        async with house(tmp_path / "b.db", Executor(), BatchLimits(storage_bytes=20_000), policy=policy) as home:
            await home.batches.upload("a", "x", "user_data", bytes(5000))
            assert (await use(tmp_path / "b.db")).bytes == 9096
            with pytest.raises(QuotaExceeded):
                await home.batches.upload("a", "x", "user_data", bytes(2000))
        unlimited = parse_policy("[default]\nbatch_bytes = 1_000_000")
        async with house(tmp_path / "b.db", Executor(), BatchLimits(storage_bytes=20_000), policy=unlimited) as home:
            with pytest.raises(
                TooLarge, match=r"have 9096 bytes .* and may have 20000 of batch-storage-bytes: not 12096 more"
            ):
                await home.batches.upload("a", "x", "user_data", bytes(8000))

    asyncio.run(run())
