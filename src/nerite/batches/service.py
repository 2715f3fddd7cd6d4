"""Files and batches as the API calls them: every call is checked, done in the database, and told to the runner."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import BinaryIO, Final, NamedTuple

from nerite.batches.file_directory import FileDirectory
from nerite.batches.items import InvalidItems, is_endpoint, read_items
from nerite.batches.records import BatchRecord, BatchSchema, BatchStatus, FileRecord
from nerite.batches.runner import SET_ASIDE, BatchRunner, new_file_id
from nerite.batches.running_batch import ItemExecutor
from nerite.batches.store import BatchLease, BatchStore, PageRequest
from nerite.core.errors import InvalidArgument
from nerite.core.item_attempt import new_batch_id
from nerite.core.tensor import Buffer
from nerite.core.work_loop import WorkLoop
from nerite.storage.database import Database, shown

MAX_METADATA: Final = 16
_MAX_KEY: Final = 64
_MAX_TEXT: Final = 512
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,6})(s|m|h|d)")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST: Final = 30 * 86400


class BatchLimits(NamedTuple):
    """Limits of batches on a server."""

    concurrency: int = 64
    """Maximum number of items under way."""
    storage_bytes: int = 10 << 30
    """Maximum bytes of all files that were uploaded."""
    lease_seconds: float = 15.0
    """Time after which others that share the database run the batches of a server that has failed."""


class NewBatch(NamedTuple):
    """What a client says about a batch that it creates."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Mapping[str, str]
    output_seconds: float | None = None
    """Seconds after which the output files expire."""


def window_seconds(text: str) -> int:
    """Return the seconds of a completion window such as ``30m`` or ``24h``. Raises ``InvalidArgument``."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST:
        raise InvalidArgument(
            f"Invalid value for 'completion_window': it must be a duration such as 30m or 24h, of at most "
            f"{_LONGEST // 86400} days."
        )
    return seconds


def default_directory(location: str) -> str:
    """Return the directory of the files beside a database; empty if that is not a file."""
    path = location.removeprefix("sqlite:///") if location.startswith("sqlite:") else location
    return "" if "://" in path else f"{path}.files"


class Batches:
    """All files and batches of a server, or of several that share a database of PostgreSQL and the directory."""

    def __init__(
        self,
        location: str,
        directory: str,
        executor: ItemExecutor,
        limits: BatchLimits,
        weight_of: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        """Open the database and the directory, by default beside the database. Blocks. Raises ``NeriteError``."""
        self._limits = limits
        beside = default_directory(location)
        shared = not beside
        directory = directory or beside
        if not directory:
            raise InvalidArgument(
                f"the database {shown(location)} is on another machine: say where the files are, with --batch-files=DIR"
            )
        self.files = FileDirectory(directory, shared=shared)
        try:
            self._database = Database(location, [BatchSchema()])
        except BaseException:
            self.files.close()
            raise
        lease = BatchLease(secrets.token_hex(8), limits.lease_seconds, sole=not shared)
        self._store = BatchStore(self._database, lease)
        self.files.remove_others(self._store.file_names())
        seconds = limits.lease_seconds if shared else math.inf
        self.runner = BatchRunner(self._store, self.files, executor, limits.concurrency, weight_of, seconds)

    @property
    def loop(self) -> WorkLoop:
        """Progress and dead letters of the batches."""
        return self.runner.loop

    async def run(self) -> None:
        """Run batches until cancelled."""
        await self.runner.run()

    async def close(self) -> None:
        """Commit what has come, and close. Call ``stop`` of the runner before."""
        await self.runner.close()
        self._database.close()
        self.files.close()

    # Files

    async def upload(
        self, tenant: str, name: str, purpose: str, content: Buffer, expires_seconds: float | None = None
    ) -> FileRecord:
        """Store a file. Raises ``InvalidItems`` with the line of the first mistake in the input of a batch."""
        now = time.time()
        until = None if expires_seconds is None else now + expires_seconds
        record = FileRecord(new_file_id(), tenant, name, purpose, len(content), now, until)
        await self._store.check_room(record, self._limits.storage_bytes)
        await asyncio.to_thread(self.files.write, record.id, content)
        try:
            if purpose == "batch":
                items = await asyncio.to_thread(self._count_items, record.id)
                record = replace(record, items=items)
            await self._store.add_file(record, self._limits.storage_bytes)
        except BaseException:
            await asyncio.to_thread(self.files.remove, [record.id])
            raise
        return record

    def _count_items(self, name: str) -> int:
        """Return the number of items in a file. Raises ``InvalidItems``."""
        with self.files.open(name) as file:
            found = read_items(file)
        if found.mistakes:
            raise InvalidItems(found.mistakes[0])
        return len(found.items)

    async def file(self, tenant: str, name: str) -> FileRecord:
        """Return a file. Raises ``NotFound``."""
        return await self._store.file(tenant, name)

    async def list_files(self, tenant: str, listing: PageRequest) -> tuple[list[FileRecord], bool]:
        """Return a page of files, and whether there are more."""
        return await self._store.files(tenant, listing)

    async def open_file(self, tenant: str, name: str) -> tuple[FileRecord, BinaryIO]:
        """Return a file and its content. Raises ``NotFound``."""
        record = await self._store.file(tenant, name)
        return record, await asyncio.to_thread(self.files.open, name)

    async def delete_file(self, tenant: str, name: str) -> None:
        """Delete a file. Raises ``NotFound``, and ``Conflict`` while a batch reads it."""
        await self._store.remove_file(tenant, name)
        await asyncio.to_thread(self.files.remove, [name])

    # Batches

    async def create(self, tenant: str, new: NewBatch) -> BatchRecord:
        """Create a batch. Raises ``NeriteError``."""
        seconds = window_seconds(new.completion_window)
        if not is_endpoint(new.endpoint):
            raise InvalidArgument(
                "Invalid value for 'endpoint': it must be /v1/chat/completions, /v1/completions, /v1/embeddings, or "
                "/v2/models/NAME/infer."
            )
        _check_metadata(new.metadata)
        now = time.time()
        batch = BatchRecord(
            new_batch_id(),
            tenant,
            new.endpoint,
            new.input_file_id,
            new.completion_window,
            BatchStatus.VALIDATING,
            now,
            now + seconds,
            dict(new.metadata),
            new.output_seconds,
        )
        await self._store.add_batch(batch)
        self.runner.changed(batch)
        return batch

    async def batch(self, tenant: str, name: str) -> BatchRecord:
        """Return a batch. Raises ``NotFound``."""
        return self._told(await self._store.batch(tenant, name))

    def _told(self, record: BatchRecord) -> BatchRecord:
        """Return a batch with why it was set aside, if it was."""
        for letter in self.loop.dead_letters:
            if record.id in letter.unit and not record.status.is_end:
                text = f"{letter.text}. It can be cancelled; an operator can have it tried again"
                error = {"code": SET_ASIDE, "message": text, "param": None, "line": None}
                return replace(record, errors=[*record.errors, error])
        return record

    async def list_batches(self, tenant: str, listing: PageRequest) -> tuple[list[BatchRecord], bool]:
        """Return a page of batches, and whether there are more."""
        return await self._store.batches(tenant, listing)

    async def cancel(self, tenant: str, name: str) -> BatchRecord:
        """Cancel a batch: what is done is kept. Raises ``NotFound``, and ``Conflict`` for one that has ended."""
        batch = await self._store.cancel(tenant, name, time.time())
        self.runner.changed(batch)
        return batch

    def predicted_end(self, name: str) -> float | None:
        """Return when a batch is predicted to end; None if that is not known."""
        return self.runner.planner.predicted_end(name, time.time())


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidArgument(f"Invalid 'metadata': it may have at most {MAX_METADATA} keys.")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(key) > _MAX_KEY or len(value) > _MAX_TEXT:
            raise InvalidArgument(
                f"Invalid 'metadata': keys have at most {_MAX_KEY} characters, and values are strings of at most "
                f"{_MAX_TEXT}."
            )
