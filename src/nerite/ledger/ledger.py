"""The ledger of a server: collects the rows of all meters, and writes them once a second, in the database's thread.

Rows and the times of instances are written together, as they were at one moment, so that the tables add up whenever the
server is killed. What cannot be written is kept; when too many rows wait, they are summed up, and no amount is lost.
A row that the database refuses is set aside, and stops no other one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from nerite.core.errors import NeriteError, RefusedData
from nerite.core.failures import report
from nerite.core.work_loop import WorkLoop
from nerite.ledger import tables
from nerite.ledger.dead_rows import Refused, row_json, set_aside, write_apart
from nerite.ledger.meter import MeterSession, VersionMeter
from nerite.ledger.row import LedgerRow, WallClock, summed
from nerite.observability.exposition import Metric, MetricTable, Page
from nerite.storage.database import Database, Transaction

if TYPE_CHECKING:
    from nerite.core.request import Caller
    from nerite.ledger.instance_clock import InstanceTime

_T = TypeVar("_T")
PERIOD: Final = 1.0
"""Seconds between two writes: what a crash of the server may lose."""
MAX_ROWS: Final = 10_000
"""Rows that may wait before they are summed up: as many as take a tenth of a processor, if they come every second."""
_ITEMS: Final = 10
"""Rows of items of batches that may wait, for each of other requests: summed up, they are not charged."""
_log = logging.getLogger("nerite.ledger")


class _Unwritten(NamedTuple):
    """All that the meters had at one moment."""

    rows: list[LedgerRow]
    """Rows of requests that are over; those beyond the maximum are summed up."""
    singles: list[LedgerRow]
    """Rows that replace others, or will be replaced."""
    times: list[InstanceTime]

    def rows_to_write(self, max_rows: int) -> list[LedgerRow]:
        """Return the rows, with so many of requests that are over by themselves."""
        rows = self.rows
        if len(rows) > max_rows:
            try:
                rows = [*rows[:max_rows], *summed(rows[max_rows:], _ITEMS * max_rows)]
            except Exception as error:
                report("loop", error, "in sums of the ledger, so that its rows are written one by one")
        return [*self.singles, *rows]


class _Written(NamedTuple):
    """What has become of rows and times that were to be written."""

    rows: int
    """Rows that were written or set aside."""
    refused: list[Refused]
    """Rows that were refused."""
    lost: list[Refused]
    """Those of them that could not be set aside either."""
    times: list[Refused]
    """Times that were refused. They are written again when they are next read, unless their instance is closed."""


class Ledger:
    """The ledger of one server. Used on the loop's thread only."""

    def __init__(self, location: str, tenant_of: Callable[[Caller], tuple[str, str]], max_rows: int = MAX_ROWS) -> None:
        """Open or create the database ``location``. Raises ``NeriteError``.

        ``tenant_of`` returns tenant and class of a caller, as rows name them.
        """
        self.loop = WorkLoop("ledger", waiting=lambda: self.waiting_rows)
        self._database = Database(location, [tables.LedgerSchema()])
        self._max_rows = max_rows
        self._rows: list[LedgerRow] = []
        self._last_rows: list[LedgerRow] = []
        """Rows of requests that had one while they were running, which is replaced."""
        self._unwritten: _Unwritten | None = None
        """What is being written, or could not be written. It is written again as it is, because it may be there."""
        self._meters: list[VersionMeter] = []
        self._unaccounted_ns = 0
        """That of versions that were unloaded."""
        self._session = secrets.randbits(62)
        self._server = socket.gethostname()
        self._writing = asyncio.Lock()
        self._failing = False
        self._kept_rows = 0
        """Rows that could not be summed up, of those that wait."""
        self.written_rows = 0
        self.summed_rows = 0
        """Rows that were added to others."""
        self.failed_writes = 0
        self.set_aside_rows = 0
        """Rows that the database has refused."""
        self.wall = WallClock(_offset_ns())
        """As it was at the last write."""
        self._meter_session = MeterSession(
            self._rows.append, self._last_rows.append, itertools.count(1), self.wall, tenant_of
        )

    @property
    def waiting_rows(self) -> int:
        """Number of rows that are not written yet."""
        unwritten = () if self._unwritten is None else (*self._unwritten.rows, *self._unwritten.singles)
        return len(self._rows) + len(self._last_rows) + len(unwritten)

    @property
    def unaccounted_ns(self) -> int:
        """Time of instances that was charged to nobody since the start of the server. Anything but 0 is a bug."""
        return self._unaccounted_ns + sum(meter.unaccounted_ns for meter in self._meters)

    def meter(self, model: str, version: str) -> VersionMeter:
        """Return the meter of a model version that is being loaded."""
        meter = VersionMeter(model, version, self._meter_session)
        self._meters.append(meter)
        return meter

    def next_number(self) -> int:
        """Return the number of the next row of this session."""
        return next(self._meter_session.numbers)

    @property
    def session(self) -> int:
        """Distinguishes the rows of this process from those of all others."""
        return self._session

    def add(self, row: LedgerRow) -> None:
        """Add a row that no meter makes: of a router."""
        self._rows.append(row)

    def write_metrics(self, page: Page) -> None:
        """Write the metrics of the ledger."""
        page.write(LEDGER, [LEDGER.row(self)])

    async def run(self) -> None:
        """Write what has come, once a second, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            writing = asyncio.ensure_future(self._try_flush())
            while not (await asyncio.wait([writing], timeout=PERIOD))[0]:
                self._bound()

    async def _try_flush(self) -> None:
        with self.loop.step("rows"):
            try:
                await self.flush()
            except NeriteError as error:
                if not self._failing:
                    _log.warning("%s. Rows are kept, and written when it works again", error.message)
                self._failing = True
                raise

    async def flush(self) -> None:
        """Write all that is known now. Raises ``NeriteError``; nothing is lost then."""
        async with self._writing:
            if self._unwritten is not None:
                await self._write(self._unwritten)
            self._unwritten = self._collect()
            await self._write(self._unwritten)

    async def read(self, work: Callable[[Transaction], _T]) -> _T:
        """Return what ``work`` finds in the tables, which have everything up to now. Raises ``NeriteError``."""
        await self.flush()
        return await self._database.run(work)

    async def close(self) -> None:
        """Write the rest, and close the database."""
        try:
            await self.flush()
        except Exception as error:
            text = error.message if isinstance(error, NeriteError) else report("loop", error, "of the ledger").message
            _log.error("%s. %d rows of the ledger are lost", text, self.waiting_rows)
        self._database.close()

    def _bound(self) -> None:
        """Sum up what waits for a database that does not answer."""
        rows = self._rows
        if len(rows) - self._kept_rows <= self._max_rows:
            return
        with self.loop.step("sums"):
            sums = summed(rows, _ITEMS * self._max_rows)
            self.summed_rows += len(rows) - len(sums)
            rows[:] = sums
            self._kept_rows = len(rows)

    def _collect(self) -> _Unwritten:
        self.wall.offset_ns = _offset_ns()
        now = time.monotonic_ns()
        rows, last = self._rows[:], self._last_rows[:]
        self._rows.clear()
        self._last_rows.clear()
        self._kept_rows = 0
        running: list[LedgerRow] = []
        times: list[InstanceTime] = []
        for meter in self._meters[:]:
            with self.loop.step(f"meter of {meter.model} {meter.version}"):
                running += meter.running_rows(now)
                times += meter.times(now)
                if meter.over:
                    self._unaccounted_ns += meter.unaccounted_ns
                    self._meters.remove(meter)
        return _Unwritten(rows, [*last, *running], times)

    async def _write(self, unwritten: _Unwritten) -> None:
        try:
            written = await self._database.run(partial(self._write_all, unwritten=unwritten))
        except Exception:
            self.failed_writes += 1
            self._bound()
            raise
        self._unwritten = None
        self.written_rows += written.rows - len(written.refused)
        self.summed_rows += len(unwritten.rows) + len(unwritten.singles) - written.rows
        self._tell_refused(written)
        if self._failing:
            self._failing = False
            _log.info("the ledger is written again")

    def _write_all(self, transaction: Transaction, unwritten: _Unwritten) -> _Written:
        """Write what the database takes, and set aside what it refuses."""

        def write_rows(transaction: Transaction, some: Sequence[LedgerRow]) -> None:
            tables.write_rows(transaction, self._session, some)

        def write_times(transaction: Transaction, some: Sequence[InstanceTime]) -> None:
            tables.write_times(transaction, self._session, self._server, some)

        rows = unwritten.rows_to_write(self._max_rows)
        refused = write_apart(transaction, rows, write_rows)
        lost = set_aside(transaction, self._session, refused) if refused else []
        return _Written(len(rows), refused, lost, write_apart(transaction, unwritten.times, write_times))

    def _tell_refused(self, written: _Written) -> None:
        if written.refused:
            self.set_aside_rows += len(written.refused)
            _log.error(
                "%d rows of the ledger were set aside, the first because: %s. nerite bill --set-aside lists them",
                len(written.refused),
                _reason(written.refused[0].error),
            )
        for row, error in written.lost:
            _log.error("a row of the ledger is lost: %s", row_json(row, str(error)))
        if written.times:
            names = ", ".join(sorted({each.entry.instance for each in written.times}))
            _log.error("times of %s were refused: %s", names, _reason(written.times[0].error))


def _reason(error: Exception) -> str:
    """Return why something is refused; what nothing foresaw becomes an incident."""
    if isinstance(error, RefusedData):
        return error.message
    return report("loop", error, "in a row of the ledger").message


def _offset_ns() -> int:
    return time.time_ns() - time.monotonic_ns()


LEDGER: Final = MetricTable[Ledger]((
    Metric("nerite_ledger_rows_total", "counter",
           "Rows that were written to the ledger, those of running requests each time", lambda it: it.written_rows),
    Metric("nerite_ledger_waiting_rows", "gauge", "Rows that are to be written", lambda it: it.waiting_rows),
    Metric("nerite_ledger_summed_rows_total", "counter",
           "Rows that were added to others of the same tenant and model, because too many waited",
           lambda it: it.summed_rows),
    Metric("nerite_ledger_failed_writes_total", "counter",
           "Writes to the database that failed and were or will be repeated", lambda it: it.failed_writes),
    Metric("nerite_ledger_set_aside_rows_total", "counter",
           "Rows that the database refuses, and that were set aside", lambda it: it.set_aside_rows),
    Metric("nerite_ledger_unaccounted_seconds", "gauge",
           "Time of instances that no request was charged for although they were busy: 0, unless there is a bug",
           lambda it: it.unaccounted_ns / 1e9),
))  # fmt: skip
