"""Model repository in an object store, staged in a cache on this machine."""

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
from nerite.core.transfer import DownloadProgress
from nerite.repository.remote.credentials import OpenedStore
from nerite.repository.remote.location import Kind, Location
from nerite.repository.remote.store import (
    Listing,
    ObjectChangedError,
    RemoteFile,
    Store,
    download,
    retried,
)
from nerite.repository.repositories import is_model_name

# Layout of the cache: each file is stored once; each state of a model is a directory of hard links to its files.
#
#     <cache>/<location>/<model>/files/<identity>          a complete file, never written again
#     <cache>/<location>/<model>/files/<identity>.part     a download in progress, or one that broke off
#     <cache>/<location>/<model>/states/<identity>/<model> the model as it was listed at some time: hard links
#
# Several servers may share a cache. Changing the directory of a model requires its exclusive lock (``locked_model``);
# using a state holds a shared lock on it, which the system releases at the latest when the process ends. States and
# files that are neither in use nor current are removed whenever the model is staged again, or is gone from the store.

_MOUNTS: dict[Kind, str] = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}
_LOCK_RETRY = 0.2
"""Seconds between two attempts to take a lock that another thread or process holds."""
_LOCK = ".lock"
"""File next to the model in a state; a process that uses the state holds a lock on it."""


def cache_directory(location: Location, environment: Mapping[str, str], flag: str) -> Path:
    """Return the cache directory for a location: below the flag's, that of Triton's variable, or the user's cache."""
    usual = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    root = flag or environment.get(_MOUNTS[location.kind]) or Path(usual) / "nerite" / "repositories"
    return Path(root).absolute() / location.key


class DownloadCache:
    """Cache of one repository on this machine. Its methods block, and raise ``Internal`` for errors of the disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = Lock()
        self._used: dict[Path, tuple[int, int]] = {}
        """States that this process uses, with the descriptor of the locked file and a reference count."""
        self._busy: dict[str, Lock] = {}
        """Held in addition to a model's file lock, which on network file systems excludes other processes only."""

    @contextmanager
    def locked_model(self, model: str, stopped: Event) -> Iterator[CacheDirectory]:
        """Lock a model's directory for the duration of the context. Raises ``Unavailable`` once ``stopped`` is set."""
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
        """Add a reference to a state, which keeps it until as many releases or the end of the process; return it."""
        with self._lock:
            handle, users = self._used.get(state) or (os.open(state.parent / _LOCK, os.O_RDWR), 0)
            if not users:
                fcntl.flock(handle, fcntl.LOCK_SH)
            self._used[state] = handle, users + 1
        return state

    def release(self, state: Path) -> None:
        """Drop one reference to a state."""
        with self._lock:
            handle, users = self._used.pop(state)
            if users > 1:
                self._used[state] = handle, users - 1
            else:
                os.close(handle)

    def models(self) -> list[str]:
        """Return the models that have a directory in the cache."""
        try:
            return sorted(entry.name for entry in os.scandir(self.directory))
        except FileNotFoundError:
            return []

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn errors of the operating system into ``Internal``, with the cache directory and the remedy."""
        try:
            yield
        except OSError as error:
            raise Internal(
                f"cannot use the cache '{self.directory}' for models: {error.strerror or error}. Set "
                "--repository-cache-directory to a directory with enough space on a file system with hard links."
            ) from None


class CacheDirectory:
    """Cache directory of one model, while this process holds its lock."""

    def __init__(self, directory: Path, used: Container[Path]) -> None:
        """``used`` contains the states that this process uses."""
        self._used = used
        self._model = directory.name
        self._files = directory / "files"
        self._states = directory / "states"

    def place(self, file: RemoteFile) -> Path:
        """Return the path of a file in the cache."""
        return self._files / file.identity

    def state(self, listing: Listing) -> Path:
        """Return the directory with the model as listed, creating it if necessary; all its files must be cached."""
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
        """Remove unused states, and files that are in no state, except those of ``listing``."""
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
    """Return whether another process has locked a state."""
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(lock, os.O_RDWR)
        try:
            return not _locked(handle)
        finally:
            os.close(handle)
    return False


def _wait_for(acquired: Callable[[], bool], model: str, stopped: Event) -> None:
    while not acquired():
        if stopped.wait(_LOCK_RETRY):
            raise Unavailable(f"the download of model '{model}' was cancelled: the server is stopping")


_log = logging.getLogger("nerite.repository")

SIDE_BY_SIDE = 8
"""Maximum number of concurrent downloads of a model. Each model has its own, so that a slow one holds up no other."""
_ATTEMPTS = 3
"""How often a model is listed and downloaded if it keeps changing meanwhile."""
_TICK = 1.0
"""Seconds between two checks of the progress of a download."""
_EMPTY = Listing((), ())


class RemoteRepository:
    """Repository in an object store. Its methods block: call them on the loader's threads."""

    def __init__(self, opened: OpenedStore, cache: DownloadCache) -> None:
        self.location = opened.location.text
        self._stopped = Event()
        self._store = Store(opened, self._stopped)
        self._cache = cache
        self._current: dict[str, Listing] = {}
        """The latest listing of each model."""

    def models(self) -> list[str]:
        """Return the names of the models, and clean up the cache of those that are gone.

        Raises ``Internal`` if the store cannot be read.
        """
        names = self._store.models()
        with self._cache.refusals():
            for gone in set(self._cache.models()).difference(names):
                self._current.pop(gone, None)
                with self._cache.locked_model(gone, self._stopped) as cached:
                    cached.tidy(_EMPTY)
        return names

    def fetch(self, name: str) -> Path | None:
        """Return a local directory with the model's current files, or None if the model does not exist.

        Equal files give the same directory. It stays until it has been released as often as it was returned. Raises
        ``NeriteError`` if the store cannot be read.
        """
        if not is_model_name(name):
            return None
        for _ in range(_ATTEMPTS):
            listing = self._store.listing(name)
            if listing == _EMPTY:
                self._current.pop(name, None)
                return None
            try:
                return self._staged(name, listing)
            except ObjectChangedError:
                _log.info("model '%s' of '%s' changed while it was downloaded", name, self.location)
        raise Internal(
            f"model '{name}' of '{self.location}' keeps changing. Load it after it has been uploaded completely."
        )

    def fetch_object(self, name: str) -> Path | None:
        """Return a local directory with the object ``name``, as ``fetch`` does for a directory; None if there is none.

        Raises ``NeriteError`` if the store cannot be read.
        """
        if not is_model_name(name) or (found := self._store.object(name)) is None:
            return None
        try:
            return self._staged(name, Listing((found,), ()))
        except ObjectChangedError:
            raise Internal(f"'{found.key}' of '{self.location}' changed while it was downloaded. Try again.") from None

    def release(self, directory: Path) -> None:
        """Drop one reference to a directory that ``fetch`` returned; an outdated one without references is removed."""
        self._cache.release(directory)
        # Files that cannot be removed now are removed at the next fetch of the model.
        with (
            contextlib.suppress(NeriteError),
            self._cache.refusals(),
            self._cache.locked_model(directory.name, self._stopped) as cached,
        ):
            cached.tidy(self._current.get(directory.name, _EMPTY))

    def content(self, name: str, path: str) -> bytes | None:
        """Return the content of one file without caching it; None if it does not exist. Raises ``NeriteError``."""
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
        """Upload a directory as a model: new and changed files are written first, then missing files are removed.

        Files with the size and time of those that ``fetch`` returned count as unchanged. Raises ``NeriteError``.
        """
        there = {file.path: file for file in self._store.listing(name).files}
        paths = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
        changed = [path for path, place in paths.items() if path not in there or not _is_same(place, there[path])]
        with ThreadPoolExecutor(SIDE_BY_SIDE, "upload") as threads:
            list(threads.map(lambda path: self._store.write(name, path, paths[path]), changed))
        self._store.remove([file for path, file in there.items() if path not in paths])

    def remove(self, name: str) -> None:
        """Remove a model. Raises ``NeriteError``."""
        self._store.remove(self._store.listing(name).files)

    def close(self) -> None:
        """Abort operations in progress because the server shuts down. Does not block."""
        self._stopped.set()

    def _staged(self, name: str, listing: Listing) -> Path:
        with self._cache.refusals(), self._cache.locked_model(name, self._stopped) as cached:
            missing = [file for file in listing.files if not cached.place(file).exists()]
            if missing:
                self._download(name, missing, cached)
            state = self._cache.use(cached.state(listing))
            self._current[name] = listing
            cached.tidy(listing)
            return state

    def _download(self, name: str, files: list[RemoteFile], cached: CacheDirectory) -> None:
        """Download files to the cache concurrently. Raises the first failure after all downloads have ended."""
        total = sum(file.size for file in files)
        progress = DownloadProgress(f"model '{name}' of '{self.location}'", len(files), total, time.monotonic())
        counting = Lock()
        failures: list[BaseException] = []

        def arrived(count: int) -> None:
            if failures or self._stopped.is_set():
                raise Unavailable(f"the download of model '{name}' was cancelled")
            with counting:
                progress.done += count

        _log.info("%s", progress.start())
        with ThreadPoolExecutor(SIDE_BY_SIDE, "download") as threads:
            waiting: set[Future[None]] = {
                threads.submit(download, self._store, file, cached.place(file), arrived, self._stopped)
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
            raise failures[0] if failures else Unavailable(f"the download of model '{name}' was cancelled")
        _log.info("%s", progress.end(time.monotonic()))


def _is_same(place: Path, file: RemoteFile) -> bool:
    found = place.stat()
    return (found.st_size, found.st_mtime_ns) == (file.size, file.modified_ns)
