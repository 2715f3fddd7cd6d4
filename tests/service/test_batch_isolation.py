"""Exceptions in every step of the loop of batches, damaged files and refused rows: each costs its own batch alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_batch_runner import Executor, House, ended, good, house, lines

from nerite.batches import runner, submitter
from nerite.batches.deadline_planner import DeadlinePlanner
from nerite.batches.records import BatchRecord, BatchSchema, BatchStatus
from nerite.batches.running_batch import ItemAnswer, ItemRequest
from nerite.batches.service import BatchLimits, NewBatch
from nerite.batches.store import BatchStore, PageRequest
from nerite.core.errors import NeriteError, RefusedData, Unavailable
from nerite.storage.database import Database, Transaction

CHAT = "/v1/chat/completions"
POISON: bytes = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"m","prompt":"x","metadata":'
POISON += b"[" * 300 + b"]" * 300 + b"}}"


class Planted(RuntimeError):
    """Nothing foresees it."""


class Plant:
    """Raises in a step of the loop for what is alice's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.armed = True
        self.raised = 0
        self.error: Exception = Planted("planted")

    def into(self, owner: Any, name: str, is_meant: Callable[..., bool] = lambda *_: True) -> None:
        """Have a method raise if its arguments are meant."""
        original = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if self.armed and is_meant(*arguments):
                self.raised += 1
                raise self.error
            return original(*arguments, **named)

        self._patch.setattr(owner, name, call)


def of_alice(home: House, name: str) -> bool:
    batch = home.batches.runner.batches.get(name)
    return batch is not None and batch.record.tenant == "alice"


async def bob_goes_on(home: House) -> None:
    """Have batches of bob, also new ones, complete."""
    for _ in range(2):
        batch = await home.create(70, tenant="bob", model="of-bob")
        record = await home.until(batch.id, ended, tenant="bob")
        assert (record.status, record.completed) == (BatchStatus.COMPLETED, 70)


def plant_step(home: House, plant: Plant, step: str) -> None:
    match step:
        case "validate":
            plant.into(runner, "read_items", lambda file, endpoint: b"of-alice" in Path(file.name).read_bytes())
        case "plan":
            plant.into(DeadlinePlanner, "add", lambda _, key, tenant, *rest: tenant == "alice")
        case "pace":
            plant.into(DeadlinePlanner, "pace", lambda _, key, now: of_alice(home, key))
        case "commit":
            plant.into(BatchStore, "commit", lambda _, rows: any(of_alice(home, row.batch) for row in rows))
        case "begin" | "load_items" | "answers" | "finish":
            plant.into(BatchStore, step, lambda _, name, *rest: of_alice(home, name))


@pytest.mark.parametrize("step", ["validate", "begin", "plan", "load_items", "pace", "commit", "answers", "finish"])
def test_an_exception_sets_its_batch_aside_and_others_go_on(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        executor = Executor()
        executor.answers = good
        executor.others = step == "pace"
        plant = Plant(monkeypatch)
        async with house(tmp_path / "batches.db", executor) as home:
            loop = home.batches.loop
            plant_step(home, plant, step)
            poison = await home.create(3, tenant="alice", model="of-alice")
            await bob_goes_on(home)
            await home.eventually(lambda: bool(loop.dead_letters))
            (letter,) = loop.dead_letters
            at_end = step in ("answers", "finish")
            assert (letter.unit, letter.tenant) == (poison.id + ".end" * at_end, "alice")
            assert plant.raised >= 2
            (error,) = (await home.batches.batch("alice", poison.id)).as_json()["errors"]["data"]
            assert error["code"] == "set_aside" and letter.text in error["message"]
            assert (await home.batches.list_batches("alice", PageRequest(9)))[0][0].errors == [error]
            tried = plant.raised
            await bob_goes_on(home)
            assert plant.raised == tried, "it is not tried again"
            assert loop.waiting == 0
            plant.armed = False
            loop.retry(letter.unit)
            record = await home.until(poison.id, ended, tenant="alice")
            assert (record.status, record.completed) == (BatchStatus.COMPLETED, 3)
            assert record.errors == []

    asyncio.run(run())


@pytest.mark.parametrize("step", ["validate", "plan", "load_items", "commit"])
@pytest.mark.parametrize("who", ["its tenant", "an operator", "the deadline"])
def test_a_batch_that_is_set_aside_can_end(
    step: str, who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        executor = Executor()
        executor.answers = good
        plant = Plant(monkeypatch)
        async with house(tmp_path / "batches.db", executor) as home:
            plant_step(home, plant, step)
            window = "4s" if who == "the deadline" else "1h"
            batch = await home.create(3, window, tenant="alice", model="of-alice")
            if who == "its tenant":
                await home.eventually(lambda: home.batches.loop.is_set_aside(batch.id))
                await home.batches.cancel("alice", batch.id)
            elif who == "an operator":
                await home.eventually(lambda: home.batches.loop.is_set_aside(batch.id))
                home.batches.loop.discard(batch.id)
            record = await home.until(batch.id, ended, tenant="alice")
            assert record.status is (BatchStatus.EXPIRED if who == "the deadline" else BatchStatus.CANCELLED)
            assert home.batches.loop.dead_letters == []

    asyncio.run(run())


@pytest.mark.parametrize("step", ["answers", "finish"])
def test_an_operator_gives_up_a_batch_that_cannot_be_ended(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        executor = Executor()
        executor.answers = good
        async with house(tmp_path / "batches.db", executor) as home:
            plant_step(home, Plant(monkeypatch), step)
            batch = await home.create(3, tenant="alice")
            await home.eventually(lambda: home.batches.loop.is_set_aside(f"{batch.id}.end"))
            home.batches.loop.discard(f"{batch.id}.end")
            record = await home.until(batch.id, ended, tenant="alice")
            assert record.status is BatchStatus.FAILED
            assert [each["code"] for each in record.errors] == ["discarded"]
            await home.eventually(
                lambda: {path.name for path in home.batches.files.path.iterdir()} == {"lock", batch.input_file_id}
            )
            await bob_goes_on(home)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("owner", "name", "step"),
    [
        (BatchStore, "claim", "claim"),
        (BatchStore, "full", "storage"),
        (BatchStore, "remove_expired_files", "sweep"),
        (BatchStore, "remove_ended", "sweep"),
    ],
)
def test_a_step_of_the_loop_that_fails_keeps_no_batch(
    owner: type, name: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        monkeypatch.setattr(runner, "SWEEP_SECONDS", 0.2)
        executor = Executor()
        executor.answers = good
        plant = Plant(monkeypatch)
        async with house(tmp_path / "batches.db", executor) as home:
            await bob_goes_on(home)
            plant.into(owner, name)
            await home.eventually(lambda: step in home.batches.loop.failing)
            await bob_goes_on(home)
            cancelled = await home.create(1, tenant="bob")
            await home.batches.cancel("bob", cancelled.id)
            await home.until(cancelled.id, ended, tenant="bob")
            assert home.batches.loop.dead_letters == []
            plant.armed = False
            await home.eventually(lambda: step not in home.batches.loop.failing)

    asyncio.run(run())


def test_an_environment_that_fails_sets_nothing_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        executor = Executor()
        executor.answers = good
        plant = Plant(monkeypatch)
        plant.error = Unavailable("the disk is away")
        async with house(tmp_path / "batches.db", executor) as home:
            plant_step(home, plant, "load_items")
            batch = await home.create(3, tenant="alice")
            await bob_goes_on(home)
            await home.eventually(lambda: plant.raised >= 3)
            assert home.batches.loop.dead_letters == []
            assert home.batches.loop.waiting == 1
            plant.armed = False
            record = await home.until(batch.id, ended, tenant="alice")
            assert record.completed == 3

    asyncio.run(run())


@pytest.mark.parametrize("step", ["submit", "answer"])
def test_an_item_for_which_something_raises_fails_alone(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        executor = Executor()
        executor.answers = good
        plant = Plant(monkeypatch)
        if step == "submit":
            plant.into(Executor, "submit", lambda _, request, done: request.tenant == "alice" and is_third(request))
        else:
            plant.into(submitter, "answer_line", lambda _, custom_id, *rest: custom_id == "item-3")
        async with house(tmp_path / "batches.db", executor) as home:
            batch = await home.create(20, tenant="alice", model="of-alice")
            record = await home.until(batch.id, ended, tenant="alice")
            assert (record.completed, record.failed) == (19, 1)
            (error,) = await home.content(record.error_file_id, "alice")
            assert (error["custom_id"], error["error"]["code"]) == ("item-3", "internal_error")
            assert plant.raised == 3
            assert home.batches.runner.items.under_way == 0
            plant.armed = False
            again = await home.create(5, tenant="bob", model="of-alice")
            assert (await home.until(again.id, ended, tenant="bob")).completed == 5
            assert home.batches.runner.items.models == set(), "no item counts as under way"

    def is_third(request: ItemRequest) -> bool:
        return Executor.name(request) == "3"

    asyncio.run(run())


def test_an_item_that_cannot_be_cancelled_keeps_no_batch_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(self: Executor, request: ItemRequest, done: Callable[[ItemAnswer], None]) -> Callable[[], None]:
        def cancel() -> None:
            raise Planted

        return cancel

    async def run() -> None:
        monkeypatch.setattr(Executor, "submit", submit)
        async with house(tmp_path / "batches.db", Executor()) as home:
            batch = await home.create(3, tenant="alice")
            await home.eventually(lambda: home.batches.runner.items.under_way == 1)
            await home.batches.cancel("alice", batch.id)
            record = await home.until(batch.id, ended, tenant="alice")
            assert record.status is BatchStatus.CANCELLED

    asyncio.run(run())


def test_answers_that_the_database_refuses_become_failed_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By halves: the others are committed."""
    commit = BatchStore.commit

    async def refusing(self: BatchStore, rows: Any) -> set[str]:
        if any(b"poison" in row.answer for row in rows):
            raise RefusedData("the database refuses a value")
        return await commit(self, rows)

    def is_poison(request: ItemRequest) -> bool:
        return request.tenant == "alice" and Executor.name(request) in ("3", "4", "17")

    def answers(request: ItemRequest) -> ItemAnswer:
        return ItemAnswer(200, b'"poison"') if is_poison(request) else good(request)

    async def run() -> None:
        monkeypatch.setattr(BatchStore, "commit", refusing)
        executor = Executor()
        executor.answers = answers
        async with house(tmp_path / "batches.db", executor) as home:
            batch = await home.create(20, tenant="alice")
            await bob_goes_on(home)
            record = await home.until(batch.id, ended, tenant="alice")
            assert (record.completed, record.failed) == (17, 3)
            errors = await home.content(record.error_file_id, "alice")
            assert [each["custom_id"] for each in errors] == ["item-3", "item-4", "item-17"]
            assert {each["error"]["code"] for each in errors} == {"invalid_answer"}
            assert home.batches.loop.dead_letters == []

    asyncio.run(run())


def test_rows_that_the_database_refuses_become_failed_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute_many = Transaction.execute_many

    def refusing(self: Transaction, statement: str, rows: Any) -> None:
        execute_many(self, statement, rows)
        if any(value in ("item-3", "item-17") for row in rows for value in row):
            raise RefusedData("the database refuses a value")

    async def run() -> None:
        monkeypatch.setattr(Transaction, "execute_many", refusing)
        executor = Executor()
        executor.answers = good
        async with house(tmp_path / "batches.db", executor) as home:
            record = await home.until((await home.create(20)).id, ended)
            assert (record.status, record.total, record.completed, record.failed) == ("completed", 20, 18, 2)
            errors = await home.content(record.error_file_id)
            assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
                ("item-3", "invalid_item"),
                ("item-17", "invalid_item"),
            ]

    asyncio.run(run())


@pytest.mark.parametrize("damage", ["shortened", "overwritten", "nested"])
def test_items_of_a_damaged_file_fail_and_others_go_on(damage: str, tmp_path: Path) -> None:
    """Across a restart: the batch was validated before its file was damaged."""

    async def before() -> str:
        executor = Executor(capacity=0)
        async with house(tmp_path / "batches.db", executor) as home:
            batch = await home.create(40, tenant="alice")
            await home.until(batch.id, lambda record: record.total == 40, tenant="alice")
            path = home.batches.files.path / batch.input_file_id
        content = path.read_bytes()
        at = content.index(b'{"custom_id": "item-30"')
        size = content.index(b"\n", at) - at
        if damage == "shortened":
            path.write_bytes(content[: at + 20])
        elif damage == "overwritten":
            path.write_bytes(content[:at] + b"\0" * (len(content) - at))
        else:
            deep = b'{"custom_id":"item-30","url":"/v1/chat/completions","body":{"model":"llm","a":' + b"[" * 300
            path.write_bytes(content[:at] + deep[:size].ljust(size) + content[at + size :])
        return batch.id

    async def after(name: str) -> None:
        executor = Executor()
        executor.answers = good
        async with house(tmp_path / "batches.db", executor) as home:
            await bob_goes_on(home)
            record = await home.until(name, ended, tenant="alice")
            failed = 1 if damage == "nested" else 10
            assert (record.status, record.completed, record.failed) == (BatchStatus.COMPLETED, 40 - failed, failed)
            errors = await home.content(record.error_file_id, "alice")
            assert {each["error"]["code"] for each in errors} == {"damaged_input"}
            assert "is not in line 31 any more" in errors[0]["error"]["message"]
            assert home.batches.loop.dead_letters == []

    asyncio.run(after(asyncio.run(before())))


def test_what_cannot_be_loaded_is_refused_at_upload(tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor()
        executor.answers = good
        async with house(tmp_path / "batches.db", executor) as home:
            with pytest.raises(NeriteError, match="Line 1: 'body' is nested deeper than 100 levels"):
                await home.batches.upload("alice", "in.jsonl", "batch", POISON)
            await bob_goes_on(home)

    asyncio.run(run())


def test_a_damaged_row_costs_its_batch_alone(tmp_path: Path) -> None:
    async def before() -> str:
        async with house(tmp_path / "batches.db", Executor(capacity=0)) as home:
            return (await home.create(3, tenant="alice")).id

    name = asyncio.run(before())
    database = Database(str(tmp_path / "batches.db"), [BatchSchema()])
    database.call(lambda each: each.execute("UPDATE batches SET metadata = '{' WHERE id = ?", [name]))
    database.close()

    async def after() -> None:
        executor = Executor()
        executor.answers = good
        async with house(tmp_path / "batches.db", executor) as home:
            await bob_goes_on(home)
            await home.eventually(lambda: home.batches.loop.is_set_aside(name))
            home.batches.loop.discard(name)
            await bob_goes_on(home)

    asyncio.run(after())
    database = Database(str(tmp_path / "batches.db"), [BatchSchema()])
    assert database.call(lambda each: each.row("SELECT status FROM batches WHERE id = ?", [name])) == ("failed",)
    database.close()


def test_the_lease_is_given_up_when_it_cannot_be_renewed(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the database fails with."""

    async def run() -> None:
        executor = Executor()
        plant = Plant(monkeypatch)
        async with house(postgres, executor, BatchLimits(lease_seconds=0.4), str(tmp_path)) as home:
            batch = await home.create(3)
            await home.under_way(1)
            plant.into(BatchStore, "claim")
            await home.under_way(0)
            assert executor.cancelled == 1
            plant.armed = False
            await home.under_way(1)
            executor.answers = good
            executor.answer()
            assert (await home.until(batch.id, ended)).completed == 3

    asyncio.run(run())


def test_a_batch_that_waits_for_room_or_answers_is_not_in_the_way_of_progress(tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor()
        async with house(tmp_path / "batches.db", executor) as home:
            loop, batches = home.batches.loop, home.batches.runner
            batch = await home.create(3)
            await home.under_way(1)
            await home.eventually(lambda: loop.waiting == 0)
            (under_way,) = batches.batches[batch.id].under_way.values()
            under_way.began -= 3590
            assert loop.waiting == 0
            under_way.began -= 20
            assert loop.waiting == 1, "its answer does not come"
            executor.capacity = 0
            executor.answer()
            await home.eventually(lambda: batches.items.counts["refused"] > 2)
            await home.eventually(lambda: loop.waiting == 0)

    asyncio.run(run())


def test_a_long_end_of_one_tenant_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers, leases and new batches go on meanwhile."""
    answers, held = BatchStore.answers, asyncio.Event()

    async def slow(self: BatchStore, name: str, *arguments: Any) -> Any:
        if of_alice(homes[0], name):
            await held.wait()
        return await answers(self, name, *arguments)

    homes: list[House] = []

    async def run() -> None:
        monkeypatch.setattr(BatchStore, "answers", slow)
        executor = Executor()
        executor.answers = good
        async with house(tmp_path / "batches.db", executor) as home:
            homes.append(home)
            batch = await home.create(3, tenant="alice")
            record: BatchRecord = await home.until(
                batch.id, lambda each: each.status is BatchStatus.FINALIZING, tenant="alice"
            )
            await bob_goes_on(home)
            held.set()
            record = await home.until(batch.id, ended, tenant="alice")
            assert record.completed == 3

    asyncio.run(run())


def test_models_without_batches_are_forgotten(tmp_path: Path) -> None:
    async def run() -> None:
        executor = Executor()
        executor.answers = good
        executor.others = True
        async with house(tmp_path / "batches.db", executor) as home:
            lasting = await home.batches.upload("acme", "in.jsonl", "batch", lines(1, "lasting"))
            executor.answers = lambda request: (
                good(request) if json.loads(request.body)["model"] != "lasting" else ItemAnswer(503, b"{}")
            )
            await home.batches.create("acme", NewBatch(lasting.id, CHAT, "1h", {}))
            for number in range(5):
                batch = await home.create(1, model=f"model-{number}")
                await home.until(batch.id, ended)
            items = home.batches.runner.items
            await home.eventually(lambda: items.models == {"lasting"})

    asyncio.run(run())
