"""One file's way from the store to the cache: what broke off is resumed, what has changed meanwhile is not mixed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event

from nerite.repository.remote.listing import RemoteFile
from nerite.repository.remote.retries import PassingFailure, retried
from nerite.repository.remote.store import Store


def download(store: Store, file: RemoteFile, place: Path, arrived: Callable[[int], None], stopped: Event) -> None:
    """Bring a file to its place, whole; ``arrived`` is told how many bytes came, in steps, and may raise.

    The file's time is that of its last change in the store. Raises ``ObjectChangedError`` if it is not any more what
    it was, ``NeriteError`` if it cannot be had, ``OSError`` if it cannot be written.
    """
    part = place.with_name(f"{place.name}.part")
    retried(f"downloading '{file.key}'", partial(_continue, store, file, part, arrived), stopped)
    os.utime(part, ns=(file.modified_ns, file.modified_ns))
    part.rename(place)
    # Loads share the file, so a model that writes to it would change what others get.
    place.chmod(0o444)


def _continue(store: Store, file: RemoteFile, part: Path, arrived: Callable[[int], None]) -> None:
    """Fetch what is missing. What came is kept when it breaks off."""
    with open(part, "ab") as sink:
        have = sink.tell()
        if have == file.size:
            return
        begin, pieces = store.read(file, have if have < file.size else 0)
        sink.truncate(begin)
        sink.seek(begin)
        try:
            for piece in pieces:
                sink.write(piece)
                arrived(len(piece))
        except PassingFailure as failure:
            raise PassingFailure(str(failure), progressed=sink.tell() > begin) from None
        sink.flush()
        os.fsync(sink.fileno())
        if sink.tell() != file.size:
            raise PassingFailure(f"{sink.tell()} of {file.size} bytes came", progressed=sink.tell() > begin)
