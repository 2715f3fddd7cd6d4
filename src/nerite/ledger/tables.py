"""The tables of the ledger: rows of requests, and how instances spent each day."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from nerite.ledger.instance_clock import InstanceTime
from nerite.ledger.row import ANSWERS, Amounts, Ending, LedgerRow, Source, charged_once
from nerite.storage.database import Transaction

_FIRST_KEY: Final = ("tenant", "model", "version", "route", "arm", "class", "origin", "ending")
_KEY: Final = (*_FIRST_KEY, "source", "pool", "member")
"""Columns of ``RowKey``."""
GROUPS: Final = ("day", *_KEY)
"""Columns that sums may be grouped by."""
_FIRST_COUNTS: Final = ("requests", "prompt_tokens", "cached_tokens", "answer_tokens")
_FIRST_TIMES: Final = ("queue_seconds", "compute_seconds", "prefill_seconds", "decode_seconds", "kv_block_seconds")
_TIMES: Final = (*_FIRST_TIMES, "first_byte_seconds")
_AMOUNTS: Final = (*_FIRST_COUNTS, *_TIMES, "attempts")
"""Columns of ``Amounts``. Times are in nanoseconds outside the tables."""
_TIMES_BEGIN: Final = len(_FIRST_COUNTS)
_TIMES_END: Final = _TIMES_BEGIN + len(_TIMES)
_ROW: Final = ("session", "number", "day", "started", "ended", *_KEY, *_AMOUNTS, "request_id")
LONGEST_BATCH_DAYS: Final = 31
"""Days after which no item of a batch runs again."""
_SUMS: Final = ", ".join(f"SUM({column})" for column in _AMOUNTS)


_MIGRATIONS: Final = (
    f"""CREATE TABLE ledger_rows (
        session BIGINT NOT NULL, number BIGINT NOT NULL, day BIGINT NOT NULL,
        started DOUBLE PRECISION NOT NULL, ended DOUBLE PRECISION NOT NULL,
        {", ".join(f"{column} TEXT NOT NULL" for column in _FIRST_KEY)},
        {", ".join(f"{column} BIGINT NOT NULL" for column in _FIRST_COUNTS)},
        {", ".join(f"{column} DOUBLE PRECISION NOT NULL" for column in _FIRST_TIMES)},
        PRIMARY KEY (session, number))""",
    "CREATE INDEX ledger_rows_ended ON ledger_rows (ended)",
    """CREATE TABLE ledger_times (
        session BIGINT NOT NULL, number BIGINT NOT NULL, day BIGINT NOT NULL, server TEXT NOT NULL,
        model TEXT NOT NULL, version TEXT NOT NULL, instance TEXT NOT NULL,
        since DOUBLE PRECISION NOT NULL, until DOUBLE PRECISION NOT NULL,
        idle_seconds DOUBLE PRECISION NOT NULL, used_seconds DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (session, number, day))""",
    "ALTER TABLE ledger_rows ADD COLUMN source TEXT NOT NULL DEFAULT 'server'",
    "ALTER TABLE ledger_rows ADD COLUMN pool TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE ledger_rows ADD COLUMN member TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE ledger_rows ADD COLUMN first_byte_seconds DOUBLE PRECISION NOT NULL DEFAULT 0",
    "ALTER TABLE ledger_rows ADD COLUMN attempts BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE ledger_rows ADD COLUMN request_id TEXT NOT NULL DEFAULT ''",
    "CREATE INDEX ledger_rows_request ON ledger_rows (request_id) WHERE request_id <> ''",
    """CREATE TABLE ledger_items (
        item TEXT PRIMARY KEY, session BIGINT NOT NULL, request_id TEXT NOT NULL, ended DOUBLE PRECISION NOT NULL)""",
    "CREATE INDEX ledger_items_ended ON ledger_items (ended)",
    """CREATE TABLE ledger_dead_rows (
        session BIGINT NOT NULL, number BIGINT NOT NULL, day BIGINT NOT NULL, busy_seconds DOUBLE PRECISION NOT NULL,
        content TEXT NOT NULL, PRIMARY KEY (session, number))""",
)


class LedgerSchema(NamedTuple):
    """Tables of the ledger."""

    migrations: Sequence[str] = _MIGRATIONS
    name: str = "ledger"


_ROWS_AT_ONCE: Final = 100
"""Rows of one statement: with one for each, the thread would ask for the interpreter's lock for each."""


def _insertion(rows: int) -> str:
    values = ", ".join([f"({', '.join('?' * len(_ROW))})"] * rows)
    replaced = ", ".join(f"{column} = excluded.{column}" for column in ("day", "ended", "ending", *_AMOUNTS))
    columns = ", ".join(_ROW)
    return f"INSERT INTO ledger_rows ({columns}) VALUES {values} ON CONFLICT (session, number) DO UPDATE SET {replaced}"


_INSERT_ROWS: Final = _insertion(_ROWS_AT_ONCE)
_INSERT_ROW: Final = _insertion(1)
_INSERT_TIME: Final = (
    "INSERT INTO ledger_times VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (session, number, day) "
    "DO UPDATE SET since = excluded.since, until = excluded.until, idle_seconds = excluded.idle_seconds, "
    "used_seconds = excluded.used_seconds"
)


def write_rows(transaction: Transaction, session: int, rows: Iterable[LedgerRow]) -> None:
    """Write rows; those that are there already are replaced.

    Of several attempts at an item of a batch, the one whose answer is written first is charged.
    """
    rows = list(rows)
    if any(row.request_id for row in rows):
        rows = charged_once(rows, _holders(transaction, session, rows))
    values = [_values(session, row) for row in rows]
    whole = len(values) - len(values) % _ROWS_AT_ONCE
    for start in range(0, whole, _ROWS_AT_ONCE):
        transaction.execute(_INSERT_ROWS, [*itertools.chain.from_iterable(values[start : start + _ROWS_AT_ONCE])])
    transaction.execute_many(_INSERT_ROW, values[whole:])


def write_times(transaction: Transaction, session: int, server: str, times: Iterable[InstanceTime]) -> None:
    """Write the times of instances; those that are there already are replaced."""
    transaction.execute_many(
        _INSERT_TIME,
        [
            (session, number, day, server, model, version, instance, since, until, idle_ns / 1e9, used_ns / 1e9)
            for number, model, version, instance, day, since, until, idle_ns, used_ns in times
        ],
    )


def _holders(transaction: Transaction, session: int, rows: Iterable[LedgerRow]) -> dict[str, str]:
    """Charge each item of a batch for its first answer, unless it is charged; return the attempts that are charged."""
    firsts: dict[str, LedgerRow] = {}
    for row in rows:
        if row.key.ending in ANSWERS and row.request_id and (item := row.item):
            firsts.setdefault(item, row)
    items = sorted(firsts)  # two servers that charge the same items do not wait for each other
    transaction.execute_many(
        "INSERT INTO ledger_items (item, session, request_id, ended) VALUES (?, ?, ?, ?) ON CONFLICT (item) DO NOTHING",
        [(item, session, firsts[item].request_id, firsts[item].ended) for item in items],
    )
    holders: dict[str, str] = {}
    for start in range(0, len(items), _ROWS_AT_ONCE):
        some = items[start : start + _ROWS_AT_ONCE]
        statement = f"SELECT item, session, request_id FROM ledger_items WHERE item IN ({', '.join('?' * len(some))})"
        holders |= {item: name if by == session else "" for item, by, name in transaction.rows(statement, some)}
    return holders


def _values(session: int, row: LedgerRow) -> tuple[object, ...]:
    number, started, ended, key, amounts, request_id = row
    times = [ns / 1e9 for ns in amounts[_TIMES_BEGIN:_TIMES_END]]
    return (
        session,
        number,
        int(ended // 86400),
        started,
        ended,
        *map(str, key),
        *amounts[:_TIMES_BEGIN],
        *times,
        amounts.attempts,
        request_id,
    )


class UsageSum(NamedTuple):
    """Sum of rows."""

    group: dict[str, Any]
    """By column: what the rows have in common."""
    amounts: Amounts


def sums(
    transaction: Transaction,
    start: float,
    end: float,
    group_by: Sequence[str] = (),
    where: dict[str, Sequence[str]] | None = None,
) -> list[UsageSum]:
    """Return sums of the rows that ended from ``start`` until before ``end`` (Unix times).

    ``group_by``: columns of ``GROUPS``. ``where``: values that columns may have. Of a request of which both a router
    and a server have a row, that of the server counts, unless one of them names ``source``; of attempts at an item of
    a batch, those that are repeated do not, unless one of them names ``ending``.
    """
    named = {*group_by, *(where or ())}
    assert named <= {*GROUPS}
    conditions, values = ["ended >= ?", "ended < ?"], [start, end]
    parameters: list[object] = [*values]
    for column, left_out in (("source", Source.COPY), ("ending", Ending.REPEATED)):
        if column not in named:
            conditions.append(f"{column} <> ?")
            parameters.append(str(left_out))
    if where is not None and not all(where.values()):
        return []
    for column, allowed in (where or {}).items():
        conditions.append(f"{column} IN ({', '.join('?' * len(allowed))})")
        parameters += allowed
    columns = "".join(f"{column}, " for column in group_by)
    grouped = f" GROUP BY {', '.join(group_by)} ORDER BY {', '.join(group_by)}" if group_by else ""
    found = transaction.rows(
        f"SELECT {columns}{_SUMS} FROM ledger_rows WHERE {' AND '.join(conditions)}{grouped}", parameters
    )
    return [
        UsageSum(dict(zip(group_by, row, strict=False)), _amounts(row[len(group_by) :]))
        for row in found
        if row[len(group_by)] is not None
    ]


def _amounts(columns: Sequence[Any]) -> Amounts:
    times = [round(seconds * 1e9) for seconds in columns[_TIMES_BEGIN:_TIMES_END]]
    return Amounts._make([*map(int, columns[:_TIMES_BEGIN]), *times, int(columns[_TIMES_END])])


def sum_up(transaction: Transaction, before_day: int, session: int) -> tuple[int, int]:
    """Replace rows of a day before ``before_day`` that have one key by their sum; return how many became how many.

    The sums become rows of ``session``, which must be new. Rows of running requests stay, because they are replaced.
    Which items of batches were charged is forgotten of those that cannot run again.
    """
    transaction.execute("DELETE FROM ledger_items WHERE ended < ?", [(before_day - LONGEST_BATCH_DAYS) * 86400])
    which = "FROM ledger_rows WHERE day < ? AND ending <> ?"
    parameters = [before_day, str(Ending.RUNNING)]
    keys = ", ".join(GROUPS)
    found = transaction.rows(
        f"SELECT {keys}, MIN(started), MAX(ended), {_SUMS} {which} GROUP BY {keys} ORDER BY {keys}", parameters
    )
    count = transaction.execute(f"DELETE {which}", parameters)
    sums_of = []
    for number, (day, *rest) in enumerate(found, 1):
        key, (started, ended), amounts = rest[: len(_KEY)], rest[len(_KEY) :][:2], rest[len(_KEY) + 2 :]
        counts = [int(amount) for amount in amounts[:_TIMES_BEGIN]]
        times = amounts[_TIMES_BEGIN:_TIMES_END]
        sums_of.append((session, number, day, started, ended, *key, *counts, *times, int(amounts[_TIMES_END]), ""))
    transaction.execute_many(_INSERT_ROW, sums_of)
    return count, len(found)


SET_ASIDE: Final = "(rows that were set aside)"
"""Stands for the model in the equation of rows that the database refuses."""


class Equation(NamedTuple):
    """Whether the rows of a model account for the time of its instances. In seconds."""

    model: str
    wall: float
    """From the load of each instance until its last known moment."""
    idle: float
    rows: float
    """Time of instances in rows."""
    cut_short: int = 0
    """Requests that were running when their server died."""

    @property
    def unaccounted(self) -> float:
        """Time that is neither idle nor in rows; negative if rows have more than there was."""
        return self.wall - self.idle - self.rows

    @property
    def share(self) -> float:
        """``unaccounted`` as a share of the wall time."""
        return self.unaccounted / self.wall if self.wall else 0.0


def equations(transaction: Transaction, first_day: int, end_day: int) -> list[Equation]:
    """Return the equation of each model for the UTC days from ``first_day`` until before ``end_day``."""
    days = [first_day, end_day]
    times = transaction.rows(
        "SELECT model, SUM(until - since), SUM(idle_seconds) FROM ledger_times WHERE day >= ? AND day < ? "
        "GROUP BY model ORDER BY model",
        days,
    )
    rows = dict(
        transaction.rows(
            "SELECT model, SUM(compute_seconds + prefill_seconds + decode_seconds) FROM ledger_rows "
            "WHERE day >= ? AND day < ? GROUP BY model",
            days,
        )
    )
    cut = dict(
        transaction.rows(
            "SELECT model, SUM(requests) FROM ledger_rows WHERE day >= ? AND day < ? AND ending = ? GROUP BY model",
            [*days, str(Ending.RUNNING)],
        )
    )
    found = [Equation(model, wall, idle, rows.get(model, 0.0), int(cut.get(model, 0))) for model, wall, idle in times]
    dead = transaction.row("SELECT SUM(busy_seconds) FROM ledger_dead_rows WHERE day >= ? AND day < ?", days)
    if dead and dead[0]:  # their models may be what the database refuses
        found.append(Equation(SET_ASIDE, 0.0, 0.0, dead[0]))
    return found
