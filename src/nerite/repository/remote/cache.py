"""Where the files of a remote repository lie on this machine: each once, and links to them in a directory a state.

    <cache>/<location>/<model>/files/<identity>          a file, complete and never written again
    <cache>/<location>/<model>/files/<identity>.part     one that is on its way, or broke off
    <cache>/<location>/<model>/states/<identity>/<model> the model as it was listed at some time: hard links

Several servers may share it. Who changes what belongs to a model holds the lock of its shelf; who uses a state holds
a lock on it, which ends with the process at the latest. What nobody uses and the store has no more is
removed whenever the model is staged again, or is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Lock

from nerite.core.errors import Internal, Unavailable
from nerite.repository.remote.listing import Listing, RemoteFile
from nerite.repository.remote.location import Kind, Location

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


class Cache:
    """The shelves of one repository. Its methods block, and raise ``Internal`` if the disk refuses."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = Lock()
        self._used: dict[Path, tuple[int, int]] = {}
        """Of each state that is in use here: the file that we have locked, and how many use it."""
        self._busy: dict[str, Lock] = {}
        """Held with the lock of a model's shelf: on network file systems that keeps out other processes only."""

    @contextmanager
    def shelf(self, model: str, stopped: Event) -> Iterator[Shelf]:
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
                yield Shelf(directory, self._used)
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


class Shelf:
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
