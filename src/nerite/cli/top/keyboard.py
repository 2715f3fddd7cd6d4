"""A terminal that gives each key at once, on a screen that goes away without a trace."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType

from nerite.cli.command import write

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"


class Keyboard:
    """Enters the screen with ``with``, and leaves it however that ends."""

    def __enter__(self) -> Keyboard:
        self._descriptor = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._descriptor)
        tty.setcbreak(self._descriptor)
        write(_ENTER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        write(_LEAVE)
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def key(self, seconds: float) -> str:
        """Wait for a key at most so long; return it, or nothing."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._descriptor], [], [], left)[0]:
                pressed = os.read(self._descriptor, 1).decode(errors="ignore")
                return pressed or "q"  # nobody is there any more
        return ""
