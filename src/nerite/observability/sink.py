"""Where log records go: stdout and stderr, or a file."""

from __future__ import annotations

import os
import select
import threading

_PATIENCE = 1.0


class Sink:
    """Writes whole lines to a file descriptor: one system call a line, nothing buffered, lines never mixed.

    Cannot fail: where a line cannot be written (disk full, reader gone) it is dropped, and serving goes on.
    """

    def __init__(self, fd: int, *, owned: bool = False) -> None:
        self._fd = fd
        self._owned = owned
        self._lock = threading.Lock()

    @classmethod
    def to_file(cls, path: str) -> Sink:
        """Open ``path`` for appending. Raises ``OSError``."""
        return cls(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644), owned=True)

    def write(self, text: str) -> None:
        """Write ``text`` and a newline; return when the system has taken them."""
        # What a model printed may be no text that UTF-8 can hold; a log line is not worth an exception.
        left = memoryview((text + "\n").encode(errors="backslashreplace"))
        with self._lock:
            while left:
                try:
                    left = left[os.write(self._fd, left) :]
                except BlockingIOError:
                    # Somebody who shares the terminal made it non-blocking. Wait as a plain write would, for a while.
                    if not select.select((), (self._fd,), (), _PATIENCE)[1]:
                        return
                except OSError:
                    return

    def close(self) -> None:
        """Close the file, if this sink opened it."""
        with self._lock:
            if self._owned:
                fd, self._fd, self._owned = self._fd, -1, False
                os.close(fd)
