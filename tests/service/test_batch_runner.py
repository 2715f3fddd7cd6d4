"""Batches on a real database, executed by a stand-in that a test controls: order, crashes, ends, files."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nerite.admission.policy import AdmissionPolicy
from nerite.batches.items import InvalidItems
from nerite.batches.records import BatchRecord, BatchSchema, BatchStatus
from nerite.batches.running_batch import ItemAnswer, ItemRequest
from nerite.batches.service import Batches, BatchLimits, NewBatch, default_directory
from nerite.batches.store import BatchLease, BatchQuotas, BatchStore, BatchUse, PageRequest
from nerite.core.errors import Conflict, InvalidArgument, NotFound, TooLarge
from nerite.core.item_attempt import item_of
from nerite.storage.database import Database

URL = "/v1/chat/completions"
UNLIMITED = BatchQuotas(BatchUse(10**9, 10**9, 10**18), lambda _: None)
Waiting = tuple[ItemRequest, Callable[[ItemAnswer], None]]


class Executor:
    """Holds items until a test answers them."""

    def __init__(self, capacity: int = 1000) -> None:
        self.capacity = capacity
        self.waiting: list[Waiting] = []
        self.seen: list[str] = []
        self.cancelled = 0
        self.others = False
        """Others use the models."""
        self.answers: Callable[[ItemRequest], ItemAnswer] | None = None
        """Answers items at once, if set."""

    def has_others(self, model: str) -> bool:
        return self.others

    def submit(self, request: ItemRequest, done: Callable[[ItemAnswer], None]) -> Callable[[], None]:
        if self.answers is not None:
            self.seen.append(self.name(request))
            done(self.answers(request))
            return lambda: None
        if len(self.waiting) >= self.capacity and not request.raised:
            done(ItemAnswer(503, b"{}"))
            return lambda: None
        self.seen.append(self.name(request))
        entry = (request, done)
        self.waiting.append(entry)

        def cancel() -> None:
            self.cancelled += 1
            self.waiting.remove(entry)

        return cancel

    @staticmethod
    def name(request: ItemRequest) -> str:
        return str(json.loads(request.body)["name"])

    def answer(self, count: int = 1, status: int = 200) -> None:
        for _ in range(count):
            request, done = self.waiting.pop(0)
            done(ItemAnswer(status, json.dumps({"to": self.name(request)}).encode()))


def good(request: ItemRequest) -> ItemAnswer:
    return ItemAnswer(200, json.dumps({"to": Executor.name(request)}).encode(), request_id="r")


def lines(count: int, model: str = "llm") -> bytes:
    return b"".join(
        json.dumps({"custom_id": f"item-{n}", "url": URL, "body": {"model": model, "name": str(n)}}).encode() + b"\n"
        for n in range(count)
    )


class House:
    """Batches that run."""

    def __init__(self, batches: Batches, executor: Executor) -> None:
        self.batches = batches
        self.executor = executor

    async def create(self, count: int, window: str = "1h", tenant: str = "acme", model: str = "llm") -> BatchRecord:
        file = await self.batches.upload(tenant, "in.jsonl", "batch", lines(count, model))
        return await self.batches.create(tenant, NewBatch(file.id, URL, window, {}))

    async def until(self, name: str, holds: Callable[[BatchRecord], bool], tenant: str = "acme") -> BatchRecord:
        deadline = time.monotonic() + 30
        while not holds(record := await self.batches.batch(tenant, name)):
            assert time.monotonic() < deadline, record
            await asyncio.sleep(0.01)
        return record

    async def under_way(self, count: int) -> None:
        await self.eventually(lambda: len(self.executor.waiting) == count)

    @staticmethod
    async def eventually(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    async def content(self, name: str | None, tenant: str = "acme") -> list[dict[str, Any]]:
        assert name is not None
        _, file = await self.batches.open_file(tenant, name)
        with file:
            return [json.loads(line) for line in file]


@asynccontextmanager
async def house(
    location: Path | str,
    executor: Executor,
    limits: BatchLimits | None = None,
    directory: str = "",
    policy: AdmissionPolicy | None = None,
) -> AsyncIterator[House]:
    batches = Batches(str(location), directory, executor, limits or BatchLimits(), lambda: policy)
    task = asyncio.create_task(batches.run())
    try:
        yield House(batches, executor)
    finally:
        batches.runner.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await batches.close()


def ended(record: BatchRecord) -> bool:
    return record.status.is_end


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_batch_from_its_creation_to_its_files(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    location = str(tmp_path / "batches.db") if kind == "sqlite" else str(request.getfixturevalue("postgres"))

    async def run() -> None:
        executor = Executor()
        executor.answers = lambda item: ItemAnswer(400, b'{"error":"no"}') if Executor.name(item) == "7" else good(item)
        async with house(location, executor, directory=str(tmp_path / "files")) as home:
            batch = await home.create(300)
            assert batch.status is BatchStatus.VALIDATING
            record = await home.until(batch.id, ended)
            assert record.status is BatchStatus.COMPLETED
            assert (record.total, record.completed, record.failed) == (300, 299, 1)
            output = await home.content(record.output_file_id)
            assert [each["custom_id"] for each in output] == [f"item-{n}" for n in range(300) if n != 7]
            assert output[3]["response"] == {"status_code": 200, "request_id": "r", "body": {"to": "3"}}
            (error,) = await home.content(record.error_file_id)
            assert (error["custom_id"], error["response"]["status_code"]) == ("item-7", 400)
            files, more = await home.batches.list_files("acme", PageRequest(10, purpose="batch_output"))
            assert {each.id for each in files} == {record.output_file_id, record.error_file_id}
            assert not more
            assert home.batches.runner.batches == {}

    asyncio.run(run())


def test_after_a_crash_only_what_was_not_committed_runs_again(tmp_path: Path) -> None:
    async def before() -> str:
        executor = Executor()
        async with house(tmp_path / "batches.db", executor) as home:
            batch = await home.create(20)
            await home.under_way(1)
            while len(executor.seen) < 12:
                executor.answer(len(executor.waiting))
                await asyncio.sleep(0.01)
            answered = len(executor.seen) - len(executor.waiting)
            await home.until(batch.id, lambda record: record.completed == answered)
            return batch.id

    async def after(name: str, done: int) -> None:
        executor = Executor()
        executor.answers = good
        async with house(tmp_path / "batches.db", executor) as home:
            record = await home.until(name, ended)
            assert (record.status, record.completed) == (BatchStatus.COMPLETED, 20)
            assert len(executor.seen) == 20 - done
            output = await home.content(record.output_file_id)
            assert [each["custom_id"] for each in output] == [f"item-{n}" for n in range(20)]

    async def committed(name: str) -> int:
        async with house(tmp_path / "batches.db", Executor(capacity=0)) as home:
            return (await home.batches.batch("acme", name)).completed

    name = asyncio.run(before())
    done = asyncio.run(committed(name))
    assert 0 < done < 20
    asyncio.run(after(name, done))


def test_an_item_that_may_have_run_is_known_by_its_id_and_not_charged_to_quotas_again(tmp_path: Path) -> None:
    count = 400
    asked: dict[str, list[ItemRequest]] = {}

    def noted(status: int) -> Callable[[ItemRequest], ItemAnswer]:
        def answers(request: ItemRequest) -> ItemAnswer:
            asked.setdefault(Executor.name(request), []).append(request)
            return ItemAnswer(status, b"{}", retry_after=600.0)

        return answers

    async def run(status: int, holds: Callable[[BatchRecord], bool], name: str = "") -> str:
        executor = Executor()
        executor.answers = noted(status)
        async with house(tmp_path / "batches.db", executor) as home:
            name = name or (await home.create(count)).id
            await home.until(name, lambda record: holds(record) and bool(executor.seen))
        return name

    name = asyncio.run(run(429, lambda record: True))  # loaded, but not answered
    assert not any(request.paid for tries in asked.values() for request in tries)
    first = {each: tries[0].request_id for each, tries in asked.items()}
    asked.clear()
    asyncio.run(run(200, ended, name))
    assert len(asked) == count
    paid = {int(each) for each, (request,) in asked.items() if request.paid}
    assert paid == set(range(len(paid))), "those that were loaded"
    assert 0 < len(paid) < count
    for each, request_id in first.items():
        (again,) = asked[each]
        assert again.paid
        assert again.request_id != request_id
        assert item_of(again.request_id) == item_of(request_id) != ""
    assert len({item_of(request.request_id) for (request,) in asked.values()}) == count


def test_a_cancelled_batch_keeps_what_is_done(tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor()
        async with house(tmp_path / "batches.db", executor) as home:
            batch = await home.create(10)
            await home.under_way(1)
            executor.answer()
            await home.under_way(2)
            cancelling = await home.batches.cancel("acme", batch.id)
            assert cancelling.status is BatchStatus.CANCELLING
            record = await home.until(batch.id, ended)
            assert (record.status, record.completed, record.failed) == (BatchStatus.CANCELLED, 1, 0)
            assert executor.cancelled == 2
            assert len(await home.content(record.output_file_id)) == 1
            assert record.error_file_id is None
            with pytest.raises(Conflict, match="Cannot cancel a batch with status 'cancelled'"):
                await home.batches.cancel("acme", batch.id)

    asyncio.run(run())


def test_a_batch_that_was_being_cancelled_is_cancelled_after_a_crash(tmp_path: Path) -> None:
    async def before() -> str:
        async with house(tmp_path / "batches.db", Executor(capacity=0)) as home:
            return (await home.create(3)).id

    async def after(name: str) -> None:
        async with house(tmp_path / "batches.db", Executor(capacity=0)) as home:
            assert (await home.until(name, ended)).status is BatchStatus.CANCELLED

    name = asyncio.run(before())
    database = Database(str(tmp_path / "batches.db"), [BatchSchema()])
    database.call(lambda each: each.execute("UPDATE batches SET status = 'cancelling' WHERE id = ?", [name]))
    database.close()
    asyncio.run(after(name))


def test_at_the_deadline_the_rest_gets_error_rows(tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor()
        async with house(tmp_path / "batches.db", executor) as home:
            batch = await home.create(5, window="2s")
            await home.under_way(1)
            executor.answer()
            record = await home.until(batch.id, ended)
            assert (record.status, record.completed, record.failed) == (BatchStatus.EXPIRED, 1, 4)
            errors = await home.content(record.error_file_id)
            assert [each["error"]["code"] for each in errors] == ["batch_expired"] * 4
            assert executor.waiting == []

    asyncio.run(run())


def test_items_take_the_room_that_there_is_and_are_raised_when_time_gets_short(tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor(capacity=0)
        async with house(tmp_path / "batches.db", executor) as home:
            await home.create(30, window="10s")
            deadline = time.monotonic() + 30
            while not executor.waiting:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert all(request.raised for request, _ in executor.waiting)
            assert home.batches.runner.items.counts["refused"] > 3

    asyncio.run(run())


def test_beside_others_a_batch_keeps_its_pace(tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor()
        executor.others = True
        async with house(tmp_path / "batches.db", executor) as home:
            batch = await home.create(100, window="1h")
            for answered in range(1, 30):
                await home.under_way(1)
                executor.answer()
                await home.until(batch.id, lambda record, answered=answered: record.completed == answered)
                assert len(executor.waiting) <= 1

    asyncio.run(run())


def test_a_failure_of_the_server_is_tried_again(tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor()
        tried: list[str] = []

        def answers(request: ItemRequest) -> ItemAnswer:
            name = Executor.name(request)
            tried.append(name)
            return ItemAnswer(500, b"{}") if name == "0" or (name == "1" and tried.count("1") < 3) else good(request)

        executor.answers = answers
        async with house(tmp_path / "batches.db", executor) as home:
            record = await home.until((await home.create(3)).id, ended)
            assert (record.completed, record.failed) == (2, 1)
            assert (tried.count("0"), tried.count("1"), tried.count("2")) == (3, 3, 1)

    asyncio.run(run())


def test_mistakes_are_found_at_upload_and_at_creation(tmp_path: Path) -> None:
    async def run() -> None:
        async with house(tmp_path / "batches.db", Executor()) as home:
            with pytest.raises(InvalidItems, match="Line 2: This line is not parseable"):
                await home.batches.upload("acme", "in.jsonl", "batch", lines(1) + b"{\n")
            file = await home.batches.upload("acme", "in.jsonl", "batch", lines(2))
            batch = await home.batches.create("acme", NewBatch(file.id, "/v1/completions", "1h", {}))
            record = await home.until(batch.id, ended)
            assert record.status is BatchStatus.FAILED
            assert [(each["code"], each["line"]) for each in record.errors] == [
                ("mismatched_endpoint", 1),
                ("mismatched_endpoint", 2),
            ]
            for new in (
                NewBatch(file.id, URL, "soon", {}),
                NewBatch(file.id, URL, "31d", {}),
                NewBatch(file.id, "/v1/models", "1h", {}),
                NewBatch(file.id, URL, "1h", {"k" * 65: ""}),
                NewBatch(file.id, URL, "1h", {"k": "v" * 513}),
                NewBatch(file.id, URL, "1h", {str(number): "" for number in range(17)}),
            ):
                with pytest.raises(InvalidArgument):
                    await home.batches.create("acme", new)

    asyncio.run(run())


def test_tenants_do_not_see_each_others_files_and_batches(tmp_path: Path) -> None:
    async def run() -> None:
        async with house(tmp_path / "batches.db", Executor()) as home:
            batch = await home.create(2)
            for call in (
                home.batches.batch("umbrella", batch.id),
                home.batches.cancel("umbrella", batch.id),
                home.batches.file("umbrella", batch.input_file_id),
                home.batches.delete_file("umbrella", batch.input_file_id),
                home.batches.create("umbrella", NewBatch(batch.input_file_id, URL, "1h", {})),
            ):
                with pytest.raises(NotFound):
                    await call
            assert await home.batches.list_batches("umbrella", PageRequest(10)) == ([], False)

    asyncio.run(run())


def test_files_are_bounded_and_removed(tmp_path: Path) -> None:
    async def run() -> None:
        limits = BatchLimits(storage_bytes=2 * 4096 + 2000)
        async with house(tmp_path / "batches.db", Executor(), limits) as home:
            batch = await home.create(2)
            with pytest.raises(Conflict, match="is the input of batch"):
                await home.batches.delete_file("acme", batch.input_file_id)
            other = await home.batches.upload("acme", "x", "user_data", b"data")
            with pytest.raises(TooLarge, match="batch-storage-bytes"):
                await home.batches.upload("acme", "in.jsonl", "batch", lines(20))
            with pytest.raises(Conflict, match="must be 'batch'"):
                await home.batches.create("acme", NewBatch(other.id, URL, "1h", {}))
            await home.batches.delete_file("acme", other.id)
            with pytest.raises(NotFound):
                await home.batches.open_file("acme", other.id)
            kept.append(batch.input_file_id)

    kept = ["lock"]
    asyncio.run(run())
    directory = Path(default_directory(str(tmp_path / "batches.db")))
    assert sorted(path.name for path in directory.iterdir()) == sorted(kept)


def test_pages_of_a_list(tmp_path: Path) -> None:
    async def run() -> None:
        async with house(tmp_path / "batches.db", Executor(capacity=0)) as home:
            names = [(await home.create(1)).id for _ in range(5)]
            first, more = await home.batches.list_batches("acme", PageRequest(2))
            assert more
            second, more = await home.batches.list_batches("acme", PageRequest(3, after=first[-1].id))
            assert not more
            assert [each.id for each in (*first, *second)] == names[::-1]
            with pytest.raises(NotFound, match="'after'"):
                await home.batches.list_batches("acme", PageRequest(2, after="batch_x"))

    asyncio.run(run())


def test_one_server_uses_a_directory(tmp_path: Path) -> None:
    async def run() -> None:
        async with house(tmp_path / "batches.db", Executor()):
            with pytest.raises(InvalidArgument, match="another server keeps its batches"):
                Batches(str(tmp_path / "batches.db"), "", Executor(), BatchLimits())
        with pytest.raises(InvalidArgument, match="--batch-files"):
            Batches("postgresql://nobody@localhost/none", "", Executor(), BatchLimits())

    asyncio.run(run())


def test_two_tenants_share_the_room(tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor(capacity=4)
        async with house(tmp_path / "batches.db", executor) as home:
            await home.create(100, tenant="acme")
            await home.create(100, tenant="umbrella")
            served = {"acme": 0, "umbrella": 0}
            while sum(served.values()) < 80:
                if executor.waiting:
                    served[executor.waiting[0][0].tenant] += 1
                    executor.answer()
                await asyncio.sleep(0.005)
            assert min(served.values()) >= 25

    asyncio.run(run())


def test_files_expire_unless_a_batch_reads_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with house(tmp_path / "batches.db", Executor(capacity=0)) as home:
            used = await home.batches.upload("acme", "in.jsonl", "batch", lines(1), 100.0)
            await home.batches.create("acme", NewBatch(used.id, URL, "1h", {}))
            unused = await home.batches.upload("acme", "x", "user_data", b"1", 100.0)
            lasting = await home.batches.upload("acme", "y", "user_data", b"1")
            database = Database(str(tmp_path / "batches.db"), [BatchSchema()])
            store = BatchStore(database, BatchLease("one", 15.0, sole=False), UNLIMITED)
            assert await store.remove_expired_files(unused.created_at + 99) == []
            assert await store.remove_expired_files(unused.created_at + 101) == [unused.id]
            database.close()
            left, _ = await home.batches.list_files("acme", PageRequest(10))
            assert [each.id for each in left] == [lasting.id, used.id]

    asyncio.run(run())


def test_batches_wait_while_the_database_fails(tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor()
        async with house(tmp_path / "batches.db", executor) as home:
            batch = await home.create(3)
            await home.under_way(1)
            database = Database(str(tmp_path / "batches.db"), [])
            database.call(lambda each: each.execute("ALTER TABLE batch_items RENAME TO hidden"))
            executor.answer()
            await home.under_way(2)
            executor.answer(2)
            await home.eventually(lambda: "commit" in home.batches.loop.failing)
            assert "the database of the batches does not answer" in home.batches.loop.failing["commit"]
            assert (await home.batches.batch("acme", batch.id)).completed == 0
            database.call(lambda each: each.execute("ALTER TABLE hidden RENAME TO batch_items"))
            database.close()
            assert (await home.until(batch.id, ended)).completed == 3

    asyncio.run(run())
