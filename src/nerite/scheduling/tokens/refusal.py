"""Why somebody is not let in: which limit, its value, the current use, and when to come again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

from nerite.core.errors import InvalidArgument, NeriteError, Overloaded, QuotaExceeded, TooLarge, TooLate

LONGEST_PAUSE: Final = 3600
"""Seconds after which a client may try again, at the most: by then the policy may be another."""


class Limit(StrEnum):
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


class Fault(Enum):
    """Whose fault a refusal is, and the error that tells it."""

    CLIENT = InvalidArgument
    SIZE = TooLarge
    QUOTA = QuotaExceeded
    LOAD = Overloaded
    TIME = TooLate


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One refusal, for a client, a log and the counts."""

    limit: Limit
    fault: Fault
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


def pause(nanoseconds: float) -> int:
    """Return whole seconds for a Retry-After: never too early, never 0."""
    return max(1, min(math.ceil(nanoseconds / 1e9), LONGEST_PAUSE))


def _figure(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
