"""The database of tables that outlive the server, in SQLite and in PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import sqlite3
from pathlib import Path
from typing import NamedTuple

import pytest

from nerite.core.errors import InvalidArgument, RefusedData, Unavailable
from nerite.storage.database import Database, Transaction, postgres_text, refuses_value, shown


class Notes(NamedTuple):
    """Tables of a test."""

    migrations: tuple[str, ...] = (
        "CREATE TABLE notes (number BIGINT PRIMARY KEY, text TEXT NOT NULL, data BLOB, seconds DOUBLE PRECISION)",
    )
    name: str = "notes"


LATER = Notes((*Notes().migrations, "ALTER TABLE notes ADD COLUMN author TEXT NOT NULL DEFAULT 'anon'"))
IDLE_TIMEOUT = "idle_in_transaction_session_timeout"
INSERT = "INSERT INTO notes (number, text, data, seconds) VALUES (?, ?, ?, ?)"


@pytest.fixture(params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "deep" / "er" / "notes.db")
    where = str(request.getfixturevalue("postgres"))
    database = Database(where, [])
    database.call(lambda transaction: transaction.execute("DROP TABLE IF EXISTS notes"))
    database.call(
        lambda transaction: transaction.execute("DELETE FROM schema_versions") if _has_versions(transaction) else 0
    )
    database.close()
    return where


def _has_versions(transaction: Transaction) -> bool:
    return transaction.row("SELECT 1 FROM pg_tables WHERE tablename = 'schema_versions'") is not None


def numbers(transaction: Transaction) -> list[int]:
    return [number for (number,) in transaction.rows("SELECT number FROM notes ORDER BY number")]


def test_rows_are_kept_for_the_next_who_opens_it(location: str) -> None:
    database = Database(location, [Notes()])
    with database.transaction() as transaction:
        assert transaction.execute(INSERT, [1, "50 % of ?", b"\0\xff", 1.5]) == 1
        transaction.execute_many(INSERT, ((number, "", None, 0.0) for number in (2, 3)))
    database.close()
    again = Database(location, [Notes()])
    first = "SELECT text, data, seconds FROM notes WHERE number = 1"
    assert again.call(lambda transaction: transaction.row(first)) == ("50 % of ?", b"\0\xff", 1.5)
    assert again.call(numbers) == [1, 2, 3]
    assert again.call(lambda transaction: transaction.row("SELECT number FROM notes WHERE number = ?", [4])) is None
    again.close()


def test_nothing_is_written_when_the_tables_are_there(tmp_path: Path) -> None:
    """A bill can be read when the disk is full."""
    path = str(tmp_path / "notes.db")
    Database(path, [Notes()]).close()
    with contextlib.closing(sqlite3.connect(path)) as other:
        (before,) = other.execute("PRAGMA data_version").fetchone()
        Database(path, [Notes()]).close()
        assert other.execute("PRAGMA data_version").fetchone() == (before,)
        Database(path, [LATER]).close()
        assert other.execute("PRAGMA data_version").fetchone() != (before,)


def test_a_transaction_takes_effect_as_a_whole_or_not_at_all(location: str) -> None:
    database = Database(location, [Notes()])
    with pytest.raises(ZeroDivisionError), database.transaction() as transaction:
        transaction.execute(INSERT, [1, "", None, 0.0])
        raise ZeroDivisionError
    with pytest.raises(RefusedData), database.transaction() as transaction:
        transaction.execute(INSERT, [2, "", None, 0.0])
        transaction.execute(INSERT, [2, "", None, 0.0])
    assert database.call(numbers) == []
    database.close()


REFUSED = [
    [2**70, "", None, 0.0],
    [2**63, "", None, 0.0],
    [1, "\ud800", None, 0.0],
    [1, None, None, 0.0],
    [1, object(), None, 0.0],
]


@pytest.mark.parametrize("row", REFUSED)
def test_values_that_can_never_be_stored_are_told_from_a_database_that_fails(location: str, row: list[object]) -> None:
    database = Database(location, [Notes()])
    try:
        with pytest.raises(RefusedData, match="refuses a value: "), database.transaction() as transaction:
            transaction.execute(INSERT, [2, "", None, 0.0])
            transaction.execute_many(INSERT, [row])
        database.call(lambda transaction: transaction.execute(INSERT, [3, "", None, 0.0]))
        assert database.call(numbers) == [3]
        for statement in ("SELECT nothing FROM notes", "no statement", "SELECT 1 FROM away"):
            with pytest.raises(Unavailable):
                database.call(lambda transaction, statement=statement: transaction.rows(statement))
        with pytest.raises(TypeError), database.transaction() as transaction:
            transaction.execute_many(INSERT, ([int([])] for _ in (1,)))  # type: ignore[call-overload]
    finally:
        database.close()


def test_a_savepoint_undoes_its_own_statements_alone(location: str) -> None:
    database = Database(location, [Notes()])
    with database.transaction() as transaction:
        transaction.execute(INSERT, [1, "", None, 0.0])
        with pytest.raises(RefusedData), transaction.savepoint():
            transaction.execute(INSERT, [2, "", None, 0.0])
            with transaction.savepoint():
                transaction.execute(INSERT, [2, "", None, 0.0])
        with transaction.savepoint():
            transaction.execute(INSERT, [3, "", None, 0.0])
    assert database.call(numbers) == [1, 3]
    with pytest.raises(Unavailable), database.transaction() as transaction, transaction.savepoint():
        transaction.rows("SELECT 1 FROM away")
    assert database.call(numbers) == [1, 3]
    database.close()


def test_postgres_refuses_nul_and_index_entries_that_are_too_large(postgres: str) -> None:
    database = Database(postgres, [])
    made = "CREATE TEMPORARY TABLE names (name TEXT PRIMARY KEY)"
    for name in ("a\0b", os.urandom(20_000).hex()):
        with pytest.raises(RefusedData, match="the database refuses a value: "), database.transaction() as transaction:
            transaction.execute(made)
            transaction.execute("INSERT INTO names VALUES (?)", [name])
    database.close()


def test_kinds_of_sqlite_errors() -> None:
    assert refuses_value(sqlite3, sqlite3.DataError("string or blob too big"))
    assert not refuses_value(sqlite3, sqlite3.ProgrammingError("Cannot operate on a closed database."))
    assert not refuses_value(sqlite3, sqlite3.OperationalError("disk I/O error"))


def test_errors_say_what_a_database_is_for_and_the_log_where_it_is(
    postgres: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nerite.storage")
    admin = Database(postgres, [])
    admin.call(lambda transaction: transaction.execute("CREATE ROLE guest LOGIN SUPERUSER"))
    guests = postgres.replace("nerite@", "guest@")
    database = Database(guests, [Notes()])
    pid = database.call(lambda transaction: transaction.row("SELECT pg_backend_pid()"))
    assert pid is not None
    admin.call(lambda transaction: transaction.execute("ALTER ROLE guest NOLOGIN"))
    admin.call(lambda transaction: transaction.rows("SELECT pg_terminate_backend(?)", pid))
    for _ in range(3):
        with pytest.raises(Unavailable) as failed:
            database.call(lambda transaction: transaction.rows("SELECT 1"))
        assert failed.value.message == "the database of the notes does not answer; see the server's log"
    admin.call(lambda transaction: transaction.execute("ALTER ROLE guest LOGIN"))
    assert database.call(lambda transaction: transaction.rows("SELECT 1")) == [(1,)]
    lost, closed = caplog.messages  # once each, however often it is tried
    assert lost.startswith(f"the database {guests} failed: ")
    assert closed.startswith(f"cannot connect to the database {guests}: ")
    database.close()
    admin.close()


def test_work_from_the_loop_is_carried_out_in_its_order(location: str) -> None:
    async def main() -> None:
        database = Database(location, [Notes()])
        last = "SELECT COALESCE(MAX(number), 0) FROM notes"

        def append(transaction: Transaction) -> int:
            found = transaction.row(last)
            assert found is not None
            transaction.execute(INSERT, [found[0] + 1, "", None, 0.0])
            return int(found[0])

        assert await asyncio.gather(*(database.run(append) for _ in range(50))) == list(range(50))
        database.close()

    asyncio.run(main())


def test_tables_of_an_earlier_release_are_brought_up_to_date(location: str) -> None:
    first = Database(location, [Notes()])
    first.call(lambda transaction: transaction.execute(INSERT, [1, "", None, 0.0]))
    first.close()
    later = Database(location, [LATER])
    assert later.call(lambda transaction: transaction.rows("SELECT number, author FROM notes")) == [(1, "anon")]
    later.close()
    with pytest.raises(InvalidArgument, match=r"are of a later release \(version 2, known are 1\)"):
        Database(location, [Notes()])


def test_a_connection_that_was_lost_is_opened_again(postgres: str) -> None:
    database, other = Database(postgres, []), Database(postgres, [])
    (pid,) = database.call(lambda transaction: transaction.row("SELECT pg_backend_pid()")) or (0,)
    other.call(lambda transaction: transaction.rows("SELECT pg_terminate_backend(?)", [pid]))
    with pytest.raises(Unavailable):
        database.call(lambda transaction: transaction.rows("SELECT 1"))
    assert database.call(lambda transaction: transaction.rows("SELECT 1")) == [(1,)]
    database.close()
    other.close()


def test_a_program_that_stands_still_within_a_transaction_holds_up_no_other(postgres: str) -> None:
    def setting(database: Database) -> object:
        return database.call(lambda transaction: transaction.row(f"SHOW {IDLE_TIMEOUT}"))

    other = Database(postgres, [])
    assert setting(other) == ("10s",)
    stopped = Database(f"{postgres}&options=-c%20{IDLE_TIMEOUT}%3D200ms", [])
    assert setting(stopped) == ("200ms",), "what the location says counts"
    with pytest.raises(Unavailable), stopped.transaction() as transaction:
        transaction.rows("SELECT pg_advisory_xact_lock(1)")
        other.call(lambda transaction: transaction.rows("SELECT pg_advisory_xact_lock(1)"))
    assert setting(stopped) == ("200ms",), "it goes on with a new connection"
    stopped.close()
    other.close()


def _insert_and_die(location: str) -> None:
    database = Database(location, [Notes()])
    for number in range(10):
        database.call(lambda transaction, number=number: transaction.execute(INSERT, [number, "", None, 0.0]))
    with database.transaction() as transaction:
        transaction.execute(INSERT, [10, "", None, 0.0])
        os._exit(0)


def test_what_was_committed_outlives_a_process_that_dies(tmp_path: Path) -> None:
    location = str(tmp_path / "notes.db")
    process = multiprocessing.get_context("spawn").Process(target=_insert_and_die, args=(location,))
    process.start()
    process.join()
    database = Database(location, [Notes()])
    assert database.call(numbers) == list(range(10))
    database.close()


def test_a_location_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but a text that is long enough to be looked at")
    with pytest.raises(InvalidArgument, match=r"cannot open the database .*text': file is not a database"):
        Database(str(tmp_path / "text"), [])
    with pytest.raises(
        InvalidArgument, match="'mysql://me@host/db' is no database: a path, sqlite:///PATH or postgres"
    ):
        Database("mysql://me:secret@host/db", [])
    with pytest.raises(Unavailable, match="cannot connect to the database postgresql://me@localhost:1/db: ") as refused:
        Database("postgresql://me:secret@localhost:1/db", [])
    assert "secret" not in str(refused.value)


def test_statements_are_the_same_for_both() -> None:
    assert postgres_text("CREATE TABLE a (b BLOB); SELECT '5 %' WHERE b = ?") == (
        "CREATE TABLE a (b BYTEA); SELECT '5 %%' WHERE b = %s"
    )
    assert shown("postgresql://me:secret@host/db") == "postgresql://me@host/db"
    assert shown("postgresql:///db?password=secret&host=h") == "postgresql:///db?password=...&host=h"
    assert sqlite3.sqlite_version_info >= (3, 24), "of upserts"
