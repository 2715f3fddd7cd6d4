"""How a worker waits for its next message: asleep, or awake while messages come one soon after the other.

To fall asleep and to be woken again costs each of two processes tens of microseconds, more than a small model needs,
and leaves both with cold caches. So where the last message came soon, the worker stays awake for the next one, as long
again at most, and gives way to everybody else in between. Where messages are further apart it sleeps as ever: what is
spent awake is never more than one core, and only by a worker that answers thousands of batches a second.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping

from nerite.backends import cores
from nerite.core.errors import InvalidArgument

SETTING = "stay-awake-microseconds"
_DEFAULT_MICROSECONDS = 400


class Vigil:
    """Receives from a blocking socket. Asleep until ``limit`` is set."""

    def __init__(self, channel: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = 0.0
        """Seconds to stay awake; 0 is never."""
        self._receive = channel.recv_into
        self._clock = clock
        self._soon = True

    def receive(self, space: memoryview) -> int:
        """Wait for bytes and return how many came, 0 at the end of the channel."""
        clock, limit = self._clock, self.limit
        began = clock()
        size = -1
        if self._soon:
            while size < 0 and clock() - began < limit:
                try:
                    size = self._receive(space, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    os.sched_yield()
        if size < 0:
            size = self._receive(space)
        self._soon = clock() - began < limit
        return size


def limit_of(settings: Mapping[str, str]) -> float:
    """Return how many seconds workers with these backend settings stay awake. Raises ``InvalidArgument``.

    Never by default where it would take from somebody: on one core, and under a quota of processor time, which it
    would use up.
    """
    text = settings.get(SETTING)
    if text is None:
        return _DEFAULT_MICROSECONDS / 1e6 if cores.usable_cores() > 1 and not cores.quota() else 0.0
    if not text.isdecimal():
        raise InvalidArgument(
            f"backend setting '{SETTING}' is '{text}'; it must be a number of microseconds, 0 for never"
        )
    return int(text) / 1e6
