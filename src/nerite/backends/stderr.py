"""What frameworks write to the file descriptor of standard error, past every setting of theirs."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nerite.core.anonymous_file import anonymous_file

_one_at_a_time = threading.Lock()


@contextmanager
def taken(chatter: re.Pattern[bytes], log: logging.Logger) -> Iterator[list[str]]:
    """Log lines that begin like ``chatter`` as details, and let all others through, a little later than written.

    For moments only: all threads of the process write there. The list has the lines that were logged, afterwards.
    """
    found: list[str] = []
    with _one_at_a_time, open(anonymous_file(), "r+b") as said:
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            for line in said.read().splitlines(keepends=True):
                if chatter.match(line):
                    found.append(line.decode(errors="replace").rstrip())
                    log.debug("%s", found[-1])
                else:
                    os.write(2, line)
