"""Batches on a real database, executed by a stand-in that a test controls: order, crashes, ends, files."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nerite.batches.deadline_planner import DeadlinePlanner
from nerite.batches.items import InvalidItems
from nerite.batches.records import BatchRecord, BatchSchema, BatchStatus
from nerite.batches.running_batch import ItemAnswer, ItemRequest
from nerite.batches.service import Batches, BatchLimits, NewBatch, default_directory
from nerite.batches.store import BatchLease, BatchStore, ItemAnswerRow, PageRequest
from nerite.core.errors import Conflict, InvalidArgument, NotFound, QuotaExceeded, RefusedData, TooLarge
from nerite.core.item_attempt import item_of
from nerite.storage.database import Database
from postgres_server import postgres_server

URL = "/v1/chat/completions"
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
        deadline = time.monotonic() + 30
        while len(self.executor.waiting) != count:
            assert time.monotonic() < deadline, len(self.executor.waiting)
            await asyncio.sleep(0.01)

    async def content(self, name: str | None, tenant: str = "acme") -> list[dict[str, Any]]:
        assert name is not None
        _, file = await self.batches.open_file(tenant, name)
        with file:
            return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgres_server(tmp_path_factory.mktemp("postgres")) as location:
        yield location


@asynccontextmanager
async def house(
    location: Path | str, executor: Executor, limits: BatchLimits | None = None, directory: str = ""
) -> AsyncIterator[House]:
    batches = Batches(str(location), directory, executor, limits or BatchLimits())
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
            assert home.batches.runner.counts["refused"] > 3

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
        limits = BatchLimits(storage_bytes=6 * len(lines(2)))
        async with house(tmp_path / "batches.db", Executor(), limits) as home:
            batch = await home.create(2)
            with pytest.raises(Conflict, match="is the input of batch"):
                await home.batches.delete_file("acme", batch.input_file_id)
            other = await home.batches.upload("acme", "x", "user_data", b"data")
            with pytest.raises(TooLarge, match="batch-storage-bytes"):
                await home.batches.upload("acme", "in.jsonl", "batch", lines(20))
            with pytest.raises(QuotaExceeded, match=r"tenant .acme. has \d+ bytes of files, and may have no more than"):
                await home.batches.upload("acme", "in.jsonl", "batch", lines(8))
            kept.append((await home.batches.upload("bob", "in.jsonl", "batch", lines(4))).id)
            assert len(list(home.batches.files.path.iterdir())) == 4  # with the lock: what was refused was not written
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
            store = BatchStore(database, BatchLease("one", 15.0, sole=False))
            assert await store.remove_expired_files(unused.created_at + 99) == []
            assert await store.remove_expired_files(unused.created_at + 101) == [unused.id]
            database.close()
            left, _ = await home.batches.list_files("acme", PageRequest(10))
            assert [each.id for each in left] == [lasting.id, used.id]

    asyncio.run(run())


def test_batches_wait_while_the_database_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:

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
            deadline = time.monotonic() + 30
            while "batches: 'answers' waits: the database of the batches does not answer" not in caplog.text:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert (await home.batches.batch("acme", batch.id)).completed == 0
            database.call(lambda each: each.execute("ALTER TABLE hidden RENAME TO batch_items"))
            database.close()
            assert (await home.until(batch.id, ended)).completed == 3

    asyncio.run(run())


# One batch that cannot be handled keeps no other from its turn.

POISON = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"llm","x":%s}}\n'


def nested(levels: int) -> bytes:
    return POISON % (b"[" * levels + b"]" * levels)


def test_items_that_could_not_be_written_are_refused_at_the_upload(tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor()
        async with house(tmp_path / "batches.db", executor) as home:
            with pytest.raises(InvalidItems, match=r"Line 1: 'body' is nested too deeply\."):
                await home.batches.upload("alice", "in.jsonl", "batch", nested(300))
            await home.batches.upload("alice", "in.jsonl", "batch", nested(200))

    asyncio.run(run())


@pytest.mark.parametrize("content", [nested(300), POISON[:40], b"", b"\xff" * 400])
def test_a_file_that_was_damaged_fails_its_items_alone(tmp_path: Path, content: bytes) -> None:
    """As files that an earlier release has accepted, or that somebody has shortened; also after a restart."""

    async def run(restart: bool) -> None:
        executor = Executor()
        if not restart:
            executor.capacity = 0
        async with house(tmp_path / "batches.db", executor) as home:
            if not restart:
                file = await home.batches.upload("alice", "in.jsonl", "batch", nested(1))
                batch = await home.batches.create("alice", NewBatch(file.id, URL, "1h", {}))
                await home.until(batch.id, lambda now: now.status is BatchStatus.IN_PROGRESS, "alice")
                (home.batches.files.path / file.id).write_bytes(content)
                names.append(batch.id)
                return
            executor.answers = good
            bob = await home.create(3, tenant="bob")
            assert (await home.until(bob.id, ended, "bob")).completed == 3
            record = await home.until(names[0], ended, "alice")
            assert (record.status, record.failed, record.completed) == (BatchStatus.COMPLETED, 1, 0)
            (line,) = await home.content(record.error_file_id, "alice")
            assert line["error"]["code"] == "damaged_input"

    names: list[str] = []
    for restart in (False, True):
        asyncio.run(run(restart))


class Fault:
    """Raises in a method of the store or the planner for the first batch that it is called for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: type, name: str) -> None:
        self.batch = ""
        self.planted = True
        real = getattr(where, name)

        def method(owner: object, batch: str, *rest: Any, **named: Any) -> Any:
            self.batch = self.batch or batch
            if self.planted and batch == self.batch:
                raise TypeError("Recursion limit reached")
            return real(owner, batch, *rest, **named)

        monkeypatch.setattr(where, name, method)


STEPS: dict[str, tuple[type, str]] = {
    "validate": (BatchStore, "begin"),
    "load": (BatchStore, "load_items"),
    "plan": (DeadlinePlanner, "add"),
    "write": (BatchStore, "answers"),
    "finish": (BatchStore, "finish"),
}


@pytest.mark.parametrize("step", STEPS)
def test_an_exception_in_a_step_of_one_batch_sets_that_batch_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def run() -> None:
        executor = Executor()
        executor.answers = good
        async with house(tmp_path / "batches.db", executor) as home:
            loop = home.batches.loop
            alice = await home.create(3, tenant="alice")
            told = await home.until(alice.id, lambda now: bool(now.errors), "alice")
            assert (told.status.is_end, told.errors[0]["code"]) == (False, "set_aside")
            assert "incident" in told.errors[0]["message"]
            (letter,) = loop.dead_letters
            assert (letter.tenant, alice.id in letter.unit) == ("alice", True)
            bob = await home.create(3, tenant="bob")
            assert (await home.until(bob.id, ended, "bob")).completed == 3
            fault.planted = False
            loop.retry(letter.unit)
            assert (await home.until(alice.id, ended, "alice")).completed == 3
            assert loop.dead_letters == []

    fault = Fault(monkeypatch, *STEPS[step])
    asyncio.run(run())


def test_an_operator_discards_a_batch_that_was_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with house(tmp_path / "batches.db", Executor()) as home:
            batch = await home.create(1, tenant="alice")
            await home.until(batch.id, lambda now: bool(now.errors), "alice")
            home.batches.loop.discard(batch.id)
            record = await home.until(batch.id, ended, "alice")
            assert (record.status, record.errors[0]["code"]) == (BatchStatus.FAILED, "set_aside")
            assert home.batches.loop.dead_letters == []

    Fault(monkeypatch, BatchStore, "begin")
    asyncio.run(run())


def test_a_batch_that_was_set_aside_can_be_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with house(tmp_path / "batches.db", Executor()) as home:
            batch = await home.create(1, tenant="alice")
            await home.until(batch.id, lambda now: bool(now.errors), "alice")
            await home.batches.cancel("alice", batch.id)
            assert (await home.until(batch.id, ended, "alice")).status is BatchStatus.CANCELLED

    Fault(monkeypatch, BatchStore, "load_items")
    asyncio.run(run())


@pytest.mark.parametrize(("method", "step"), [("claim", "leases"), ("remove_expired_files", "expired files")])
def test_an_exception_in_a_step_of_the_loop_stops_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, step: str
) -> None:
    async def planted(store: BatchStore, *_: Any) -> None:
        raise TypeError

    async def run() -> None:
        executor = Executor()
        executor.answers = good
        async with house(tmp_path / "batches.db", executor) as home:
            first = await home.create(1)  # which shows that the leases are there
            await home.until(first.id, ended)
            if method == "claim":
                monkeypatch.setattr(BatchStore, method, planted)
            batch = await home.create(3)
            assert (await home.until(batch.id, ended)).completed == 3
            deadline = time.monotonic() + 30
            while [*home.batches.loop.failing] != [step]:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)

    if method != "claim":
        monkeypatch.setattr(BatchStore, method, planted)
    asyncio.run(run())


def test_an_executor_that_raises_fails_the_item_after_three_attempts(tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor()

        def answers(item: ItemRequest) -> ItemAnswer:
            if Executor.name(item) == "1":
                raise ZeroDivisionError
            return good(item)

        executor.answers = answers
        async with house(tmp_path / "batches.db", executor) as home:
            batch = await home.create(3)
            record = await home.until(batch.id, ended)
            assert (record.completed, record.failed) == (2, 1)
            (line,) = await home.content(record.error_file_id)
            assert "incident" in line["response"]["body"]["text"]
            assert home.batches.runner.under_way == 0

    asyncio.run(run())


def test_an_answer_that_the_database_refuses_fails_its_item_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = BatchStore.commit

    async def refusing(self: BatchStore, answers: Sequence[ItemAnswerRow]) -> set[str]:
        if any(b"too big" in row.answer for row in answers):
            raise RefusedData("string or blob too big")
        return await real(self, answers)

    async def run() -> None:
        executor = Executor()
        executor.answers = lambda item: (
            ItemAnswer(200, b'{"to": "too big"}') if Executor.name(item) in ("3", "4", "90") else good(item)
        )
        async with house(tmp_path / "batches.db", executor) as home:
            batch = await home.create(100)
            record = await home.until(batch.id, ended)
            assert (record.completed, record.failed) == (97, 3)
            errors = await home.content(record.error_file_id)
            assert [line["custom_id"] for line in errors] == ["item-3", "item-4", "item-90"]
            assert {line["error"]["code"] for line in errors} == {"invalid_answer"}

    monkeypatch.setattr(BatchStore, "commit", refusing)
    asyncio.run(run())


def test_no_tenant_takes_all_batches_or_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have as many as are left free; without a policy, all of them."""

    async def fill(home: House, tenant: str, items: int) -> int:
        file = await home.batches.upload(tenant, "in.jsonl", "batch", lines(items))
        for count in range(1000):
            try:
                await home.batches.create(tenant, NewBatch(file.id, URL, "30d", {}))
            except (QuotaExceeded, Conflict) as error:
                said.append(error.message)
                return count
        raise AssertionError

    async def run() -> None:
        async with house(tmp_path / "batches.db", Executor(capacity=0)) as home:
            assert [await fill(home, tenant, 1) for tenant in ("alice", "bob", "carol", "")] == [10, 5, 3, 2]
            assert said[0] == (
                "tenant 'alice' has 10 batches that have not ended, and may have no more than are free: 10 of 20. "
                "Wait for a batch, or cancel one"
            )
            assert said[-1] == "20 batches have not ended: wait for one, or cancel one"
        async with house(tmp_path / "items.db", Executor(capacity=0)) as home:
            assert [await fill(home, tenant, 10) for tenant in ("alice", "bob", "")] == [5, 3, 2]
            assert "items without an answer" in said[-3] and "the batch has 10 items" in said[-1]

    said: list[str] = []
    monkeypatch.setattr("nerite.batches.store.MAX_OPEN", 20)
    monkeypatch.setattr("nerite.batches.store.MAX_OPEN_ITEMS", 100)
    asyncio.run(run())
