"""Where log records go: stdout and stderr, or a file."""

from __future__ import annotations

import os
import select
import threading

from nerite.core.failure_text import system_error

_PATIENCE = 1.0


class Sink:
    """Writes whole lines to a file descriptor: one system call a line, nothing buffered, lines never mixed.

    Never raises: where a line cannot be written (disk full, reader gone) it is dropped and counted, and serving goes
    on.
    """

    def __init__(self, fd: int, path: str = "") -> None:
        """With a ``path`` it is the sink's own file, which ``close`` closes."""
        self._fd = fd
        self._path = path
        self._lock = threading.Lock()
        self._torn = False
        """The last line in the file has no end."""
        self.lost = 0
        """Lines that were dropped since the last that was written."""
        self.problem = ""
        """Why the last of them was."""

    @classmethod
    def to_file(cls, path: str) -> Sink:
        """Open ``path`` for appending. Raises ``OSError``."""
        return cls(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644), path)

    def write(self, text: str) -> bool:
        """Write ``text`` and a newline; return when the system has taken them, with False if it has not."""
        # What a model printed may be no text that UTF-8 can hold; a log line is not worth an exception.
        line = (text + "\n").encode(errors="backslashreplace")
        with self._lock:
            left = memoryview(b"\n" + line if self._torn else line)
            size = len(left)
            try:
                while left:
                    left = left[self._write(left) :]
            except OSError as error:
                self._torn = self._torn or 0 < len(left) < size
                self.lost += 1
                self.problem = system_error(error, self._path)
                return False
            self._torn = False
            self.lost = 0
        return True

    def _write(self, line: memoryview) -> int:
        try:
            return os.write(self._fd, line)
        except BlockingIOError:
            # Somebody who shares the terminal made it non-blocking. Wait as a plain write would, for a while.
            if not select.select((), (self._fd,), (), _PATIENCE)[1]:
                raise
            return 0

    def close(self) -> None:
        """Close the file, if this sink opened it."""
        with self._lock:
            if self._path:
                fd, self._fd, self._path = self._fd, -1, ""
                os.close(fd)
