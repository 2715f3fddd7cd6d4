"""Rows of files, batches and items in the database. Every change is one transaction."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from nerite.batches.items import ItemLine
from nerite.batches.records import (
    BATCH_COLUMNS,
    FILE_COLUMNS,
    BatchObstacle,
    BatchRecord,
    BatchStatus,
    FileRecord,
    ItemState,
)
from nerite.core.errors import Conflict, NeriteError, NotFound, QuotaExceeded, RefusedData, TooLarge
from nerite.storage.database import Database, Transaction

_FILES: Final = ", ".join(FILE_COLUMNS)
_BATCHES: Final = ", ".join(BATCH_COLUMNS)
_STATUS: Final = BATCH_COLUMNS.index("status")
_ENDS: Final = tuple(str(status) for status in BatchStatus if status.is_end)
_OPEN: Final = "status NOT IN ('" + "', '".join(_ENDS) + "')"
"""As in the index ``batches_open``."""
_ENDED: Final = f"NOT ({_OPEN})"
_FILE_BYTES: Final = 4096
"""Bytes that a file takes beside its content, on a disk and as a row."""
NO_LINES: Final[Mapping[int, bytes]] = MappingProxyType({})
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
    refused: bool = False
    """The database has refused the answer of the item, and this says so instead."""


class UnreadableBatch(NamedTuple):
    """A batch whose row is damaged."""

    tenant: str
    error: Exception


class BatchTakenOver(NeriteError):
    """Another server runs the batch: the lease of this one was over before it was renewed."""


class BatchLease(NamedTuple):
    """In whose name, and for how long, batches are run. Nobody else runs them meanwhile."""

    owner: str
    """Unique to the process."""
    seconds: float
    sole: bool
    """No other process uses the database, so batches of any owner are those of one that has ended."""


class BatchUse(NamedTuple):
    """What batches use of a server, or may use."""

    open: int
    """Batches that have not ended."""
    items: int
    """Items of these."""
    bytes: int
    """Bytes of files, outputs included, and of items and answers in the database."""


class TenantQuota(NamedTuple):
    """What a tenant may use; None for as much as is left free."""

    open: int | None = None
    items: int | None = None
    bytes: int | None = None


class BatchQuotas(NamedTuple):
    """What all tenants together may use, and each of them."""

    total: BatchUse
    of: Callable[[str], TenantQuota | None]
    """Return what a tenant may use; None for everything."""


class BatchStore:
    """All rows. ``tenant`` restricts what a call can see; rows of others do not exist for it.

    Several servers may use one database. Each runs the batches that it has leased: what it changes of them takes effect
    only as long as it has them, whatever its clock says.
    """

    def __init__(self, database: Database, lease: BatchLease, quotas: BatchQuotas) -> None:
        self._database = database
        self._lease = lease
        self._quotas = quotas

    # Quotas

    def _check_room(self, transaction: Transaction, tenant: str, new: BatchUse) -> None:
        """Raise ``QuotaExceeded`` for what a tenant may not use, ``Conflict`` or ``TooLarge`` for the server's limits.

        Limits of which ``new`` uses nothing are not looked at. A tenant without a quota may have no more than are left
        free (dynamic thresholds): alone half of all, and the next tenant finds as much as each of the others has.
        """
        total, used, own = self._quotas.total, _use(transaction), _use(transaction, tenant)
        quota = self._quotas.of(tenant)
        for index, limit in enumerate(_LIMITS):
            wanted, free = new[index], total[index] - used[index]
            if wanted > max(free, 0):
                raise limit.error(
                    f"all together have {used[index]} {limit.what}, and may have {total[index]}{limit.of_all}: not "
                    f"{wanted} more. {limit.remedy}"
                )
            most = None if quota is None else quota[index]
            if wanted and quota is not None and own[index] + wanted > (free if most is None else most):
                allowed = f"no more than are free, which are {free}" if most is None else f"{most} ({limit.of_tenant})"
                raise QuotaExceeded(
                    f"tenant '{tenant}' has {own[index]} {limit.what}, and may have {allowed}: not {wanted} more. "
                    f"{limit.remedy}"
                )

    async def use(self, tenant: str | None = None) -> BatchUse:
        """Return what a tenant uses, or all of them."""
        return await self._database.run(lambda transaction: _use(transaction, tenant))

    async def check_room(self, tenant: str, size: int) -> None:
        """Raise ``QuotaExceeded`` or ``TooLarge`` if there is no room for ``size`` bytes of a file."""
        new = BatchUse(0, 0, size + _FILE_BYTES)
        await self._database.run(lambda transaction: self._check_room(transaction, tenant, new))

    async def full(self, tenants: Collection[str]) -> set[str]:
        """Return those of the tenants for whom no more answers may be stored."""

        def work(transaction: Transaction) -> set[str]:
            total = self._quotas.total.bytes
            if _use(transaction).bytes >= total:
                return set(tenants)
            quotas = {tenant: quota.bytes for tenant in tenants if (quota := self._quotas.of(tenant)) is not None}
            # What has begun goes on until it uses half of all: others may have used up what was free.
            return {
                tenant
                for tenant, most in quotas.items()
                if _use(transaction, tenant).bytes >= (total // 2 if most is None else most)
            }

        return await self._database.run(work)

    # Files

    async def add_file(self, file: FileRecord) -> None:
        """Add a file. Raises ``QuotaExceeded`` or ``TooLarge`` if there is no room for it."""

        def work(transaction: Transaction) -> None:
            self._check_room(transaction, file.tenant, BatchUse(0, 0, file.size + _FILE_BYTES))
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

        Raises ``NotFound`` without its input file, ``Conflict`` for a file of another purpose, and for what exceeds
        limits ``QuotaExceeded``, ``Conflict`` or ``TooLarge``.
        """

        def work(transaction: Transaction) -> None:
            file = _file(transaction, batch.tenant, batch.input_file_id)
            if file.purpose != "batch":
                raise Conflict(f"the purpose of file '{file.id}' is '{file.purpose}': it must be 'batch'")
            self._check_room(transaction, batch.tenant, BatchUse(1, file.items, file.row_bytes))
            places = ", ".join("?" * (len(BATCH_COLUMNS) + 4))
            until = transaction.now() + self._lease.seconds
            transaction.execute(
                f"INSERT INTO batches ({_BATCHES}, owner, owned_until, items, stored) VALUES ({places})",
                [*batch.as_row(), self._lease.owner, until, file.items, file.row_bytes],
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

    async def claim(self, known: Collection[str] = ()) -> dict[str, BatchRecord | UnreadableBatch | None]:
        """Renew the leases of this server, and take the batches whose lease is over; return all that it runs now.

        None stands for a batch that is ``known``, and not to be cancelled.
        """
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

        found = {str(row[0]): row for row in await self._database.run(work)}
        changed = {name for name, row in found.items() if name not in known or row[_STATUS] == BatchStatus.CANCELLING}
        return {name: _readable(row) if name in changed else None for name, row in found.items()}

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

    async def cancel(self, tenant: str | None, name: str, now: float) -> BatchRecord:
        """Begin to cancel a batch, of any tenant for None. Raises ``NotFound``, ``Conflict`` for one that has ended."""

        def work(transaction: Transaction) -> BatchRecord:
            batch = _by_id(transaction, name) if tenant is None else _batch(transaction, tenant, name)
            if batch.status.is_end or batch.status is BatchStatus.FINALIZING:
                raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.")
            if batch.status is BatchStatus.CANCELLING:
                return batch
            return _change(transaction, name, {"status": BatchStatus.CANCELLING, "cancelling_at": now})

        return await self._database.run(work)

    async def abandon(self, name: str, now: float, why: BatchObstacle) -> None:
        """End a batch that cannot be ended otherwise as failed, whatever is in its row. Raises ``BatchTakenOver``."""

        def work(transaction: Transaction) -> None:
            self._check_held(transaction, name)
            transaction.execute("DELETE FROM batch_items WHERE batch_id = ?", [name])
            errors = json.dumps([{**why._asdict(), "param": None, "line": None}])
            transaction.execute(
                "UPDATE batches SET status = ?, failed_at = ?, errors = ?, stored = 0 WHERE id = ?",
                [str(BatchStatus.FAILED), now, errors, name],
            )

        await self._database.run(work)

    async def remove_ended(self, most: int) -> None:
        """Remove the oldest batches that have ended of each tenant that has more than ``most`` of them."""

        def work(transaction: Transaction) -> None:
            statement = f"SELECT tenant FROM batches WHERE {_ENDED} GROUP BY tenant HAVING COUNT(*) > ?"
            newest = f"SELECT created_at FROM batches WHERE tenant = ? AND {_ENDED} ORDER BY created_at DESC"
            for (tenant,) in transaction.rows(statement, [most]):
                transaction.execute(
                    f"DELETE FROM batches WHERE tenant = ? AND {_ENDED} AND created_at <= ({newest} LIMIT 1 OFFSET ?)",
                    [tenant, tenant, most],
                )

        await self._database.run(work)

    # Items

    async def refuses(self, name: str, items: Sequence[ItemLine]) -> bool:
        """Return whether the database refuses rows of items as data. Adds none."""

        def work(transaction: Transaction) -> None:
            _insert_items(transaction, name, items)
            raise _Undone

        with contextlib.suppress(_Undone):
            try:
                await self._database.run(work)
            except RefusedData:
                return True
        return False

    async def begin(
        self, name: str, items: Sequence[ItemLine], model: str, now: float, failed: Mapping[int, bytes] = NO_LINES
    ) -> BatchRecord:
        """Add the items of a validated batch, which is in progress from now on, unless it was cancelled meanwhile.

        ``failed`` has the lines of the error file of items that have failed already. Raises ``BatchTakenOver``.
        """

        def work(transaction: Transaction) -> BatchRecord:
            self._check_held(transaction, name)
            found = _by_id(transaction, name)
            if found.status is not BatchStatus.VALIDATING:
                return found
            _insert_items(transaction, name, items)
            transaction.execute_many(
                "INSERT INTO batch_items (batch_id, line, custom_id, position, size, state, answer) "
                "VALUES (?, ?, '', 0, 0, ?, ?)",
                [(name, line, str(ItemState.FAILED), answer) for line, answer in failed.items()],
            )
            total = len(items) + len(failed)
            transaction.execute("UPDATE batches SET items = ? WHERE id = ?", [total, name])
            changes = {"status": BatchStatus.IN_PROGRESS, "in_progress_at": now, "total": total, "model": model}
            return _change(transaction, name, {**changes, "failed": len(failed)})

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
                transaction.execute(
                    f"UPDATE batches SET {column} = {column} + ?, stored = stored + ? WHERE id = ?",
                    [changed, changed * len(row.answer), row.batch],
                )
            return lost

        return await self._database.run(work)

    async def answers(
        self, name: str, state: ItemState, after: int, limit: int, most_bytes: int
    ) -> list[tuple[int, str, bytes]]:
        """Return line, custom id and answer of items in a state, those behind line ``after``, in order.

        They have ``most_bytes`` together, but for the first.
        """

        def work(transaction: Transaction) -> list[tuple[Any, ...]]:
            where = "FROM batch_items WHERE batch_id = ? AND state = ? AND line > ?"
            sizes = transaction.rows(
                f"SELECT line, COALESCE(LENGTH(answer), 0) {where} ORDER BY line LIMIT ?",
                [name, str(state), after, limit],
            )
            last, left = after, most_bytes
            for line, size in sizes:
                if size > left and last != after:
                    break
                last, left = line, left - size
            return transaction.rows(
                f"SELECT line, custom_id, answer {where} AND line <= ? ORDER BY line", [name, str(state), after, last]
            )

        rows = await self._database.run(work)
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
            transaction.execute("UPDATE batches SET stored = 0 WHERE id = ?", [name])
            return _change(transaction, name, values)

        return await self._database.run(work)


class _Limit(NamedTuple):
    """What the errors for a limit say."""

    what: str
    of_tenant: str
    """The setting of the policy."""
    of_all: str
    remedy: str
    error: type[NeriteError]
    """For what exceeds the limit of the server."""


_LIMITS: Final = (
    _Limit("batches that have not ended", "open_batches", "", "Wait for one, or cancel one", Conflict),
    _Limit("items in batches that have not ended", "batch_items", "", "Wait for batches, or cancel some", Conflict),
    _Limit(
        "bytes of files, items and answers of batches",
        "batch_bytes",
        " of batch-storage-bytes",
        "Delete files, or wait for batches",
        TooLarge,
    ),
)


class _Undone(Exception):
    """Undoes a transaction."""


def _use(transaction: Transaction, tenant: str | None = None) -> BatchUse:
    """Return what a tenant uses, or all of them."""
    also, parameters = ("", []) if tenant is None else (" AND tenant = ?", [tenant])

    def sums(columns: str, table: str) -> Iterator[int]:
        found = transaction.row(f"SELECT COUNT(*), {columns} FROM {table}{also}", parameters)
        return map(int, found or ())  # PostgreSQL sums up integers as decimals

    files, size = sums("COALESCE(SUM(size), 0)", "batch_files WHERE TRUE")
    open_batches, items, stored = sums("COALESCE(SUM(items), 0), COALESCE(SUM(stored), 0)", f"batches WHERE {_OPEN}")
    return BatchUse(open_batches, items, size + files * _FILE_BYTES + stored)


def _readable(row: Sequence[Any]) -> BatchRecord | UnreadableBatch:
    try:
        return BatchRecord.of_row(row)
    except Exception as error:
        return UnreadableBatch(str(row[BATCH_COLUMNS.index("tenant")]), error)


def _insert_items(transaction: Transaction, name: str, items: Sequence[ItemLine]) -> None:
    transaction.execute_many(
        "INSERT INTO batch_items (batch_id, line, custom_id, position, size, state) VALUES (?, ?, ?, ?, ?, ?)",
        [(name, item.line, item.custom_id, item.position, item.size, str(ItemState.WAITING)) for item in items],
    )


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
