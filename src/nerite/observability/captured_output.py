"""What models print, as lines of the log. Workers load this without the log itself."""

from __future__ import annotations

import io
from collections.abc import Callable

from nerite.core.request import current_request_ids


class CapturedOutput(io.TextIOWrapper):
    """Replacement for ``sys.stdout`` or ``sys.stderr`` of a worker, or of a server with models in its process.

    Lines printed while requests with ids are executed go to the log, which adds the ids. All else goes to the file
    descriptor, which the server reads, too.
    """

    def __init__(
        self, descriptor: int, name: str, log: Callable[[str, str, str, int], None], *, always: bool = False
    ) -> None:
        """``log`` takes level, text, file and line. ``always``: all lines go there."""
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
        """Incomplete last line."""
        self._ids = ""
        """Ids of the requests that the incomplete line belongs to."""

    def write(self, text: str, /) -> int:
        """Write text. A line is logged when it ends, or when output of other requests follows."""
        ids = current_request_ids()
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
