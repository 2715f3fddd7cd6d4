"""Refusals of admission control: the limit, its value, the current use, and when to retry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

from nerite.admission.policy import PriorityClass, Tenant
from nerite.core.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NeriteError,
    NoIdleRoom,
    Overloaded,
    QuotaExceeded,
    TooLarge,
)

LONGEST_PAUSE: Final = 3600
"""Maximum Retry-After in seconds: by then the policy may have changed."""


class QuotaLimit(StrEnum):
    """Limits by their names in the policy file; those that it does not contain are named in the same style."""

    MAX_INPUT_TOKENS = "max_input_tokens"
    MAX_OUTPUT_TOKENS = "max_output_tokens"
    MAX_BYTES = "max_bytes"
    CONTEXT_WINDOW = "context_window"
    KV_BLOCKS = "kv_blocks"
    QUEUE_LENGTH = "queue_length"
    QUEUE_TOKENS = "queue_tokens"
    QUEUE_BYTES = "queue_bytes"
    INPUT_RATE = "input_tokens_per_minute"
    OUTPUT_RATE = "output_tokens_per_minute"
    REQUEST_RATE = "requests_per_minute"
    BYTE_RATE = "bytes_per_minute"
    BUDGET = "tokens_per_month"
    MONEY = "money_per_month"
    CONCURRENCY = "concurrency"
    RETRIES = "retry_fraction"
    CLASS = "class"
    FIRST_TOKEN = "ttft_seconds"
    DEADLINE = "deadline"
    DRAINING = "draining"
    IDLE_ROOM = "idle_room"


class RefusalCause(Enum):
    """Cause of a refusal, and the type of the error that reports it."""

    CLIENT = InvalidArgument
    SIZE = TooLarge
    QUOTA = QuotaExceeded
    LOAD = Overloaded
    TIME = DeadlineExceeded
    IDLE = NoIdleRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRefusal:
    """Why a request is rejected: for the client, the log and the counters."""

    limit: QuotaLimit
    fault: RefusalCause
    of: str
    """Owner of the limit: ``tenant 'acme'``, ``model 'llama'``."""
    value: float | str
    """Configured value of the limit."""
    use: float | str
    """Current use, or the amount that the request needs or is predicted to need."""
    text: str
    """Human-readable reason without the figures above."""
    retry_after: int | None = None
    """Seconds; None if waiting alone does not help or the time is unknown."""

    def as_error(self) -> NeriteError:
        """Return the error for the client."""
        error: type[NeriteError] = self.fault.value
        again = f" Try again in {self.retry_after} s." if self.retry_after else ""
        figures = f"{self.limit} of {self.of} is {_figure(self.value)}, now {_figure(self.use)}"
        return error(f"{self.text} ({figures}).{again}", self.retry_after or 0)


def retry_pause(nanoseconds: float) -> int:
    """Return whole seconds for a Retry-After header: rounded up, at least 1."""
    return max(1, min(math.ceil(nanoseconds / 1e9), LONGEST_PAUSE))


def _figure(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def closed_refusal(of: str, running: int) -> AdmissionRefusal:
    """Return the refusal of requests that arrive while the model drains."""
    return AdmissionRefusal(
        limit=QuotaLimit.DRAINING,
        fault=RefusalCause.LOAD,
        of=of,
        value="on",
        use=f"{running} running",
        text="no new requests are accepted",
        retry_after=1,
    )


def no_room_refusal(of: str, running: int) -> AdmissionRefusal:
    """Return the refusal of a request of the idle class for which there is no idle room."""
    return AdmissionRefusal(
        limit=QuotaLimit.IDLE_ROOM,
        fault=RefusalCause.IDLE,
        of=of,
        value="0",
        use=f"{running} running",
        text="requests of other classes come first",
    )


def unknown_class_refusal(tenant: Tenant, wanted: str) -> AdmissionRefusal:
    """Return the refusal of a class that does not exist or is more important than the tenant's."""
    return AdmissionRefusal(
        limit=QuotaLimit.CLASS,
        fault=RefusalCause.CLIENT,
        of=f"tenant '{tenant.name}'",
        value=tenant.level,
        use=f"'{wanted}'",
        text="this tenant may not use the requested class",
    )


def full_refusal(limit: QuotaLimit, of: str, value: int, use: int, work: float | None) -> AdmissionRefusal:
    """Return the refusal when the queue is full; ``work`` is the queued work in nanoseconds, if known."""
    return AdmissionRefusal(
        limit=limit,
        fault=RefusalCause.LOAD,
        of=of,
        value=value,
        use=use,
        text="the queue is full",
        retry_after=retry_pause(work or 0.0),
    )


def slow_refusal(level: PriorityClass, takes: float, beyond: float | None) -> AdmissionRefusal:
    """Return the refusal when a class's time to first token cannot be met. Arguments are nanoseconds."""
    return AdmissionRefusal(
        limit=QuotaLimit.FIRST_TOKEN,
        fault=RefusalCause.LOAD,
        of=f"class '{level.name}'",
        value=level.ttft_seconds,
        use=takes / 1e9,
        text="the first token would arrive too late",
        retry_after=retry_pause(beyond or 0.0),
    )


def late_refusal(left: float, takes: float) -> AdmissionRefusal:
    """Return the refusal when a deadline cannot be met or was missed; both arguments are nanoseconds."""
    return AdmissionRefusal(
        limit=QuotaLimit.DEADLINE,
        fault=RefusalCause.TIME,
        of="the request",
        value=left / 1e9,
        use=takes / 1e9,
        text="the answer would miss its deadline; times in seconds",
    )
