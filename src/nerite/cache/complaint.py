"""Trouble that may come with every request, said now and then."""

from __future__ import annotations

import logging
import time
from typing import Final

EVERY: Final = 10.0
"""Seconds between two lines."""

_log = logging.getLogger("nerite.cache")


class Complaint:
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
