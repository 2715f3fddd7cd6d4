"""A model repository in an object store, as if it were a directory of this machine."""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event, Lock

from nerite.core.errors import Internal, NeriteError, Unavailable
from nerite.repository.remote.cache import Cache, Shelf
from nerite.repository.remote.credentials import Opened
from nerite.repository.remote.download import download
from nerite.repository.remote.listing import Listing, RemoteFile
from nerite.repository.remote.progress import Progress
from nerite.repository.remote.retries import retried
from nerite.repository.remote.store import ObjectChangedError, Store
from nerite.repository.source import is_model_name

_log = logging.getLogger("nerite.repository")

SIDE_BY_SIDE = 8
"""Files that are downloaded at the same time."""
_LOOKS = 3
"""How often a model is listed anew when it changes while it is downloaded."""
_TICK = 1.0
_NOTHING = Listing((), ())


class RemoteRepository:
    """A place with a directory for each model. Its methods block: they are for the loader's threads."""

    def __init__(self, opened: Opened, cache: Cache) -> None:
        self.location = opened.location.text
        self._stopped = Event()
        self._store = Store(opened, self._stopped)
        self._cache = cache
        self._current: dict[str, Listing] = {}
        """What each model was when it was last looked at."""
        self._threads = ThreadPoolExecutor(SIDE_BY_SIDE, "download")

    def models(self) -> list[str]:
        """Return the names of the models. Raises ``Internal`` if the store cannot be read."""
        names = self._store.models()
        with self._cache.refusals():
            for gone in set(self._cache.models()).difference(names):
                self._current.pop(gone, None)
                with self._cache.shelf(gone, self._stopped) as shelf:
                    shelf.tidy(_NOTHING)
        return names

    def fetch(self, name: str) -> Path | None:
        """Return a directory with a model's files as they are now; None: there is no such model.

        The same files give the same directory. It stays until it was released as often as it was returned. Raises
        ``NeriteError`` if the store cannot be read.
        """
        if not is_model_name(name):
            return None
        for _ in range(_LOOKS):
            listing = self._store.listing(name)
            if listing == _NOTHING:
                self._current.pop(name, None)
                return None
            try:
                return self._staged(name, listing)
            except ObjectChangedError:
                _log.info("model '%s' of '%s' changed while it was downloaded", name, self.location)
        raise Internal(
            f"model '{name}' of '{self.location}' changes all the time. Load it when it has been uploaded completely."
        )

    def release(self, directory: Path) -> None:
        """Say that a directory that ``fetch`` returned is not used any more: it may be removed, if it is an old one."""
        self._cache.release(directory)
        # What cannot be removed now will be when the model is fetched the next time.
        with (
            contextlib.suppress(NeriteError),
            self._cache.refusals(),
            self._cache.shelf(directory.name, self._stopped) as shelf,
        ):
            shelf.tidy(self._current.get(directory.name, _NOTHING))

    def content(self, name: str, path: str) -> bytes | None:
        """Return one file of a model, which is not kept; None: there is no such. Raises ``NeriteError``."""
        found = next((file for file in self._store.listing(name).files if file.path == path), None)
        if found is None:
            return None

        def read() -> bytes:
            _, pieces = self._store.read(found, 0)
            return b"".join(pieces)

        try:
            return retried(f"reading '{found.key}'", read, self._stopped)
        except ObjectChangedError:
            return None

    def publish(self, name: str, directory: Path) -> None:
        """Make a model what a directory has: what is new is written first, then what is gone is removed.

        Files with the time of those that ``fetch`` has brought are taken to be the same. Raises ``NeriteError``.
        """
        there = {file.path: file for file in self._store.listing(name).files}
        paths = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
        changed = [path for path, place in paths.items() if path not in there or not _is_same(place, there[path])]
        list(self._threads.map(lambda path: self._store.write(name, path, paths[path]), changed))
        self._store.remove([file for path, file in there.items() if path not in paths])

    def remove(self, name: str) -> None:
        """Remove a model. Raises ``NeriteError``."""
        self._store.remove(self._store.listing(name).files)

    def close(self) -> None:
        """Give up what is under way, for the server ends. Does not block."""
        self._stopped.set()

    def _staged(self, name: str, listing: Listing) -> Path:
        with self._cache.refusals(), self._cache.shelf(name, self._stopped) as shelf:
            missing = [file for file in listing.files if not shelf.place(file).exists()]
            if missing:
                self._download(name, missing, shelf)
            state = self._cache.use(shelf.state(listing))
            self._current[name] = listing
            shelf.tidy(listing)
            return state

    def _download(self, name: str, files: list[RemoteFile], shelf: Shelf) -> None:
        """Bring files to the shelf, side by side. Raises the first failure, when nothing is under way any more."""
        total = sum(file.size for file in files)
        progress = Progress(f"model '{name}' of '{self.location}'", len(files), total, time.monotonic())
        counting = Lock()
        failures: list[BaseException] = []

        def arrived(count: int) -> None:
            if failures or self._stopped.is_set():
                raise Unavailable(f"the download of model '{name}' was given up")
            with counting:
                progress.done += count

        _log.info("%s", progress.start())
        waiting: set[Future[None]] = {
            self._threads.submit(download, self._store, file, shelf.place(file), arrived, self._stopped)
            for file in files
        }
        while waiting:
            done, waiting = wait(waiting, _TICK, FIRST_EXCEPTION)
            failures += [error for future in done if not future.cancelled() and (error := future.exception())]
            if failures:
                for future in waiting:
                    future.cancel()
            elif line := progress.line(time.monotonic()):
                _log.info("%s", line)
        if failures or self._stopped.is_set():
            raise failures[0] if failures else Unavailable(f"the download of model '{name}' was given up")
        _log.info("%s", progress.end(time.monotonic()))


def _is_same(place: Path, file: RemoteFile) -> bool:
    found = place.stat()
    return (found.st_size, found.st_mtime_ns) == (file.size, file.modified_ns)
