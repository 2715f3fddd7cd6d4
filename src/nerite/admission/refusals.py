"""Why somebody is not let in: which limit, its value, the current use, and when to come again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

from nerite.admission.policy import PriorityClass, Tenant
from nerite.core.errors import InvalidArgument, NeriteError, Overloaded, QuotaExceeded, TooLarge, TooLate

LONGEST_PAUSE: Final = 3600
"""Seconds after which a client may try again, at the most: by then the policy may be another."""


class QuotaLimit(StrEnum):
    """The limits by the names they have in the policy file; those that are not in it have names of the same kind."""

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
    CONCURRENCY = "concurrency"
    RETRIES = "retry_fraction"
    CLASS = "class"
    FIRST_TOKEN = "ttft_seconds"
    DEADLINE = "deadline"
    DRAINING = "draining"


class RefusalCause(Enum):
    """Whose fault a refusal is, and the error that tells it."""

    CLIENT = InvalidArgument
    SIZE = TooLarge
    QUOTA = QuotaExceeded
    LOAD = Overloaded
    TIME = TooLate


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRefusal:
    """One refusal, for a client, a log and the counts."""

    limit: QuotaLimit
    fault: RefusalCause
    of: str
    """Whose limit: ``tenant 'acme'``, ``model 'llama'``."""
    value: float | str
    """What the limit is set to."""
    use: float | str
    """What is in use now, or what the request asks for or is predicted to take."""
    text: str
    """A sentence for people, without the figures above."""
    retry_after: int | None = None
    """Seconds; None: waiting alone does not help, or nobody knows."""

    def as_error(self) -> NeriteError:
        """Return the error that a client is told."""
        error: type[NeriteError] = self.fault.value
        again = f" Try again in {self.retry_after} s." if self.retry_after else ""
        figures = f"{self.limit} of {self.of} is {_figure(self.value)}, now {_figure(self.use)}"
        return error(f"{self.text} ({figures}).{again}", self.retry_after or 0)


def retry_pause(nanoseconds: float) -> int:
    """Return whole seconds for a Retry-After: never too early, never 0."""
    return max(1, min(math.ceil(nanoseconds / 1e9), LONGEST_PAUSE))


def _figure(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# The refusals of a gate, in words.


def closed_refusal(of: str, running: int) -> AdmissionRefusal:
    """Say that a server stops."""
    return AdmissionRefusal(
        limit=QuotaLimit.DRAINING,
        fault=RefusalCause.LOAD,
        of=of,
        value="on",
        use=f"{running} running",
        text="no more requests are taken",
        retry_after=1,
    )


def unknown_class_refusal(tenant: Tenant, wanted: str) -> AdmissionRefusal:
    """Say that a class is none, or matters more than that of the tenant."""
    return AdmissionRefusal(
        limit=QuotaLimit.CLASS,
        fault=RefusalCause.CLIENT,
        of=f"tenant '{tenant.name}'",
        value=tenant.level,
        use=f"'{wanted}'",
        text="the class that is asked for is none that this tenant may have",
    )


def full_refusal(limit: QuotaLimit, of: str, value: int, use: int, work: float | None) -> AdmissionRefusal:
    """Say that too much waits, nanoseconds of ``work`` as far as that is known."""
    return AdmissionRefusal(
        limit=limit,
        fault=RefusalCause.LOAD,
        of=of,
        value=value,
        use=use,
        text="too much waits already",
        retry_after=retry_pause(work or 0.0),
    )


def slow_refusal(level: PriorityClass, takes: float, beyond: float | None) -> AdmissionRefusal:
    """Say that what a class promises cannot be kept: it takes nanoseconds, so many of them too long."""
    return AdmissionRefusal(
        limit=QuotaLimit.FIRST_TOKEN,
        fault=RefusalCause.LOAD,
        of=f"class '{level.name}'",
        value=level.ttft_seconds,
        use=takes / 1e9,
        text="the first token would come too late",
        retry_after=retry_pause(beyond or 0.0),
    )


def late_refusal(left: float, takes: float) -> AdmissionRefusal:
    """Say that a deadline cannot be met, or was not; both are nanoseconds."""
    return AdmissionRefusal(
        limit=QuotaLimit.DEADLINE,
        fault=RefusalCause.TIME,
        of="the request",
        value=left / 1e9,
        use=takes / 1e9,
        text="the answer would be complete too late, in seconds",
    )
