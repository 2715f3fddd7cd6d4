"""stdout and stderr of a worker, or of a server with models in it, as Python sees them."""

from __future__ import annotations

import io
from collections.abc import Callable

from nerite.core.at_hand import ids_at_hand


class PrintedLines(io.TextIOWrapper):
    """Passes lines that are printed while a request with an id is executed to the log, which notes the id.

    All else goes where it would have gone without: to the file descriptor, which the server reads too.
    """

    def __init__(
        self, descriptor: int, name: str, log: Callable[[str, str, str, int], None], *, always: bool = False
    ) -> None:
        """``log`` takes level, text, file and line. ``always``: everything goes there."""
        super().__init__(
            io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        self._name = name
        self._log = log
        self._always = always
        self._rest = ""
        self._ids = ""
        """Of the requests that the unfinished line belongs to."""

    def write(self, text: str, /) -> int:
        """Take text; a line counts when it ends, or when another request begins one."""
        ids = ids_at_hand()
        if ids != self._ids:
            rest, self._rest = self._rest, ""
            if rest:
                self._log("INFO", rest, self._name, 0)
            self._ids = ids
        if not ids and not self._always:
            return super().write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line:
                self._log("INFO", line, self._name, 0)
        return len(text)
