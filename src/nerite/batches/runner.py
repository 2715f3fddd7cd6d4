"""Runs batches: validates them, submits their items as the planner says, commits the answers, writes the outputs.

One coroutine does all that waits for the disk; items are submitted and answered by plain calls. An answer counts once
it is committed. Items under way when the server crashes have no committed answer, so they run again; ledgers know from
the ids of both attempts that they were for one item.

Of several servers with one database, each runs the batches that it has leased. Leases are renewed every second or so. A
server that cannot renew them runs nothing once they are over, because another server may.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from nerite.batches.deadline_planner import DeadlinePlanner
from nerite.batches.file_directory import FileDirectory
from nerite.batches.idle_room import IdleRoom
from nerite.batches.items import (
    EXPIRED,
    ItemFile,
    ItemLine,
    ItemMistake,
    answer_line,
    body_of_line,
    error_line,
    read_items,
)
from nerite.batches.records import BatchRecord, BatchStatus, FileRecord, ItemState
from nerite.batches.running_batch import ItemAnswer, ItemExecutor, ItemRequest, ItemUnderWay, LoadedItem, RunningBatch
from nerite.batches.store import BatchStore, BatchTakenOver, ItemAnswerRow
from nerite.core.errors import NeriteError, RefusedData
from nerite.core.failures import report
from nerite.core.item_attempt import new_attempt
from nerite.core.work_loop import WorkLoop
from nerite.observability.log import log

SET_ASIDE: Final = "set_aside"
"""Code of the error of a batch that has raised something unforeseen twice."""
_END: Final = "end of "
_FILES: Final = "expired files"
_COMMIT_SECONDS: Final = 0.05
"""Time for which answers are gathered for one commit."""
_LOOK_SECONDS: Final = 1.0
"""Longest time between two looks at deadlines."""
_SWEEP_SECONDS: Final = 60.0
_PAGE: Final = 128
_PAGE_BYTES: Final = 4 << 20
"""Items, and bytes of lines, that are loaded of a batch at a time."""
_LOW: Final = 64
"""Number of loaded items below which more are loaded."""
_OTHERS_SECONDS: Final = 10.0
"""Time for which batches keep their pace after others have last used a model."""
_AT_ONCE: Final = 8
"""Items that are submitted per turn of the event loop."""
_ATTEMPTS: Final = 3
"""Times that an item is tried which the server fails to execute."""
_SHORTEST_REST: Final = 0.5
_LONGEST_REST: Final = 600.0
"""Seconds for which a batch submits nothing after a quota has refused an item, whatever the refusal says."""
_NO_ROOM: Final = 503
_QUOTA: Final = 429
_FAILURES: Final = frozenset((408, 500, 502, 504))


class BatchRunner:
    """Runs all batches of a server. Used from the loop's thread only."""

    def __init__(
        self,
        store: BatchStore,
        files: FileDirectory,
        executor: ItemExecutor,
        most: int,
        weight_of: Callable[[str], float],
        lease_seconds: float = math.inf,
    ) -> None:
        """``most`` is the maximum number of items under way; ``weight_of`` returns the weight of a tenant.

        ``lease_seconds`` is how long the batches that ``store`` has claimed are this server's.
        """
        self.loop = WorkLoop("batches", waiting=self._waiting)
        self.loop.on_discard = self._discarded_soon
        self.loop.woken = lambda: self._woken.set()
        self._discarded: dict[str, str] = {}
        """Batches that an operator gives up, and why they were set aside."""
        self._store = store
        self._files = files
        self._executor = executor
        self._most = most
        self._weight_of = weight_of
        self.planner = DeadlinePlanner()
        self.batches: dict[str, RunningBatch] = {}
        """Batches that have not ended."""
        self.counts = dict.fromkeys(("completed", "failed", "expired", "refused", "retried"), 0)
        """Items by what became of them; one may be refused or retried several times."""
        self._rooms: dict[str, IdleRoom] = {}
        self._others_until: dict[str, float] = {}
        """Until when batches of a model keep their pace, because others use it."""
        self._answers: list[ItemAnswerRow] = []
        self._woken = asyncio.Event()
        self._filling = False
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._swept_at = 0.0
        self._lease_seconds = lease_seconds
        self._claimed_at = self._leased_until = -math.inf
        """When leases were renewed last, and are over, by the monotonic clock."""

    @property
    def under_way(self) -> int:
        """Number of items under way."""
        return sum(len(batch.under_way) for batch in self.batches.values())

    def changed(self, record: BatchRecord) -> None:
        """Take note of a batch that was created here, or is to be cancelled and may run elsewhere."""
        if record.status is not BatchStatus.CANCELLING:
            self.batches.setdefault(record.id, RunningBatch(record))
        elif (batch := self.batches.get(record.id)) is not None:
            batch.record = record
        self._woken.set()

    def stop(self) -> None:
        """Submit no more items, and cancel those under way; they run when the server has started again."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for batch in self.batches.values():
            self._cancel_items(batch)

    async def close(self) -> None:
        """Commit the answers that have come, and let others run the rest. To be called when ``run`` has ended."""
        await self._commit()
        with contextlib.suppress(NeriteError):  # they are over soon in any case
            await self._store.release()

    async def run(self) -> None:
        """Run batches until cancelled. May be called again after it has raised."""
        while True:
            if not await self._look():
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            self._fill_soon()
            waiting = [batch.record.expires_at for batch in self.batches.values()]
            left = min([*waiting, time.time() + _LOOK_SECONDS]) - time.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(left, 0.0)):
                    await self._woken.wait()
                await asyncio.sleep(_COMMIT_SECONDS)

    async def _look(self) -> bool:
        """Do all that is due; return whether the database works. A batch that raises keeps no other from its turn."""
        self._woken.clear()
        if not await self._step("leases", self._claim_if_due) or not await self._step("answers", self._commit):
            if time.monotonic() >= self._leased_until:
                for batch in list(self.batches.values()):
                    self._lose(batch)
            return False
        for batch in list(self.batches.values()):
            unit = _unit(batch.record)
            if self.loop.admits(unit):
                with self.loop.unit(unit, batch.record.tenant):
                    await self._advance(batch)
        if time.time() - self._swept_at > _SWEEP_SECONDS and self.loop.admits(_FILES):
            await self._step(_FILES, self._sweep)
        return True

    async def _step(self, name: str, work: Callable[[], Awaitable[None]]) -> bool:
        """Do a step that is no batch's own; return whether what it needs works."""
        works = True
        with self.loop.step(name):
            try:
                await work()
            except NeriteError:
                works = False
                raise
        return works

    def _waiting(self) -> int:
        return sum(not self.loop.is_set_aside(_unit(batch.record)) for batch in self.batches.values())

    def _discarded_soon(self, unit: str) -> None:
        name = unit.removeprefix(_END)
        self._discarded[name] = next(each.text for each in self.loop.dead_letters if each.unit == unit)

    async def _claim_if_due(self) -> None:
        now = time.monotonic()
        if now - self._claimed_at >= min(_LOOK_SECONDS, self._lease_seconds / 4):
            await self._claim(now)

    async def _claim(self, now: float) -> None:
        """Renew the leases, take over the batches of servers that have failed, and note what others have cancelled."""
        known = list(self.batches)
        records = {record.id: record for record in await self._store.claim()}
        self._claimed_at, self._leased_until = now, now + self._lease_seconds
        for name in known:
            if name not in records:
                self._lose(self.batches[name])
        for name, record in records.items():
            batch = self.batches.get(name)
            if batch is None:
                self.batches[name] = RunningBatch(record)
            elif record.status is BatchStatus.CANCELLING:
                batch.record = record

    def _lose(self, batch: RunningBatch) -> None:
        """Leave a batch to others, and drop what is under way of it."""
        log.warning(f"batch '{batch.record.id}' is no longer run here: its lease is over")
        self._cancel_items(batch)
        self._forget(batch)

    # From one status to the next

    async def _advance(self, batch: RunningBatch) -> None:
        """Do what is due for a batch. Raises ``NeriteError`` if the database or the disk fails."""
        record, now = batch.record, time.time()
        try:
            if record.id in self._discarded:
                await self._give_up(batch)
            elif record.status is BatchStatus.CANCELLING:
                await self._end(batch, BatchStatus.CANCELLED, cancelled_at=now)
            elif record.status is BatchStatus.FINALIZING:
                await self._end(batch, BatchStatus.COMPLETED, completed_at=time.time())
            elif now >= record.expires_at:
                await self._end(batch, BatchStatus.EXPIRED, expired_at=now)
            elif record.status is BatchStatus.VALIDATING:
                await self._validate(batch)
            else:
                await self._load(batch)
        except BatchTakenOver:
            self._lose(batch)

    async def _give_up(self, batch: RunningBatch) -> None:
        """Fail a batch that an operator has discarded."""
        name = batch.record.id
        self._cancel_items(batch)
        error = {"code": SET_ASIDE, "message": self._discarded[name], "param": None, "line": None}
        batch.record = await self._store.change(
            name, status=BatchStatus.FAILED, failed_at=time.time(), errors=[*batch.record.errors, error]
        )
        log.warning(f"batch '{name}' has failed: an operator has discarded it")
        self._forget(batch)

    async def _validate(self, batch: RunningBatch) -> None:
        record = batch.record
        found = await asyncio.to_thread(self._read_input, record)
        if found.mistakes:
            errors = [
                {"code": each.code, "message": each.message, "param": each.param, "line": each.line}
                for each in found.mistakes
            ]
            batch.record = await self._store.change(
                record.id, status=BatchStatus.FAILED, failed_at=time.time(), errors=errors
            )
            self._forget(batch)
            return
        started = await self._store.begin(record.id, found.items, found.model, time.time())
        # It may have been cancelled meanwhile; the newer record is that of the database.
        batch.record = started
        log.info(f"batch '{record.id}' has {started.total} items for '{found.model}'")
        await self._load(batch)

    def _read_input(self, record: BatchRecord) -> ItemFile:
        try:
            with self._files.open(record.input_file_id) as file:
                return read_items(file, record.endpoint)
        except NeriteError as error:
            return ItemFile([], [ItemMistake("file_not_found", error.message)], "")

    async def _load(self, batch: RunningBatch) -> None:
        """Load the next items of a batch in progress, or complete it."""
        record = batch.record
        if record.status is not BatchStatus.IN_PROGRESS:
            return
        if len(batch.ready) < _LOW and not batch.exhausted and not self._stopping:
            items, loaded = await self._store.load_items(record.id, batch.loaded, _PAGE)
            if batch.ran_before < 0:
                batch.ran_before = loaded
            exhausted = len(items) < _PAGE
            size = 0
            for count, item in enumerate(items):
                size += item.size
                if count and size > _PAGE_BYTES:
                    items, exhausted = items[:count], False
                    break
            if items:
                places = [(item.position, item.size) for item in items]
                bodies = await asyncio.to_thread(self._bodies, record.input_file_id, places)
                batch.loaded = items[-1].line
                for item, body in zip(items, bodies, strict=True):
                    if isinstance(body, bytes):
                        batch.ready.append(LoadedItem(item.line, item.custom_id, body))
                    else:
                        self._fail(record.id, item, body)
            batch.exhausted = exhausted
        self._plan(batch)
        if batch.done and not record.left:
            batch.record = await self._store.change(record.id, status=BatchStatus.FINALIZING, finalizing_at=time.time())
            await self._end(batch, BatchStatus.COMPLETED, completed_at=time.time())

    def _bodies(self, name: str, places: list[tuple[int, int]]) -> list[bytes | ItemMistake]:
        return [body_of_line(raw) for raw in self._files.read_lines(name, places)]

    def _fail(self, name: str, item: ItemLine, mistake: ItemMistake) -> None:
        """Answer an item that cannot be executed."""
        line = error_line(_item_id(), item.custom_id, mistake.code, mistake.message)
        self.counts["failed"] += 1
        self._answers.append(ItemAnswerRow(name, item.line, ItemState.FAILED, line, item.custom_id))

    def _plan(self, batch: RunningBatch) -> None:
        """Tell the planner of a batch when it is in progress."""
        record = batch.record
        if not self.planner.knows(record.id):
            weight = self._weight_of(record.tenant)
            self.planner.add(
                record.id, record.tenant, record.model, record.left, record.expires_at, time.time(), weight
            )

    async def _end(self, batch: RunningBatch, status: BatchStatus, **times: float) -> None:
        """End a batch: write its output files, and change it together with them."""
        self._cancel_items(batch)
        await self._commit()
        record = batch.record = await self._store.by_id(batch.record.id)
        if record.status.is_end:  # the connection broke when that was committed
            self._forget(batch)
            return
        expired = status is BatchStatus.EXPIRED
        files: list[FileRecord] = []
        states = (ItemState.FAILED, ItemState.WAITING) if expired else (ItemState.FAILED,)
        try:
            output = await self._write(record, "output", (ItemState.COMPLETED,), files)
            errors = await self._write(record, "error", states, files)
        except NeriteError:
            await asyncio.to_thread(self._files.remove, [file.id for file in files])
            raise
        lost = record.left if expired else 0
        self.counts["expired"] += lost
        batch.record = await self._store.finish(
            record.id,
            files,
            status=status,
            output_file_id=output,
            error_file_id=errors,
            failed=record.failed + lost,
            **times,
        )
        log.info(
            f"batch '{record.id}' is {status}: {batch.record.completed} of {record.total} items completed, "
            f"{batch.record.failed} failed"
        )
        self._forget(batch)

    async def _write(
        self, record: BatchRecord, kind: str, states: tuple[ItemState, ...], files: list[FileRecord]
    ) -> str | None:
        """Write the lines of all items in some states to a file; return its id, or None if there are none."""
        name = new_file_id()
        writer = self._files.begin(name)
        try:
            for state in states:
                after = 0
                while rows := await self._store.answers(record.id, state, after, _PAGE):
                    after = rows[-1][0]
                    lines = [
                        answer if state is not ItemState.WAITING else error_line(_item_id(), custom_id, *EXPIRED)
                        for _, custom_id, answer in rows
                    ]
                    await asyncio.to_thread(writer.add, [line + b"\n" for line in lines])
        except NeriteError:
            await asyncio.to_thread(writer.discard)
            raise
        if not writer.size:
            return None
        await asyncio.to_thread(writer.commit)
        now = time.time()
        until = None if record.output_seconds is None else now + record.output_seconds
        file_name = f"{record.id}_{kind}.jsonl"
        files.append(FileRecord(name, record.tenant, file_name, "batch_output", writer.size, now, until))
        return name

    def _forget(self, batch: RunningBatch) -> None:
        name = batch.record.id
        self.batches.pop(name, None)
        self._discarded.pop(name, None)
        self.loop.forget(name)
        self.loop.forget(_END + name)
        self.planner.remove(batch.record.id)
        models = {each.record.model for each in self.batches.values()}
        self._rooms = {model: room for model, room in self._rooms.items() if model in models or room.under_way}
        self._others_until = {model: until for model, until in self._others_until.items() if model in models}

    def _cancel_items(self, batch: RunningBatch) -> None:
        """Cancel the items of a batch that are under way, and submit no more."""
        batch.ready.clear()
        batch.exhausted = True
        for under_way in list(batch.under_way.values()):
            if batch.under_way.pop(under_way.item.line, None) is not None:
                if not under_way.raised:
                    self._room(batch).withdrawn()
                under_way.cancel()

    async def _commit(self) -> None:
        """Commit the answers that have come, and count them."""
        if not self._answers:
            return
        rows = list(self._answers)
        committed, lost = await self._commit_rows(rows)
        del self._answers[: len(rows)]
        for row in committed:
            batch = self.batches.get(row.batch)
            if batch is None:
                continue
            if row.batch in lost:
                self._lose(batch)
            else:
                batch.record = batch.record.counted(row.state is ItemState.COMPLETED)

    async def _commit_rows(self, rows: list[ItemAnswerRow]) -> tuple[list[ItemAnswerRow], set[str]]:
        """Commit answers, in halves if they are refused; an item whose own answer is refused has failed.

        Return what was committed, and the batches that another server has taken over.
        """
        try:
            return rows, await self._store.commit(rows)
        except Exception as error:
            if isinstance(error, NeriteError) and not isinstance(error, RefusedData):
                raise
            refusal = error
        if len(rows) > 1:
            half = len(rows) // 2
            first, second = await self._commit_rows(rows[:half]), await self._commit_rows(rows[half:])
            return first[0] + second[0], first[1] | second[1]
        text = report("loop", refusal, f"of {self.loop}: an answer of batch '{rows[0].batch}' cannot be stored").message
        line = error_line(_item_id(), rows[0].custom_id, "invalid_answer", text)
        rows = [rows[0]._replace(state=ItemState.FAILED, answer=line)]
        return rows, await self._store.commit(rows)

    async def _sweep(self) -> None:
        """Remove expired files."""
        now = time.time()
        names = await self._store.remove_expired_files(now)
        await asyncio.to_thread(self._files.remove, names)
        self._swept_at = now

    # Items

    def _fill_soon(self) -> None:
        if not self._filling and not self._stopping:
            self._filling = True
            asyncio.get_running_loop().call_soon(self._fill)

    def _fill(self) -> None:
        """Submit items while there is room; a few in each turn of the loop, so that others are not delayed."""
        self._filling = False
        if self._stopping or time.monotonic() >= self._leased_until:
            return
        now = time.time()
        left = min(self._most - self.under_way, _AT_ONCE)
        wakes: list[float] = []
        for key in self.planner.order(now):
            batch = self.batches[key]
            while left > 0 and batch.ready and (raised := self._lane(batch, now, wakes)) is not None:
                left -= 1
                self._begin(batch, raised, now)
        if left <= 0 and self.under_way < self._most:
            self._fill_soon()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wakes:
            delay = max(min(wakes) - now, 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay, self._fill_soon)

    def _lane(self, batch: RunningBatch, now: float, wakes: list[float]) -> bool | None:
        """Return whether the next item of a batch goes raised; None if it has to wait, until a time in ``wakes``."""
        if now < batch.rests_until:
            wakes.append(batch.rests_until)
            return None
        room, key = self._room(batch), batch.record.id
        paced = self._has_others(batch.record.model, now) and len(batch.under_way) >= self.planner.pace(key, now)
        if not paced and room.admits(now):
            return False
        if len(batch.under_way) < self.planner.needs(key, now):
            return True
        if (until := room.wakes(now)) is not None:
            wakes.append(until)
        return None

    def _has_others(self, model: str, now: float) -> bool:
        """Return whether others use a model, or did a moment ago."""
        if self._executor.has_others(model):
            self._others_until[model] = now + _OTHERS_SECONDS
        return now < self._others_until.get(model, 0.0)

    def _room(self, batch: RunningBatch) -> IdleRoom:
        model = batch.record.model
        room = self._rooms.get(model)
        if room is None:
            room = self._rooms[model] = IdleRoom(self._most)
        return room

    def _begin(self, batch: RunningBatch, raised: bool, now: float) -> None:
        item = batch.ready.popleft()
        record = batch.record
        under_way = batch.under_way[item.line] = ItemUnderWay(item, raised, now)
        if not raised:
            self._room(batch).begun()
        attempt = new_attempt(record.id, item.line)
        paid = item.line <= batch.ran_before
        request = ItemRequest(record.tenant, record.endpoint, record.model, item.body, raised, attempt, paid)
        done = partial(self._done, batch, under_way)
        try:
            under_way.cancel = self._executor.submit(request, done)
        except Exception as error:
            text = report("loop", error, f"when an item of batch '{record.id}' was submitted").message
            done(ItemAnswer(500, text.encode()))

    def _done(self, batch: RunningBatch, under_way: ItemUnderWay, answer: ItemAnswer) -> None:
        """Take the answer to an item. Never raises."""
        item, now = under_way.item, time.time()
        if batch.under_way.pop(item.line, None) is not under_way:
            return  # the batch has ended
        try:
            self._take(batch, under_way, answer, now)
        except Exception as error:
            report("loop", error, f"in an answer of batch '{batch.record.id}'")
            batch.again(item)
        if len(batch.ready) < _LOW or self._answers:
            self._woken.set()
        self._fill_soon()

    def _take(self, batch: RunningBatch, under_way: ItemUnderWay, answer: ItemAnswer, now: float) -> None:
        room = None if under_way.raised else self._room(batch)
        item = under_way.item
        if answer.status in (_NO_ROOM, _QUOTA):
            self.counts["refused"] += 1
            batch.again(item)
            if room is not None and answer.status == _NO_ROOM:
                room.refused(now, answer.retry_after)
                return
            batch.rests_until = now + min(max(answer.retry_after, _SHORTEST_REST), _LONGEST_REST)
            if room is not None:
                room.withdrawn()
            return
        if room is not None:
            room.answered()
        failures = batch.failures.pop(item.line, 0) + 1
        if answer.status in _FAILURES and failures < _ATTEMPTS:
            self.counts["retried"] += 1
            batch.failures[item.line] = failures
            batch.again(item)
            return
        good = answer.status == 200
        state = ItemState.COMPLETED if good else ItemState.FAILED
        self.counts[str(state)] += 1
        line = answer_line(_item_id(), item.custom_id, answer.status, answer.request_id, answer.body)
        self._answers.append(ItemAnswerRow(batch.record.id, item.line, state, line, item.custom_id))
        self.planner.ended(batch.record.id, now - under_way.began, now)


def _unit(record: BatchRecord) -> str:
    """Return the unit of a batch in its loop: its end is one of its own, so that what cannot be loaded can end."""
    ends = record.status in (BatchStatus.CANCELLING, BatchStatus.FINALIZING) or time.time() >= record.expires_at
    return _END + record.id if ends else record.id


def _item_id() -> str:
    return f"batch_req_{secrets.token_hex(16)}"


def new_file_id() -> str:
    """Return an id for a file."""
    return f"file-{secrets.token_hex(16)}"
