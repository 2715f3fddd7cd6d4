"""Rows of files and batches, the tables that they are in, and their form in OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final


class BatchStatus(StrEnum):
    """Status of a batch by OpenAI's name."""

    VALIDATING = "validating"
    FAILED = "failed"
    """Its input file has mistakes."""
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    """Its output files are being written."""
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether the batch will not change any more."""
        return self in _ENDS


_ENDS: Final = frozenset((BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED))


class ItemState(StrEnum):
    """State of an item."""

    WAITING = "waiting"
    """It waits or runs: an item that ran when the server crashed runs again."""
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A stored file."""

    id: str
    tenant: str
    name: str
    purpose: str
    size: int
    created_at: float
    expires_at: float | None = None
    items: int = 0
    """Items of the input of a batch."""

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        document: dict[str, Any] = {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": int(self.created_at),
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }
        if self.expires_at is not None:
            document["expires_at"] = int(self.expires_at)
        return document


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch. Times are seconds since 1970; None for what has not happened."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: float
    expires_at: float
    """The deadline."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    output_seconds: float | None = None
    """Seconds after which its output files expire; None for never."""
    model: str = ""
    """Model of all items; known once the input file was read."""
    errors: Sequence[Mapping[str, Any]] = ()
    """Mistakes in the input file."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> BatchRecord:
        """Return the batch in a row of the table."""
        values = dict(zip(BATCH_COLUMNS, row, strict=True))
        values["status"] = BatchStatus(values["status"])
        for name in _JSON:
            values[name] = json.loads(values[name])
        return cls(**values)

    def as_row(self) -> list[Any]:
        """Return the row of the table."""
        values = [getattr(self, name) for name in BATCH_COLUMNS]
        return [
            json.dumps(value) if name in _JSON else str(value) if name == "status" else value
            for name, value in zip(BATCH_COLUMNS, values, strict=True)
        ]

    @property
    def left(self) -> int:
        """Number of items without an answer."""
        return self.total - self.completed - self.failed

    def counted(self, completed: bool) -> BatchRecord:
        """Return the batch with one more item that has an answer."""
        if completed:
            return replace(self, completed=self.completed + 1)
        return replace(self, failed=self.failed + 1)

    def as_json(self, predicted_end: float | None = None) -> dict[str, Any]:
        """Return OpenAI's batch object, with our ``estimated_completion_at`` if ``predicted_end`` is known."""
        errors = {"object": "list", "data": list(self.errors)} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": str(self.status),
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": dict(self.metadata) or None,
            **{name: None if (at := getattr(self, name)) is None else int(at) for name in _TIMES},
            "estimated_completion_at": None if predicted_end is None else int(predicted_end),
        }


_JSON: Final = ("metadata", "errors")
"""Columns whose text is JSON."""
_TIMES: Final = (
    "created_at",
    "expires_at",
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
BATCH_COLUMNS: Final = tuple(each.name for each in fields(BatchRecord))
FILE_COLUMNS: Final = tuple(each.name for each in fields(FileRecord))


class BatchSchema:
    """Tables of files, batches and items. The answer of an item is its line of the output file."""

    name = "batches"
    migrations = (
        "CREATE TABLE batch_files (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, "
        "purpose TEXT NOT NULL, size BIGINT NOT NULL, created_at DOUBLE PRECISION NOT NULL, "
        "expires_at DOUBLE PRECISION)",
        "CREATE TABLE batches (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, endpoint TEXT NOT NULL, "
        "input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, status TEXT NOT NULL, "
        "created_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION NOT NULL, metadata TEXT NOT NULL, "
        "output_seconds DOUBLE PRECISION, model TEXT NOT NULL, errors TEXT NOT NULL, output_file_id TEXT, "
        "error_file_id TEXT, in_progress_at DOUBLE PRECISION, finalizing_at DOUBLE PRECISION, "
        "completed_at DOUBLE PRECISION, failed_at DOUBLE PRECISION, expired_at DOUBLE PRECISION, "
        "cancelling_at DOUBLE PRECISION, cancelled_at DOUBLE PRECISION, total BIGINT NOT NULL, "
        "completed BIGINT NOT NULL, failed BIGINT NOT NULL)",
        "CREATE TABLE batch_items (batch_id TEXT NOT NULL, line BIGINT NOT NULL, custom_id TEXT NOT NULL, "
        "position BIGINT NOT NULL, size BIGINT NOT NULL, state TEXT NOT NULL, answer BLOB, "
        "PRIMARY KEY (batch_id, line))",
        "CREATE INDEX batches_by_tenant ON batches (tenant, created_at)",
        "CREATE INDEX batch_files_by_tenant ON batch_files (tenant, created_at)",
        "ALTER TABLE batches ADD COLUMN owner TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE batches ADD COLUMN owned_until DOUBLE PRECISION NOT NULL DEFAULT 0",
        "ALTER TABLE batches ADD COLUMN loaded BIGINT NOT NULL DEFAULT 0",
        "ALTER TABLE batch_files ADD COLUMN items BIGINT NOT NULL DEFAULT 0",
    )
