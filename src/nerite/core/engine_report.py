"""What an engine tells of itself: how it is after a step, and what the step has brought to which request.

An engine goes on by itself with many requests at a time, and what it does with them cannot be seen from their answers:
how long their prompts are, whether memory is left, who waits inside it. So it says so, step by step.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from nerite.core.request import InferenceRequest


class RequestEnded(enum.Enum):
    """How a request ended, in the words of vLLM's metrics."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "abort"
    TOO_LATE = "timeout"
    FAILED = "error"


class RequestBegun(NamedTuple):
    """What is known of a request once an engine has taken it up."""

    at_ns: int
    """When that was, as ``time.monotonic_ns`` has it."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Of those, as many as were computed before, as far as the engine tells."""
    sequences: int = 1
    image_tokens: int = 0
    """Of ``prompt_tokens``, those that images have become."""


class RequestProgress(NamedTuple):
    """What a step has brought to one request."""

    request: InferenceRequest
    tokens: int = 0
    """New ones, of all its sequences."""
    begun: RequestBegun | None = None
    """Once, in the first of them; not at all where the engine never took it up."""
    ended: RequestEnded | None = None
    """In the last of them."""


class EngineReport(NamedTuple):
    """An engine after a step, or at rest. A count is of all since the engine began, None where the engine has none."""

    running: int = 0
    """Sequences in the batch."""
    waiting: int = 0
    """Sequences that the engine has, and that are not in the batch."""
    total_blocks: int = 0
    free_blocks: int = 0
    """Of KV memory; those that the engine may use again are free."""
    block_size: int = 0
    """Tokens that a block holds."""
    context_length: int = 0
    """Tokens of prompt and answer together that a sequence can have."""
    most_sequences: int = 0
    """That the engine runs at once; 0: any number."""
    patience: int = 0
    """Seconds that the engine may be silent while it has requests; then it hangs. 0: for ever."""
    failures: int = 0
    """Times that a step failed, and the engine began anew."""
    prefix_queries: int | None = None
    """Tokens of prompts that were looked for among those computed before."""
    prefix_hits: int | None = None
    preemptions: int | None = None
    drafted: int | None = None
    """Tokens that were guessed ahead (speculative decoding)."""
    accepted: int | None = None
    progress: Sequence[RequestProgress] = ()
