"""Runs batches: validates them, submits their items as the planner says, commits the answers, writes the outputs.

Coroutines do what waits for the disk; items are submitted and answered by plain calls. An answer counts once it is
committed. Items under way when the server crashes have no committed answer, so they run again; ledgers know from the
ids of both attempts that they were for one item.

No batch keeps another from going on. Leases, commits and the removal of old files are steps of their own. What is done
for the batches of one tenant is done one after the other, in a task for each tenant. A batch is two units of the loop:
its work, and its end, which is tried although its work was set aside.

Of several servers with one database, each runs the batches that it has leased. Leases are renewed every second or so. A
server that cannot renew them runs nothing once they are over, because another server may.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from nerite.batches.deadline_planner import DeadlinePlanner
from nerite.batches.file_directory import FileDirectory
from nerite.batches.items import ItemFile, ItemLine, ItemMistake, body_of_line, error_line, read_items
from nerite.batches.output_files import OutputWriter, new_item_id
from nerite.batches.records import BatchObstacle, BatchRecord, BatchStatus, ItemState
from nerite.batches.running_batch import ItemExecutor, LoadedItem, RunningBatch
from nerite.batches.store import BatchStore, BatchTakenOver, UnreadableBatch
from nerite.batches.submitter import LOW, ItemSubmitter
from nerite.core.errors import Conflict, NeriteError, NotFound, RefusedData
from nerite.core.failures import report
from nerite.core.work_loop import WorkLoop
from nerite.observability.log import log

_COMMIT_SECONDS: Final = 0.05
"""Time for which answers are gathered for one commit."""
_LOOK_SECONDS: Final = 1.0
"""Longest time between two looks at deadlines."""
_STORAGE_SECONDS: Final = 2.0
"""Time between two looks at what tenants have stored."""
SWEEP_SECONDS: Final = 60.0
_LONGEST_REST: Final = 5.0
"""Seconds after which a database or a disk that has failed is tried again."""
MOST_ENDED: Final = 5000
"""Batches of a tenant that are kept when they have ended."""
_END: Final = ".end"
"""Behind the id of a batch: the unit of the loop that is its end."""
_DISCARD: Final = ".discard"
"""Behind a unit: the unit that gives it up."""
_AT_A_TIME: Final = 16
"""Batches of a tenant that are handled before it is decided anew which are due."""
_STEPS: Final = 4
"""Steps of a batch that are done one after the other."""
_PAGE: Final = 128
_PAGE_BYTES: Final = 4 << 20
"""Items, and bytes of lines, that are loaded of a batch at a time."""
TENANT_BYTES: Final = 64 << 20
"""Bytes of loaded items of a tenant, beyond which only the first batch for each model gets another one."""
_OVERDUE: Final = 10.0
_SHORTEST_OVERDUE: Final = 600.0
_UNKNOWN_OVERDUE: Final = 3600.0
"""An item is overdue after so many times the seconds of others of its batch, but not before the shortest time."""


class BatchRunner:
    """Runs all batches of a server. Used from the loop's thread only."""

    def __init__(
        self,
        store: BatchStore,
        files: FileDirectory,
        executor: ItemExecutor,
        most: int,
        weight_of: Callable[[str], float],
        most_of: Callable[[str], int],
        lease_seconds: float = math.inf,
    ) -> None:
        """``most`` is the maximum number of items under way; ``weight_of`` and ``most_of`` return those of a tenant.

        ``lease_seconds`` is how long the batches that ``store`` has claimed are this server's.
        """
        self.loop = WorkLoop("batches", waiting=self._waiting, longest_rest=_LONGEST_REST)
        self.loop.on_discard = self._discard_soon
        self._store = store
        self._files = files
        self._outputs = OutputWriter(store, files)
        self._weight_of = weight_of
        self._woken = asyncio.Event()
        self.loop.woken = self._woken.set
        self.batches: dict[str, RunningBatch] = {}
        """Batches that have not ended."""
        self.planner = DeadlinePlanner()
        self.items = ItemSubmitter(self.loop, self.batches, self.planner, executor, most, most_of, self._woken.set)
        self._turns: dict[str, asyncio.Task[None]] = {}
        """What is being done for the batches of a tenant."""
        self._loaded: Counter[str] = Counter()
        """Bytes of loaded items by tenant."""
        self._discarded: list[str] = []
        """Units that an operator has given up."""
        self._committing = asyncio.Lock()
        self._stopping = False
        self._measured_at = self._swept_at = -math.inf
        self._lease_seconds = lease_seconds
        self._claimed_at = -math.inf
        """When leases were renewed last, by the monotonic clock."""

    def changed(self, record: BatchRecord) -> None:
        """Take note of a batch that was created here, or is to be cancelled and may run elsewhere."""
        if record.status is not BatchStatus.CANCELLING:
            self.batches.setdefault(record.id, RunningBatch(record))
        elif (batch := self.batches.get(record.id)) is not None:
            batch.record = record
        self._woken.set()

    def obstacle(self, name: str) -> BatchObstacle | None:
        """Return why nothing more is done for a batch that runs here; None if something is, or nothing need be."""
        for unit in (name, name + _END):
            if self.loop.is_set_aside(unit):
                text = next(letter.text for letter in self.loop.dead_letters if letter.unit == unit)
                return BatchObstacle("set_aside", f"{text}. It goes on when an operator has it tried again")
        batch = self.batches.get(name)
        if batch is not None and batch.record.tenant in self.items.full:
            text = "No more answers can be stored (batch_bytes or batch-storage-bytes): delete files"
            return BatchObstacle("storage_full", text)
        return None

    def stop(self) -> None:
        """Submit no more items, and cancel those under way; they run when the server has started again."""
        self._stopping = True
        self.items.stop()
        for batch in self.batches.values():
            self.items.cancel(batch)

    async def close(self) -> None:
        """Commit the answers that have come, and let others run the rest. To be called when ``run`` has ended."""
        with self.loop.step("commit"):
            await self._commit()
        with contextlib.suppress(NeriteError):  # they are over soon in any case
            await self._store.release()

    async def run(self) -> None:
        """Run batches until cancelled. May be called again after it has raised."""
        try:
            while True:
                await self._look()
                self.items.submit_soon()
                now = time.time()
                deadlines = [batch.record.expires_at for batch in self.batches.values()]
                left = min([*(each for each in deadlines if each > now), now + _LOOK_SECONDS]) - now
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._woken.wait()
                    await asyncio.sleep(_COMMIT_SECONDS)
        finally:
            turns = list(self._turns.values())
            for turn in turns:
                turn.cancel()
            await asyncio.gather(*turns, return_exceptions=True)

    async def _look(self) -> None:
        """Do all that is due."""
        self._woken.clear()
        loop, now = self.loop, time.monotonic()
        if now - self._claimed_at >= min(_LOOK_SECONDS, self._lease_seconds / 4) and loop.admits("claim"):
            with loop.step("claim", routine=True):
                await self._claim(now)
        if time.monotonic() >= self.items.allowed_until:
            for batch in list(self.batches.values()):
                self._lose(batch)
        for unit in [unit for unit in self._discarded if loop.admits(unit + _DISCARD)]:
            with loop.unit(unit + _DISCARD):
                await self._discard(unit)
                self._discarded.remove(unit)
        if any(batch.answers for batch in self.batches.values()) and loop.admits("commit"):
            with loop.step("commit"):
                await self._commit()
        if now - self._measured_at >= _STORAGE_SECONDS and loop.admits("storage"):
            with loop.step("storage", routine=True):
                self.items.full = await self._store.full({batch.record.tenant for batch in self.batches.values()})
                self._measured_at = now
        if now - self._swept_at >= SWEEP_SECONDS and loop.admits("sweep"):
            with loop.step("sweep", routine=True):
                await self._sweep()
                self._swept_at = now
        self._start_turns(time.time())

    async def _claim(self, now: float) -> None:
        """Renew the leases, take over the batches of servers that have failed, and note what others have cancelled."""
        known = set(self.batches)
        found = await self._store.claim(known)
        self._claimed_at, self.items.allowed_until = now, now + self._lease_seconds
        for name in known:
            if name not in found and name in self.batches:
                self._lose(self.batches[name])
        for name, record in found.items():
            if isinstance(record, UnreadableBatch):
                if self.loop.admits(name):
                    self.loop.failed(name, record.error, record.tenant)
            elif record is not None:
                batch = self.batches.setdefault(name, RunningBatch(record))
                if record.status is BatchStatus.CANCELLING:
                    batch.record = record

    def _lose(self, batch: RunningBatch) -> None:
        """Leave a batch to others, and drop what is under way of it."""
        log.warning(f"batch '{batch.record.id}' is no longer run here: its lease is over")
        self._forget(batch)

    async def _sweep(self) -> None:
        """Remove expired files, and the oldest of many batches that have ended."""
        names = await self._store.remove_expired_files(time.time())
        await asyncio.to_thread(self._files.remove, names)
        await self._store.remove_ended(MOST_ENDED)

    # Which batches are due

    def _start_turns(self, now: float) -> None:
        """Begin what is due for the batches of each tenant for whom nothing is being done."""
        self._loaded = Counter()
        for batch in self.batches.values():
            self._loaded[batch.record.tenant] += batch.ready_bytes
        due: dict[str, list[RunningBatch]] = {}
        for batch in self.batches.values():
            tenant, unit = batch.record.tenant, self._due(batch, now)
            if unit and tenant not in self._turns and self.loop.admits(unit):
                due.setdefault(tenant, []).append(batch)
        for tenant, batches in due.items():
            # Those that were handled longest ago go first.
            batches.sort(key=lambda batch: batch.handled_at)
            turn = asyncio.create_task(self._turn(batches[:_AT_A_TIME]))
            self._turns[tenant] = turn
            turn.add_done_callback(partial(self._turned, tenant))

    def _turned(self, tenant: str, turn: asyncio.Task[None]) -> None:
        del self._turns[tenant]
        if not turn.cancelled() and (error := turn.exception()) is not None:
            report("loop", error, "in a turn of batches")
        self._woken.set()

    async def _turn(self, batches: Sequence[RunningBatch]) -> None:
        """Do what is due for batches of one tenant."""
        for batch in batches:
            batch.handled_at = time.monotonic()
            for _ in range(_STEPS):
                unit = self._due(batch, time.time())
                if not unit or not self._has(batch) or not self.loop.admits(unit):
                    break
                with self.loop.unit(unit, batch.record.tenant):
                    await self._advance(batch, unit)

    def _due(self, batch: RunningBatch, now: float) -> str:
        """Return the unit of a batch for which something is due; empty if nothing is."""
        record = batch.record
        if record.status in (BatchStatus.CANCELLING, BatchStatus.FINALIZING) or now >= record.expires_at:
            return record.id + _END
        due = record.status is BatchStatus.VALIDATING or not self.planner.knows(record.id) or self._wants_items(batch)
        return record.id if due or (batch.done and not record.left) else ""

    def _wants_items(self, batch: RunningBatch) -> bool:
        if self._stopping or batch.exhausted or len(batch.ready) >= LOW:
            return False
        return self._loaded[batch.record.tenant] < TENANT_BYTES or (
            not batch.ready and self.planner.is_first(batch.record.id)
        )

    def _has(self, batch: RunningBatch) -> bool:
        return self.batches.get(batch.record.id) is batch

    def _waiting(self) -> int:
        """Return for how many batches something is due; one that waits for room, a quota or answers is not counted."""
        now, failing = time.time(), self.loop.failing
        stands = "commit" in failing or "submit" in failing

        def waits(batch: RunningBatch) -> bool:
            if (unit := self._due(batch, now)) and not self.loop.is_set_aside(unit):
                return True
            if stands and (batch.answers or batch.ready):
                return True
            patience = self._patience(batch)
            return any(now >= item.began + patience for item in batch.under_way.values())

        return sum(map(waits, self.batches.values()))

    def _patience(self, batch: RunningBatch) -> float:
        """Return the seconds after which an item of a batch is overdue."""
        seconds = self.planner.mean_seconds(batch.record.id)
        return max(seconds * _OVERDUE, _SHORTEST_OVERDUE) if seconds else _UNKNOWN_OVERDUE

    def _discard_soon(self, unit: str) -> None:
        self._discarded.append(unit.removesuffix(_DISCARD))

    async def _discard(self, unit: str) -> None:
        """Cancel a batch for an operator; give it up without output files if it is its end that has failed."""
        name = unit.removesuffix(_END)
        batch = self.batches.get(name)
        try:
            if batch is not None and name == unit:
                self.changed(await self._store.cancel(None, name, time.time()))
                return
            why = BatchObstacle("discarded", "The batch could not be ended, and was given up by an operator.")
            await self._store.abandon(name, time.time(), why)
        except (NotFound, Conflict, BatchTakenOver):  # it has ended, or runs elsewhere
            return
        if batch is not None:
            await self._remove_outputs(batch)
            self._forget(batch)

    # From one status to the next

    async def _advance(self, batch: RunningBatch, unit: str) -> None:
        """Do what is due for a batch."""
        try:
            if unit.endswith(_END):
                await self._end(batch)
            elif batch.record.status is BatchStatus.VALIDATING:
                await self._validate(batch)
            else:
                await self._load(batch)
        except BatchTakenOver:
            self._lose(batch)

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
        # It may have been cancelled meanwhile; the newer record is that of the database.
        try:
            batch.record = await self._store.begin(record.id, found.items, found.model, time.time())
        except RefusedData as error:
            refused = await self._refused(record.id, found.items)
            good = [item for item in found.items if item.line not in refused]
            lines = {
                line: error_line(new_item_id(), name, "invalid_item", error.message) for line, name in refused.items()
            }
            batch.record = await self._store.begin(record.id, good, found.model, time.time(), lines)
        log.info(f"batch '{record.id}' has {batch.record.total} items for '{found.model}'")

    def _read_input(self, record: BatchRecord) -> ItemFile:
        try:
            with self._files.open(record.input_file_id) as file:
                return read_items(file, record.endpoint)
        except NotFound as error:
            return ItemFile([], [ItemMistake("file_not_found", error.message)], "")

    async def _refused(self, name: str, items: Sequence[ItemLine]) -> dict[int, str]:
        """Return line and custom id of the items whose rows the database refuses as data."""
        if not items or not await self._store.refuses(name, items):
            return {}
        if len(items) == 1:
            return {items[0].line: items[0].custom_id}
        half = len(items) // 2
        return {**await self._refused(name, items[:half]), **await self._refused(name, items[half:])}

    async def _load(self, batch: RunningBatch) -> None:
        """Load the next items of a batch in progress, or complete it."""
        record = batch.record
        if batch.done and not record.left:
            batch.record = await self._store.change(record.id, status=BatchStatus.FINALIZING, finalizing_at=time.time())
            return
        self._plan(batch)
        if not self._wants_items(batch):
            return
        items, loaded = await self._store.load_items(record.id, batch.loaded, _PAGE)
        if batch.ran_before < 0:
            batch.ran_before = loaded
        exhausted = len(items) < _PAGE
        left = min(_PAGE_BYTES, TENANT_BYTES - self._loaded[record.tenant])
        for count, item in enumerate(items):
            left -= item.size
            if count and left < 0:
                items, exhausted = items[:count], False
                break
        if items:
            bodies = await asyncio.to_thread(self._bodies, record.input_file_id, items)
            if batch.exhausted:  # it was cancelled or lost meanwhile
                return
            batch.loaded = items[-1].line
            for item, body in zip(items, bodies, strict=True):
                if isinstance(body, bytes):
                    batch.add(LoadedItem(item.line, item.custom_id, body))
                    self._loaded[record.tenant] += len(body)
                else:
                    self.items.fail(batch, item.line, item.custom_id, "damaged_input", body)
        batch.exhausted = exhausted

    def _bodies(self, name: str, items: Sequence[ItemLine]) -> list[bytes | str]:
        """Return the bodies of items, and of those that cannot be read the reason."""
        bodies: list[bytes | str] = []
        for item, raw in zip(items, self._files.read_lines(name, [it[2:] for it in items]), strict=True):
            try:
                bodies.append(body_of_line(raw, item))
            except NeriteError as error:
                bodies.append(error.message)
            except Exception as error:
                bodies.append(report("loop", error, f"in the input file of a batch, line {item.line}").message)
        return bodies

    def _plan(self, batch: RunningBatch) -> None:
        """Tell the planner of a batch that is in progress."""
        record = batch.record
        if self._has(batch) and not self.planner.knows(record.id):
            weight = self._weight_of(record.tenant)
            self.planner.add(
                record.id, record.tenant, record.model, record.left, record.expires_at, time.time(), weight
            )

    async def _end(self, batch: RunningBatch) -> None:
        """End a batch: write its output files, and change it together with them."""
        self.items.cancel(batch)
        await self._commit_batch(batch, ending=True)
        record = batch.record = await self._store.by_id(batch.record.id)
        if record.status.is_end:  # the connection broke when that was committed
            self._forget(batch)
            return
        expired = False
        match record.status:
            case BatchStatus.CANCELLING:
                status, ended_at = BatchStatus.CANCELLED, "cancelled_at"
            case BatchStatus.FINALIZING:
                status, ended_at = BatchStatus.COMPLETED, "completed_at"
            case _:
                status, ended_at, expired = BatchStatus.EXPIRED, "expired_at", True
        lost = record.left if expired else 0
        await self._remove_outputs(batch)
        files = await self._outputs.write(record, expired=expired)
        batch.outputs = [file.id for file in files.all]
        try:
            batch.record = await self._store.finish(
                record.id,
                files.all,
                status=status,
                output_file_id=files.output and files.output.id,
                error_file_id=files.errors and files.errors.id,
                failed=record.failed + lost,
                **{ended_at: time.time()},
            )
        except BatchTakenOver:
            await self._remove_outputs(batch)
            raise
        self.items.counts["expired"] += lost
        log.info(
            f"batch '{record.id}' is {status}: {batch.record.completed} of {record.total} items completed, "
            f"{batch.record.failed} failed"
        )
        self._forget(batch)

    async def _remove_outputs(self, batch: RunningBatch) -> None:
        """Remove the files of an attempt to end a batch that has failed."""
        await asyncio.to_thread(self._files.remove, batch.outputs)
        batch.outputs = []

    def _forget(self, batch: RunningBatch) -> None:
        """Drop a batch that has ended, or is left to others."""
        name = batch.record.id
        self.items.cancel(batch)
        if not self._has(batch):
            return
        del self.batches[name]
        self.planner.remove(name)
        self.loop.forget(name)
        self.loop.forget(name + _END)
        self.items.forget_models()

    # Answers

    async def _commit(self) -> None:
        """Commit the answers that have come, and count them: in one transaction, unless one of them is in the way."""
        async with self._committing:
            batches = [
                batch for name, batch in self.batches.items() if batch.answers and not self.loop.is_set_aside(name)
            ]
            counts = [len(batch.answers) for batch in batches]
            try:
                lost = await self._store.commit([row for batch in batches for row in batch.answers])
            except Exception as error:
                if not _is_about_data(error):
                    raise
            else:
                for batch, count in zip(batches, counts, strict=True):
                    self._committed(batch, count, lost)
                return
        for batch in batches:
            name = batch.record.id
            if self._has(batch) and self.loop.admits(name):
                with self.loop.unit(name, batch.record.tenant):
                    await self._commit_batch(batch)

    async def _commit_batch(self, batch: RunningBatch, *, ending: bool = False) -> None:
        """Commit the answers of one batch; items whose answers the database refuses fail.

        A row that cannot be committed in any case is dropped if the batch is ``ending``, else this raises.
        """
        async with self._committing:
            while batch.answers:
                await self._commit_rows(batch, len(batch.answers), ending)

    async def _commit_rows(self, batch: RunningBatch, count: int, ending: bool) -> None:
        """Commit the first answers of a batch: by halves if the database refuses them."""
        row = batch.answers[0]
        try:
            # A copy: an answer that comes meanwhile is not among those that were counted.
            self._committed(batch, count, await self._store.commit(batch.answers[:count]))
        except Exception as error:
            if not _is_about_data(error):
                raise
            if count > 1:
                await self._commit_rows(batch, count // 2, ending)
                await self._commit_rows(batch, count - count // 2, ending)
            elif isinstance(error, RefusedData) and not row.refused:
                line = error_line(new_item_id(), row.custom_id, "invalid_answer", error.message)
                batch.answers[0] = row._replace(state=ItemState.FAILED, answer=line, refused=True)
                await self._commit_rows(batch, 1, ending)
            elif ending:
                report("loop", error, f"in the answer of item {row.line} of batch '{row.batch}', which is lost")
                del batch.answers[0]
            else:
                raise

    def _committed(self, batch: RunningBatch, count: int, lost: set[str]) -> None:
        rows = batch.answers[:count]
        del batch.answers[:count]
        if batch.record.id in lost:
            batch.answers.clear()
            self._lose(batch)
            return
        for row in rows:
            batch.record = batch.record.counted(row.state is ItemState.COMPLETED)


def _is_about_data(error: Exception) -> bool:
    """Return whether an error of a transaction is about what was to be written, and not about the database."""
    return not isinstance(error, NeriteError) or isinstance(error, RefusedData)
