"""What a cache is to those who ask it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeAlias

from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument
from nerite.core.response import InferenceResponse
from nerite.observability.exposition import MetricFamily

Found: TypeAlias = Callable[[InferenceResponse | None], None]
"""Called once, on the loop's thread, with what is kept under a key: None if that is nothing."""


class ResponseCache(Protocol):
    """Keeps responses under keys. For the loop's thread only."""

    shared: bool
    """Other servers ask it, too: keys have to say what a model was made from, not when it was loaded."""

    def lookup(self, key: bytes, found: Found) -> None:
        """Look for a response; ``found`` is called before this returns, or when another machine has answered."""

    def insert(self, key: bytes, response: InferenceResponse) -> None:
        """Keep a response that succeeded: its bytes are copied. What cannot be kept is said in the log."""

    def families(self) -> list[MetricFamily]:
        """Return the cache's own metrics."""

    def close(self) -> None:
        """Give back what it holds outside this process."""


# What a response takes in memory: its tensors and, byte by byte, the objects around them.
#
# Measured with ``tracemalloc``, which a test repeats, and rounded up to what a dictionary takes just after it has
# grown.

ENTRY: Final = 336
"""The key, the place in the dictionary, the response and the tuple of its tensors."""
PART: Final = 56
"""What a tensor takes beside its bytes."""


def response_bytes(response: InferenceResponse) -> int:
    """Return the bytes that a response takes beside its header, which many responses may have in common."""
    return ENTRY + sum(PART + len(part) for part in response.data)


# Trouble that may come with every request, said now and then.

EVERY: Final = 10.0
"""Seconds between two lines."""

_log = logging.getLogger("nerite.cache")


class RateLimitedWarning:
    """Says an error at once, and again at the earliest after some seconds, with how often it came meanwhile."""

    __slots__ = ("_next", "count")

    def __init__(self) -> None:
        self.count = 0
        """How often there was trouble."""
        self._next = 0.0

    def say(self, text: str) -> None:
        """Count the trouble, and log it unless one like it was logged just now."""
        self.count += 1
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY
            _log.error("%s%s", text, f" ({self.count} times by now)" if self.count > 1 else "")


# What is said of names that there are not.


def refuse_unknown(cache: str, settings: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``InvalidArgument`` for the first setting that a cache does not have."""
    known = list(known)
    for name in settings:
        if name not in known:
            raise InvalidArgument(f"the cache '{cache}' has no setting '{name}'. It has {bad_choice(name, known)}")


def bad_choice(wrong: str, known: Iterable[str]) -> str:
    """Return the names that there are, and the one that was probably meant."""
    known = list(known)
    near = nearest(wrong, known)
    return ", ".join(f"'{name}'" for name in known) + "." + (f" Did you mean '{near}'?" if near else "")
