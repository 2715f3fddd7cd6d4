"""The last records of the log, in memory, for the console."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, Final, NamedTuple

from nerite.core.text import cut, render_table
from nerite.observability.log_records import LogLevel, LogRecord

RECORDS: Final = 1000
"""Records that are kept of errors and warnings, and as many of all others."""
_BYTES: Final = 1 << 20
"""Characters of them, of each kind."""
_LONGEST: Final = 16 * 1024
"""Characters of one record that are kept."""

LEVELS: Final = {
    "error": (LogLevel.ERROR,),
    "warning": (LogLevel.ERROR, LogLevel.WARNING),
    "info": (LogLevel.ERROR, LogLevel.WARNING, LogLevel.INFO),
    "verbose": tuple(LogLevel),
}
"""Levels by the least severe of them."""
_SEVERE: Final = frozenset(LEVELS["warning"])
_EXTRAS: Final = ("model", "instance", "request_id")


class RecentRecord(NamedTuple):
    """A record that is kept."""

    number: int
    """Counts all records since the start."""
    record: LogRecord
    text: str

    def concerns(self, model: str, instances: Collection[str]) -> bool:
        """Return whether the record is about a model, whose ``instances`` are running.

        Either it says so, or it comes from an instance, or its text has the name of the model in quotes.
        """
        extras = self.record.extras
        if extras.get("model") == model:
            return True
        name, instance = re.escape(model), str(extras.get("instance", ""))
        if instance in instances or re.fullmatch(rf"{name}((_\d+)+|_auto_complete)", instance):
            return True
        return bool(re.search(rf"(['\"]){name}\1|\b{name}:\d+\b", self.text))

    def to_json(self) -> dict[str, Any]:
        """Return the record as an object."""
        record = self.record
        told = {name: _unicode(str(record.extras[name])) for name in _EXTRAS if record.extras.get(name)}
        return {
            "number": self.number,
            "time": record.time_ns / 1e9,
            "level": record.level.name.lower(),
            "message": _unicode(self.text),
            "source": f"{record.file}:{record.line}",
            "pid": record.pid,
            **told,
        }


def _unicode(text: str) -> str:
    """Return text that UTF-8 can encode: what a model prints may contain surrogates."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


class _Shelf:
    """The last records of some levels."""

    def __init__(self, most: int) -> None:
        self.records: deque[RecentRecord] = deque()
        self._most = most
        self._size = 0

    def add(self, recent: RecentRecord) -> None:
        self.records.append(recent)
        self._size += len(recent.text)
        while len(self.records) > self._most or self._size > _BYTES:
            self._size -= len(self.records.popleft().text)


class RecentLog:
    """Keeps the last records. Errors and warnings have room of their own, which no number of others takes.

    Thread-safe.
    """

    def __init__(self, most: int = RECORDS) -> None:
        self._lock = threading.Lock()
        self._severe, self._others = _Shelf(most), _Shelf(most)
        self._count = 0

    def add(self, record: LogRecord) -> None:
        """Keep a record; drop the oldest if there are too many."""
        text = cut(record.message, _LONGEST)
        if record.table is not None:
            text = cut(f"{text}\n{render_table(record.table.headings, record.table.rows)}".strip("\n"), _LONGEST)
        # Without the table and the message, which may be longer.
        kept = record._replace(message="", table=None)
        with self._lock:
            self._count += 1
            shelf = self._severe if record.level in _SEVERE else self._others
            shelf.add(RecentRecord(self._count, kept, text))

    def read(
        self, level: str = "verbose", after: int = 0, model: str = "", instances: Collection[str] = ()
    ) -> tuple[int, Iterator[RecentRecord]]:
        """Return how many records there were since the start, and those kept, oldest first.

        ``level`` is the least severe; ``after`` is the number of the last record that is known already. With a
        ``model``, only those that concern it.
        """
        with self._lock:
            count = self._count
            kept = [*self._severe.records, *self._others.records]
        levels = LEVELS[level]
        chosen = sorted(each for each in kept if each.number > after and each.record.level in levels)
        return count, (each for each in chosen if not model or each.concerns(model, instances))
