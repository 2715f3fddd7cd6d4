"""One database: SQLite by default, or PostgreSQL. Statements run in a thread of their own, never on the event loop.

Statements are written once for both: parameters are ``?``, upserts ``ON CONFLICT``, and types ``TEXT``, ``BIGINT``,
``DOUBLE PRECISION`` and ``BLOB``, which PostgreSQL calls ``BYTEA``. What a transaction has committed outlives a crash
of the process, of the machine, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

from nerite.core.errors import InvalidArgument, NeriteError, RefusedData, Unavailable

_T = TypeVar("_T")
_log = logging.getLogger("nerite.storage")
_BUSY_SECONDS: Final = 30.0
"""How long a statement waits for another process that writes."""
_PATIENCE: Final = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""How PostgreSQL's client notices that a host has vanished without a word, unless the location says otherwise."""
_IDLE_TIMEOUT: Final = "idle_in_transaction_session_timeout"
"""PostgreSQL's setting after which it ends the session of a program that stands still within a transaction."""
_IDLE_SECONDS: Final = 10
"""Value of that setting unless the location has another: a program that is suspended holds its locks no longer."""
_SAME_SECONDS: Final = 60.0
"""Time after which a failure of the database is logged again."""
_MIGRATION_LOCK: Final = 0x4E657269
"""Number of PostgreSQL's lock under which one server at a time creates tables."""
_BINDING_ERRORS: Final = (OverflowError, TypeError, ValueError)
"""What drivers raise for a parameter before it reaches the database; ``UnicodeEncodeError`` is a ``ValueError``."""
_UNKNOWN_TYPES: Final = ("Error binding parameter", "cannot adapt type")
"""How the drivers' ``ProgrammingError`` about a parameter begins; others are about statements and connections."""
_TOO_LARGE: Final = "54000"
"""PostgreSQL's code for a value that exceeds what an index or a row can hold."""
_VERSIONS: Final = "CREATE TABLE IF NOT EXISTS schema_versions (name TEXT PRIMARY KEY, version BIGINT NOT NULL)"


class Schema(Protocol):
    """Tables of one purpose. A later release appends to ``migrations`` and never changes what is there."""

    @property
    def name(self) -> str:
        """Name of the purpose."""

    @property
    def migrations(self) -> Sequence[str]:
        """Statements that lead from an empty database to the present tables, in order."""


class Transaction:
    """Statements that take effect together, or not at all."""

    def __init__(
        self, connection: Any, driver: Any, error_of: Callable[[Exception], NeriteError], *, numbered: bool
    ) -> None:
        """``error_of`` returns the error for one of the driver; ``numbered``: the connection is one of PostgreSQL."""
        self._connection = connection
        self._errors: Final = (driver.Error, *_BINDING_ERRORS)
        self._error_of = error_of
        self._numbered = numbered

    def execute(self, statement: str, parameters: Sequence[object] = ()) -> int:
        """Execute a statement; return how many rows it has changed."""
        with self._cursor() as cursor:
            cursor.execute(self._text(statement), parameters)
            return int(cursor.rowcount)

    def execute_many(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Execute a statement once for each row of parameters."""
        rows = [*rows]  # what makes the rows may raise the same errors as the driver
        with self._cursor() as cursor:
            cursor.executemany(self._text(statement), rows)

    def rows(self, statement: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self._cursor() as cursor:
            cursor.execute(self._text(statement), parameters)
            found: list[tuple[Any, ...]] = cursor.fetchall()
            return found

    def row(self, statement: str, parameters: Sequence[object] = ()) -> tuple[Any, ...] | None:
        """Return the first row of a query; None if there is none."""
        found = self.rows(statement, parameters)
        return found[0] if found else None

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo the statements within, and only those, if anything raises: the transaction may go on then."""
        self.execute("SAVEPOINT part")
        try:
            yield
        except Unavailable:  # the transaction is over
            raise
        except BaseException:
            self.execute("ROLLBACK TO SAVEPOINT part")
            self.execute("RELEASE SAVEPOINT part")
            raise
        self.execute("RELEASE SAVEPOINT part")

    def now(self) -> float:
        """Return the Unix time of the database, which is the same for all programs that use it."""
        if not self._numbered:  # a file, which programs on one machine use
            return time.time()
        found = self.row("SELECT EXTRACT(EPOCH FROM clock_timestamp())")
        assert found is not None
        return float(found[0])

    @contextlib.contextmanager
    def _cursor(self) -> Iterator[Any]:
        with contextlib.closing(self._connection.cursor()) as cursor:
            try:
                yield cursor
            except self._errors as error:
                raise self._error_of(error) from error

    def _text(self, statement: str) -> str:
        return postgres_text(statement) if self._numbered else statement


def postgres_text(statement: str) -> str:
    """Return a statement as psycopg takes it. Values are always parameters, so a text has no ``?`` of its own."""
    return re.sub(r"\bBLOB\b", "BYTEA", statement.replace("%", "%%").replace("?", "%s"))


class Database:
    """A database. ``run`` is for the event loop, ``transaction`` for programs that may block."""

    def __init__(self, location: str, schemas: Sequence[Schema]) -> None:
        """Open ``location``: a path, ``sqlite:///PATH`` or ``postgresql://USER@HOST/NAME``; create what is missing.

        Raises ``InvalidArgument`` for a location that cannot be used, ``Unavailable`` for one that does not answer.
        """
        self.location = shown(location)
        self._about = " and ".join(f"the database of the {schema.name}" for schema in schemas) or "the database"
        self._lock = threading.Lock()
        self._postgres = urlsplit(location).scheme in ("postgresql", "postgres")
        self._open = partial(_open_postgres if self._postgres else _open_sqlite, location)
        self._connection, self._driver = self._open()
        self._opened = False
        self._said: dict[str, float] = {}
        """When each failure was logged last: work that succeeds beside does not end those of other work."""
        self._thread = ThreadPoolExecutor(1, "database")
        try:
            with self.transaction() as transaction:
                for schema in schemas:
                    self._migrate(transaction, schema)
        except BaseException:
            self.close()
            raise
        self._opened = True

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Give statements that are committed together at the end, or undone if anything raises.

        Raises ``RefusedData`` for values that the database refuses whenever they are written, and ``Unavailable`` for
        anything else that it says. Once it is open, errors say what the database is for, and the log where it is.
        """
        with self._lock:
            if self._postgres and self._connection.closed:
                self._open_again()
            try:
                if not self._postgres:
                    self._connection.execute("BEGIN IMMEDIATE")
                yield Transaction(self._connection, self._driver, self._error_of, numbered=self._postgres)
                self._connection.commit()
            except self._driver.Error as error:
                self._undo()
                raise self._error_of(error) from error
            except BaseException:
                self._undo()
                raise

    def _open_again(self) -> None:
        try:
            self._connection, self._driver = self._open()
        except NeriteError as error:
            raise self._failed(error.message) from error

    def _error_of(self, error: Exception) -> NeriteError:
        if refuses_value(self._driver, error):
            return RefusedData(f"{self._about} refuses a value: {_line(error)}")
        return self._failed(f"the database {self.location} failed: {_line(error)}")

    def _failed(self, text: str) -> Unavailable:
        """Return the error for a database that fails; ``text`` is for the operator alone."""
        if not self._opened:
            return Unavailable(text)
        now = time.monotonic()
        if now - self._said.get(text, -math.inf) >= _SAME_SECONDS:
            self._said = {other: at for other, at in self._said.items() if now - at < _SAME_SECONDS}
            self._said[text] = now
            _log.error("%s", text)
        return Unavailable(f"{self._about} does not answer; see the server's log")

    def _undo(self) -> None:
        with contextlib.suppress(self._driver.Error):
            self._connection.rollback()

    async def run(self, work: Callable[[Transaction], _T]) -> _T:
        """Run ``work`` in a transaction, in the database's thread; calls are carried out in their order."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.call, work)

    def call(self, work: Callable[[Transaction], _T]) -> _T:
        """Run ``work`` in a transaction, in this thread."""
        with self.transaction() as transaction:
            return work(transaction)

    def close(self) -> None:
        """Finish what was begun, and close."""
        self._thread.shutdown()
        with self._lock:
            self._connection.close()

    def _migrate(self, transaction: Transaction, schema: Schema) -> None:
        if self._postgres:
            transaction.execute("SELECT pg_advisory_xact_lock(?)", [_MIGRATION_LOCK])
        transaction.execute(_VERSIONS)
        found = transaction.row("SELECT version FROM schema_versions WHERE name = ?", [schema.name])
        version = int(found[0]) if found else 0
        if version > len(schema.migrations):
            raise InvalidArgument(
                f"the tables '{schema.name}' of the database {self.location} are of a later release "
                f"(version {version}, known are {len(schema.migrations)}): use that release, or another database"
            )
        if version == len(schema.migrations):
            return  # nothing is written, so that a full disk can still be read
        for statement in schema.migrations[version:]:
            transaction.execute(statement)
        transaction.execute(
            "INSERT INTO schema_versions VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET version = excluded.version",
            [schema.name, len(schema.migrations)],
        )


def shown(location: str) -> str:
    """Return a location without its passwords."""
    return re.sub(r"(?<=password=)[^&]*", "...", re.sub(r"(?<=://)([^:/@]*):[^@/]*@", r"\1@", location))


def refuses_value(driver: Any, error: Exception) -> bool:
    """Return whether a driver's error is about a value, and not about the database, the connection or a statement."""
    return (
        isinstance(error, (*_BINDING_ERRORS, driver.DataError, driver.IntegrityError))
        or getattr(error, "sqlstate", None) == _TOO_LARGE
        or (isinstance(error, driver.ProgrammingError) and str(error).startswith(_UNKNOWN_TYPES))
    )


def _open_sqlite(location: str) -> tuple[Any, Any]:
    """Return a connection and the module of its driver, whose errors have the names of DB-API 2.0."""
    path = location.removeprefix("sqlite:///") if location.startswith("sqlite:") else location
    if "://" in path:
        raise InvalidArgument(
            f"'{shown(location)}' is no database: a path, sqlite:///PATH or postgresql://USER@HOST/NAME"
        )
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")  # readers do not wait for the writer
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    except (OSError, sqlite3.Error) as error:
        raise InvalidArgument(f"cannot open the database '{path}': {_line(error)}") from error
    return connection, sqlite3


def _open_postgres(location: str) -> tuple[Any, Any]:
    try:
        import psycopg
    except ImportError:
        raise InvalidArgument(f"the database {shown(location)} needs psycopg: pip install 'nerite[postgres]'") from None
    try:
        given = psycopg.conninfo.conninfo_to_dict(location)
        settings: dict[str, Any] = {name: value for name, value in _PATIENCE.items() if name not in given}
        connection = psycopg.connect(location, **settings)
        if _IDLE_TIMEOUT not in str(given.get("options")):
            connection.execute(f"SET {_IDLE_TIMEOUT} = '{_IDLE_SECONDS}s'")
            connection.commit()
        return connection, psycopg
    except psycopg.Error as error:
        raise Unavailable(f"cannot connect to the database {shown(location)}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
