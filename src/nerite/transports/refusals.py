"""What the log says of an inference that fails: its client is told anyhow, so it is a detail."""

from __future__ import annotations

from nerite.core.errors import NeriteError
from nerite.observability.bridge import about
from nerite.observability.log import log


def note(request_id: str, error: NeriteError) -> None:
    """Note that a request gets an error for an answer, as Triton does at verbosity 1."""
    if log.verbose_level >= 1:
        log.verbose(1, f"Infer failed: {error.message}", **about(request_id))
