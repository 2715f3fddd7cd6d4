"""Follows a rollout until it ends: a live view on a terminal, lines elsewhere, and the exit status for a pipeline."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from nerite.cli.command import show, write
from nerite.client import Client, ClientError
from nerite.client.connection import Unreachable
from nerite.tools.rollout import view
from nerite.tools.top import Keyboard

STATUSES: Final = {"promoted": 0, "rolled_back": 1, "aborted": 1, "inconclusive": 3}
"""Exit status by the state of a rollout at which nothing follows without an operator."""
_PATIENCE: Final = 120.0
"""Seconds for which an unreachable server is asked again: it may be restarting, and the rollout goes on then."""
_LINE_SECONDS: Final = 30.0
"""Longest time between two lines."""


class RolloutFollower:
    """Asks for the status of a rollout, also while its server restarts."""

    def __init__(self, client: Client, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._model = model
        self._clock = clock
        self._lost_at: float | None = None
        self.lost = ""
        """Why the server does not answer; empty if it does."""

    def look(self) -> dict[str, Any] | None:
        """Return the status; None if the server does not answer at the moment. Raises ``ClientError``."""
        try:
            status = self._client.rollout(self._model)
        except ClientError as error:
            if not isinstance(error, Unreachable) and error.status not in (None, 503):
                raise
            now = self._clock()
            self._lost_at = now if self._lost_at is None else self._lost_at
            if now - self._lost_at > _PATIENCE:
                raise
            self.lost = str(error).partition("\n")[0]
            return None
        self._lost_at, self.lost = None, ""
        return status


def follow_lines(client: Client, model: str, interval: float) -> int:
    """Print a line for each change and at intervals, until the rollout ends; return the exit status."""
    follower = RolloutFollower(client, model)
    said: tuple[object, ...] = ()
    said_at = 0.0
    lost = ""
    while True:
        status = follower.look()
        now = time.monotonic()
        if status is None:
            if not lost:
                show(f"{time.strftime('%H:%M:%S')} the server does not answer: {follower.lost}")
        else:
            news = status["id"], status["state"], status["step"]
            if news != said or now - said_at >= _LINE_SECONDS:
                text = f"   {status['text']}" if news != said and status["text"] else ""
                show(f"{time.strftime('%H:%M:%S')} {view.line(status)}{text}")
                said, said_at = news, now
            if status["state"] in STATUSES:
                return STATUSES[status["state"]]
        lost = follower.lost
        time.sleep(interval)


def follow_live(client: Client, model: str, interval: float) -> int:
    """Show the live view until the rollout ends or the user quits; return the exit status."""
    follower = RolloutFollower(client, model)
    status: dict[str, Any] = client.rollout(model)
    with Keyboard() as keyboard, contextlib.suppress(KeyboardInterrupt):
        while True:
            width, height = shutil.get_terminal_size()
            note = f"stale: {follower.lost}" if follower.lost else "q quits; the rollout goes on"
            lines = view.frame(status, width, note)[: height - 1]
            write("\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in lines) + "\x1b[J")
            if status["state"] in STATUSES or keyboard.key(interval) == "q":
                break
            status = follower.look() or status
    show("\n".join(view.frame(status, shutil.get_terminal_size().columns)))
    return STATUSES.get(status["state"], 0)


def follow(client: Client, model: str, interval: float) -> int:
    """Follow a rollout on a terminal or in a log; return the exit status."""
    live = sys.stdin.isatty() and sys.stdout.isatty()
    return (follow_live if live else follow_lines)(client, model, interval)
