"""Where traces are written: files that are JSON arrays at any time, as Triton's tools read them."""

from __future__ import annotations

from io import FileIO
from pathlib import Path

from nerite.core.failure_text import system_error
from nerite.observability.log import log

_MOST = 100
"""Traces kept in memory where no frequency is set."""


class TraceFile:
    """Collects complete traces, and writes them from time to time.

    With a frequency each so many traces make a file with a number of its own behind its name. Without one everything
    goes into one file, which grows.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._traces: list[bytes] = []
        self._next = 0
        self._frequency = 0
        self._size = 0
        """Of the one file, as far as it is ours."""

    def add(self, trace: bytes, frequency: int, last: bool) -> None:
        """Take the records of a trace; write, if it is the last that was asked for, or enough are there."""
        self._traces.append(trace)
        self._frequency = frequency
        if last or 0 < frequency <= len(self._traces):
            self._write_numbered()
        elif len(self._traces) >= _MOST:
            self.write()

    def write(self) -> None:
        """Write what is there."""
        if not self._traces:
            return
        if self._frequency:
            self._write_numbered()
        else:
            self._append()

    def _write_numbered(self) -> None:
        name, self._next = f"{self._name}.{self._next}", self._next + 1
        self._put(name, 0, b"[")

    def _append(self) -> None:
        """Write to the one file: begin it, or replace the bracket that ends it."""
        if self._size and not Path(self._name).exists():
            self._size = 0
        self._size = self._put(self._name, max(self._size - 1, 0), b"," if self._size else b"[")

    def _put(self, name: str, at: int, first: bytes) -> int:
        """Write what is there to a file, from the bracket at some place on; return the size of the file then.

        A file that cannot be written is a matter for the log, not for those whose requests are traced: the traces are
        lost, and the file is what it was.
        """
        traces, self._traces = self._traces, []
        rest = b",".join(filter(None, traces)) + b"]"
        try:
            with Path(name).open("r+b" if at else "wb", buffering=0) as file:
                try:
                    # The bracket goes last: until then the file can be made what it was.
                    _write(file, rest, at + 1)
                    _write(file, first, at)
                except OSError:
                    if at:
                        file.truncate(at + 1)
                    else:
                        Path(name).unlink()
                    raise
        except OSError as error:
            log.error(
                f"cannot write {len(traces)} traces, which are lost: {system_error(error, name)}. "
                "Or name another file: --trace-config triton,file"
            )
            return at and at + 1
        return at + 1 + len(rest)


def _write(file: FileIO, data: bytes, at: int) -> None:
    """Write all of ``data`` at some place. Raises ``OSError``."""
    file.seek(at)
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
