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

from nerite.core.errors import InvalidArgument, RefusedData, Unavailable

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
_SAME_SECONDS: Final = 60.0
"""Time after which a problem of the database is logged again."""
_MIGRATION_LOCK: Final = 0x4E657269
"""Number of PostgreSQL's lock under which one server at a time creates tables."""
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

    def __init__(self, connection: Any, *, numbered: bool) -> None:
        """``numbered``: the connection is one of PostgreSQL."""
        self._connection = connection
        self._numbered = numbered

    def execute(self, statement: str, parameters: Sequence[object] = ()) -> int:
        """Execute a statement; return how many rows it has changed."""
        with contextlib.closing(self._connection.cursor()) as cursor:
            cursor.execute(self._text(statement), parameters)
            return int(cursor.rowcount)

    def execute_many(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Execute a statement once for each row of parameters."""
        with contextlib.closing(self._connection.cursor()) as cursor:
            cursor.executemany(self._text(statement), rows)

    def rows(self, statement: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with contextlib.closing(self._connection.cursor()) as cursor:
            cursor.execute(self._text(statement), parameters)
            found: list[tuple[Any, ...]] = cursor.fetchall()
            return found

    def row(self, statement: str, parameters: Sequence[object] = ()) -> tuple[Any, ...] | None:
        """Return the first row of a query; None if there is none."""
        found = self.rows(statement, parameters)
        return found[0] if found else None

    def now(self) -> float:
        """Return the Unix time of the database, which is the same for all programs that use it."""
        if not self._numbered:  # a file, which programs on one machine use
            return time.time()
        found = self.row("SELECT EXTRACT(EPOCH FROM clock_timestamp())")
        assert found is not None
        return float(found[0])

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
        self._purpose = " and ".join(schema.name for schema in schemas)
        self._lock = threading.Lock()
        self._said: dict[str, float] = {}
        """When each problem was logged last."""
        self._postgres = urlsplit(location).scheme in ("postgresql", "postgres")
        self._open = partial(_open_postgres if self._postgres else _open_sqlite, location)
        self._connection, self._errors = self._open()
        self._thread = ThreadPoolExecutor(1, "database")
        self._schemas = schemas
        try:
            with self.transaction() as transaction:
                for schema in schemas:
                    self._migrate(transaction, schema)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Give statements that are committed together at the end, or undone if anything raises.

        Raises ``RefusedData`` for values that the database cannot store, and ``Unavailable`` for anything else that it
        says. Their messages go to clients, so what it said is in the log only: it may name hosts and users.
        """
        with self._lock:
            if self._postgres and self._connection.closed:
                self._connection, self._errors = self._open()
            try:
                if not self._postgres:
                    self._connection.execute("BEGIN IMMEDIATE")
                yield Transaction(self._connection, numbered=self._postgres)
                self._connection.commit()
            except self._errors as error:
                self._undo()
                self._say(_line(error))
                text = f"the database of the {self._purpose} failed: see the server's log"
                raise (RefusedData if _is_refusal(error) else Unavailable)(text) from error
            except (OverflowError, UnicodeEncodeError) as error:  # of parameters, before the database sees them
                self._undo()
                raise RefusedData(f"the database of the {self._purpose} refuses a value: {error}") from error
            except BaseException:
                self._undo()
                raise

    def _say(self, problem: str) -> None:
        """Log what the database says, and the same again after a while only."""
        now = time.monotonic()
        if now - self._said.get(problem, -math.inf) >= _SAME_SECONDS:
            self._said = {text: at for text, at in self._said.items() if now - at < _SAME_SECONDS}
            self._said[problem] = now
            _log.error("the database %s failed: %s", self.location, problem)

    def _undo(self) -> None:
        with contextlib.suppress(*self._errors):
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
    """Return a location without its password."""
    return re.sub(r"(?<=://)([^:/@]*):[^@/]*@", r"\1@", location)


def _open_sqlite(location: str) -> tuple[Any, tuple[type[Exception], ...]]:
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
    return connection, (sqlite3.Error,)


def _open_postgres(location: str) -> tuple[Any, tuple[type[Exception], ...]]:
    try:
        import psycopg
    except ImportError:
        raise InvalidArgument(f"the database {shown(location)} needs psycopg: pip install 'nerite[postgres]'") from None
    try:
        given = psycopg.conninfo.conninfo_to_dict(location)
        settings: dict[str, Any] = {name: value for name, value in _PATIENCE.items() if name not in given}
        return psycopg.connect(location, **settings), (psycopg.Error,)
    except psycopg.Error as error:
        raise Unavailable(f"cannot connect to the database {shown(location)}: {_line(error)}") from error


def _is_refusal(error: Exception) -> bool:
    """Return whether an error of SQLite or PostgreSQL is about the values of a statement, whenever it is executed."""
    names = {each.__name__ for each in type(error).__mro__}
    if names & {"DataError", "IntegrityError"}:
        return True
    # Types of parameters that cannot be bound. PostgreSQL's own errors of this class are subclasses: a missing table.
    return type(error).__name__ in ("InterfaceError", "ProgrammingError") and (
        "binding parameter" in str(error) or "cannot adapt type" in str(error)
    )


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
