"""Reports of language model engines: state of the engine after a step, and the progress of each request.

An engine runs many requests at once on its own, and its responses do not show prompt lengths, free KV memory or
requests queued inside it. So it reports them after each step.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from nerite.core.request import InferenceRequest


class RequestEnded(enum.Enum):
    """Outcome of a request, named as in vLLM's metrics."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "abort"
    TOO_LATE = "timeout"
    FAILED = "error"


class RequestBegun(NamedTuple):
    """Facts about a request that are known once an engine has scheduled it."""

    at_ns: int
    """Time of scheduling (``time.monotonic_ns``)."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Part of ``prompt_tokens`` served from the prefix cache, as far as the engine reports it."""
    sequences: int = 1
    image_tokens: int = 0
    """Part of ``prompt_tokens`` that came from images."""


class RequestProgress(NamedTuple):
    """Progress of one request in one step."""

    request: InferenceRequest
    tokens: int = 0
    """New tokens of all its sequences."""
    begun: RequestBegun | None = None
    """Set once, in the first report of the request; never if the engine did not schedule it."""
    ended: RequestEnded | None = None
    """Set in the last report of the request."""


class AdapterUse(NamedTuple):
    """The LoRA adapters of an engine, and which of them its requests use."""

    most: int = 0
    """Number of adapters that requests may choose from."""
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    """Adapters of requests that the engine has not started, apart from those that are running."""


class EngineReport(NamedTuple):
    """State of an engine after a step or at rest. Counters run from the engine's start; None if it does not count."""

    running: int = 0
    """Sequences in the batch."""
    waiting: int = 0
    """Sequences in the engine that are not in the batch."""
    total_blocks: int = 0
    free_blocks: int = 0
    """KV cache blocks that are free or reusable."""
    block_size: int = 0
    """Tokens per block."""
    context_length: int = 0
    """Maximum tokens of a sequence, prompt and completion together."""
    max_sequences: int = 0
    """Maximum number of sequences in the batch; 0: no limit."""
    patience: int = 0
    """Seconds without progress, while it has requests, after which the engine counts as hung. 0: never."""
    failures: int = 0
    """Failed steps, each of which restarted the engine."""
    prefix_queries: int | None = None
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int | None = None
    preemptions: int | None = None
    drafted: int | None = None
    """Draft tokens of speculative decoding."""
    accepted: int | None = None
    progress: Sequence[RequestProgress] = ()
    step_began_ns: int = 0
    """When the reported step began (``time.monotonic_ns``). 0: the engine does not time its steps, or ran none."""
    step_ended_ns: int = 0
    adapters: AdapterUse = AdapterUse()
