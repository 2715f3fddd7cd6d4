"""Writes the output files of a batch that ends: a line for each item with an answer, in the order of the input."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from nerite.batches.file_directory import FileDirectory
from nerite.batches.items import EXPIRED, error_line
from nerite.batches.records import BatchRecord, FileRecord, ItemState
from nerite.batches.store import BatchStore

_PAGE: Final = 128
_PAGE_BYTES: Final = 4 << 20
"""Items, and bytes of answers, that are in memory at a time."""


class OutputFiles(NamedTuple):
    """The files of a batch; None for one without lines."""

    output: FileRecord | None
    errors: FileRecord | None

    @property
    def all(self) -> list[FileRecord]:
        """Those that there are."""
        return [file for file in self if file is not None]


class OutputWriter:
    """Writes output files, which exist once the batch is changed together with their rows."""

    def __init__(self, store: BatchStore, files: FileDirectory) -> None:
        self._store = store
        self._files = files

    async def write(self, record: BatchRecord, *, expired: bool) -> OutputFiles:
        """Write both files; items without an answer are in the error file if the batch has ``expired``."""
        output = await self._write(record, "output", (ItemState.COMPLETED,))
        states = (ItemState.FAILED, ItemState.WAITING) if expired else (ItemState.FAILED,)
        try:
            return OutputFiles(output, await self._write(record, "error", states))
        except BaseException:
            self._files.remove([] if output is None else [output.id])
            raise

    async def _write(self, record: BatchRecord, kind: str, states: Sequence[ItemState]) -> FileRecord | None:
        name = new_file_id()
        writer = self._files.begin(name)
        try:
            for state in states:
                after = 0
                while rows := await self._store.answers(record.id, state, after, _PAGE, _PAGE_BYTES):
                    after = rows[-1][0]
                    lines = [
                        answer if state is not ItemState.WAITING else error_line(new_item_id(), custom_id, *EXPIRED)
                        for _, custom_id, answer in rows
                    ]
                    await asyncio.to_thread(writer.add, [line + b"\n" for line in lines])
            if not writer.size:
                return None
            await asyncio.to_thread(writer.commit)
        except BaseException:
            writer.discard()
            raise
        now = time.time()
        until = None if record.output_seconds is None else now + record.output_seconds
        file_name = f"{record.id}_{kind}.jsonl"
        return FileRecord(name, record.tenant, file_name, "batch_output", writer.size, now, until)


def new_file_id() -> str:
    """Return an id for a file."""
    return f"file-{secrets.token_hex(16)}"


def new_item_id() -> str:
    """Return an id for the line of an item."""
    return f"batch_req_{secrets.token_hex(16)}"
