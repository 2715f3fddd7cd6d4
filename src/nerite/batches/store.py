"""Rows of files, batches and items in the database. Every change is one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from nerite.batches.items import ItemLine
from nerite.batches.records import BATCH_COLUMNS, FILE_COLUMNS, BatchRecord, BatchStatus, FileRecord, ItemState
from nerite.core.errors import Conflict, NeriteError, NotFound, QuotaExceeded, TooLarge
from nerite.storage.database import Database, Transaction

_FILES: Final = ", ".join(FILE_COLUMNS)
_BATCHES: Final = ", ".join(BATCH_COLUMNS)
_ENDS: Final = tuple(str(status) for status in BatchStatus if status.is_end)
_OPEN: Final = "status NOT IN ('" + "', '".join(_ENDS) + "')"
MAX_OPEN: Final = 1000
"""Batches that have not ended."""
MAX_OPEN_ITEMS: Final = 2_000_000
"""Items of these batches that have no answer."""
_RENEWAL: Final = 2 / 3
"""Fraction of a lease below which it is renewed."""


class PageRequest(NamedTuple):
    """What a list asks for."""

    limit: int
    after: str = ""
    """Id of the last object of the page before."""
    ascending: bool = False
    purpose: str = ""


class ItemAnswerRow(NamedTuple):
    """The answer of an item, to be committed."""

    batch: str
    line: int
    state: ItemState
    answer: bytes
    """Its line of an output file."""
    custom_id: str = ""


class BatchTakenOver(NeriteError):
    """Another server runs the batch: the lease of this one was over before it was renewed."""


class BatchLease(NamedTuple):
    """In whose name, and for how long, batches are run. Nobody else runs them meanwhile."""

    owner: str
    """Unique to the process."""
    seconds: float
    sole: bool
    """No other process uses the database, so batches of any owner are those of one that has ended."""


class BatchStore:
    """All rows. ``tenant`` restricts what a call can see; rows of others do not exist for it.

    Several servers may use one database. Each runs the batches that it has leased: what it changes of them takes effect
    only as long as it has them, whatever its clock says.
    """

    def __init__(self, database: Database, lease: BatchLease) -> None:
        self._database = database
        self._lease = lease

    # Files

    async def check_room(self, file: FileRecord, most_bytes: int) -> None:
        """Raise what ``add_file`` would raise now, before the content is written."""
        await self._database.run(lambda transaction: _check_bytes(transaction, file, most_bytes))

    async def add_file(self, file: FileRecord, most_bytes: int) -> None:
        """Add a file.

        Raises ``TooLarge`` if all files together would have more than ``most_bytes``, and ``QuotaExceeded`` if those of
        the tenant would have more than are left free.
        """

        def work(transaction: Transaction) -> None:
            _check_bytes(transaction, file, most_bytes)
            _insert_file(transaction, file)

        await self._database.run(work)

    async def file(self, tenant: str, name: str) -> FileRecord:
        """Return a file. Raises ``NotFound``."""
        return await self._database.run(lambda transaction: _file(transaction, tenant, name))

    async def files(self, tenant: str, listing: PageRequest) -> tuple[list[FileRecord], bool]:
        """Return a page of files, and whether there are more."""
        rows, more = await self._database.run(lambda transaction: _page(transaction, "batch_files", tenant, listing))
        return [FileRecord(*row) for row in rows], more

    async def remove_file(self, tenant: str, name: str) -> None:
        """Remove a file. Raises ``NotFound``, and ``Conflict`` while a batch reads it."""

        def work(transaction: Transaction) -> None:
            _file(transaction, tenant, name)
            user = transaction.row(f"SELECT id FROM batches WHERE input_file_id = ? AND {_OPEN}", [name])
            if user is not None:
                raise Conflict(f"file '{name}' is the input of batch '{user[0]}': cancel that first")
            transaction.execute("DELETE FROM batch_files WHERE id = ?", [name])

        await self._database.run(work)

    async def remove_expired_files(self, now: float) -> list[str]:
        """Remove the rows of files whose time is over, and that no batch reads; return their ids."""

        def work(transaction: Transaction) -> list[str]:
            rows = transaction.rows(
                "SELECT id FROM batch_files WHERE expires_at <= ? AND id NOT IN "
                f"(SELECT input_file_id FROM batches WHERE {_OPEN})",
                [now],
            )
            transaction.execute_many("DELETE FROM batch_files WHERE id = ?", rows)
            return [row[0] for row in rows]

        return await self._database.run(work)

    def file_names(self) -> set[str]:
        """Return the ids of all files. Blocks."""
        return self._database.call(lambda each: {row[0] for row in each.rows("SELECT id FROM batch_files")})

    # Batches

    async def add_batch(self, batch: BatchRecord) -> None:
        """Add a batch, which this server runs.

        Raises ``NotFound`` without its input file, ``Conflict`` for a file of another purpose or when there are too
        many batches or items, ``QuotaExceeded`` when the tenant has as many of them as are left free.
        """

        def work(transaction: Transaction) -> None:
            file = _file(transaction, batch.tenant, batch.input_file_id)
            if file.purpose != "batch":
                raise Conflict(f"the purpose of file '{file.id}' is '{file.purpose}': it must be 'batch'")
            _check_open(transaction, batch, file.items)
            places = ", ".join("?" * (len(BATCH_COLUMNS) + 2))
            until = transaction.now() + self._lease.seconds
            transaction.execute(
                f"INSERT INTO batches ({_BATCHES}, owner, owned_until) VALUES ({places})",
                [*batch.as_row(), self._lease.owner, until],
            )

        await self._database.run(work)

    async def batch(self, tenant: str, name: str) -> BatchRecord:
        """Return a batch. Raises ``NotFound``."""
        return await self._database.run(lambda transaction: _batch(transaction, tenant, name))

    async def by_id(self, name: str) -> BatchRecord:
        """Return a batch of any tenant. Raises ``NotFound``."""
        return await self._database.run(lambda transaction: _by_id(transaction, name))

    async def batches(self, tenant: str, listing: PageRequest) -> tuple[list[BatchRecord], bool]:
        """Return a page of batches, and whether there are more."""
        rows, more = await self._database.run(lambda transaction: _page(transaction, "batches", tenant, listing))
        return [BatchRecord.of_row(row) for row in rows], more

    async def claim(self) -> list[BatchRecord]:
        """Renew the leases of this server, and take the batches whose lease is over; return all that it runs now."""
        owner, seconds, sole = self._lease

        def work(transaction: Transaction) -> list[tuple[Any, ...]]:
            now = transaction.now()
            free = "owner <> ?" if sole else "owned_until < ?"
            transaction.execute(
                f"UPDATE batches SET owner = ?, owned_until = ? WHERE {_OPEN} AND "
                f"(owner = ? AND owned_until < ? OR {free})",
                [owner, now + seconds, owner, now + seconds * _RENEWAL, owner if sole else now],
            )
            statement = f"SELECT {_BATCHES} FROM batches WHERE {_OPEN} AND owner = ? ORDER BY created_at"
            return transaction.rows(statement, [owner])

        return [BatchRecord.of_row(row) for row in await self._database.run(work)]

    async def release(self) -> None:
        """Give back all leases: another server may run the batches at once."""
        owner = self._lease.owner
        await self._database.run(
            lambda each: each.execute("UPDATE batches SET owner = '', owned_until = 0 WHERE owner = ?", [owner])
        )

    def _holds(self, transaction: Transaction, name: str) -> bool:
        """Return whether this server runs a batch, until the end of the transaction."""
        statement = "UPDATE batches SET owner = owner WHERE id = ? AND owner = ?"
        return transaction.execute(statement, [name, self._lease.owner]) > 0

    def _check_held(self, transaction: Transaction, name: str) -> None:
        if not self._holds(transaction, name):
            raise BatchTakenOver(f"another server has taken batch '{name}' over")

    async def change(self, name: str, **values: Any) -> BatchRecord:
        """Change columns of a batch; return it. Raises ``BatchTakenOver``."""

        def work(transaction: Transaction) -> BatchRecord:
            self._check_held(transaction, name)
            return _change(transaction, name, values)

        return await self._database.run(work)

    async def cancel(self, tenant: str, name: str, now: float) -> BatchRecord:
        """Begin to cancel a batch. Raises ``NotFound``, and ``Conflict`` for one that has ended."""

        def work(transaction: Transaction) -> BatchRecord:
            batch = _batch(transaction, tenant, name)
            if batch.status.is_end or batch.status is BatchStatus.FINALIZING:
                raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.")
            if batch.status is BatchStatus.CANCELLING:
                return batch
            return _change(transaction, name, {"status": BatchStatus.CANCELLING, "cancelling_at": now})

        return await self._database.run(work)

    # Items

    async def begin(self, name: str, items: Sequence[ItemLine], model: str, now: float) -> BatchRecord:
        """Add the items of a validated batch, which is in progress from now on, unless it was cancelled meanwhile.

        Raises ``BatchTakenOver``.
        """

        def work(transaction: Transaction) -> BatchRecord:
            self._check_held(transaction, name)
            found = _by_id(transaction, name)
            if found.status is not BatchStatus.VALIDATING:
                return found
            rows = [
                (name, item.line, item.custom_id, item.position, item.size, str(ItemState.WAITING)) for item in items
            ]
            transaction.execute_many(
                "INSERT INTO batch_items (batch_id, line, custom_id, position, size, state) VALUES (?, ?, ?, ?, ?, ?)",
                rows,
            )
            changes = {"status": BatchStatus.IN_PROGRESS, "in_progress_at": now, "total": len(items), "model": model}
            return _change(transaction, name, changes)

        return await self._database.run(work)

    async def load_items(self, name: str, after: int, limit: int) -> tuple[list[ItemLine], int]:
        """Return items without an answer, those behind line ``after``, in order, and the last line loaded before.

        Whoever runs the batch next knows from the latter which items may have run, and have been charged to quotas.
        """

        def work(transaction: Transaction) -> tuple[list[ItemLine], int]:
            rows = transaction.rows(
                "SELECT line, custom_id, position, size FROM batch_items WHERE batch_id = ? AND line > ? AND state = ? "
                "ORDER BY line LIMIT ?",
                [name, after, str(ItemState.WAITING), limit],
            )
            loaded = int((transaction.row("SELECT loaded FROM batches WHERE id = ?", [name]) or (0,))[0])
            if rows and rows[-1][0] > loaded:
                statement = "UPDATE batches SET loaded = ? WHERE id = ? AND owner = ?"
                transaction.execute(statement, [rows[-1][0], name, self._lease.owner])
            return [ItemLine(*row) for row in rows], loaded

        return await self._database.run(work)

    async def commit(self, answers: Sequence[ItemAnswerRow]) -> set[str]:
        """Store answers and count them, together. An item that has an answer keeps its first one.

        Return the batches that another server has taken over: their answers are dropped.
        """

        def work(transaction: Transaction) -> set[str]:
            names = dict.fromkeys(row.batch for row in answers)
            lost = {name for name in names if not self._holds(transaction, name)}
            for row in answers:
                if row.batch in lost:
                    continue
                changed = transaction.execute(
                    "UPDATE batch_items SET state = ?, answer = ? WHERE batch_id = ? AND line = ? AND state = ?",
                    [str(row.state), row.answer, row.batch, row.line, str(ItemState.WAITING)],
                )
                column = "completed" if row.state is ItemState.COMPLETED else "failed"
                transaction.execute(f"UPDATE batches SET {column} = {column} + ? WHERE id = ?", [changed, row.batch])
            return lost

        return await self._database.run(work)

    async def answers(self, name: str, state: ItemState, after: int, limit: int) -> list[tuple[int, str, bytes]]:
        """Return line, custom id and answer of items in a state, those behind line ``after``, in order."""
        rows = await self._database.run(
            lambda transaction: transaction.rows(
                "SELECT line, custom_id, answer FROM batch_items WHERE batch_id = ? AND state = ? AND line > ? "
                "ORDER BY line LIMIT ?",
                [name, str(state), after, limit],
            )
        )
        return [(line, custom_id, bytes(answer or b"")) for line, custom_id, answer in rows]

    async def finish(self, name: str, files: Sequence[FileRecord], **values: Any) -> BatchRecord:
        """Add the output files of a batch, change it, and remove its items, whose answers are in the files.

        Raises ``BatchTakenOver``.
        """

        def work(transaction: Transaction) -> BatchRecord:
            self._check_held(transaction, name)
            for file in files:
                _insert_file(transaction, file)
            transaction.execute("DELETE FROM batch_items WHERE batch_id = ?", [name])
            return _change(transaction, name, values)

        return await self._database.run(work)


def _check_share(tenant: str, used: int, own: int, wanted: int, most: int, what: str, remedy: str) -> None:
    """Raise ``QuotaExceeded`` if a tenant would have more than are free for all: the rule of dynamic thresholds.

    A tenant alone may have half of all. However many take what they may, the next finds as much as each of them has.
    Without a policy there are no tenants, and nothing is kept free.
    """
    if tenant and own + wanted > most - used:
        raise QuotaExceeded(
            f"tenant '{tenant}' has {own} {what}, and may have no more than are free: {most - used} of {most}. {remedy}"
        )


def _check_bytes(transaction: Transaction, file: FileRecord, most: int) -> None:
    used, own = _sums(transaction, "SELECT {} FROM batch_files", "size", "tenant", file.tenant)
    if used + file.size > most:
        raise TooLarge(
            f"the file has {file.size} bytes, and all files together would exceed the {most} bytes of "
            f"batch-storage-bytes, of which {used} are used: delete files, or raise the limit"
        )
    _check_share(file.tenant, used, own, file.size, most, "bytes of files", "Delete files, or use smaller ones")


def _check_open(transaction: Transaction, batch: BatchRecord, items: int) -> None:
    tenant, remedy = batch.tenant, "Wait for a batch, or cancel one"
    used, own = _sums(transaction, f"SELECT {{}} FROM batches WHERE {_OPEN}", "1", "tenant", tenant)
    if used >= MAX_OPEN:
        raise Conflict(f"{MAX_OPEN} batches have not ended: wait for one, or cancel one")
    _check_share(tenant, used, own, 1, MAX_OPEN, "batches that have not ended", remedy)
    used, own = _sums(
        transaction,
        f"SELECT {{}} FROM batches b JOIN batch_files f ON f.id = b.input_file_id WHERE {_OPEN}",
        "f.items - b.completed - b.failed",
        "b.tenant",
        tenant,
    )
    if used + items > MAX_OPEN_ITEMS:
        raise Conflict(
            f"the batch has {items} items, and {used} of {MAX_OPEN_ITEMS} have not been answered: wait for a batch, or "
            "cancel one"
        )
    _check_share(tenant, used, own, items, MAX_OPEN_ITEMS, "items without an answer", remedy)


def _sums(transaction: Transaction, query: str, value: str, column: str, tenant: str) -> tuple[int, int]:
    """Return the sum of a value over all rows of a query, and over those of a tenant."""
    sums = f"COALESCE(SUM({value}), 0), COALESCE(SUM(CASE WHEN {column} = ? THEN {value} ELSE 0 END), 0)"
    used, own = transaction.row(query.format(sums), [tenant]) or (0, 0)
    return int(used), int(own)


def _insert_file(transaction: Transaction, file: FileRecord) -> None:
    values = [getattr(file, column) for column in FILE_COLUMNS]
    transaction.execute(f"INSERT INTO batch_files ({_FILES}) VALUES ({', '.join('?' * len(values))})", values)


def _file(transaction: Transaction, tenant: str, name: str) -> FileRecord:
    row = transaction.row(f"SELECT {_FILES} FROM batch_files WHERE id = ? AND tenant = ?", [name, tenant])
    if row is None:
        raise NotFound(f"No such File object: {name}")
    return FileRecord(*row)


def _batch(transaction: Transaction, tenant: str, name: str) -> BatchRecord:
    row = transaction.row(f"SELECT {_BATCHES} FROM batches WHERE id = ? AND tenant = ?", [name, tenant])
    if row is None:
        raise NotFound(f"No batch found with id '{name}'.")
    return BatchRecord.of_row(row)


def _by_id(transaction: Transaction, name: str) -> BatchRecord:
    row = transaction.row(f"SELECT {_BATCHES} FROM batches WHERE id = ?", [name])
    if row is None:
        raise NotFound(f"No batch found with id '{name}'.")
    return BatchRecord.of_row(row)


def _change(transaction: Transaction, name: str, values: Mapping[str, Any]) -> BatchRecord:
    batch = replace(_by_id(transaction, name), **values)
    row = dict(zip(BATCH_COLUMNS, batch.as_row(), strict=True))
    columns = ", ".join(f"{column} = ?" for column in values)
    transaction.execute(f"UPDATE batches SET {columns} WHERE id = ?", [*(row[column] for column in values), name])
    return batch


def _page(
    transaction: Transaction, table: str, tenant: str, listing: PageRequest
) -> tuple[list[tuple[Any, ...]], bool]:
    """Return a page of rows in the order of their creation, and whether there are more."""
    columns = _FILES if table == "batch_files" else _BATCHES
    order, compare = ("ASC", ">") if listing.ascending else ("DESC", "<")
    where = "tenant = ?"
    parameters: list[Any] = [tenant]
    if listing.purpose:
        where += " AND purpose = ?"
        parameters.append(listing.purpose)
    if listing.after:
        last = transaction.row(f"SELECT created_at FROM {table} WHERE id = ? AND tenant = ?", [listing.after, tenant])
        if last is None:
            raise NotFound(f"there is no object '{listing.after}', which 'after' names")
        where += f" AND (created_at {compare} ? OR (created_at = ? AND id {compare} ?))"
        parameters += [last[0], last[0], listing.after]
    rows = transaction.rows(
        f"SELECT {columns} FROM {table} WHERE {where} ORDER BY created_at {order}, id {order} LIMIT ?",
        [*parameters, listing.limit + 1],
    )
    return rows[: listing.limit], len(rows) > listing.limit
