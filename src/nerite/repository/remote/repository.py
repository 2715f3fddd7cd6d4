"""A model repository in an object store, as if it were a directory of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Lock

from nerite.core.errors import Internal, NeriteError, Unavailable
from nerite.repository.remote.credentials import OpenedStore
from nerite.repository.remote.location import Kind, Location
from nerite.repository.remote.store import (
    DownloadProgress,
    Listing,
    ObjectChangedError,
    RemoteFile,
    Store,
    download,
    retried,
)
from nerite.repository.repositories import is_model_name

# Where the files of a remote repository lie on this machine: each once, and links to them in a directory a state.
#
#     <cache>/<location>/<model>/files/<identity>          a file, complete and never written again
#     <cache>/<location>/<model>/files/<identity>.part     one that is on its way, or broke off
#     <cache>/<location>/<model>/states/<identity>/<model> the model as it was listed at some time: hard links
#
# Several servers may share it. Who changes what belongs to a model holds the lock of its shelf; who uses a state
# holds a lock on it, which ends with the process at the latest. What nobody uses and the store has no more is removed
# whenever the model is staged again, or is gone.

_MOUNTS: dict[Kind, str] = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}
_LOOK_AGAIN = 0.2
"""Seconds between two tries to lock what somebody else has locked."""
_LOCK = ".lock"
"""Beside the model in a state: whoever uses it has this locked."""


def cache_directory(location: Location, environment: Mapping[str, str], flag: str) -> Path:
    """Return the directory for a location: below that of the flag, of Triton's variable, or of the user's caches."""
    usual = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    root = flag or environment.get(_MOUNTS[location.kind]) or Path(usual) / "nerite" / "repositories"
    return Path(root).absolute() / location.key


class DownloadCache:
    """The shelves of one repository. Its methods block, and raise ``Internal`` if the disk refuses."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = Lock()
        self._used: dict[Path, tuple[int, int]] = {}
        """Of each state that is in use here: the file that we have locked, and how many use it."""
        self._busy: dict[str, Lock] = {}
        """Held with the lock of a model's shelf: on network file systems that keeps out other processes only."""

    @contextmanager
    def shelf(self, model: str, stopped: Event) -> Iterator[CacheDirectory]:
        """Lock what belongs to a model, for as long as the context lasts. Raises ``Unavailable`` if it has to stop."""
        directory = self.directory / model
        with self.refusals():
            (directory / "files").mkdir(parents=True, exist_ok=True)
            (directory / "states").mkdir(exist_ok=True)
            handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        busy = self._busy.setdefault(model, Lock())
        try:
            _wait_for(partial(busy.acquire, blocking=False), model, stopped)
            try:
                _wait_for(partial(_locked, handle), model, stopped)
                yield CacheDirectory(directory, self._used)
            finally:
                busy.release()
        finally:
            os.close(handle)

    def use(self, state: Path) -> Path:
        """Keep a state until it was released as often as it was used, or the process ends; return it."""
        with self._lock:
            handle, users = self._used.get(state) or (os.open(state.parent / _LOCK, os.O_RDWR), 0)
            if not users:
                fcntl.flock(handle, fcntl.LOCK_SH)
            self._used[state] = handle, users + 1
        return state

    def release(self, state: Path) -> None:
        """Say that one user of a state is done."""
        with self._lock:
            handle, users = self._used.pop(state)
            if users > 1:
                self._used[state] = handle, users - 1
            else:
                os.close(handle)

    def models(self) -> list[str]:
        """Return the models that have something here."""
        try:
            return sorted(entry.name for entry in os.scandir(self.directory))
        except FileNotFoundError:
            return []

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn what the disk says into an error that names the cache and the remedy."""
        try:
            yield
        except OSError as error:
            raise Internal(
                f"cannot use the cache '{self.directory}' for models: {error.strerror or error}. Name a directory with "
                "enough room, on a file system with hard links, in --repository-cache-directory."
            ) from None


class CacheDirectory:
    """What belongs to one model, while we hold its lock."""

    def __init__(self, directory: Path, used: Container[Path]) -> None:
        """``used``: the states that this process uses."""
        self._used = used
        self._model = directory.name
        self._files = directory / "files"
        self._states = directory / "states"

    def place(self, file: RemoteFile) -> Path:
        """Return where a file belongs."""
        return self._files / file.identity

    def state(self, listing: Listing) -> Path:
        """Return the directory with the model as ``listing`` has it; all its files have to be here."""
        root = self._states / listing.identity
        if not root.exists():
            growing = self._states / "growing"
            shutil.rmtree(growing, ignore_errors=True)
            model = growing / self._model
            model.mkdir(parents=True)
            for path in listing.directories:
                (model / path).mkdir(parents=True, exist_ok=True)
            for file in listing.files:
                (model / file.path).parent.mkdir(parents=True, exist_ok=True)
                os.link(self.place(file), model / file.path)
            (growing / _LOCK).touch()
            growing.rename(root)
        return root / self._model

    def tidy(self, listing: Listing) -> None:
        """Remove the states that nobody uses, and the files that are in none; but nothing that ``listing`` has."""
        for state in list(self._states.iterdir()):
            used = state.name == listing.identity or state / self._model in self._used
            if not used and not _used_elsewhere(state / _LOCK):
                shutil.rmtree(state, ignore_errors=True)
        kept = {file.identity for file in listing.files}
        for file in list(self._files.iterdir()):
            if file.name.removesuffix(".part") not in kept and file.stat().st_nlink == 1:
                file.unlink()


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _used_elsewhere(lock: Path) -> bool:
    """Say whether another process has locked a state."""
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(lock, os.O_RDWR)
        try:
            return not _locked(handle)
        finally:
            os.close(handle)
    return False


def _wait_for(acquired: Callable[[], bool], model: str, stopped: Event) -> None:
    while not acquired():
        if stopped.wait(_LOOK_AGAIN):
            raise Unavailable(f"the download of model '{model}' was given up: the server is stopping")


_log = logging.getLogger("nerite.repository")

SIDE_BY_SIDE = 8
"""Files that are downloaded at the same time."""
_LOOKS = 3
"""How often a model is listed anew when it changes while it is downloaded."""
_TICK = 1.0
_NOTHING = Listing((), ())


class RemoteRepository:
    """A place with a directory for each model. Its methods block: they are for the loader's threads."""

    def __init__(self, opened: OpenedStore, cache: DownloadCache) -> None:
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

    def _download(self, name: str, files: list[RemoteFile], shelf: CacheDirectory) -> None:
        """Bring files to the shelf, side by side. Raises the first failure, when nothing is under way any more."""
        total = sum(file.size for file in files)
        progress = DownloadProgress(f"model '{name}' of '{self.location}'", len(files), total, time.monotonic())
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
