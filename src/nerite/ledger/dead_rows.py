"""Rows that the database refuses: found among the others, kept as JSON, and written again when an operator asks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from nerite.core.errors import NeriteError, RefusedData
from nerite.ledger.row import SECOND, Amounts, LedgerRow, RowKey
from nerite.ledger.tables import write_rows
from nerite.storage.database import Transaction

_T = TypeVar("_T")
_INSERT: Final = (
    "INSERT INTO ledger_dead_rows (session, number, day, busy_seconds, content) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (session, number) DO UPDATE SET day = excluded.day, busy_seconds = excluded.busy_seconds, "
    "content = excluded.content"
)


class Refused(NamedTuple):
    """What cannot be written, although everything else can."""

    entry: Any
    error: Exception


class DeadRow(NamedTuple):
    """A row that was set aside."""

    session: int
    row: LedgerRow
    reason: str
    """What the database, or its driver, has said."""


def write_apart(
    transaction: Transaction, entries: Sequence[_T], write: Callable[[Transaction, Sequence[_T]], object]
) -> list[Refused]:
    """Write entries together if possible; return those that are refused alone, and write all others.

    A database that fails is no refusal: its error is raised, and the transaction must end.
    """
    if not entries:
        return []
    try:
        with transaction.savepoint():
            write(transaction, entries)
        return []
    except Exception as error:
        if isinstance(error, NeriteError) and not isinstance(error, RefusedData):
            raise
        if len(entries) == 1:
            return [Refused(entries[0], error)]
    middle = len(entries) // 2
    return [
        *write_apart(transaction, entries[:middle], write),
        *write_apart(transaction, entries[middle:], write),
    ]


def row_json(row: LedgerRow, reason: str) -> str:
    """Return a row as ASCII text, which every database takes."""
    started, ended, request_id = row.started, row.ended, row.request_id
    key, amounts = row.key._asdict(), row.amounts._asdict()
    content = {"reason": reason, "started": started, "ended": ended, "request_id": request_id} | key | amounts
    return json.dumps(content, default=repr)


def set_aside(transaction: Transaction, session: int, refused: Sequence[Refused]) -> list[Refused]:
    """Keep rows that were refused; return those that cannot be kept either."""
    day = int(transaction.now() // 86400)

    def keep(transaction: Transaction, some: Sequence[Refused]) -> None:
        transaction.execute_many(
            _INSERT,
            [
                (session, row.number, day, row.amounts.busy_ns / SECOND, row_json(row, str(error)))
                for row, error in some
            ],
        )

    return [each.entry for each in write_apart(transaction, refused, keep)]


def dead_rows(transaction: Transaction) -> list[DeadRow]:
    """Return all rows that were set aside, in the order of their sessions and numbers."""
    found = transaction.rows("SELECT session, number, content FROM ledger_dead_rows ORDER BY session, number")
    return [_read(session, number, json.loads(content)) for session, number, content in found]


def _read(session: int, number: int, content: dict[str, Any]) -> DeadRow:
    def part(fields: Sequence[str]) -> dict[str, Any]:
        return {name: content[name] for name in fields if name in content}

    row = LedgerRow(
        number,
        content["started"],
        content["ended"],
        RowKey(**part(RowKey._fields)),
        Amounts(**part(Amounts._fields)),
        content["request_id"],
    )
    return DeadRow(session, row, content["reason"])


def count_dead_rows(transaction: Transaction) -> int:
    """Return how many rows were set aside."""
    found = transaction.row("SELECT COUNT(*) FROM ledger_dead_rows")
    return int(found[0]) if found else 0


def write_again(transaction: Transaction) -> tuple[int, int]:
    """Write the rows that were set aside; return how many were written, and how many are refused again.

    Each is written as it is, or else with a replacement character for each character of a name that cannot be printed.
    """
    written = left = 0
    for session, row, _ in dead_rows(transaction):
        if all(_is_refused(transaction, session, version) for version in (row, _printable(row))):
            left += 1
            continue
        transaction.execute("DELETE FROM ledger_dead_rows WHERE session = ? AND number = ?", [session, row.number])
        written += 1
    return written, left


def _is_refused(transaction: Transaction, session: int, row: LedgerRow) -> bool:
    def write(transaction: Transaction, rows: Sequence[LedgerRow]) -> None:
        write_rows(transaction, session, rows)

    return bool(write_apart(transaction, [row], write))


def _printable(row: LedgerRow) -> LedgerRow:
    key = RowKey._make(map(_printable_text, row.key))
    return row._replace(key=key, request_id=_printable_text(row.request_id))


def _printable_text(text: str) -> str:
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
