"""Where traces are written: files that are JSON arrays at any time, as Triton's tools read them."""

from __future__ import annotations

from pathlib import Path

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
        self._begun = False

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
        self._write(name, "wb", b"[" + self._taken() + b"]")

    def _append(self) -> None:
        """Write to the one file: begin it, or replace the bracket that ends it."""
        if self._begun:
            self._write(self._name, "r+b", b"," + self._taken() + b"]")
        else:
            self._begun = True
            self._write(self._name, "wb", b"[" + self._taken() + b"]")

    def _taken(self) -> bytes:
        traces, self._traces = self._traces, []
        return b",".join(filter(None, traces))

    def _write(self, name: str, mode: str, data: bytes) -> None:
        """Write; a file that cannot be written is a matter for the log, not for those whose requests are traced."""
        try:
            with Path(name).open(mode) as file:
                if mode == "r+b":
                    file.seek(-1, 2)
                file.write(data)
        except OSError as error:
            log.error(
                f"cannot write the traces to '{name}': {error.strerror}. Name another: --trace-config triton,file"
            )
